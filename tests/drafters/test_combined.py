"""The combined drafter: which rounds copy, the prefix protocol on both sides, blocks that repeat."""

from __future__ import annotations

import numpy as np
import pytest

from specdiff_dist import load_pair
from specdiff_dist.config import Effort
from specdiff_dist.core.calibration import NUM_BINS, read_table
from specdiff_dist.drafters import split_name
from specdiff_dist.drafters.combined import MAX_COPIED, CombinedDrafter
from specdiff_dist.drafters.draft_choice import LOOKUP_RATES
from specdiff_dist.errors import DrafterUnavailable, InvalidConfig, InvalidRequest, PrefixMismatch, StaleRound
from specdiff_dist.types import DraftBlock, DraftCall, DrafterInfo, PrefixStatement, SamplingParams, prefix_crc
from tests.doubles import Direct, ScriptedDrafter, TableDrafter
from tests.law.enumeration import run_now
from tests.tiny_models import save_drafter, save_verifier, tiny_llama

VOCAB = 100
NINES = (99,) * 16  # what the inner drafter says
REPEATING = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2


def make(**options) -> tuple[CombinedDrafter, ScriptedDrafter]:
    inner = ScriptedDrafter(lambda prefix, n: NINES[:n], VOCAB, **options)
    return CombinedDrafter(Direct(inner), expected_acceptance=(0.4,)), inner


def info_of(drafter: CombinedDrafter) -> DrafterInfo:
    return run_now(drafter.info())


def draft(
    drafter: CombinedDrafter,
    tokens: list[int],
    *,
    cached: int = 0,
    index: int = 0,
    wanted: int = 4,
    before=(),
    session: str = "s",
) -> DraftBlock:
    call = call_of(tokens, cached=cached, index=index, wanted=wanted, before=before, session=session)
    return run_now(drafter.draft(call))


def call_of(
    tokens: list[int], *, cached: int = 0, index: int = 0, wanted: int = 4, before=(), session: str = "s"
) -> DraftCall:
    committed = np.array(tokens, np.int32)
    prefix = PrefixStatement(session, index, cached, prefix_crc(committed[:cached]), committed[cached:])
    return DraftCall(prefix, wanted, Effort(), SamplingParams(1.0), 64, 0, np.array(before, np.int32))


def test_it_copies_where_the_text_repeats_and_drafts_elsewhere():
    drafter, inner = make()
    fresh = draft(drafter, [1, 2, 3])
    assert fresh.token_ids.tolist() == [99] * 4
    assert fresh.cached_len == 2

    copy = draft(drafter, REPEATING, cached=2, index=1)
    assert copy.token_ids.tolist() == [1, 2, 3, 4]
    assert copy.proposals.token_ids.tolist() == [1, 2, 3, 4] and copy.proposals.probs.tolist() == [1.0] * 4
    assert copy.cached_len == len(REPEATING) - 1
    assert len(inner.calls) == 1
    copy.proposals.check(vocab_size=VOCAB)


def test_a_copys_confidence_is_what_such_matches_were_worth():
    drafter, _ = make()
    block = draft(drafter, [1, 2, 3, 50, 9, 1, 2, 3])
    assert block.confidences.tolist() == block.max_probs.tolist()
    assert block.confidences.tolist() == pytest.approx([LOOKUP_RATES[size - 1] for size in (3, 4, 5, 6)])
    assert block.confidences.dtype == np.float32


def test_the_inner_drafters_calibration_is_applied():
    table = (tuple(np.linspace(0.0, 0.5, NUM_BINS).tolist()), (0.125,) * NUM_BINS)
    drafter, inner = make(calibration=table)
    assert info_of(drafter).calibration == ()
    own = inner.draft(call_of([1, 2, 3]))
    block = draft(drafter, [1, 2, 3])
    np.testing.assert_allclose(
        block.max_probs, read_table(own.max_probs.astype(np.float64), np.array(table)), rtol=1e-6
    )
    assert block.confidences.tolist() == own.confidences.tolist()
    assert block.max_probs[1:].tolist() == [0.125] * 3 and block.max_probs.dtype == np.float32
    more = draft(drafter, [1, 2, 3], before=(7,))  # a later call's first token is the block's second
    assert more.max_probs.tolist() == [0.125] * 4


