"""The handle transport's own part, over a scripted Serve: what crosses, deadlines, cancellation, failures."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import BackPressureError

from specdiff_dist.errors import DrafterUnavailable, InvalidRequest, PrefixMismatch, VerifierUnavailable
from specdiff_dist.transport import handle_client, remote_roles, role_service
from specdiff_dist.transport.envelope import pack
from specdiff_dist.transport.handle_client import BY_REFERENCE_BYTES, HandleDrafter, HandleVerifier
from specdiff_dist.transport.handle_messages import HandleReply, answer_handle
from specdiff_dist.transport.role_service import RoleService, drafter_service, verifier_service
from tests.transport.doubles import (
    WAIT_S,
    Gated,
    draft_call,
    entered,
    same_arrays,
    scripted_drafter,
    statement,
    table_verifier,
    verify_call,
)

REQUEST: ContextVar[str] = ContextVar("request", default="nobody's")


class Serve:
    """A handle to one replica in this process. `answer`: what it gives instead, or raises."""

    def __init__(self, service: RoleService, answer: Any = None) -> None:
        self.service, self.answer = service, answer
        self.sent: list[tuple[str, Any]] = []
        self.seen: list[str] = []
        self.num_cancels = 0

    def send(self, method: str, request: Any) -> Any:
        self.sent.append((method, request))
        self.seen.append(REQUEST.get())
        return Response(self, asyncio.ensure_future(self._answer(method, request)))

    async def _answer(self, method: str, request: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        return await answer_handle(self.service, method, request.value if isinstance(request, Reference) else request)


class Response:
    """A DeploymentResponse."""

    def __init__(self, serve: Serve, task: asyncio.Task[Any]) -> None:
        self._serve, self._task = serve, task

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._serve.num_cancels += 1
        self._task.cancel()


class Reference:
    """An ObjectRef."""

    def __init__(self, value: bytes) -> None:
        self.value = value


@pytest.fixture
def store(monkeypatch) -> list[Reference]:
    """What has been put into the object store."""
    references: list[Reference] = []

    def put(value: bytes) -> Reference:
        references.append(Reference(value))
        return references[-1]

    monkeypatch.setattr(handle_client.ray, "put", put)
    return references


async def test_strings_and_bytes_are_all_that_crosses(store):
    """No array, no tensor, nothing of ours that Ray would pickle."""
    serve = Serve(verifier_service(table_verifier(num_layers=6)))
    reply = await HandleVerifier(serve.send).verify(verify_call())
    assert same_arrays(reply, table_verifier(num_layers=6).verify(verify_call()))
    assert [(method, type(request)) for method, request in serve.sent] == [("Info", bytes), ("Verify", bytes)]
    assert not store
    assert reply.cost.bytes_sent == len(serve.sent[1][1]) and reply.cost.bytes_received > 100


async def test_large_calls_go_by_reference(store):
    serve = Serve(verifier_service(table_verifier(max_model_len=300_000)))
    verifier = HandleVerifier(serve.send)
    at_least = statement(tuple([1] * (BY_REFERENCE_BYTES // 4)))
    await verifier.verify(verify_call(at_least))
    assert [type(request) for _, request in serve.sent] == [bytes, Reference]
    assert len(store) == 1 and len(store[0].value) >= BY_REFERENCE_BYTES


async def test_errors_of_the_replica_arrive_and_those_of_serve_mean_nobody_is_there():
    fine = verifier_service(table_verifier())
    with pytest.raises(PrefixMismatch) as mismatch:
        await HandleVerifier(Serve(fine).send).verify(verify_call(statement(cached=3)))
    assert mismatch.value.cached_len == 0
    for error in (
        ActorUnavailableError("canary", None),
        BackPressureError(num_queued_requests=3, max_queued_requests=3),
    ):
        with pytest.raises(VerifierUnavailable, match=type(error).__name__) as raised:
            await HandleVerifier(Serve(fine, error).send).verify(verify_call())
        assert "canary" not in str(raised.value)
    for garbage in (b"\xc1", pack(HandleReply(None, None)), pack(HandleReply(None, b"\xff\xff"))):
        with pytest.raises(VerifierUnavailable, match="no answer"):
            await HandleVerifier(Serve(fine, garbage).send).verify(verify_call())


async def test_a_method_that_is_not_there_is_the_callers_mistake():
    service = drafter_service(scripted_drafter())
    with pytest.raises(InvalidRequest, match="no method 'Verify'; there are Info, Draft, Release"):
        await service.answer("Verify", b"")


async def test_a_deadline_gives_the_call_up():
    engine = Gated(scripted_drafter())
    serve = Serve(drafter_service(engine))
    drafter = HandleDrafter(serve.send, deadline_s=0.1, prefill_s_per_1k_tokens=0.0)
    with pytest.raises(DrafterUnavailable, match="DEADLINE_EXCEEDED"):
        await drafter.draft(draft_call())
    assert serve.num_cancels == 1
    engine.gate.set()


async def test_a_cancelled_call_is_cancelled_there_and_is_nobodys_child():
    engine = Gated(table_verifier())
    serve = Serve(verifier_service(engine))
    REQUEST.set("a request's")
    call = asyncio.create_task(HandleVerifier(serve.send).verify(verify_call()))
    await entered(engine)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert serve.num_cancels == 1
    assert set(serve.seen) == {"nobody's"}
    engine.gate.set()


async def test_a_call_that_serve_cancels_has_no_answer():
    engine = Gated(table_verifier())
    serve = Serve(verifier_service(engine))
    call = asyncio.create_task(HandleVerifier(serve.send).verify(verify_call()))
    await entered(engine)
    for task in asyncio.all_tasks() - {call, asyncio.current_task()}:
        task.cancel()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(VerifierUnavailable, match="cancelled by Serve"):
            await call
    engine.gate.set()


async def test_a_limit_on_sizes_holds_here_too(monkeypatch):
    serve = Serve(verifier_service(table_verifier()))
    verifier = HandleVerifier(serve.send)
    await verifier.info()
    monkeypatch.setattr(role_service, "MAX_MESSAGE_BYTES", 200)
    with pytest.raises(InvalidRequest, match="the reply takes"):
        await verifier.verify(verify_call())
    monkeypatch.setattr(remote_roles, "MAX_MESSAGE_BYTES", 200)
    with pytest.raises(InvalidRequest, match="the call takes"):
        await verifier.verify(verify_call())
