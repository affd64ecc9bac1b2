"""The messages of a call whose caller streams. Owns how long each may take, and what is wrong with one that is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import grpc.aio

from service.errors import InvalidField, SlowSender
from service.rpc.interceptor import Unreadable


async def read_within(context: grpc.aio.ServicerContext[Any, Any], seconds: float, late: SlowSender) -> Any:
    """One message, or EOF; raises `late` if none has come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await cast(Any, context).read()
    except TimeoutError:
        raise late from None


def no_request() -> InvalidField:
    """For a call that has sent nothing."""
    return InvalidField("the call ended without a request")


class Coming:
    """Reads one call's messages, one at a time: what is not read yet holds the sender back."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], *, patience: float, brings: Callable[[Any], bool]
    ) -> None:
        """`patience`: seconds to wait, all in all, until a message comes that `brings` something."""
        self._context = context
        self._patience = patience
        self._brings = brings
        self._left = patience  # of it, for those that bring nothing go on waiting

    async def first(self) -> Any:
        """The first message. InvalidField if there is none."""
        message = await self._next()
        if message is grpc.aio.EOF:
            raise no_request()
        return message

    async def others(self) -> AsyncGenerator[Any, None]:
        """The messages behind it, until the caller has sent all of them."""
        while (message := await self._next()) is not grpc.aio.EOF:
            yield message
            del message  # not kept while the next one is waited for

    async def _next(self) -> Any:
        clock = asyncio.get_running_loop().time
        begun = clock()
        text = f"the next message with anything in it did not arrive within {self._patience:g} s"
        late = SlowSender(text, hint="send it faster, or in smaller messages")
        message = await read_within(self._context, self._left, late)
        if isinstance(message, Unreadable):
            raise InvalidField(message.why)
        if message is not grpc.aio.EOF:
            self._left = self._patience if self._brings(message) else max(0.0, self._left - (clock() - begun))
        return message
