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

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("instance", "boot_id", "version", "features", "limits", "uptime", "draining")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    instance: str
    boot_id: str
    version: str
    features: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    uptime: _duration_pb2.Duration
    draining: bool
    def __init__(self, instance: _Optional[str] = ..., boot_id: _Optional[str] = ..., version: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_request_bytes", "max_image_bytes", "max_images", "max_fork_branches", "max_queue", "max_batch", "max_snapshots", "max_pinned", "max_ttl", "max_watches", "max_image_pixels")
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_FORK_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_WATCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    max_request_bytes: int
    max_image_bytes: int
    max_images: int
    max_fork_branches: int
    max_queue: int
    max_batch: int
    max_snapshots: int
    max_pinned: int
    max_ttl: _duration_pb2.Duration
    max_watches: int
    max_image_pixels: int
    def __init__(self, max_request_bytes: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_images: _Optional[int] = ..., max_fork_branches: _Optional[int] = ..., max_queue: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_snapshots: _Optional[int] = ..., max_pinned: _Optional[int] = ..., max_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_watches: _Optional[int] = ..., max_image_pixels: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "fingerprint", "state", "context_tokens", "vocab_size", "eos_token_ids", "vision", "trimmable", "bytes_per_token", "default_sampling", "tells_reasoning", "tells_tool_calls", "tool_call_form")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Model.State]
        STATE_LOADING: _ClassVar[Model.State]
        STATE_READY: _ClassVar[Model.State]
        STATE_FAILED: _ClassVar[Model.State]
    STATE_UNSPECIFIED: Model.State
    STATE_LOADING: Model.State
    STATE_READY: Model.State
    STATE_FAILED: Model.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    TRIMMABLE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TELLS_REASONING_FIELD_NUMBER: _ClassVar[int]
    TELLS_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FORM_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    state: Model.State
    context_tokens: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    vision: bool
    trimmable: bool
    bytes_per_token: int
    default_sampling: _types_pb2.Sampling
    tells_reasoning: bool
    tells_tool_calls: bool
    tool_call_form: ToolCallForm
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., state: _Optional[_Union[Model.State, str]] = ..., context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., vision: _Optional[bool] = ..., trimmable: _Optional[bool] = ..., bytes_per_token: _Optional[int] = ..., default_sampling: _Optional[_Union[_types_pb2.Sampling, _Mapping]] = ..., tells_reasoning: _Optional[bool] = ..., tells_tool_calls: _Optional[bool] = ..., tool_call_form: _Optional[_Union[ToolCallForm, _Mapping]] = ...) -> None: ...

