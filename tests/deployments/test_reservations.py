"""Room for caches: never more than there is, and everybody comes to their end."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.open_leases import OpenLeases
from deployments.replica import GuardedDrafter, GuardedVerifier, Replica
from deployments.reservations import WAITER_EXPIRES_S, Reservations
from deployments.settings import AppSettings
from specdiff_dist.config import Effort
from specdiff_dist.errors import DrafterUnavailable, RoleError, VerifierUnavailable
from specdiff_dist.transport.engine_thread import DEFAULT_MAX_QUEUED
from specdiff_dist.types import DraftCall, PrefixStatement, SamplingParams, VerifyCall
from tests.doubles import ScriptedDrafter, TableVerifier, random_table


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def room(max_tokens: int | None, step: int = 10) -> tuple[Reservations, Clock]:
    clock = Clock()
    return Reservations(max_tokens, step=step, clock=clock), clock


def test_what_a_session_caches_and_a_step_are_reserved_and_never_more_than_it_may_need():
    kv, _ = room(100)
    assert kv.place("long", 30, 1000) and kv.num_tokens == 40
    assert kv.place("short", 30, 33) and kv.num_tokens == 73
    assert not kv.place("third", 20, 1000) and kv.num_tokens == 73
    kv.free("short")
    assert kv.place("third", 20, 1000) and kv.num_tokens == 70


def test_a_session_grows_by_steps_and_takes_the_rest_where_a_step_is_not_left():
    kv, _ = room(100)
    assert kv.place("a", 30, 57)
    assert kv.grow("a", 40) and kv.num_tokens == 40
    assert kv.grow("a", 41) and kv.num_tokens == 51
    assert kv.grow("a", 52) and kv.num_tokens == 57  # all it may need
    assert kv.place("b", 28, 90) and kv.num_tokens == 95
    assert kv.grow("b", 39) and kv.num_tokens == 100  # the rest


def test_a_session_without_room_gives_everything_back_and_keeps_its_turn():
    kv, _ = room(60)
    assert kv.place("first", 10, 60) and kv.place("second", 30, 60)
    assert not kv.grow("first", 21)  # 40 are the second's
    assert (kv.num_tokens, kv.num_returns, kv.num_waiting) == (40, 1, 1)
    assert not kv.grow("first", 1)  # it has no place, whatever it asks for
    assert not kv.place("newcomer", 1, 2)  # fits, but the first would wait for ever
    assert not kv.place("first", 21, 60)
    kv.free("second")
    assert kv.place("first", 21, 60)
    assert kv.place("newcomer", 1, 2)


def test_short_requests_do_not_overtake_a_long_one_for_ever():
    kv, clock = room(100)
    assert all(kv.place(f"short{i}", 15, 25) for i in range(4))
    assert not kv.place("long", 85, 95)
    for i in range(4):
        clock.now += 0.9 * WAITER_EXPIRES_S
        assert not kv.place("long", 85, 95)
        assert not kv.place(f"more{i}", 15, 25)  # 25 … are free now, and kept
        kv.free(f"short{i}")
    assert kv.place("long", 85, 95)


def test_what_fits_beside_those_that_wait_is_placed():
    kv, _ = room(100)
    assert kv.place("a", 70, 80)
    assert not kv.place("b", 20, 30)
    kv.free("a")
    assert kv.place("c", 50, 60)  # b's 30 are still there for it
    assert not kv.place("d", 10, 20)
    assert kv.place("b", 20, 30)


def test_who_does_not_ask_again_keeps_nobody_waiting():
    kv, clock = room(100)
    assert kv.place("a", 40, 50)
    assert not kv.place("gone", 60, 70)
    assert not kv.place("b", 40, 50)
    clock.now += 1.01 * WAITER_EXPIRES_S
    assert kv.num_waiting == 0
    assert kv.place("b", 40, 50)


def test_what_can_never_fit_is_refused_and_keeps_nobody_waiting():
    kv, _ = room(100)
    assert not kv.place("huge", 101, 200)
    assert kv.num_waiting == 0
    assert kv.place("a", 95, 200) and kv.num_tokens == 100  # a step more than there is, is all there is


def test_without_a_limit_everybody_has_room():
    kv, _ = room(None)
    assert all(kv.place(f"{i}", 10**6, 10**9) and kv.grow(f"{i}", 10**8) for i in range(100))


@pytest.mark.parametrize("seed", range(30))
def test_every_answer_is_made_whatever_comes(seed):
    """Sessions of any length in a small room, asking in any order, some leaving in the middle. The room is never overdrawn,
    and everybody ends within a number of calls that only their tokens and returns explain."""
    rng = random.Random(seed)
    total, step = 60, rng.choice([1, 4, 16])
    kv, clock = room(total, step)
    prompts = [rng.randint(1, 30) for _ in range(12)]
    ends = [rng.randint(prompt + 1, total) for prompt in prompts]
    cached, placed, done = list(prompts), [False] * 12, set()
    progress_at_placing = [0] * 12
    for _ in range(20_000):
        if len(done) == 12:
            break
        clock.now += 0.01
        i = rng.choice([j for j in range(12) if j not in done])
        name = str(i)
        if rng.random() < 0.0005:
            done.add(i)
            kv.free(name)
        elif not placed[i]:
            placed[i] = kv.place(name, cached[i], ends[i])
            progress_at_placing[i] = cached[i]
        else:
            wanted = min(cached[i] + rng.randint(1, 3), ends[i])
            if kv.grow(name, wanted):
                cached[i] = wanted
                if wanted == ends[i]:
                    done.add(i)
                    kv.free(name)
            else:
                placed[i] = False
                assert cached[i] + 3 > progress_at_placing[i] + step  # no placing is for nothing
        held = sum(cached[j] for j in range(12) if placed[j] and j not in done)
        assert held <= kv.num_tokens <= total
    assert len(done) == 12
    assert kv.num_tokens == 0


PROMPT = np.array([1, 2, 3], np.int32)


def verify(round_index: int, num_new: int) -> VerifyCall:
    prefix = PrefixStatement("session", round_index, 0, 0, np.ones(num_new, np.int32))
    return VerifyCall(prefix, np.zeros(0, np.int32), SamplingParams(0.0), None, np.zeros(1))


async def test_a_verifier_session_without_room_frees_its_cache_and_comes_again_when_its_lease_has_ended():
    leases = OpenLeases(kv=Reservations(20, step=5))
    guarded = GuardedVerifier(TableVerifier(random_table(10, 1), 10), leases)
    released = leases.open("session", 3, 20)
    assert released is not None and leases.open("other", 7, 20) is not None
    guarded.verify(verify(0, 8))
    assert guarded.num_sessions == 1
    with pytest.raises(VerifierUnavailable, match="goes on"):
        guarded.verify(verify(1, 9))
    assert guarded.num_sessions == 0
    await asyncio.wait_for(released.wait(), 1)
    assert leases.open("session", 9, 20) is None  # not beside its old lease, whose end frees the cache
    assert leases.close("session", released)
    leases.freed("session")
    assert leases.open("session", 9, 20) is None and leases.kv.num_waiting == 1
    leases.kv.free("other")
    assert leases.open("session", 9, 20) is not None
    guarded.verify(verify(1, 9))


async def test_a_drafter_counts_what_it_is_asked_to_draft():
    leases = OpenLeases(kv=Reservations(8, step=2))
    guarded = GuardedDrafter(ScriptedDrafter(lambda prefix, n: [1] * n, 10), leases)
    leases.open("session", 3, 100)
    prefix = PrefixStatement("session", 0, 0, 0, PROMPT)
    guarded.draft(DraftCall(prefix, 5, Effort(), SamplingParams(0.0), 4, seed=0))
    assert leases.kv.num_tokens == 8
    with pytest.raises(DrafterUnavailable, match="goes on"):
        guarded.draft(DraftCall(prefix, 6, Effort(), SamplingParams(0.0), 4, seed=0))
    assert guarded.num_sessions == 0


async def test_room_is_others_when_the_cache_is_gone_and_not_before():
    leases = OpenLeases(kv=Reservations(20, step=5))
    released = leases.open("a", 10, 20)
    assert released is not None and leases.close("a", released)
    assert leases.open("b", 10, 20) is None
    leases.freed("a")
    assert leases.open("b", 10, 20) is not None
    with pytest.raises(RoleError, match="never fit"):
        leases.open("c", 21, 30)


async def test_a_session_that_is_back_before_its_old_cache_is_gone_keeps_its_room():
    leases = OpenLeases(kv=Reservations(40, step=5))
    released = leases.open("a", 10, 20)
    assert released is not None and leases.close("a", released)
    assert leases.open("a", 10, 20) is not None
    leases.freed("a")
    assert leases.kv.num_tokens == 15


def test_every_session_that_may_be_there_may_have_a_call_in_the_engines_queue():
    most = max(meta.le for meta in AppSettings.model_fields["max_sessions"].metadata if hasattr(meta, "le"))
    assert 2 * most <= DEFAULT_MAX_QUEUED
    assert most >= 4096


async def test_the_gauges_show_what_is_reserved(monkeypatch):
    shown: dict[str, float] = {}

    class FakeGauge:
        def __init__(self, name: str, description: str) -> None:
            self._name = name

        def set(self, value: float) -> None:
            shown[self._name] = value

    class FakeContext:
        def get_node_id(self) -> str:
            return "node"

    monkeypatch.setattr("deployments.replica.Gauge", FakeGauge)
    monkeypatch.setattr("deployments.replica.ray.get_runtime_context", FakeContext)
    leases = OpenLeases(kv=Reservations(20, step=5))
    endpoint: Any = SimpleNamespace(address="here")
    replica = Replica(endpoint, leases, max_call_s=1.0)
    leases.open("a", 10, 20)
    leases.open("b", 10, 20)
    replica.check_model()
    assert shown == {
        "specdiff_kv_tokens_reserved": 15, "specdiff_kv_tokens_total": 20, "specdiff_kv_waiting": 1,
        "specdiff_kv_returns": 0,
    }  # fmt: skip
    assert Replica(endpoint, OpenLeases(), max_call_s=1.0)._kv_counters()["kv_tokens_total"] == -1