def test_the_inner_drafter_is_brought_up_to_date_after_rounds_that_copied():
    drafter, inner = make()
    draft(drafter, [1, 2, 3])
    draft(drafter, REPEATING, cached=2, index=1)
    new = [*REPEATING, 30]
    block = draft(drafter, new, cached=len(REPEATING) - 1, index=2)
    assert block.token_ids.tolist() == [99] * 4
    assert block.cached_len == len(REPEATING)
    assert inner.calls[-1].prefix.prefix_len == 2
    assert inner.calls[-1].prefix.new_token_ids.tolist() == new[2:]
    inner.release("s")  # as when it needs the room for others
    block = draft(drafter, [*new, 31], cached=len(REPEATING), index=3)
    assert block.token_ids.tolist() == [99] * 4
    assert inner.calls[-1].prefix.prefix_len == 0


def test_the_same_call_gives_the_same_block():
    inner = TableDrafter(5)
    drafter, tokens, cached = CombinedDrafter(Direct(inner)), [1, 2, 1], 0
    rng = np.random.default_rng(1)
    kinds = set()
    for index in range(40):
        first, again = (draft(drafter, tokens, cached=cached, index=index) for _ in range(2))
        assert first.token_ids.tolist() == again.token_ids.tolist()
        assert first.confidences.tolist() == again.confidences.tolist()
        kinds.add(first.proposals.row_lengths.max() == 1)
        cached = first.cached_len
        tokens = [*tokens, *first.token_ids[: rng.integers(0, 4)].tolist(), int(rng.integers(0, 5))]
    assert kinds == {True, False}


def test_a_round_keeps_to_its_choice_in_later_calls():
    drafter, inner = make()
    draft(drafter, [1, 2, 3, 4], wanted=2)
    more = draft(drafter, [1, 2, 3, 4], wanted=2, before=(1, 2, 3, 1, 2, 3))  # drafted tokens that would invite copying
    assert more.token_ids.tolist() == [99, 99]
    assert inner.calls[-1].drafted_token_ids.tolist() == [1, 2, 3, 1, 2, 3]

    copy = draft(drafter, REPEATING, cached=3, index=1, wanted=2)
    more = draft(drafter, REPEATING, cached=3, index=1, wanted=2, before=copy.token_ids.tolist())
    assert [*copy.token_ids.tolist(), *more.token_ids.tolist()] == [1, 2, 3, 4]


def test_the_prefix_protocol_is_kept():
    drafter, inner = make()
    with pytest.raises(PrefixMismatch):
        draft(drafter, [1, 2, 3], cached=2)
    draft(drafter, [1, 2, 3], index=3)
    with pytest.raises(StaleRound):
        draft(drafter, [1, 2, 3], index=2)
    with pytest.raises(PrefixMismatch):
        draft(drafter, [9, 9, 3], cached=2, index=4)
    with pytest.raises(InvalidRequest):
        draft(drafter, [1, 2], cached=2, index=4)
    assert (len(drafter._sessions), inner.num_sessions) == (1, 1)
    run_now(drafter.release("s"))
    assert (len(drafter._sessions), inner.num_sessions) == (0, 0)


def test_a_drafted_block_ends_where_the_drafters_does_and_a_copy_may_be_longer():
    drafter, inner = make(max_draft_tokens=5)
    assert info_of(drafter).max_draft_tokens == MAX_COPIED
    assert draft(drafter, REPEATING, wanted=20).num_tokens == MAX_COPIED
    assert draft(drafter, REPEATING, wanted=4, before=[1] * MAX_COPIED).num_tokens == 0
    fresh = [1, 2, 3]
    assert draft(drafter, fresh, wanted=9, session="t").num_tokens == 5
    assert draft(drafter, fresh, wanted=4, before=[99] * 3, session="t").num_tokens == 2
    assert draft(drafter, fresh, wanted=4, before=[99] * 5, session="t").num_tokens == 0
    assert [call.num_draft_tokens for call in inner.calls] == [5, 2]
    assert info_of(make(max_draft_tokens=20)[0]).max_draft_tokens == 20


