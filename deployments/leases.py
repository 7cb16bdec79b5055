"""Roles whose replica is found by a lease: Serve places the session, rounds then go straight to the replica.

A lease is a Serve stream that stays open for the session. Its end tells of a replica's death within milliseconds. It is
given back by releasing the session, and by cancelling the stream where that does not end it. A lost verifier is replaced by another one, which asks for the whole prefix
(PrefixMismatch); a lost drafter makes its rounds plain until another one is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from math import inf
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.handle_stream import HandleStream
from deployments.messages import LeaseGrant
from specdiff_dist.errors import DrafterUnavailable, PrefixMismatch, RoleError, VerifierUnavailable
from specdiff_dist.transport import envelope
from specdiff_dist.transport.remote_roles import RemoteDrafter, RemoteVerifier
from specdiff_dist.types import (
    DraftBlock,
    DraftCall,
    DrafterInfo,
    ResolveCall,
    ResolvedToken,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)

FIRST_RETRY_S = 0.1  # between attempts to lease; doubles
LAST_RETRY_S = 5.0
LAST_FULL_RETRY_S = 1.0  # when all that was wrong is that there was no room
RELEASE_PATIENCE_S = 1.0  # for a release to end the stream; then it is cancelled

log = logging.getLogger(__name__)


class Client(Protocol):
    """What a lease needs of RemoteDrafter and RemoteVerifier."""

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


ClientT = TypeVar("ClientT", bound=Client)
ReplyT = TypeVar("ReplyT")


class LeaseLost(RoleError):
    """The replica died, or ended the lease, during a call."""


class NoRoom(RoleError):
    """The replica that Serve chose has as many sessions as it takes, or no room for another one's cache."""


class Lease(Generic[ClientT]):
    """A session's place on one replica, and the client of that replica."""

    def __init__(self, session_id: str, client: ClientT, stream: HandleStream, answered: Callable[[], None]) -> None:
        """`answered` is called after every call that was."""
        self.client = client
        self._session_id = session_id
        self._stream = stream
        self._answered = answered
        self._callers: dict[asyncio.Task[Any], bool] = {}  # in a call right now; whether it is interrupted
        self._ended = asyncio.create_task(self._until_end())
        self._ended.add_done_callback(self._interrupt)

    async def _until_end(self) -> None:
        try:
            async for _ in self._stream.rest():
                pass
        except (RayError, RayServeException) as error:  # also our own cancel()
            log.debug("a lease ended: %s", type(error).__name__)

    async def call(self, work: Coroutine[Any, Any, ReplyT]) -> ReplyT:
        """The result of `work`, a call of `client`. Raises LeaseLost as soon as the lease ends."""
        caller = asyncio.current_task()
        assert caller is not None, "calls are made in tasks"
        if self._ended.done():
            work.close()
            raise LeaseLost("the replica went away before the call")
        num_cancels = caller.cancelling()
        self._callers[caller] = False
        try:
            reply = await work
        except asyncio.CancelledError:
            # As asyncio.timeout does it, without a task of its own for every call: ours or somebody else's cancel?
            if self._callers[caller] and caller.uncancel() <= num_cancels:
                raise LeaseLost("the replica went away during the call") from None
            raise
        finally:
            del self._callers[caller]
        self._answered()
        return reply

    def _interrupt(self, _: asyncio.Task[None]) -> None:
        for caller in self._callers:
            self._callers[caller] = True
            caller.cancel()

    async def close(self, *, is_lost: bool) -> None:
        """Gives the place back: the replica frees the session's cache.

        `is_lost`: cancels at once and asks nothing of the replica; the session may already have a new lease there,
        which a release would end, too.
        """
        try:
            if not is_lost:
                async with asyncio.timeout(RELEASE_PATIENCE_S):
                    await self.client.release(self._session_id)
                    await self._ended
        except TimeoutError:
            log.debug("a release takes long: cancelling the lease")
        finally:
            self._stream.close()
            await self.client.close()


