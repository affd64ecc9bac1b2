"""The outermost layer of every call: who it is, and whether it may come in. Owns what happens before a handler runs.

A caller that is not let in is told so before its message is read. Of a caller that is, at most so many calls are under
way, and each message has to arrive in time: the memory that a slow one takes is somebody else's. Health is open to
everybody who can connect, since probes cannot show tokens and it tells about no owner; everything else is not, unknown
methods included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from service.auth.authenticator import Authenticator
from service.auth.callers import Caller
from service.errors import CallError, CallQuota, InvalidField, SlowSender, Unauthenticated
from service.rpc.bounds import MAX_FIELDS, holds_too_much, shape_of
from service.rpc.caller import CALLER
from service.rpc.coming import no_request, read_within
from service.rpc.fields import MAX_TOKENS
from service.rpc.interceptor import Unreadable, leave, tolerant
from service.rpc.status import status_of

log = logging.getLogger(__name__)

OPEN = "/grpc.health.v1.Health/"
PROBE = Caller("")  # asks for health; no owner has this name
OPEN_BYTES = 1024  # of a message that has a name in it
OPEN_SECONDS = 5.0  # for it to arrive
OPEN_WAITING = 4  # calls without a caller whose message is on its way; the one that waits longest makes room
TELL_EVERY = 10.0  # seconds between log lines about callers that were not let in

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic to type checkers alone


class Door(grpc.aio.ServerInterceptor):
    """The first interceptor of a server."""

    def __init__(
        self, authenticator: Authenticator, refused: Callable[[str], None], *, max_calls: int, patience: float
    ) -> None:
        """`refused` is told the reason of each call that ends here.

        `max_calls`: of one owner at a time. `patience`: seconds that a request message may take to arrive.
        """
        self._authenticator = authenticator
        self._refused = refused
        self._max_calls = max_calls
        self._patience = patience
        self._calls: Counter[str] = Counter()
        self._waiting: OrderedDict[int, asyncio.Task[Any]] = OrderedDict()  # without a caller, oldest first
        self._strangers = Strangers()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the handler that `continuation` finds, or refuses without looking for one."""
        if handler_call_details.method.startswith(OPEN):
            caller: Caller | None = PROBE
        else:
            try:
                caller = self._authenticator.by_metadata(handler_call_details.invocation_metadata or ())
            except Unauthenticated as error:
                return self._refusal(error)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _streaming(self._opened(handler, caller), handler, handler_call_details.method)

    def _refusal(self, error: Unauthenticated) -> Handler:
        # As a method that streams requests: gRPC would read the message of any other kind before it asks the handler.
        async def refuse(messages: object, context: Context) -> None:
            self._refused(error.reason)
            self._strangers.tell(error, context.peer())
            await leave(context, status_of(error))

        return _streaming(refuse)

    def _opened(self, handler: Handler, known: Caller | None) -> Callable[[Any, Context], Awaitable[None]]:
        async def serve(messages: AsyncIterator[Any], context: Context) -> None:
            try:
                caller = known or self._authenticator.by_certificate(context.auth_context())
                if self._calls[caller.owner] >= self._max_calls and caller is not PROBE:
                    raise CallQuota(
                        f"{self._max_calls} calls of {caller.owner} are under way, and no more may be",
                        hint="wait for some of them to end",
                        metadata={"limit": str(self._max_calls)},
                    )
                self._calls[caller.owner] += 1
                try:
                    CALLER.set(caller)
                    await self._answer(handler, messages, context, caller)
                finally:
                    self._calls[caller.owner] -= 1
                    if not self._calls[caller.owner]:
                        del self._calls[caller.owner]
                return
            except CallError as error:
                self._refused(error.reason)
                if isinstance(error, Unauthenticated):
                    self._strangers.tell(error, context.peer())
                status = status_of(error)
            await leave(context, status)

        return serve

    async def _answer(self, handler: Handler, messages: Any, context: Context, caller: Caller) -> None:
        if handler.stream_unary is not None:  # it reads for itself, and looks to the time that each message takes
            await context.write(await cast(Any, handler.stream_unary)(messages, context))
            return
        if handler.request_streaming:  # reflection: it asks for one message after the other
            async with aclosing(cast(Any, handler.stream_stream)(messages, context)) as replies:
                async for reply in replies:
                    await context.write(reply)
            return
        request = await self._request(context, caller)
        if handler.response_streaming:
            await cast(Any, handler.unary_stream)(request, context)
        else:
            await context.write(await cast(Any, handler.unary_unary)(request, context))

    async def _request(self, context: Context, caller: Caller) -> Any:
        stranger = caller is PROBE
        task = asyncio.current_task()
        assert task is not None
        place = id(task)
        if stranger:
            self._make_room()
            self._waiting[place] = task
        patience = OPEN_SECONDS if stranger else self._patience
        late = SlowSender(
            f"the request did not arrive within {patience:g} s", hint="send it faster, or in smaller calls"
        )
        try:
            request = await read_within(context, patience, late)
        except asyncio.CancelledError:
            if stranger and place not in self._waiting:  # whoever cancelled it has taken it out
                task.uncancel()
                raise SlowSender("the request had not arrived when others were waiting too") from None
            raise
        finally:
            self._waiting.pop(place, None)
        if request is grpc.aio.EOF:
            raise no_request()
        if isinstance(request, Unreadable) and stranger:
            raise InvalidField(request.why)
        return request

    def _make_room(self) -> None:
        while len(self._waiting) >= OPEN_WAITING:
            _, oldest = self._waiting.popitem(last=False)
            oldest.cancel()


class Strangers:
    """Says in the log that callers were not let in, without letting them fill it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = -TELL_EVERY
        self._untold = 0

    def tell(self, error: Unauthenticated, peer: str) -> None:
        self._untold += 1
        now = self._clock()
        if now - self._told >= TELL_EVERY:
            log.warning("not let in: %s, from %s; %d since the last such line", error.reason, peer, self._untold)
            self._told, self._untold = now, 0


def _streaming(
    serve: Callable[[Any, Context], Awaitable[None]], handler: Handler | None = None, method: str = ""
) -> Handler:
    if handler is None:
        return grpc.stream_stream_rpc_method_handler(cast(Any, serve))
    return grpc.stream_stream_rpc_method_handler(
        cast(Any, serve),
        request_deserializer=_bounded(tolerant(handler.request_deserializer), method),
        response_serializer=handler.response_serializer,
    )


def _bounded(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """`parse`, but not of what is too large for `method`: one rule for all of them."""
    shape = shape_of(method)

    def parse_if_small(data: bytes) -> Any:
        if method.startswith(OPEN) and len(data) > OPEN_BYTES:
            return Unreadable(f"a request of this method has at most {OPEN_BYTES:,} bytes")
        if holds_too_much(data, shape):
            return Unreadable(f"a request has at most {MAX_FIELDS:,} fields, and {MAX_TOKENS:,} numbers in one")
        return parse(data)

    return parse_if_small
