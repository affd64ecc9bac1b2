"""The contract over HTTP: JSON in, a gRPC call with the caller's own token, JSON out. Owns which calls there are.

Errors are the contract's: code, text, reason and facts as any client gets them. A stream has one message a line, and
what ends it otherwise than well is its last line.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details_pb
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb

from service.inspector.http import Request

UNARY_SECONDS = 600.0  # a prefill may take long; whoever leaves ends it
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

_INFERENCE, _SNAPSHOTS, _SERVER = (
    f"/kvfork.v1.{name}/" for name in ("InferenceService", "SnapshotService", "ServerService")
)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Method:
    """One call of the contract."""

    path: str
    request: type[Message]
    response: type[Message]
    streams: bool = False


METHODS: Mapping[str, Method] = {
    "Generate": Method(_INFERENCE, inference_pb.GenerateRequest, inference_pb.GenerateResponse, streams=True),
    "StopGeneration": Method(_INFERENCE, inference_pb.StopGenerationRequest, inference_pb.StopGenerationResponse),
    "CreateSnapshot": Method(_INFERENCE, inference_pb.CreateSnapshotRequest, inference_pb.CreateSnapshotResponse),
    "Fork": Method(_INFERENCE, inference_pb.ForkRequest, inference_pb.ForkResponse),
    "Rollback": Method(_INFERENCE, inference_pb.RollbackRequest, inference_pb.RollbackResponse),
    "CountTokens": Method(_INFERENCE, inference_pb.CountTokensRequest, inference_pb.CountTokensResponse),
    "GetSnapshot": Method(_SNAPSHOTS, snapshot_pb.GetSnapshotRequest, snapshot_pb.GetSnapshotResponse),
    "DeleteSnapshot": Method(_SNAPSHOTS, snapshot_pb.DeleteSnapshotRequest, snapshot_pb.DeleteSnapshotResponse),
    "WatchSnapshots": Method(
        _SNAPSHOTS, snapshot_pb.WatchSnapshotsRequest, snapshot_pb.WatchSnapshotsResponse, streams=True
    ),
    "GetServerInfo": Method(_SERVER, server_pb.GetServerInfoRequest, server_pb.GetServerInfoResponse),
    "ListModels": Method(_SERVER, server_pb.ListModelsRequest, server_pb.ListModelsResponse),
    "GetCacheStats": Method(_SERVER, server_pb.GetCacheStatsRequest, server_pb.GetCacheStatsResponse),
}
"""What a page may call; TrimCache and the like are for the command line."""

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class Refused(Exception):
    """A call that was not answered: what a page is told, and the status to tell it with."""

    def __init__(self, code: grpc.StatusCode, text: str, *, reason: str = "", facts: dict[str, str] | None = None):
        super().__init__(code.name)
        self.status = HTTP_STATUS.get(code, 500)
        self.told: dict[str, Any] = {"code": code.name, "reason": reason, "text": text, "facts": facts or {}}

    @classmethod
    def by(cls, error: grpc.aio.AioRpcError) -> Refused:
        """As the contract's status has it."""
        reason, facts, wrong = "", dict[str, str](), list[str]()
        status = rpc_status.from_call(cast(Any, error))
        for packed in status.details if status is not None else ():
            info, bad = details_pb.ErrorInfo(), details_pb.BadRequest()
            if packed.Unpack(info):
                reason, facts = info.reason, dict(info.metadata)
            elif packed.Unpack(bad):
                wrong = [violation.field for violation in bad.field_violations]
        refused = cls(error.code(), error.details() or "", reason=reason, facts=facts)
        refused.told["fields"] = wrong
        return refused


class Gateway:
    """A channel to the server's own door. `open`, then `close`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel: grpc.aio.Channel | None = None

    def open(self) -> None:
        """On the event loop that the calls are made on; connects with the first of them."""
        self._channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def unary(self, name: str, message: Message, metadata: Metadata) -> Message:
        """Raises Refused."""
        method = METHODS[name]
        assert self._channel is not None and not method.streams
        call = self._channel.unary_unary(
            method.path + name,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            return await call(message, metadata=metadata, timeout=UNARY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise Refused.by(error) from None

    async def stream(self, name: str, message: Message, metadata: Metadata) -> AsyncGenerator[Message, None]:
        """Raises Refused. Closing it ends the call."""
        method = METHODS[name]
        assert self._channel is not None and method.streams
        call = self._channel.unary_stream(
            method.path + name,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(message, metadata=metadata)
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise Refused.by(error) from None
        finally:
            call.cancel()


def read(name: str, body: bytes) -> Message:
    """The request message of a method, from JSON. Raises Refused."""
    message = METHODS[name].request()
    try:
        json_format.Parse(body.decode(), message)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        what = str(error) if isinstance(error, json_format.ParseError) else "it is no UTF-8"
        text = f"the request is no {message.DESCRIPTOR.name} in JSON: {what}"
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, text[:500], reason="INVALID_FIELD") from None
    return message


def written(message: Message) -> bytes:
    """JSON on one line, with fields that are at their default."""
    return json_format.MessageToJson(message, indent=None, always_print_fields_with_no_presence=True).encode()


def told(refused: Refused) -> bytes:
    return json.dumps({"error": refused.told}).encode()


def metadata_of(request: Request) -> Metadata:
    """The caller's token as it came: the door judges it. Raises Refused for what cannot be sent on."""
    values = request.all("authorization")
    if any(not value.isascii() or not value.isprintable() for value in values):
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, "the token is not one of this server's", reason="TOKEN_UNKNOWN")
    return tuple(("authorization", value) for value in values)