def test_names_that_combine(tmp_path):
    assert split_name("combined") == split_name("diffusion+prompt-lookup") == ("diffusion", True)
    assert split_name("/some/folder+prompt-lookup") == ("/some/folder", True)
    assert [split_name(name) for name in ("diffusion", "prompt-lookup")] == [
        ("diffusion", False),
        ("prompt-lookup", False),
    ]
    verifier = str(save_verifier(tmp_path / "verifier", tiny_llama()))
    folder = save_drafter(tmp_path / "drafter", tiny_llama())
    with load_pair(verifier, drafter=f"{folder}+prompt-lookup", device="cpu", dtype="float32") as pair:
        info = pair.drafter_info
        assert info is not None and info.name == f"{folder}+prompt-lookup"
        assert not info.is_deterministic and info.reports_true_proposals
    with pytest.raises(InvalidConfig, match=r"was trained for a vocabulary of"):
        load_pair(verifier, drafter="combined", device="cpu")
    with pytest.raises(InvalidConfig, match="unknown drafter 'nonsense'"):
        load_pair(verifier, drafter="nonsense+prompt-lookup", device="cpu")


def test_a_round_that_copies_tells_and_asks_nobody():
    drafter, inner = make()
    copy = draft(drafter, REPEATING)
    assert copy.is_local and copy.num_tokens == 4 and copy.cost.wall_s > 0.0 and not inner.calls
    assert copy.followed_by(copy).is_local and copy.head(2).is_local and copy.statistics.is_local
    assert not draft(drafter, [1, 2, 3], session="t").is_local
    run_now(drafter.release("u"))  # unknown sessions are fine
    assert len(inner.calls) == 1


def test_a_session_or_a_round_may_do_without_the_drafter():
    drafter, inner = make()
    copying = drafter.copying()
    assert run_now(copying.info()).feature_layers == () and run_now(copying.info()).is_deterministic
    assert run_now(copying.draft(call_of([1, 2, 3]))).num_tokens == 0
    assert run_now(copying.draft(call_of(REPEATING, cached=2, index=1))).token_ids.tolist() == [1, 2, 3, 4]
    assert not inner.calls
    run_now(copying.release("s"))
    assert len(drafter._sessions) == 0

    for index in range(
        40
    ):  # rounds that were not to ask leave nothing behind that a later one would have to make up for
        assert run_now(drafter.copy(call_of([1, 2, 3], index=index))).num_tokens == 0
    assert draft(drafter, [1, 2, 3, 4], cached=2, index=40).token_ids.tolist() == [99] * 4


def test_a_drafter_that_forgets_is_told_again_and_given_up_in_the_end():
    drafter, inner = make()
    draft(drafter, [1, 2, 3])
    lost = Lost(inner, times=2)
    drafter._inner = lost
    assert draft(drafter, [1, 2, 3, 4], cached=2, index=1).token_ids.tolist() == [99] * 4
    drafter._inner = Lost(inner, times=100)
    with pytest.raises(DrafterUnavailable, match="keeps losing"):
        draft(drafter, [1, 2, 3, 4, 5], cached=3, index=2)


class Lost(Direct):
    """Has forgotten the session so many times."""

    def __init__(self, engine: ScriptedDrafter, times: int) -> None:
        super().__init__(engine)
        self._times = times

    async def draft(self, call: DraftCall) -> DraftBlock:
        self._times -= 1
        if self._times >= 0:
            raise PrefixMismatch(0)
        return await super().draft(call)


def test_a_round_that_would_not_pay_drafts_nothing_and_asks_nobody():
    inner = ScriptedDrafter(lambda prefix, n: NINES[:n], VOCAB)
    drafter = CombinedDrafter(Direct(inner), expected_acceptance=(0.1,))
    block = draft(drafter, [1, 2, 3])
    assert (block.num_tokens, block.cached_len, inner.calls) == (0, 2, [])
    copy = draft(drafter, REPEATING, cached=2, index=1)
    assert copy.num_tokens == 4
