import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class Residency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESIDENCY_UNSPECIFIED: _ClassVar[Residency]
    RESIDENCY_MEMORY: _ClassVar[Residency]
    RESIDENCY_DISK: _ClassVar[Residency]
    RESIDENCY_TOKENS: _ClassVar[Residency]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_DISK: _ClassVar[Durability]

class Landmark(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANDMARK_UNSPECIFIED: _ClassVar[Landmark]
    LANDMARK_PROMPT_END: _ClassVar[Landmark]
    LANDMARK_REASONING_START: _ClassVar[Landmark]
    LANDMARK_REASONING_END: _ClassVar[Landmark]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_BETWEEN_CHECKPOINTS: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_NOT_WRITTEN: _ClassVar[MissReason]
    MISS_REASON_CORRUPT: _ClassVar[MissReason]
    MISS_REASON_CHEAPER_TO_COMPUTE: _ClassVar[MissReason]
    MISS_REASON_PROVENANCE: _ClassVar[MissReason]
    MISS_REASON_THINNED: _ClassVar[MissReason]
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
RESIDENCY_UNSPECIFIED: Residency
RESIDENCY_MEMORY: Residency
RESIDENCY_DISK: Residency
RESIDENCY_TOKENS: Residency
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_DISK: Durability
LANDMARK_UNSPECIFIED: Landmark
LANDMARK_PROMPT_END: Landmark
LANDMARK_REASONING_START: Landmark
LANDMARK_REASONING_END: Landmark
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_BETWEEN_CHECKPOINTS: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_NOT_WRITTEN: MissReason
MISS_REASON_CORRUPT: MissReason
MISS_REASON_CHEAPER_TO_COMPUTE: MissReason
MISS_REASON_PROVENANCE: MissReason
MISS_REASON_THINNED: MissReason

class Input(_message.Message):
    __slots__ = ("raw", "chat")
    RAW_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    raw: RawInput
    chat: ChatInput
    def __init__(self, raw: _Optional[_Union[RawInput, _Mapping]] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ...) -> None: ...

class RawInput(_message.Message):
    __slots__ = ("parts", "add_special_tokens")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    add_special_tokens: bool
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "template_vars_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    add_generation_prompt: bool
    template_vars_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., template_vars_json: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "tokens", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: TokenRun
    image: Image
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[TokenRun, _Mapping]] = ..., image: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("data", "sha256", "mime_type")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    sha256: bytes
    mime_type: str
    def __init__(self, data: _Optional[bytes] = ..., sha256: _Optional[bytes] = ..., mime_type: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop", "time_limit")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop: bool
    time_limit: _duration_pb2.Duration
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop: _Optional[bool] = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("name", "parent", "model", "model_fingerprint", "token_count", "checkpointed_tokens", "prefix_hash", "image_spans", "residency", "durable", "expire_time", "ttl", "pinned", "labels", "create_time", "last_use_time", "exclusive_bytes", "instance", "active_uses", "state_revision")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_SPANS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_USES_FIELD_NUMBER: _ClassVar[int]
    STATE_REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    parent: str
    model: str
    model_fingerprint: str
    token_count: int
    checkpointed_tokens: int
    prefix_hash: bytes
    image_spans: _containers.RepeatedCompositeFieldContainer[TokenSpan]
    residency: Residency
    durable: bool
    expire_time: _timestamp_pb2.Timestamp
    ttl: _duration_pb2.Duration
    pinned: bool
    labels: _containers.ScalarMap[str, str]
    create_time: _timestamp_pb2.Timestamp
    last_use_time: _timestamp_pb2.Timestamp
    exclusive_bytes: int
    instance: str
    active_uses: int
    state_revision: int
    def __init__(self, name: _Optional[str] = ..., parent: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., token_count: _Optional[int] = ..., checkpointed_tokens: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ..., image_spans: _Optional[_Iterable[_Union[TokenSpan, _Mapping]]] = ..., residency: _Optional[_Union[Residency, str]] = ..., durable: _Optional[bool] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pinned: _Optional[bool] = ..., labels: _Optional[_Mapping[str, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_use_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., exclusive_bytes: _Optional[int] = ..., instance: _Optional[str] = ..., active_uses: _Optional[int] = ..., state_revision: _Optional[int] = ...) -> None: ...

class TokenSpan(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class SnapshotOptions(_message.Message):
    __slots__ = ("snapshot_id", "ttl", "pinned", "labels", "durability")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    ttl: _duration_pb2.Duration
    pinned: bool
    labels: _containers.ScalarMap[str, str]
    durability: Durability
    def __init__(self, snapshot_id: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pinned: _Optional[bool] = ..., labels: _Optional[_Mapping[str, str]] = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("token_count", "message_count", "landmark", "options")
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LANDMARK_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    token_count: int
    message_count: int
    landmark: Landmark
    options: SnapshotOptions
    def __init__(self, token_count: _Optional[int] = ..., message_count: _Optional[int] = ..., landmark: _Optional[_Union[Landmark, str]] = ..., options: _Optional[_Union[SnapshotOptions, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "recomputed_tokens", "new_tokens", "image_tokens", "completion_tokens", "memory_tokens", "disk_tokens", "disk_bytes_read", "diverged_at", "miss_reason", "grid_tokens", "state_remade")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_AT_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    GRID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_REMADE_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    new_tokens: int
    image_tokens: int
    completion_tokens: int
    memory_tokens: int
    disk_tokens: int
    disk_bytes_read: int
    diverged_at: int
    miss_reason: MissReason
    grid_tokens: int
    state_remade: bool
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., image_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., disk_bytes_read: _Optional[int] = ..., diverged_at: _Optional[int] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., grid_tokens: _Optional[int] = ..., state_remade: _Optional[bool] = ...) -> None: ...