class ToolCallForm(_message.Message):
    __slots__ = ("opening", "closing", "syntax")
    class Syntax(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SYNTAX_UNSPECIFIED: _ClassVar[ToolCallForm.Syntax]
        SYNTAX_JSON: _ClassVar[ToolCallForm.Syntax]
        SYNTAX_TAGS: _ClassVar[ToolCallForm.Syntax]
    SYNTAX_UNSPECIFIED: ToolCallForm.Syntax
    SYNTAX_JSON: ToolCallForm.Syntax
    SYNTAX_TAGS: ToolCallForm.Syntax
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    SYNTAX_FIELD_NUMBER: _ClassVar[int]
    opening: str
    closing: str
    syntax: ToolCallForm.Syntax
    def __init__(self, opening: _Optional[str] = ..., closing: _Optional[str] = ..., syntax: _Optional[_Union[ToolCallForm.Syntax, str]] = ...) -> None: ...

class GetCacheStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCacheStatsResponse(_message.Message):
    __slots__ = ("stats", "rows", "owner")
    STATS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    stats: CacheStats
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    owner: str
    def __init__(self, stats: _Optional[_Union[CacheStats, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., owner: _Optional[str] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("generation", "phase", "parent", "prompt_tokens", "done_tokens", "completion_tokens", "age", "priority")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[Row.Phase]
        PHASE_QUEUED: _ClassVar[Row.Phase]
        PHASE_RESTORING: _ClassVar[Row.Phase]
        PHASE_PREFILL: _ClassVar[Row.Phase]
        PHASE_DECODE: _ClassVar[Row.Phase]
        PHASE_SAVING: _ClassVar[Row.Phase]
    PHASE_UNSPECIFIED: Row.Phase
    PHASE_QUEUED: Row.Phase
    PHASE_RESTORING: Row.Phase
    PHASE_PREFILL: Row.Phase
    PHASE_DECODE: Row.Phase
    PHASE_SAVING: Row.Phase
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    generation: str
    phase: Row.Phase
    parent: str
    prompt_tokens: int
    done_tokens: int
    completion_tokens: int
    age: _duration_pb2.Duration
    priority: int
    def __init__(self, generation: _Optional[str] = ..., phase: _Optional[_Union[Row.Phase, str]] = ..., parent: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., done_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("checkpoint_interval", "active_sequences", "queued_calls", "memory_snapshots", "disk_snapshots", "token_snapshots", "memory_bytes", "memory_limit_bytes", "disk_bytes", "disk_limit_bytes", "prompt_tokens", "cached_tokens", "recomputed_tokens", "checkpoints_written", "checkpoints_read", "checkpoints_corrupt", "evictions", "checkpoint_policy", "checkpoints_skipped", "pending_bytes", "written_today_bytes", "daily_write_limit_bytes", "write_errors", "writes_paused", "last_write_error", "restoring_rows", "prefilling_rows", "decoding_rows", "saving_rows", "completion_tokens", "active_bytes", "active_limit_bytes", "evictions_by_tier", "images_encoded", "image_bytes", "image_limit_bytes")
    class CheckpointsSkippedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EvictionsByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CHECKPOINT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_CALLS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    DISK_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_READ_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_POLICY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TODAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAILY_WRITE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    WRITES_PAUSED_FIELD_NUMBER: _ClassVar[int]
    LAST_WRITE_ERROR_FIELD_NUMBER: _ClassVar[int]
    RESTORING_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODING_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAVING_ROWS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    checkpoint_interval: int
    active_sequences: int
    queued_calls: int
    memory_snapshots: int
    disk_snapshots: int
    token_snapshots: int
    memory_bytes: int
    memory_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    checkpoints_written: int
    checkpoints_read: int
    checkpoints_corrupt: int
    evictions: int
    checkpoint_policy: str
    checkpoints_skipped: _containers.ScalarMap[str, int]
    pending_bytes: int
    written_today_bytes: int
    daily_write_limit_bytes: int
    write_errors: int
    writes_paused: bool
    last_write_error: str
    restoring_rows: int
    prefilling_rows: int
    decoding_rows: int
    saving_rows: int
    completion_tokens: int
    active_bytes: int
    active_limit_bytes: int
    evictions_by_tier: _containers.ScalarMap[str, int]
    images_encoded: int
    image_bytes: int
    image_limit_bytes: int
    def __init__(self, checkpoint_interval: _Optional[int] = ..., active_sequences: _Optional[int] = ..., queued_calls: _Optional[int] = ..., memory_snapshots: _Optional[int] = ..., disk_snapshots: _Optional[int] = ..., token_snapshots: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_limit_bytes: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., checkpoints_written: _Optional[int] = ..., checkpoints_read: _Optional[int] = ..., checkpoints_corrupt: _Optional[int] = ..., evictions: _Optional[int] = ..., checkpoint_policy: _Optional[str] = ..., checkpoints_skipped: _Optional[_Mapping[str, int]] = ..., pending_bytes: _Optional[int] = ..., written_today_bytes: _Optional[int] = ..., daily_write_limit_bytes: _Optional[int] = ..., write_errors: _Optional[int] = ..., writes_paused: _Optional[bool] = ..., last_write_error: _Optional[str] = ..., restoring_rows: _Optional[int] = ..., prefilling_rows: _Optional[int] = ..., decoding_rows: _Optional[int] = ..., saving_rows: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., active_bytes: _Optional[int] = ..., active_limit_bytes: _Optional[int] = ..., evictions_by_tier: _Optional[_Mapping[str, int]] = ..., images_encoded: _Optional[int] = ..., image_bytes: _Optional[int] = ..., image_limit_bytes: _Optional[int] = ...) -> None: ...

class TrimCacheRequest(_message.Message):
    __slots__ = ("memory_bytes", "disk_bytes")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    disk_bytes: int
    def __init__(self, memory_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ...) -> None: ...

class TrimCacheResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: CacheStats
    def __init__(self, stats: _Optional[_Union[CacheStats, _Mapping]] = ...) -> None: ...