class Replicas(Generic[ClientT]):
    """Opens leases on the replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle, connect: Callable[[str], ClientT], caller: ActorHandle | None) -> None:
        """`connect`: the client of the replica at the address that a LeaseGrant names."""
        self._handle = handle.options(stream=True)
        self._connect = connect
        self._caller = caller
        self.last_answer_s = -inf  # monotonic: when a replica last granted a lease or answered a call of this process
        self._closing: set[asyncio.Task[None]] = set()

    async def lease(self, session_id: str, num_tokens: int = 0, max_tokens: int = 0) -> Lease[ClientT]:
        """Waits until a replica has room, however long; cancel it to give up. `num_tokens`: cached at once; `max_tokens`: that
        the session may come to."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return await self._open(session_id, num_tokens, max_tokens)
            except NoRoom:
                self._note_answer()  # it lives, and whoever asks again gets a turn (reservations.py)
                last_s = LAST_FULL_RETRY_S
            except (RayError, RayServeException) as error:
                log.warning("leasing from %s failed: %s", self._handle.deployment_name, type(error).__name__)
                last_s = LAST_RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, last_s)

    async def _open(self, session_id: str, num_tokens: int, max_tokens: int) -> Lease[ClientT]:
        stream = HandleStream(lambda: self._handle.lease.remote(session_id, self._caller, num_tokens, max_tokens))
        try:
            grant = await stream.first()
            if grant is None:
                raise NoRoom(f"no room on a replica of {self._handle.deployment_name}")
            client = self._connect(_reachable(envelope.unpack(grant, LeaseGrant)))
            self._note_answer()
            return Lease(session_id, client, stream, self._note_answer)
        except BaseException:  # above all our own cancellation: an open lease nobody knows of would hold its place
            stream.close()
            raise

    def _note_answer(self) -> None:
        self.last_answer_s = monotonic()

    def give_back(self, lease: Lease[ClientT], *, is_lost: bool = False) -> None:
        """Closes the lease in the background: an answer does not wait for it, and cancelling cannot interrupt it."""
        task = asyncio.create_task(lease.close(is_lost=is_lost))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def give_up(self, leasing: asyncio.Task[Lease[ClientT]]) -> None:
        """Ends an attempt to lease, and gives back what it has already got."""
        if not leasing.cancel() and not leasing.cancelled() and leasing.exception() is None:
            self.give_back(leasing.result())


def _reachable(grant: LeaseGrant) -> str:
    host = urlsplit(f"//{grant.address}").hostname
    if host in ("127.0.0.1", "::1") and grant.node_id != ray.get_runtime_context().get_node_id():
        raise RoleError(
            f"a replica on another machine listens on {host} only; set grpc_host to 'node' when machines join later"
        )
    return grant.address


class LeasedVerifier:
    """A Verifier for one session. Any trouble with its replica becomes PrefixMismatch(0) on the next one."""

    def __init__(
        self,
        replicas: Replicas[RemoteVerifier],
        info: VerifierInfo,
        *,
        timeout_s: float,
        num_tokens: int = 0,
        max_tokens: int = 0,
    ) -> None:
        """`num_tokens`: of the prompt; `max_tokens`: that the session may come to, prompt and answer."""
        self._replicas, self._info, self._timeout_s = replicas, info, timeout_s
        self._num_tokens, self._max_tokens = num_tokens, max_tokens
        self._lease: Lease[RemoteVerifier] | None = None
        self._trouble_since: float | None = None  # monotonic; set while there is some

    async def info(self) -> VerifierInfo:
        return self._info

    @asynccontextmanager
    async def placed(self, session_id: str) -> AsyncIterator[None]:
        """Around a session: begins when it has a replica, so that whoever waits for a verifier holds no drafter.

        Raises VerifierUnavailable as `verify` does.
        """
        self._lease = await self._open(session_id)
        try:
            yield
        finally:
            await self.release(session_id)

    async def verify(self, call: VerifyCall) -> TargetRows:
        """Raises VerifierUnavailable when no replica has answered for `timeout_s` seconds."""
        self._num_tokens = call.prefix.num_committed + len(call.draft_token_ids)
        if self._lease is None:
            self._lease = await self._open(call.prefix.session_id)
            if call.prefix.prefix_len:
                raise PrefixMismatch(0)
        try:
            target = await self._lease.call(self._lease.client.verify(call))
        except (LeaseLost, VerifierUnavailable) as error:
            raise self._lost(self._lease, call.prefix.session_id, error) from error
        self._trouble_since = None
        return target

    async def resolve(self, call: ResolveCall) -> ResolvedToken:
        """Raises PrefixMismatch(0) when the replica is gone: the round is then verified anew elsewhere."""
        if self._lease is None:
            raise PrefixMismatch(0)
        try:
            return await self._lease.call(self._lease.client.resolve(call))
        except (LeaseLost, VerifierUnavailable) as error:
            raise self._lost(self._lease, call.session_id, error) from error

    def _lost(self, lease: Lease[RemoteVerifier], session_id: str, error: Exception) -> PrefixMismatch:
        """Gives the lost replica up; what to tell the round loop, which then resends everything."""
        log.warning("session %s lost its verifier: %s", session_id, error)
        self._lease = None
        self._replicas.give_back(lease, is_lost=True)
        self._trouble_since = self._trouble_since or monotonic()
        return PrefixMismatch(0)

    async def _open(self, session_id: str) -> Lease[RemoteVerifier]:
        """Waits its turn for as long as verifiers answer the sessions before it, and `timeout_s` when none does."""
        since = monotonic() if self._trouble_since is None else self._trouble_since
        leasing = asyncio.create_task(self._replicas.lease(session_id, self._num_tokens, self._max_tokens))
        try:
            while not leasing.done():
                left_s = max(since, self._replicas.last_answer_s) + self._timeout_s - monotonic()
                if left_s <= 0:
                    raise VerifierUnavailable(f"no verifier replica answered within {self._timeout_s:g} s")
                await asyncio.wait({leasing}, timeout=left_s)
            return leasing.result()
        except BaseException:
            self._replicas.give_up(leasing)
            raise

    async def release(self, session_id: str) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._replicas.give_back(lease)


