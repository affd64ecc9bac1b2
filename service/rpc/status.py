"""Errors into gRPC statuses. Owns the one table of codes and details, and the bounds that keep a status deliverable.

A status travels in trailers, and a peer may drop trailers beyond 8 KiB and refuses those beyond 16 KiB, the original
code with them. So text and details are cut to a budget: what was cut is counted, never silently lost.
"""

from __future__ import annotations

from typing import cast
from urllib.parse import quote

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf import message as protobuf
from google.rpc import error_details_pb2 as details_pb
from google.rpc import status_pb2
from grpc_status import rpc_status

from service import errors
from service.errors import CallError

DOMAIN = "kvfork"

MAX_TEXT_BYTES = 1536  # percent-encoded, as grpc-message carries it
MAX_STATUS_BYTES = 3800  # google.rpc.Status with its details; base64 makes 5.1 kB of it
MAX_DESCRIPTION = 240  # bytes of one violation
MAX_PATH = 160  # bytes of one field path or name
MAX_METADATA_BYTES = 800  # keys and values of ErrorInfo together
MAX_METADATA_VALUE = 160  # bytes

PUSHBACK = "grpc-retry-pushback-ms"

CODES: dict[type[CallError], grpc.StatusCode] = {
    CallError: grpc.StatusCode.INTERNAL,
    errors.InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.ModelLoading: grpc.StatusCode.UNAVAILABLE,
    errors.ModelMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelChanged: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EngineDown: grpc.StatusCode.UNAVAILABLE,
    errors.EngineFailed: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ActiveMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineUnmet: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.SnapshotNotFound: grpc.StatusCode.NOT_FOUND,
    errors.SnapshotIdTaken: grpc.StatusCode.ALREADY_EXISTS,
    errors.SnapshotInUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SnapshotQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StoreFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ForkMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RecomputeLimit: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RollbackBeyondEnd: grpc.StatusCode.OUT_OF_RANGE,
    errors.NotAnAncestor: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongInstance: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TurnOpen: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TemplateNotAppendable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TemplateMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ImageNotHeld: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ImageMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ConstraintFailed: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestInProgress: grpc.StatusCode.ABORTED,
    errors.RequestIdReused: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PageTokenInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ImmutableField: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.WatchOverflow: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.WatchQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ResumeTokenExpired: grpc.StatusCode.OUT_OF_RANGE,
    errors.ExchangeQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ExchangeKeyDiffers: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ExportUnreadable: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ExportDamaged: grpc.StatusCode.DATA_LOSS,
    errors.ExportIncomplete: grpc.StatusCode.ABORTED,
    errors.FingerprintDiffers: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SlowSender: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.AdminRequired: grpc.StatusCode.PERMISSION_DENIED,
    errors.CallQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Internal: grpc.StatusCode.INTERNAL,
    errors.RowFailed: grpc.StatusCode.INTERNAL,
}

# Waiting helps with these; how long, if the error does not say.
_RETRY_SECONDS: dict[type[CallError], float] = {
    errors.ModelLoading: 2.0,
    errors.Draining: 5.0,  # for another instance, or this one's successor
    errors.QueueFull: 1.0,
    errors.CallQuota: 1.0,
    errors.ExchangeQuota: 1.0,
}

# Limits per caller or per server: these carry a QuotaFailure. ForkMemory and SlowReader are no quota.
_QUOTAS = (
    errors.QueueFull,
    errors.CallQuota,
    errors.SnapshotQuota,
    errors.StoreFull,
    errors.WatchQuota,
    errors.ExchangeQuota,
    errors.ImageMemory,
)


