"""What the sessions of one drafter-verifier pair share."""

from __future__ import annotations

from collections import OrderedDict

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.calibration import AcceptanceCalibration
from specdiff_dist.core.costs import MeasuredCosts
from specdiff_dist.core.speculation import Knowledge
from specdiff_dist.types import DrafterInfo

MAX_KINDS = 64  # requests choose their rules freely; beyond this the kind not used for longest is forgotten


class PairKnowledge:
    """What speculation policies have learned, apart for each kind of request: how often a draft is accepted depends on the
    rule, on the effort and on whether drafts are greedy, and what a draft costs on the effort. A verification costs the same
    for all, and is learned from all."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[object, Knowledge] = OrderedDict()
        self._verification = MeasuredCosts.unknown().verification

    def for_session(self, config: DecodeConfig, drafter: DrafterInfo | None, *, is_greedy: bool) -> Knowledge:
        """What a new session starts with, and teaches. `drafter`: whose calibration of training is the first guess."""
        kind = (config.rule, config.effort, config.draft_temperature, config.draft_top_k, is_greedy)
        known = self._kinds.get(kind)
        if known is None:
            known = Knowledge(
                AcceptanceCalibration(() if drafter is None else drafter.calibration),
                MeasuredCosts(MeasuredCosts.unknown().draft, self._verification),
            )
            self._kinds[kind] = known
        self._kinds.move_to_end(kind)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return known.for_session()
