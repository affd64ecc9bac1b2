"""The layer around every handler of ours. Owns what leaves when a handler raises: a status, and nothing else.

* `CallError` becomes the status that `status` has for it.
* An abort and a cancellation pass untouched: swallowing either leaks the call.
* A request that cannot be parsed is the caller's mistake, and gets a status of ours instead of gRPC's UNKNOWN.
* Anything else is a bug. The client gets a fixed text and an incident id; the log gets the id and where it happened,
  but not the exception's own words, which may hold a prompt.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from service.errors import CallError, Internal, InvalidField, WrongInstance
from service.rpc.ended import is_ended
from service.rpc.status import status_of

log = logging.getLogger(__name__)

INSTANCE = "x-kvfork-instance"  # metadata: the one server that a call is for, since a proxy may not know
INTERNAL_TEXT = "the server failed; its log has the incident"

Context = grpc.aio.ServicerContext[Any, Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of the handlers under `prefix` into statuses; others (health, reflection) are left alone."""

    def __init__(self, instance: str, refused: Callable[[str], None], prefix: str = "/kvfork.v1.") -> None:
        """`instance`: this server's; a call that asks for another one is refused before it is looked at.

        `refused` is told the reason of each call that ends with an error.
        """
        self._instance = instance
        self._refused = refused
        self._prefix = prefix

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler that `continuation` finds."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        codecs = {
            "request_deserializer": tolerant(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._guarded(handler.unary_unary, method), **codecs)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._guarded(handler.unary_stream, method), **codecs)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._guarded(handler.stream_unary, method), **codecs)
        raise AssertionError(f"{method}: the contract has no streams both ways")

    def _guarded(self, handler: Callable[..., Any], method: str) -> Any:
        # Streams of ours write to the context instead of yielding, so one wrapper serves both kinds and no generator is
        # left to be closed by the garbage collector.
        async def guarded(request: Any, context: Context) -> Any:
            try:
                _check_instance(context, self._instance)
                if isinstance(request, Unreadable):
                    raise InvalidField(request.why)
                return await handler(request, context)
            except grpc.aio.AbortError:
                raise  # it is an Exception, and the call has its status already
            except Exception as error:  # ours or a bug: either way its status is all that may leave
                self._refused(error.reason if isinstance(error, CallError) else Internal.reason)
                status = _status_for(error, request, method)
            # Outside of the except clause: should the abort fail as well, grpc logs it with all that it came after.
            return await leave(context, status)

        return guarded


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a request that is no message of its method, or not made into one."""

    why: str = "the request cannot be parsed as this method's message"


def tolerant(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """`parse`, which gives Unreadable where it would raise."""
    assert parse is not None, "generated handlers have one"

    def parse_or_tell(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Unreadable()

    return parse_or_tell


def _check_instance(context: Context, instance: str) -> None:
    for key, wanted in context.invocation_metadata() or ():
        if key == INSTANCE and wanted != instance:
            raise WrongInstance(
                f"this is {instance}, and the call is for another instance",
                hint="snapshots work where they were made: connect to that server",
                metadata={"instance": instance},
            )


async def leave(context: Context, status: grpc.Status) -> NoReturn:
    """Ends the call with `status`. Never returns.

    Where the call has ended under it, by its deadline for one, gRPC cannot send any more, and nobody hears: that is a
    cancellation like any other and no error of the server's.
    """
    try:
        await context.abort_with_status(status)
    except Exception as error:
        if not is_ended(error):
            raise
        raise asyncio.CancelledError from None
    raise AssertionError("an abort raises")


def _status_for(error: Exception, request: object, method: str) -> grpc.Status:
    if isinstance(error, CallError):
        try:
            return status_of(error, names_snapshot=names_snapshot(request))
        except Exception as broken:  # an error that cannot be written down must not hide that there was one
            error = broken
    incident = uuid.uuid4().hex
    log.error("incident %s in %s: %s", incident, method, describe(error))
    return status_of(Internal(INTERNAL_TEXT), incident=incident)


def describe(error: BaseException) -> str:
    """Types and places of an exception and its causes, without their words."""
    lines = []
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.extract_tb(seen.__traceback__)
        places = "".join(f"\n  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        lines.append(f"{type(seen).__module__}.{type(seen).__qualname__}{places}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\nafter ".join(lines)


def names_snapshot(request: Any) -> bool:
    """Whether `request` needs a snapshot of this very instance."""
    return any(getattr(request, field, "") for field in ("parent", "source", "name", "names"))
