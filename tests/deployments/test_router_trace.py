"""The router's trace: off by default, numbers only, whatever becomes of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments import router as router_module
from deployments.messages import pack_call
from deployments.settings import AppSettings
from specdiff_dist.config import TIERS
from specdiff_dist.core.pair_knowledge import PairKnowledge
from specdiff_dist.errors import InvalidConfig
from specdiff_dist.simulate.trace import read_trace
from specdiff_dist.types import GenerateRequest
from tests.doubles import Direct, TableDrafter, TableVerifier, make_request, random_table

VOCAB = 12


class PlacedAtOnce(Direct):
    """A LeasedVerifier that never waits."""

    @asynccontextmanager
    async def placed(self, session_id: str) -> AsyncIterator[None]:
        yield


@pytest.fixture
def router() -> Iterator[Any]:
    """A router's round loop over table roles: no Serve, no leases."""
    cls = router_module.Router.func_or_class

    class TableRouter(cls):
        def _verifier(self, _: GenerateRequest) -> Any:
            return PlacedAtOnce(TableVerifier(random_table(VOCAB, order=2), VOCAB))

        def _drafter(self, _: GenerateRequest) -> Any:
            return Direct(TableDrafter(VOCAB))

    one = object.__new__(TableRouter)
    one._tiers, one._tokenizer, one._knowledge = TIERS, None, PairKnowledge()
    one._drafter_handle = one._drafter_info = one._trace = None
    yield one
    if one._trace is not None:
        one._trace.close()


def call(**changes: Any) -> bytes:
    return pack_call(make_request(temperature=1.0, top_k=8, **changes), tier="high", config=None)


async def items(router: Any, packed: bytes) -> list[bytes]:
    return [item async for item in router.generate(packed)]


def settings(tmp_path: Any) -> AppSettings:
    return AppSettings(trace_dir=str(tmp_path / "traces"))


def test_tracing_is_off_unless_asked_for():
    assert AppSettings().trace_dir is None


async def test_each_request_becomes_one_of_the_trace(router, tmp_path):
    router._trace = router_module._trace_writer(tmp_path / "traces", settings(tmp_path))
    lengths = [len(await items(router, call(max_tokens=n, request_id=str(n)))) for n in (8, 20)]
    about, requests = read_trace(next((tmp_path / "traces").iterdir()))
    assert [len(rounds) + 1 for rounds in requests] == lengths  # the first item is empty
    assert about["verifier"] == "smollm2-135m"


async def test_an_abandoned_request_is_traced_as_far_as_it_came(router, tmp_path):
    router._trace = router_module._trace_writer(tmp_path / "traces", settings(tmp_path))
    stream = router.generate(call(max_tokens=200))
    for _ in range(4):
        await anext(stream)
    await stream.aclose()
    requests = read_trace(next((tmp_path / "traces").iterdir()))[1]
    assert [len(rounds) for rounds in requests] == [3]


async def test_without_a_trace_nothing_is_written(router, tmp_path):
    assert len(await items(router, call(max_tokens=8))) > 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path):
    (tmp_path / "traces").write_text("a file")
    with pytest.raises(InvalidConfig, match="cannot write traces"):
        router_module._trace_writer(tmp_path / "traces", settings(tmp_path))
