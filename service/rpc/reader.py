"""A stream's reader. Owns what happens when it stops reading or goes away in the middle of a write.

A reader that stops holds several MB of window before a write blocks at all. gRPC cannot take back a write or end a
call above it, so the write is left to itself: what is ended is the work behind it, and the reader hears of that when
it reads on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from service.core_api import Observer
from service.errors import SlowReader


class Reader:
    """Writes to one call, and closes `events` once a write has blocked for `patience` seconds.

    As a context it closes them at the end in any case, and once.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        events: AsyncGenerator[Any, None],
        *,
        patience: float,
        observer: Observer,
    ) -> None:
        self._context = context
        self._events = events
        self._patience = patience
        self._observer = observer
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await (self._closing or self._events.aclose())

    async def write(self, message: object) -> None:
        """One message. `events` is suspended meanwhile, so it can be closed from aside.

        Raises SlowReader if it took too long, and CancelledError if the reader went away meanwhile.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        timer = loop.call_later(self._patience, self._give_up)
        try:
            await written(self._context, message)
        finally:
            timer.cancel()
            self._observer.waited(loop.time() - began)
        if self._closing is not None:
            self._observer.gave_up()
            text = f"the stream was not read for {self._patience:g} s"
            raise SlowReader(text, hint="read faster; a generation can be asked for larger deltas")

    def _give_up(self) -> None:
        self._closing = asyncio.ensure_future(self._events.aclose())


async def written(context: grpc.aio.ServicerContext[Any, Any], message: object) -> None:
    """Writes one message. Raises CancelledError if the reader went away meanwhile."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:  # gRPC's word for a call that ended under a write; the cancel comes after it
        raise asyncio.CancelledError("the reader is gone") from None
