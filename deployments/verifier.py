"""The verifier deployment: a VerifierEngine open to calls, sessions placed by leases."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from ray import serve
from ray.actor import ActorHandle

from deployments.busy import BusyInterval
from deployments.endpoints import open_endpoint
from deployments.kv_space import KVSpace
from deployments.open_leases import OpenLeases
from deployments.replica import GuardedVerifier, Replica
from deployments.settings import Transport
from specdiff_dist.roles import VerifierEngine
from specdiff_dist.transport import envelope
from specdiff_dist.transport.role_service import verifier_service


@serve.deployment(logging_config={"enable_access_log": False})  # a line per session says nothing
class Verifier:
    """One replica. `load` is called in the replica's own process."""

    async def __init__(
        self,
        load: Callable[[], VerifierEngine],
        *,
        transport: Transport,
        grpc_host: str,
        max_sessions: int,
        max_call_s: float,
        kv_space: KVSpace | None = None,
    ) -> None:
        loaded = load()
        leases = OpenLeases(max_sessions, (kv_space or KVSpace()).reservations(loaded))
        engine = GuardedVerifier(loaded, leases)
        self._endpoint = await open_endpoint("Verifier", verifier_service(engine), transport, grpc_host)
        info = engine.info  # longer sessions than there is room for could never be placed
        self._info = replace(info, max_model_len=min(info.max_model_len, leases.kv.max_tokens or info.max_model_len))
        self._replica = Replica(self._endpoint, leases, max_call_s=max_call_s)

    async def lease(
        self, session_id: str, caller: ActorHandle | None = None, num_tokens: int = 0, max_tokens: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """See Replica.lease."""
        return self._replica.lease(session_id, caller, num_tokens, max_tokens)

    async def call(self, method: str, request: bytes) -> bytes:
        """One call of the handle transport: the packed reply."""
        return await self._endpoint.answer(method, request)

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
        """Fails when the model is stuck or the endpoint does not answer."""
        self._replica.check_model()
        await self._endpoint.check()
