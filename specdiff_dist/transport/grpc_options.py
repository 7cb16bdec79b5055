"""Channel and server settings: what is set, and why."""

from __future__ import annotations

from specdiff_dist.transport.role_service import MAX_MESSAGE_BYTES

KEEPALIVE_S = 10.0  # a client pings a silent connection this often, and gives it up when a ping stays unanswered
KEEPALIVE_TIMEOUT_S = 10.0

_FRAME_BYTES = 1024  # around a message that travels as a frame of a stream
_SIZE_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + _FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + _FRAME_BYTES),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SIZE_OPTIONS,
    # A prefill can be silent for a minute while the client pings: by default a few pings within five minutes are
    # answered with GOAWAY (too_many_pings), which fails the call. 0: never.
    ("grpc.http2.max_ping_strikes", 0),
    # By default two servers may share one port in silence, each getting half of the other's calls.
    ("grpc.so_reuseport", 0),
]


def channel_options(keepalive_s: float = KEEPALIVE_S) -> list[tuple[str, int]]:
    """Options of a client's channel."""
    return [
        *_SIZE_OPTIONS,
        ("grpc.keepalive_time_ms", round(1000 * keepalive_s)),
        ("grpc.keepalive_timeout_ms", round(1000 * KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A replica that restarts at its address is found again soon; the default backs off for up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),  # also how long a connection may take to open (default: 20 s)
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Replicas are peers inside the cluster: neither a proxy from the environment nor DNS service records apply.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]


def join_address(host: str, port: int) -> str:
    """host:port, with the brackets an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
