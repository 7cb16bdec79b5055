"""The verifier deployment: a VerifierEngine behind a gRPC port, sessions placed by leases."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from ray import serve
from ray.actor import ActorHandle

from deployments.busy import BusyInterval
from deployments.replica import GuardedVerifier, OpenLeases, Replica, listen_host
from specdiff_dist.roles import VerifierEngine
from specdiff_dist.transport import envelope
from specdiff_dist.transport.grpc_client import GrpcVerifier
from specdiff_dist.transport.grpc_server import start_verifier_server


@serve.deployment(logging_config={"enable_access_log": False})  # a line per session says nothing
class Verifier:
    """One replica. `load` is called in the replica's own process."""

    async def __init__(self, load: Callable[[], VerifierEngine], *, grpc_host: str, max_call_s: float) -> None:
        leases = OpenLeases()
        engine = GuardedVerifier(load(), leases)
        server = await start_verifier_server(engine, host=listen_host(grpc_host))
        self._info = engine.info
        self._address = server.address
        self._replica = Replica(server, GrpcVerifier(server.address), leases, max_call_s=max_call_s)

    async def lease(self, session_id: str, caller: ActorHandle | None = None) -> AsyncGenerator[bytes, None]:
        """See Replica.lease."""
        return self._replica.lease(session_id, caller)

    async def info(self) -> bytes:
        """The packed VerifierInfo."""
        return envelope.pack(self._info)

    async def counters(self) -> dict[str, int | str]:
        """See Replica.counters."""
        return self._replica.counters()

    async def busy_intervals(self, since_s: float = 0.0) -> list[BusyInterval]:
        """See Replica.busy_intervals."""
        return self._replica.busy_intervals(since_s)

    async def check_health(self) -> None:
        """Fails when the model is stuck or the port does not answer a new connection."""
        self._replica.check_model()
        client = GrpcVerifier(self._address)
        try:
            await client.info()
        finally:
            await client.close()
