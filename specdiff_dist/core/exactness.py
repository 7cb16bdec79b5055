"""Which configurations keep the exact tier's promise: the output law is the verifier's, jointly over all tokens.

Three traps break it although every single step looks right (tests/law enumerates them):
1. Order of reveal. A token revealed early, out of left-to-right order, is not conditionally independent of the
   acceptance of tokens to its left that were drawn later given it; "the proposal it was drawn from" is then wrong.
2. Selection by a sampled token's own confidence conditions on the sample.
3. The proposal reported must be the proposal drawn from.
Greedy drafts (temperature 0) and deterministic drafters report one-hot proposals, for which 1 and 2 are harmless.
"""

from __future__ import annotations

from specdiff_dist.config import DecodeConfig
from specdiff_dist.core.speculation import FailFast, LibraSpec, MeasuredLibraSpec, Off, statistic_of
from specdiff_dist.errors import InexactConfig
from specdiff_dist.types import DrafterInfo


def check_exact(config: DecodeConfig, drafter: DrafterInfo | None, *, greedy_draft: bool = False) -> None:
    """Raises InexactConfig, naming the trap, when the output law would not be the target's (trap 0: a lossy rule).

    Args:
        drafter: None when decoding is always plain, or the drafter is not known yet (then judged by `config` alone).
        greedy_draft: the drafts are greedy whatever `config` says, as for temperature-0 requests.
    """
    if config.rule.leniency > 0.0:
        raise InexactConfig(
            f"the exact tier needs leniency 0, not {config.rule.leniency}; use another tier for a lossy rule", trap=0
        )
    if isinstance(config.policy, Off):
        return
    if drafter is not None and not drafter.reports_true_proposals:
        raise InexactConfig(
            f"trap 3 (the proposal reported must be the proposal drawn from): drafter {drafter.name!r} does not report "
            "the distributions it samples from; use another drafter or another tier",
            trap=3,
        )
    if greedy_draft or config.draft_temperature == 0.0 or (drafter is not None and drafter.is_deterministic):
        return
    effort = config.effort
    if effort.num_denoising_steps > 1 and effort.reveal_order != "left_to_right" and effort.early_reveal == "proposal":
        raise InexactConfig(
            f"trap 1 (order of reveal): {effort.num_denoising_steps} denoising steps revealing by "
            f"{effort.reveal_order!r} with the proposals of early tokens are not jointly lossless; use one step, "
            "reveal_order 'left_to_right', early_reveal 'one_hot', or draft_temperature 0",
            trap=1,
        )
    # FailFast may look at sampled tokens: it submits all that it has looked at, and so decides only about later ones.
    if statistic_of(config.policy) == "token_prob" and not isinstance(config.policy, FailFast):
        raise InexactConfig(
            "trap 2 (selection by a sampled token's own confidence): choosing the length by the sampled tokens' "
            "probabilities conditions on the sample; use statistic 'max_prob' or 'sum_squares', or draft_temperature 0",
            trap=2,
        )
    # A roll-back weighs statistics of later positions, which must not depend on a token that it may cut off: not on one
    # revealed in an earlier step, nor (Algorithm 1 may cut into an earlier block) on an earlier block's.
    is_stepwise = effort.num_denoising_steps > 1 and effort.early_reveal == "proposal"
    if isinstance(config.policy, LibraSpec | MeasuredLibraSpec) and is_stepwise:
        raise InexactConfig(
            "trap 2 (selection by a sampled token's own confidence): later confidences depend on tokens sampled in "
            "earlier steps, which the policy may cut off because of them; use one denoising step, early_reveal 'one_hot' "
            "or draft_temperature 0",
            trap=2,
        )
    if isinstance(config.policy, LibraSpec) and config.policy.max_length > config.policy.block:
        raise InexactConfig(
            "trap 2 (selection by a sampled token's own confidence): Algorithm 1 may cut into a block because of what was "
            "drafted given that block; use policy 'libraspec_measured', which does not, or draft_temperature 0",
            trap=2,
        )


def is_exact(config: DecodeConfig, drafter: DrafterInfo | None, *, greedy_draft: bool = False) -> bool:
    """Whether `check_exact` passes."""
    try:
        check_exact(config, drafter, greedy_draft=greedy_draft)
    except InexactConfig:
        return False
    return True