def code_of(error: CallError) -> grpc.StatusCode:
    """The code of the nearest class that has a row."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def status_of(error: CallError, *, incident: str = "", names_snapshot: bool = False) -> grpc.Status:
    """The status to end a call with.

    `incident` leads from an internal error to the log. `names_snapshot` says that the request needs this very
    instance, so that a client's own retry policy must not carry it elsewhere while this one drains. That policy must
    not repeat a call either that may have brought the model thread down.
    """
    code = code_of(error)
    stay = (isinstance(error, errors.Draining) and names_snapshot) or isinstance(error, errors.EngineFailed)
    rich = status_pb2.Status(
        code=code.value[0],
        message=_cut_text(f"{error.text} ({error.hint})" if error.hint else error.text),
    )
    _add(rich, _error_info(error))
    for detail in _details(error, code, incident=incident, may_retry=not stay):
        if rich.ByteSize() + detail.ByteSize() + 64 < MAX_STATUS_BYTES:  # 64: an Any's type URL and lengths
            _add(rich, detail)
    if error.fields:
        _add_violations(rich, error)
    status = rpc_status.to_status(rich)
    if stay:
        status = status._replace(trailing_metadata=(*status.trailing_metadata, (PUSHBACK, "-1")))
    return cast(grpc.Status, status)


def _error_info(error: CallError) -> details_pb.ErrorInfo:
    metadata = {}
    room = MAX_METADATA_BYTES
    for key, value in error.metadata.items():
        short = _cut(value, MAX_METADATA_VALUE)
        room -= len(key) + len(short.encode())
        if room < 0:
            break
        metadata[key] = short
    return details_pb.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)


def _details(error: CallError, code: grpc.StatusCode, *, incident: str, may_retry: bool) -> list[protobuf.Message]:
    """All but ErrorInfo and BadRequest, most useful first."""
    details: list[protobuf.Message] = []
    text = _cut(error.text, MAX_DESCRIPTION)
    subject = _cut(error.resource[1], MAX_PATH) if error.resource else DOMAIN
    if code is grpc.StatusCode.INTERNAL and (incident or "incident" in error.metadata):
        details.append(details_pb.RequestInfo(request_id=incident or error.metadata["incident"]))
    seconds = error.retry_after if error.retry_after is not None else _RETRY_SECONDS.get(type(error))
    if seconds is not None and may_retry:
        micros = max(0, round(seconds * 1e6))
        delay = duration_pb2.Duration(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1000)
        details.append(details_pb.RetryInfo(retry_delay=delay))
    if error.resource:
        kind = error.resource[0]
        details.append(details_pb.ResourceInfo(resource_type=kind, resource_name=subject, description=text))
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        violation = details_pb.PreconditionFailure.Violation(type=error.reason, subject=subject)
        violation.description = text
        details.append(details_pb.PreconditionFailure(violations=[violation]))
    if isinstance(error, _QUOTAS):
        quota = details_pb.QuotaFailure.Violation(subject=subject, description=text)
        details.append(details_pb.QuotaFailure(violations=[quota]))
    return details


def _add_violations(rich: status_pb2.Status, error: CallError) -> None:
    """As many violations as fit; the last one then counts the rest."""
    bad = details_pb.BadRequest()
    room = MAX_STATUS_BYTES - rich.ByteSize() - 128  # 128: the Any around it and the closing count
    for index, violation in enumerate(error.fields):
        entry = details_pb.BadRequest.FieldViolation(
            field=_cut(violation.field, MAX_PATH), description=_cut(violation.text, MAX_DESCRIPTION)
        )
        room -= entry.ByteSize() + 4
        if room < 0:
            left = len(error.fields) - index
            bad.field_violations.add(field="", description=f"and {left} more fields that are wrong")
            break
        bad.field_violations.append(entry)
    _add(rich, bad)


def _add(rich: status_pb2.Status, detail: protobuf.Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    rich.details.append(packed)


def _cut(text: str, most: int) -> str:
    """`text` within `most` bytes of UTF-8."""
    if len(text) <= most // 4:
        return text
    data = text[:most].encode()
    if len(text) <= most and len(data) <= most:
        return text
    return data[: most - 3].decode(errors="ignore") + "..."


def _cut_text(text: str) -> str:
    """`text` within MAX_TEXT_BYTES as the wire counts them: a character outside ASCII takes up to 12."""
    if len(text) <= MAX_TEXT_BYTES // 12:
        return text
    room = MAX_TEXT_BYTES - 3
    for index, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else len(quote(character, safe=""))
        if room < 0:
            return text[:index] + "..."
    return text
