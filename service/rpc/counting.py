"""The layer behind the door: sees each call that was let in begin and end, and tells the core's observer.

Owns which code a call ended with: the one that leaves, whoever ended it. Methods that are not there are not told of:
their names are a client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from service.core_api import Observer

Context = grpc.aio.ServicerContext[Any, Any]

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class CountingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers under `prefix`."""

    def __init__(self, observer: Observer, prefix: str = "/kvfork.v1.") -> None:
        self._observer = observer
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
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._seen(handler.stream_unary, method), **codecs)
        return handler

    def _seen(self, handler: Callable[..., Any], method: str) -> Any:
        async def seen(request: Any, context: Context) -> Any:
            with self._observer.call(method.removeprefix("/"), pairs(context)) as tell:
                try:
                    reply = await handler(request, context)
                except asyncio.CancelledError:
                    left = context.time_remaining()
                    late = left is not None and left <= 0
                    tell("DEADLINE_EXCEEDED" if late else "CANCELLED")
                    raise
                except BaseException:  # of whatever kind: it goes on, and the code is what the client gets
                    tell(_code_of(context).name)
                    raise
                tell("OK")
                return reply

        return seen


def _code_of(context: Context) -> grpc.StatusCode:
    code: Any = context.code()  # a number or a member, by how it was set
    found = code if isinstance(code, grpc.StatusCode) else _BY_NUMBER.get(code)
    return found if found not in (None, grpc.StatusCode.OK) else grpc.StatusCode.UNKNOWN


def pairs(context: Context) -> list[tuple[str, Any]]:
    """The metadata that came with a call."""
    return [(key, value) for key, value in context.invocation_metadata() or ()]
