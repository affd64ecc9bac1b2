import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvfork.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Channel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANNEL_UNSPECIFIED: _ClassVar[Channel]
    CHANNEL_REASONING: _ClassVar[Channel]
    CHANNEL_TOOL_CALL: _ClassVar[Channel]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_MAX_TOKENS: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_FULL: _ClassVar[FinishReason]
    FINISH_REASON_TIME_LIMIT: _ClassVar[FinishReason]
    FINISH_REASON_STOPPED: _ClassVar[FinishReason]

class Rounding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUNDING_UNSPECIFIED: _ClassVar[Rounding]
    ROUNDING_EXACT: _ClassVar[Rounding]
    ROUNDING_DOWN: _ClassVar[Rounding]

class Release(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_UNSPECIFIED: _ClassVar[Release]
    RELEASE_NONE: _ClassVar[Release]
    RELEASE_SOURCE: _ClassVar[Release]
    RELEASE_ABANDONED: _ClassVar[Release]

class Admission(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMISSION_UNSPECIFIED: _ClassVar[Admission]
    ADMISSION_NOW: _ClassVar[Admission]
    ADMISSION_QUEUED: _ClassVar[Admission]
    ADMISSION_REFUSED: _ClassVar[Admission]
CHANNEL_UNSPECIFIED: Channel
CHANNEL_REASONING: Channel
CHANNEL_TOOL_CALL: Channel
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_MAX_TOKENS: FinishReason
FINISH_REASON_CONTEXT_FULL: FinishReason
FINISH_REASON_TIME_LIMIT: FinishReason
FINISH_REASON_STOPPED: FinishReason
ROUNDING_UNSPECIFIED: Rounding
ROUNDING_EXACT: Rounding
ROUNDING_DOWN: Rounding
RELEASE_UNSPECIFIED: Release
RELEASE_NONE: Release
RELEASE_SOURCE: Release
RELEASE_ABANDONED: Release
ADMISSION_UNSPECIFIED: Admission
ADMISSION_NOW: Admission
ADMISSION_QUEUED: Admission
ADMISSION_REFUSED: Admission

class GenerateRequest(_message.Message):
    __slots__ = ("model", "parent", "input", "sampling", "stopping", "output", "save", "save_on_cancel", "max_recompute_tokens", "marks", "constraint", "priority", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    SAVE_ON_CANCEL_FIELD_NUMBER: _ClassVar[int]
    MAX_RECOMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    parent: str
    input: _types_pb2.Input
    sampling: _types_pb2.Sampling
    stopping: _types_pb2.Stopping
    output: OutputOptions
    save: _types_pb2.SnapshotOptions
    save_on_cancel: bool
    max_recompute_tokens: int
    marks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Mark]
    constraint: Constraint
    priority: int
    request_id: str
    def __init__(self, model: _Optional[str] = ..., parent: _Optional[str] = ..., input: _Optional[_Union[_types_pb2.Input, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.Stopping, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., save: _Optional[_Union[_types_pb2.SnapshotOptions, _Mapping]] = ..., save_on_cancel: _Optional[bool] = ..., max_recompute_tokens: _Optional[int] = ..., marks: _Optional[_Iterable[_Union[_types_pb2.Mark, _Mapping]]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., priority: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "choice", "after_reasoning")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    AFTER_REASONING_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    choice: Choice
    after_reasoning: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., after_reasoning: _Optional[bool] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("token_ids", "top_logprobs", "min_tokens_per_delta", "progress")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_PER_DELTA_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bool
    top_logprobs: int
    min_tokens_per_delta: int
    progress: bool
    def __init__(self, token_ids: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., min_tokens_per_delta: _Optional[int] = ..., progress: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "progress", "delta", "finished", "marked")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MARKED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    progress: Progress
    delta: Delta
    finished: Finished
    marked: Marked
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., marked: _Optional[_Union[Marked, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("generation", "instance", "prompt_tokens", "seed", "queue_time")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    generation: str
    instance: str
    prompt_tokens: int
    seed: int
    queue_time: _duration_pb2.Duration
    def __init__(self, generation: _Optional[str] = ..., instance: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("done_tokens", "total_tokens")
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    done_tokens: int
    total_tokens: int
    def __init__(self, done_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class Marked(_message.Message):
    __slots__ = ("mark", "snapshot", "save_error_reason")
    MARK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SAVE_ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    mark: int
    snapshot: _types_pb2.Snapshot
    save_error_reason: str
    def __init__(self, mark: _Optional[int] = ..., snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., save_error_reason: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "first_position", "token_count", "token_ids", "logprobs", "channel")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    first_position: int
    token_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    channel: Channel
    def __init__(self, text: _Optional[str] = ..., first_position: _Optional[int] = ..., token_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., channel: _Optional[_Union[Channel, str]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token_bytes", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token_bytes: bytes
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token_bytes: _Optional[bytes] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token_bytes")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token_bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop", "stop_token_id", "snapshot", "usage", "timing", "save_error_reason")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    SAVE_ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop: str
    stop_token_id: int
    snapshot: _types_pb2.Snapshot
    usage: _types_pb2.Usage
    timing: Timing
    save_error_reason: str
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., save_error_reason: _Optional[str] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue", "load", "prefill", "decode")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    load: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., load: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StopGenerationRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: str
    def __init__(self, generation: _Optional[str] = ...) -> None: ...

class StopGenerationResponse(_message.Message):
    __slots__ = ("was_running",)
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    def __init__(self, was_running: _Optional[bool] = ...) -> None: ...

class CreateSnapshotRequest(_message.Message):
    __slots__ = ("model", "parent", "input", "options", "marks", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    parent: str
    input: _types_pb2.Input
    options: _types_pb2.SnapshotOptions
    marks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Mark]
    request_id: str
    def __init__(self, model: _Optional[str] = ..., parent: _Optional[str] = ..., input: _Optional[_Union[_types_pb2.Input, _Mapping]] = ..., options: _Optional[_Union[_types_pb2.SnapshotOptions, _Mapping]] = ..., marks: _Optional[_Iterable[_Union[_types_pb2.Mark, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateSnapshotResponse(_message.Message):
    __slots__ = ("snapshot", "usage", "marked")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MARKED_FIELD_NUMBER: _ClassVar[int]
    snapshot: _types_pb2.Snapshot
    usage: _types_pb2.Usage
    marked: _containers.RepeatedCompositeFieldContainer[_types_pb2.Snapshot]
    def __init__(self, snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., marked: _Optional[_Iterable[_Union[_types_pb2.Snapshot, _Mapping]]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("parent", "branches", "request_id")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    parent: str
    branches: _containers.RepeatedCompositeFieldContainer[ForkBranch]
    request_id: str
    def __init__(self, parent: _Optional[str] = ..., branches: _Optional[_Iterable[_Union[ForkBranch, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ForkBranch(_message.Message):
    __slots__ = ("append", "options")
    APPEND_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    append: _types_pb2.Input
    options: _types_pb2.SnapshotOptions
    def __init__(self, append: _Optional[_Union[_types_pb2.Input, _Mapping]] = ..., options: _Optional[_Union[_types_pb2.SnapshotOptions, _Mapping]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("snapshots", "usage")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[_types_pb2.Snapshot]
    usage: _types_pb2.Usage
    def __init__(self, snapshots: _Optional[_Iterable[_Union[_types_pb2.Snapshot, _Mapping]]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("source", "token_count", "drop_tokens", "ancestor", "rounding", "release", "options", "max_recompute_tokens", "request_id")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANCESTOR_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_RECOMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    source: str
    token_count: int
    drop_tokens: int
    ancestor: str
    rounding: Rounding
    release: Release
    options: _types_pb2.SnapshotOptions
    max_recompute_tokens: int
    request_id: str
    def __init__(self, source: _Optional[str] = ..., token_count: _Optional[int] = ..., drop_tokens: _Optional[int] = ..., ancestor: _Optional[str] = ..., rounding: _Optional[_Union[Rounding, str]] = ..., release: _Optional[_Union[Release, str]] = ..., options: _Optional[_Union[_types_pb2.SnapshotOptions, _Mapping]] = ..., max_recompute_tokens: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("snapshot", "released", "usage")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    snapshot: _types_pb2.Snapshot
    released: _containers.RepeatedScalarFieldContainer[str]
    usage: _types_pb2.Usage
    def __init__(self, snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., released: _Optional[_Iterable[str]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("model", "parent", "input", "include_rendered", "plan")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_RENDERED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    model: str
    parent: str
    input: _types_pb2.Input
    include_rendered: bool
    plan: PlanOptions
    def __init__(self, model: _Optional[str] = ..., parent: _Optional[str] = ..., input: _Optional[_Union[_types_pb2.Input, _Mapping]] = ..., include_rendered: _Optional[bool] = ..., plan: _Optional[_Union[PlanOptions, _Mapping]] = ...) -> None: ...

class PlanOptions(_message.Message):
    __slots__ = ("branches", "max_tokens")
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    branches: int
    max_tokens: int
    def __init__(self, branches: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("memory_tokens", "disk_tokens", "recomputed_tokens", "new_tokens", "miss_reason", "disk_bytes", "memory_bytes", "predicted_load", "predicted_prefill", "predicted_ttft", "admission", "reason", "need_bytes", "free_bytes")
    MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_LOAD_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_tokens: int
    disk_tokens: int
    recomputed_tokens: int
    new_tokens: int
    miss_reason: _types_pb2.MissReason
    disk_bytes: int
    memory_bytes: int
    predicted_load: _duration_pb2.Duration
    predicted_prefill: _duration_pb2.Duration
    predicted_ttft: _duration_pb2.Duration
    admission: Admission
    reason: str
    need_bytes: int
    free_bytes: int
    def __init__(self, memory_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., miss_reason: _Optional[_Union[_types_pb2.MissReason, str]] = ..., disk_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., predicted_load: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., predicted_prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., predicted_ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., admission: _Optional[_Union[Admission, str]] = ..., reason: _Optional[str] = ..., need_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("total_tokens", "image_tokens", "cached_tokens", "remaining_tokens", "token_ids", "text", "plan")
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    total_tokens: int
    image_tokens: int
    cached_tokens: int
    remaining_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    plan: Plan
    def __init__(self, total_tokens: _Optional[int] = ..., image_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., remaining_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...
