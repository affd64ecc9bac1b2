import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from kvfork.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GoneReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GONE_REASON_UNSPECIFIED: _ClassVar[GoneReason]
    GONE_REASON_DELETED: _ClassVar[GoneReason]
    GONE_REASON_ROLLED_BACK: _ClassVar[GoneReason]
    GONE_REASON_EXPIRED: _ClassVar[GoneReason]
    GONE_REASON_EVICTED: _ClassVar[GoneReason]
    GONE_REASON_CORRUPT: _ClassVar[GoneReason]
    GONE_REASON_UNLISTED: _ClassVar[GoneReason]
GONE_REASON_UNSPECIFIED: GoneReason
GONE_REASON_DELETED: GoneReason
GONE_REASON_ROLLED_BACK: GoneReason
GONE_REASON_EXPIRED: GoneReason
GONE_REASON_EVICTED: GoneReason
GONE_REASON_CORRUPT: GoneReason
GONE_REASON_UNLISTED: GoneReason

class GetSnapshotRequest(_message.Message):
    __slots__ = ("name", "include_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    include_tokens: bool
    def __init__(self, name: _Optional[str] = ..., include_tokens: _Optional[bool] = ...) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("snapshot", "token_ids")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    snapshot: _types_pb2.Snapshot
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "labels", "parent")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    labels: _containers.ScalarMap[str, str]
    parent: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., parent: _Optional[str] = ...) -> None: ...

class ListSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots", "next_page_token")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[_types_pb2.Snapshot]
    next_page_token: str
    def __init__(self, snapshots: _Optional[_Iterable[_Union[_types_pb2.Snapshot, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdateSnapshotRequest(_message.Message):
    __slots__ = ("snapshot", "update_mask")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    snapshot: _types_pb2.Snapshot
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class UpdateSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: _types_pb2.Snapshot
    def __init__(self, snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ...) -> None: ...

class ExtendSnapshotsRequest(_message.Message):
    __slots__ = ("names", "ttl")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    ttl: _duration_pb2.Duration
    def __init__(self, names: _Optional[_Iterable[str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ExtendSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots", "missing")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[_types_pb2.Snapshot]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshots: _Optional[_Iterable[_Union[_types_pb2.Snapshot, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteSnapshotRequest(_message.Message):
    __slots__ = ("name", "descendants", "stop_active", "allow_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCENDANTS_FIELD_NUMBER: _ClassVar[int]
    STOP_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    descendants: bool
    stop_active: bool
    allow_missing: bool
    def __init__(self, name: _Optional[str] = ..., descendants: _Optional[bool] = ..., stop_active: _Optional[bool] = ..., allow_missing: _Optional[bool] = ...) -> None: ...

class DeleteSnapshotResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, deleted: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchSnapshotsRequest(_message.Message):
    __slots__ = ("labels", "resume_token")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    resume_token: str
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., resume_token: _Optional[str] = ...) -> None: ...

class WatchSnapshotsResponse(_message.Message):
    __slots__ = ("changed", "gone", "synced", "bookmark", "resume_token")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    changed: _types_pb2.Snapshot
    gone: Gone
    synced: Synced
    bookmark: Bookmark
    resume_token: str
    def __init__(self, changed: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ..., synced: _Optional[_Union[Synced, _Mapping]] = ..., bookmark: _Optional[_Union[Bookmark, _Mapping]] = ..., resume_token: _Optional[str] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: GoneReason
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[_Union[GoneReason, str]] = ...) -> None: ...

class Synced(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Bookmark(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportSnapshotRequest(_message.Message):
    __slots__ = ("name", "manifest_only", "held")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ONLY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    name: str
    manifest_only: bool
    held: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, name: _Optional[str] = ..., manifest_only: _Optional[bool] = ..., held: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExportSnapshotResponse(_message.Message):
    __slots__ = ("data", "summary")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    summary: ExportSummary
    def __init__(self, data: _Optional[bytes] = ..., summary: _Optional[_Union[ExportSummary, _Mapping]] = ...) -> None: ...

class ExportSummary(_message.Message):
    __slots__ = ("snapshot", "records", "held_records", "bytes", "state_tokens")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    HELD_RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    snapshot: _types_pb2.Snapshot
    records: int
    held_records: int
    bytes: int
    state_tokens: int
    def __init__(self, snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., records: _Optional[int] = ..., held_records: _Optional[int] = ..., bytes: _Optional[int] = ..., state_tokens: _Optional[int] = ...) -> None: ...

class CheckImportRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    def __init__(self, manifest: _Optional[bytes] = ...) -> None: ...

class CheckImportResponse(_message.Message):
    __slots__ = ("held", "missing_records", "missing_bytes")
    HELD_FIELD_NUMBER: _ClassVar[int]
    MISSING_RECORDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BYTES_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[bytes]
    missing_records: int
    missing_bytes: int
    def __init__(self, held: _Optional[_Iterable[bytes]] = ..., missing_records: _Optional[int] = ..., missing_bytes: _Optional[int] = ...) -> None: ...

class ImportSnapshotRequest(_message.Message):
    __slots__ = ("data", "options")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    options: _types_pb2.SnapshotOptions
    def __init__(self, data: _Optional[bytes] = ..., options: _Optional[_Union[_types_pb2.SnapshotOptions, _Mapping]] = ...) -> None: ...

class ImportSnapshotResponse(_message.Message):
    __slots__ = ("snapshot", "received_records", "received_bytes", "held_records")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_RECORDS_FIELD_NUMBER: _ClassVar[int]
    snapshot: _types_pb2.Snapshot
    received_records: int
    received_bytes: int
    held_records: int
    def __init__(self, snapshot: _Optional[_Union[_types_pb2.Snapshot, _Mapping]] = ..., received_records: _Optional[int] = ..., received_bytes: _Optional[int] = ..., held_records: _Optional[int] = ...) -> None: ...
