"""The outermost layer of all: sees each call of ours begin and end. Owns the log line of a call and who else is told.

A call is counted under its method and the code that leaves, whoever ended it. The line has ids, names and numbers, and
never what was said. Calls of InferenceService are told at info, the others at debug.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from service import facts
from service.metering import Meter
from service.tracing import Tracer

log = logging.getLogger("kvfork.calls")

Context = grpc.aio.ServicerContext[Any, Any]

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class CountingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers under `prefix`; methods that are not there are not counted, for their names are a client's."""

    def __init__(self, meter: Meter, tracer: Tracer, prefix: str = "/kvfork.v1.") -> None:
        self._meter = meter
        self._tracer = tracer
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
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._seen(handler.unary_unary, method), **codecs)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._seen(handler.unary_stream, method), **codecs)
        return handler

    def _seen(self, handler: Callable[..., Any], method: str) -> Any:
        short = method.removeprefix(self._prefix)  # "InferenceService/Generate"
        name = short.rpartition("/")[2]
        level = logging.INFO if short.startswith("InferenceService/") else logging.DEBUG

        async def seen(request: Any, context: Context) -> Any:
            known = facts.begin(method=name)
            began = time.monotonic()
            self._meter.call_began(name)
            code = grpc.StatusCode.OK
            with self._tracer.call(method.removeprefix("/"), pairs(context)) as span:
                try:
                    return await handler(request, context)
                except asyncio.CancelledError:
                    left = context.time_remaining()
                    late = left is not None and left <= 0
                    code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
                    raise
                except BaseException:  # of whatever kind: it goes on, and the code is what the client gets
                    code = _code_of(context)
                    raise
                finally:
                    seconds = time.monotonic() - began
                    self._meter.call_ended(name, code.name, seconds)
                    span.end(code.name, known)
                    log.log(
                        level,
                        "%s %s",
                        name,
                        code.name,
                        extra={"fields": {**known, "code": code.name, "seconds": round(seconds, 6)}},
                    )

        return seen


def _code_of(context: Context) -> grpc.StatusCode:
    code: Any = context.code()  # a number or a member, by how it was set
    found = code if isinstance(code, grpc.StatusCode) else _BY_NUMBER.get(code)
    return found if found not in (None, grpc.StatusCode.OK) else grpc.StatusCode.UNKNOWN


def pairs(context: Context) -> list[tuple[str, Any]]:
    """The metadata that came with a call."""
    return [(key, value) for key, value in context.invocation_metadata() or ()]
