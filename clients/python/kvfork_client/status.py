"""A gRPC status and its google.rpc details as one exception of `errors`. Pure; owns the lookup table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from .errors import FieldViolation, KVForkError, TlsFailed, Unavailable, Unknown

DETAILS_KEY = "grpc-status-details-bin"


def _descendants(cls: type[KVForkError]) -> Iterator[type[KVForkError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


# (code, reason) → class. The classes of a bare code have the empty reason.
BY_REASON: dict[tuple[grpc.StatusCode, str], type[KVForkError]] = {
    (cls.CODE, cls.REASON): cls for cls in _descendants(KVForkError)
}


def error_class(code: grpc.StatusCode, reason: str) -> type[KVForkError]:
    """The class for a status; an unknown reason gets the class of its code."""
    return BY_REASON.get((code, reason)) or BY_REASON.get((code, "")) or Unknown


def from_status(code: grpc.StatusCode, text: str, trailers: Iterable[tuple[str, Any]] = ()) -> KVForkError:
    """The exception for a status that ended a call. Undecodable details are as good as none."""
    reason, resource, incident = "", "", ""
    metadata: dict[str, str] = {}
    fields: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    for detail in _details(trailers):
        if isinstance(detail, error_details_pb2.ErrorInfo):
            reason, metadata = detail.reason, dict(detail.metadata)
        elif isinstance(detail, error_details_pb2.BadRequest):
            fields = tuple(FieldViolation(one.field, one.description) for one in detail.field_violations)
        elif isinstance(detail, error_details_pb2.RetryInfo):
            retry_after = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
        elif isinstance(detail, error_details_pb2.ResourceInfo):
            resource = detail.resource_name
        elif isinstance(detail, error_details_pb2.RequestInfo):
            incident = detail.request_id
    if code is grpc.StatusCode.UNAVAILABLE and not reason and "handshake failed" in text.lower():
        return TlsFailed(text)
    if code is grpc.StatusCode.INTERNAL and not reason and "RST_STREAM" in text:
        # What a proxy says when its server vanished behind a stream that had begun; the server's own INTERNAL has a
        # reason. Without a proxy the same is UNAVAILABLE.
        return Unavailable(text)
    return error_class(code, reason)(
        text,
        reason=reason,
        metadata=metadata,
        fields=fields,
        retry_after=retry_after,
        resource=resource,
        incident=incident,
    )


_DETAIL_TYPES = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
    error_details_pb2.ResourceInfo,
    error_details_pb2.RequestInfo,
)


def _details(trailers: Iterable[tuple[str, Any]]) -> Iterator[Any]:
    for key, value in trailers:
        if key != DETAILS_KEY:
            continue
        try:
            packed = status_pb2.Status.FromString(value).details
        except DecodeError:
            return
        for any_message in packed:
            for kind in _DETAIL_TYPES:
                if any_message.Is(kind.DESCRIPTOR):
                    try:
                        yield kind.FromString(any_message.value)
                    except DecodeError:
                        continue
