from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
DTYPE_UNSPECIFIED: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class SparseRows(_message.Message):
    __slots__ = ("row_splits", "token_ids", "probs")
    ROW_SPLITS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    row_splits: Tensor
    token_ids: Tensor
    probs: Tensor
    def __init__(self, row_splits: _Optional[_Union[Tensor, _Mapping]] = ..., token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., probs: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ...) -> None: ...

class LogitProcessing(_message.Message):
    __slots__ = ("frequency_penalty", "presence_penalty", "repetition_penalty", "bias_token_ids", "biases", "min_tokens", "allowed_token_ids")
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    min_tokens: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., min_tokens: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetLogprobs(_message.Message):
    __slots__ = ("top_token_ids", "top", "draft", "entries", "recovered", "plain")
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    top_token_ids: Tensor
    top: Tensor
    draft: Tensor
    entries: Tensor
    recovered: Tensor
    plain: Tensor
    def __init__(self, top_token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., top: _Optional[_Union[Tensor, _Mapping]] = ..., draft: _Optional[_Union[Tensor, _Mapping]] = ..., entries: _Optional[_Union[Tensor, _Mapping]] = ..., recovered: _Optional[_Union[Tensor, _Mapping]] = ..., plain: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Effort(_message.Message):
    __slots__ = ("num_denoising_steps", "reveal_order", "early_reveal")
    NUM_DENOISING_STEPS_FIELD_NUMBER: _ClassVar[int]
    REVEAL_ORDER_FIELD_NUMBER: _ClassVar[int]
    EARLY_REVEAL_FIELD_NUMBER: _ClassVar[int]
    num_denoising_steps: int
    reveal_order: str
    early_reveal: str
    def __init__(self, num_denoising_steps: _Optional[int] = ..., reveal_order: _Optional[str] = ..., early_reveal: _Optional[str] = ...) -> None: ...

class PrefixStatement(_message.Message):
    __slots__ = ("session_id", "round_index", "prefix_len", "prefix_crc", "new_token_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CRC_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    round_index: int
    prefix_len: int
    prefix_crc: int
    new_token_ids: Tensor
    def __init__(self, session_id: _Optional[str] = ..., round_index: _Optional[int] = ..., prefix_len: _Optional[int] = ..., prefix_crc: _Optional[int] = ..., new_token_ids: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class CallCost(_message.Message):
    __slots__ = ("forward_s", "queue_s", "num_forwards", "batch_size", "batch_tokens")
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    forward_s: float
    queue_s: float
    num_forwards: int
    batch_size: int
    batch_tokens: int
    def __init__(self, forward_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., num_forwards: _Optional[int] = ..., batch_size: _Optional[int] = ..., batch_tokens: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterInfo(_message.Message):
    __slots__ = ("name", "vocab_size", "max_model_len", "max_draft_tokens", "reveal_orders", "is_deterministic", "reports_true_proposals", "feature_layers", "feature_size", "calibration")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REVEAL_ORDERS_FIELD_NUMBER: _ClassVar[int]
    IS_DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    REPORTS_TRUE_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    max_model_len: int
    max_draft_tokens: int
    reveal_orders: _containers.RepeatedScalarFieldContainer[str]
    is_deterministic: bool
    reports_true_proposals: bool
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_size: int
    calibration: Tensor
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., reveal_orders: _Optional[_Iterable[str]] = ..., is_deterministic: _Optional[bool] = ..., reports_true_proposals: _Optional[bool] = ..., feature_layers: _Optional[_Iterable[int]] = ..., feature_size: _Optional[int] = ..., calibration: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class VerifierInfo(_message.Message):
    __slots__ = ("name", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "num_layers", "hidden_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    num_layers: int
    hidden_size: int
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("prefix", "num_draft_tokens", "effort", "sampling", "draft_top_k", "seed", "drafted_token_ids", "features")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixStatement
    num_draft_tokens: int
    effort: Effort
    sampling: SamplingParams
    draft_top_k: int
    seed: bytes
    drafted_token_ids: Tensor
    features: Tensor
    def __init__(self, prefix: _Optional[_Union[PrefixStatement, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., effort: _Optional[_Union[Effort, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., draft_top_k: _Optional[int] = ..., seed: _Optional[bytes] = ..., drafted_token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., features: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("token_ids", "proposals", "confidences", "max_probs", "cached_len", "cost")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    token_ids: Tensor
    proposals: SparseRows
    confidences: Tensor
    max_probs: Tensor
    cached_len: int
    cost: CallCost
    def __init__(self, token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., proposals: _Optional[_Union[SparseRows, _Mapping]] = ..., confidences: _Optional[_Union[Tensor, _Mapping]] = ..., max_probs: _Optional[_Union[Tensor, _Mapping]] = ..., cached_len: _Optional[int] = ..., cost: _Optional[_Union[CallCost, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("prefix", "draft_token_ids", "sampling", "proposals", "target_uniforms", "hold_rows", "feature_layers", "feature_start", "processing", "num_prompt_tokens", "ending_token_ids", "num_logprobs")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    TARGET_UNIFORMS_FIELD_NUMBER: _ClassVar[int]
    HOLD_ROWS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_START_FIELD_NUMBER: _ClassVar[int]
    PROCESSING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDING_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixStatement
    draft_token_ids: Tensor
    sampling: SamplingParams
    proposals: SparseRows
    target_uniforms: Tensor
    hold_rows: bool
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_start: int
    processing: LogitProcessing
    num_prompt_tokens: int
    ending_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    def __init__(self, prefix: _Optional[_Union[PrefixStatement, _Mapping]] = ..., draft_token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., proposals: _Optional[_Union[SparseRows, _Mapping]] = ..., target_uniforms: _Optional[_Union[Tensor, _Mapping]] = ..., hold_rows: _Optional[bool] = ..., feature_layers: _Optional[_Iterable[int]] = ..., feature_start: _Optional[int] = ..., processing: _Optional[_Union[LogitProcessing, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., ending_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("rows", "row_mass", "recovered_token_ids", "plain_token_ids", "cached_len", "cost", "features", "logprobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_MASS_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rows: SparseRows
    row_mass: Tensor
    recovered_token_ids: Tensor
    plain_token_ids: Tensor
    cached_len: int
    cost: CallCost
    features: Tensor
    logprobs: TargetLogprobs
    def __init__(self, rows: _Optional[_Union[SparseRows, _Mapping]] = ..., row_mass: _Optional[_Union[Tensor, _Mapping]] = ..., recovered_token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., plain_token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., cached_len: _Optional[int] = ..., cost: _Optional[_Union[CallCost, _Mapping]] = ..., features: _Optional[_Union[Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[TargetLogprobs, _Mapping]] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("session_id", "round_index", "position", "scale", "uniform", "proposal")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    round_index: int
    position: int
    scale: float
    uniform: float
    proposal: SparseRows
    def __init__(self, session_id: _Optional[str] = ..., round_index: _Optional[int] = ..., position: _Optional[int] = ..., scale: _Optional[float] = ..., uniform: _Optional[float] = ..., proposal: _Optional[_Union[SparseRows, _Mapping]] = ...) -> None: ...

class ResolveReply(_message.Message):
    __slots__ = ("token_id", "cost", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    cost: CallCost
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., cost: _Optional[_Union[CallCost, _Mapping]] = ..., logprob: _Optional[float] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "message", "cached_len", "param")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ErrorDetail.Kind]
        KIND_INVALID_REQUEST: _ClassVar[ErrorDetail.Kind]
        KIND_INVALID_CONFIG: _ClassVar[ErrorDetail.Kind]
        KIND_PREFIX_MISMATCH: _ClassVar[ErrorDetail.Kind]
        KIND_STALE_ROUND: _ClassVar[ErrorDetail.Kind]
        KIND_INVALID_ROWS: _ClassVar[ErrorDetail.Kind]
        KIND_UNAVAILABLE: _ClassVar[ErrorDetail.Kind]
    KIND_UNSPECIFIED: ErrorDetail.Kind
    KIND_INVALID_REQUEST: ErrorDetail.Kind
    KIND_INVALID_CONFIG: ErrorDetail.Kind
    KIND_PREFIX_MISMATCH: ErrorDetail.Kind
    KIND_STALE_ROUND: ErrorDetail.Kind
    KIND_INVALID_ROWS: ErrorDetail.Kind
    KIND_UNAVAILABLE: ErrorDetail.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorDetail.Kind
    message: str
    cached_len: int
    param: str
    def __init__(self, kind: _Optional[_Union[ErrorDetail.Kind, str]] = ..., message: _Optional[str] = ..., cached_len: _Optional[int] = ..., param: _Optional[str] = ...) -> None: ...

class CallFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[CallFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[CallFrame, _Mapping]]] = ...) -> None: ...

class CallFrame(_message.Message):
    __slots__ = ("call_id", "method", "request", "is_cancelled")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    method: str
    request: bytes
    is_cancelled: bool
    def __init__(self, call_id: _Optional[int] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ..., is_cancelled: _Optional[bool] = ...) -> None: ...

class ReplyFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[ReplyFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[ReplyFrame, _Mapping]]] = ...) -> None: ...

class ReplyFrame(_message.Message):
    __slots__ = ("call_id", "reply", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    reply: bytes
    error: ErrorDetail
    def __init__(self, call_id: _Optional[int] = ..., reply: _Optional[bytes] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ...) -> None: ...