class LeasedDrafter:
    """A Drafter for one session. While it has no replica it raises DrafterUnavailable and leases in the background.

    `info` None: no drafter has ever answered; then every call raises.
    """

    def __init__(
        self, replicas: Replicas[RemoteDrafter], info: DrafterInfo | None, *, patience_s: float, max_tokens: int = 0
    ) -> None:
        """`max_tokens`: that the session may come to, prompt and answer."""
        self._replicas, self._info, self._patience_s, self._max_tokens = replicas, info, patience_s, max_tokens
        self._num_tokens = 0  # that the last call needed cached
        self._lease: Lease[RemoteDrafter] | None = None
        self._leasing: asyncio.Task[Lease[RemoteDrafter]] | None = None
        self._num_failures = 0  # in a row

    async def info(self) -> DrafterInfo:
        if self._info is None:
            raise DrafterUnavailable("no drafter has answered yet")
        return self._info

    async def draft(self, call: DraftCall) -> DraftBlock:
        """Never waits for a replica, the first time apart (`patience_s`)."""
        await self.info()
        session_id = call.prefix.session_id
        self._num_tokens = call.prefix.num_committed + len(call.drafted_token_ids) + call.num_draft_tokens
        if self._lease is None:
            self._lease = await self._leased(session_id)
            if call.prefix.prefix_len:
                raise PrefixMismatch(0)
        try:
            block = await self._lease.call(self._lease.client.draft(call))
        except (LeaseLost, DrafterUnavailable) as error:
            log.warning("session %s lost its drafter: %s", session_id, error)
            lease, self._lease = self._lease, None
            self._replicas.give_back(lease, is_lost=True)
            self._num_failures += 1
            self._leasing = asyncio.create_task(self._lease_again(session_id))
            raise DrafterUnavailable(str(error)) from error
        self._num_failures = 0
        return block

    async def _leased(self, session_id: str) -> Lease[RemoteDrafter]:
        patience_s = 0.0
        if self._leasing is None:
            self._leasing = asyncio.create_task(self._replicas.lease(session_id, self._num_tokens, self._max_tokens))
            patience_s = self._patience_s
        await asyncio.wait({self._leasing}, timeout=patience_s)
        if not self._leasing.done():
            raise DrafterUnavailable("no drafter replica has room at the moment")
        leasing, self._leasing = self._leasing, None
        try:
            return leasing.result()
        except RoleError as error:
            raise DrafterUnavailable(str(error)) from error

    async def _lease_again(self, session_id: str) -> Lease[RemoteDrafter]:
        # A drafter that fails at every call is not asked at every round.
        await asyncio.sleep(min(FIRST_RETRY_S * 2**self._num_failures, LAST_RETRY_S))
        return await self._replicas.lease(session_id, self._num_tokens, self._max_tokens)

    async def release(self, session_id: str) -> None:
        lease, self._lease = self._lease, None
        leasing, self._leasing = self._leasing, None
        if leasing is not None:
            self._replicas.give_up(leasing)
        if lease is not None:
            self._replicas.give_back(lease)
