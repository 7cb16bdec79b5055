"""What a call and a reply must satisfy, whatever transport carried them.

Calls are checked where they are received, with the replica's own limits; replies where they are received too. Wrong
calls raise InvalidRequest, wrong rows InvalidRows, so that nothing malformed reaches a model or an acceptance rule.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdiff_dist.core.features import MAX_FEATURE_BYTES, fault, max_rows
from specdiff_dist.core.rows import SparseRows
from specdiff_dist.errors import InvalidRequest, InvalidRows, SpecdiffError
from specdiff_dist.transport.logits_checks import check_logits_asked, check_logprobs, is_logprob
from specdiff_dist.types import (
    DraftBlock,
    DraftCall,
    DrafterInfo,
    PrefixStatement,
    ResolveCall,
    ResolvedToken,
    TargetRows,
    VerifierInfo,
    VerifyCall,
)

MAX_SESSION_ID = 256  # characters
_DTYPES: dict[type[np.generic], np.dtype] = {  # ready made
    kind: np.dtype(kind) for kind in (np.int32, np.int64, np.float32, np.float64)
}
MASS_TOLERANCE = 1e-2  # a softmax over 150k float32 numbers sums to 1 well within it


def check_draft_call(call: DraftCall, info: DrafterInfo) -> None:
    """Raises InvalidRequest."""
    _check_prefix(call.prefix, info.vocab_size)
    if not 1 <= call.num_draft_tokens <= info.max_draft_tokens:
        raise InvalidRequest(f"num_draft_tokens must be 1 … {info.max_draft_tokens}, not {call.num_draft_tokens}")
    _check_array(call.drafted_token_ids, np.int32, None, "drafted_token_ids", InvalidRequest)
    _check_ids(call.drafted_token_ids, info.vocab_size, "drafted_token_ids", InvalidRequest)
    if len(call.drafted_token_ids) + call.num_draft_tokens > info.max_draft_tokens:
        raise InvalidRequest(f"a round drafts at most {info.max_draft_tokens} tokens")
    if call.draft_top_k < 1:
        raise InvalidRequest(f"draft_top_k must be positive, not {call.draft_top_k}")
    if not info.feature_layers:
        if call.features is not None:
            raise InvalidRequest(f"drafter {info.name!r} takes no features")
    elif wrong := fault(call.features, len(call.prefix.new_token_ids) - 1, info.feature_size):
        raise InvalidRequest(f"drafter {info.name!r}: {wrong}")


def check_verify_call(call: VerifyCall, info: VerifierInfo) -> None:
    """Raises InvalidRequest, and InvalidRows for proposals that are no distributions."""
    _check_prefix(call.prefix, info.vocab_size)
    _check_array(call.draft_token_ids, np.int32, None, "draft_token_ids", InvalidRequest)
    _check_ids(call.draft_token_ids, info.vocab_size, "draft_token_ids", InvalidRequest)
    num_draft = len(call.draft_token_ids)
    _check_array(call.target_uniforms, np.float64, num_draft + 1, "target_uniforms", InvalidRequest)
    if not (call.target_uniforms.min() >= 0.0 and call.target_uniforms.max() < 1.0):  # false for NaN
        raise InvalidRequest("target_uniforms must be in [0, 1)")
    if call.proposals is not None:
        _check_distributions(call.proposals, num_draft, info.vocab_size, "proposal")
    elif num_draft and call.sampling.may_be_wide:
        raise InvalidRequest("these sampling parameters can give wide target rows: send the proposals")
    if call.feature_layers:
        _check_feature_layers(call, info)
    check_logits_asked(call, info)


def check_draft_block(block: DraftBlock, call: DraftCall, info: DrafterInfo) -> None:
    """Raises InvalidRows. Tokens without a proposal each are an error: never a silent change of rule."""
    _check_array(block.token_ids, np.int32, None, "draft tokens", InvalidRows)
    if block.num_tokens > call.num_draft_tokens:
        raise InvalidRows(f"asked for {call.num_draft_tokens} draft tokens, got {block.num_tokens}")
    _check_ids(block.token_ids, info.vocab_size, "draft tokens", InvalidRows)
    _check_distributions(block.proposals, block.num_tokens, info.vocab_size, "proposal")
    for values, what in ((block.confidences, "confidences"), (block.max_probs, "max_probs")):
        _check_array(values, np.float32, block.num_tokens, what, InvalidRows)
        if not np.isfinite(values).all():
            raise InvalidRows(f"{what}: NaN or infinite")


def check_target_rows(target: TargetRows, call: VerifyCall, info: VerifierInfo) -> None:
    """Raises InvalidRows."""
    if not call.feature_layers:
        if target.features is not None:
            raise InvalidRows("features came that were not asked for")
    elif wrong := fault(target.features, call.num_feature_rows, len(call.feature_layers) * info.hidden_size):
        raise InvalidRows(wrong)
    check_logprobs(target, call, info)
    num_draft = len(call.draft_token_ids)
    _check_array(target.row_mass, np.float64, num_draft + 1, "row_mass", InvalidRows)
    if not (np.abs(target.row_mass - 1.0) <= MASS_TOLERANCE).all():  # false for NaN
        raise InvalidRows("a target row does not sum to 1")
    if target.recovered_token_ids is None or target.plain_token_ids is None:
        if target.recovered_token_ids is not target.plain_token_ids:
            raise InvalidRows("wide target rows need both recovered and plain tokens")
        _check_distributions(target.rows, num_draft + 1, info.vocab_size, "target row")
        return
    for ids, length, what in (
        (target.recovered_token_ids, num_draft, "recovered tokens"),
        (target.plain_token_ids, num_draft + 1, "plain tokens"),
    ):
        _check_array(ids, np.int32, length, what, InvalidRows)
        _check_ids(ids, info.vocab_size, what, InvalidRows)
    _check_on_support(target, call.proposals)


def check_resolve_call(call: ResolveCall, info: VerifierInfo) -> None:
    """Raises InvalidRequest, and InvalidRows for a proposal that is no distribution."""
    _check_session_id(call.session_id)
    if call.round_index < 0 or call.position < 0:
        raise InvalidRequest("round_index and position must not be negative")
    if not (0.0 <= call.scale <= 1.0 and 0.0 <= call.uniform < 1.0):  # false for NaN
        raise InvalidRequest(f"scale must be in [0, 1] and uniform in [0, 1), not {call.scale} and {call.uniform}")
    _check_distributions(call.proposal, 1, info.vocab_size, "proposal")


def check_resolved(resolved: ResolvedToken, info: VerifierInfo) -> None:
    """Raises InvalidRows."""
    if not 0 <= resolved.token_id < info.vocab_size:
        raise InvalidRows(f"the recovered token must be in [0, {info.vocab_size}), not {resolved.token_id}")
    if resolved.logprob is not None and not is_logprob(resolved.logprob):
        raise InvalidRows(f"the recovered token's logprob cannot be {resolved.logprob}")


def _check_feature_layers(call: VerifyCall, info: VerifierInfo) -> None:
    layers = call.feature_layers
    if not info.num_layers:
        raise InvalidRequest(f"verifier {info.name!r} gives no features; use a drafter that needs none")
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= info.num_layers:
        raise InvalidRequest(f"feature_layers must ascend within 0 … {info.num_layers - 1}, not {list(layers)}")
    if not call.prefix.prefix_len <= call.feature_start <= call.prefix.num_committed + len(call.draft_token_ids):
        raise InvalidRequest(f"feature_start must be a position that this call adds, not {call.feature_start}")
    if call.num_feature_rows > max(max_rows(len(layers) * info.hidden_size), len(call.draft_token_ids) + 1):
        raise InvalidRequest(
            f"features of {call.num_feature_rows} tokens take more than {MAX_FEATURE_BYTES} bytes; ask for fewer at a time"
        )


def _check_on_support(target: TargetRows, proposals: SparseRows | None) -> None:
    """Wide rows: the target on exactly the support that was sent, so sub-distributions, zeros allowed."""
    rows = target.rows
    proposals = SparseRows.from_rows([]) if proposals is None else proposals
    _check_csr(rows, "target row")
    if not np.array_equal(rows.row_splits, proposals.row_splits) or not np.array_equal(
        rows.token_ids, proposals.token_ids
    ):
        raise InvalidRows("wide target rows are not on the proposals' support")
    is_number = rows.probs.min(initial=0.0) >= 0.0 and rows.probs.max(initial=0.0) < np.inf  # false for NaN
    if len(rows.probs) != len(rows.token_ids) or not is_number:
        raise InvalidRows("target row: NaN, infinite, negative or missing probability")
    if (rows.row_sums() > 1.0 + MASS_TOLERANCE).any():
        raise InvalidRows("a target row's part sums to more than 1")


def _check_session_id(session_id: str) -> None:
    if not 1 <= len(session_id) <= MAX_SESSION_ID:
        raise InvalidRequest(f"session_id must have 1 … {MAX_SESSION_ID} characters, not {len(session_id)}")


def _check_prefix(prefix: PrefixStatement, vocab_size: int) -> None:
    _check_session_id(prefix.session_id)
    if prefix.prefix_len < 0 or prefix.round_index < 0:
        raise InvalidRequest("prefix_len and round_index must not be negative")
    _check_array(prefix.new_token_ids, np.int32, None, "new_token_ids", InvalidRequest)
    if len(prefix.new_token_ids) == 0:
        raise InvalidRequest("new_token_ids is empty; the anchor is always sent")
    _check_ids(prefix.new_token_ids, vocab_size, "new_token_ids", InvalidRequest)


def _check_distributions(rows: SparseRows, num_rows: int, vocab_size: int, what: str) -> None:
    _check_csr(rows, what)
    if rows.num_rows != num_rows:
        raise InvalidRows(f"{num_rows} {what}s expected, got {rows.num_rows}")
    rows.check(vocab_size=vocab_size, what=what)


def _check_csr(rows: SparseRows, what: str) -> None:
    _check_array(rows.row_splits, np.int64, None, f"{what} row_splits", InvalidRows)
    _check_array(rows.token_ids, np.int32, None, f"{what} token_ids", InvalidRows)
    _check_array(rows.probs, np.float32, None, f"{what} probs", InvalidRows)


def _check_array(
    array: NDArray, dtype: type[np.generic], length: int | None, what: str, error: type[SpecdiffError]
) -> None:
    """One dimension, exactly this dtype (casting would change numbers without a word), and this length if given."""
    if array.dtype != _DTYPES[dtype] or array.ndim != 1 or (length is not None and len(array) != length):
        shape = "[n]" if length is None else f"[{length}]"
        raise error(f"{what} must be {_DTYPES[dtype]} {shape}, not {array.dtype} {list(array.shape)}")


def _check_ids(ids: NDArray[np.integer], vocab_size: int, what: str, error: type[SpecdiffError]) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise error(f"{what} must be token ids in [0, {vocab_size})")
