"""From the engine thread to asyncio. Owns the crossing: one wake-up a step, what is pending merged while nobody reads.

`Outlet` lives on both sides: `emit` and `flush` run on the engine thread, delivery on the event loop. A `Channel` is
one work's mailbox on the loop. What a reader never took (nodes) is let go when the channel closes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvcache.tree import Node
from service.work import Ended, Failed, NodeAt, Prefilled, Tokens, WorkEvent


class Channel:
    """One work's events, in order, on the event loop. Pending `Tokens` merge, so memory follows text, not messages.

    Of progress only the newest is kept.
    """

    def __init__(self, let_go: Callable[[Node], None]) -> None:
        self._let_go = let_go
        self._pending: deque[WorkEvent] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self.ended = False  # its last event was taken: there is nothing to wait for

    def put(self, event: WorkEvent) -> None:
        if self._closed:
            self._drop(event)
            return
        last = self._pending[-1] if self._pending else None
        if isinstance(event, Tokens) and isinstance(last, Tokens) and event.channel is last.channel:
            last.text += event.text
            last.picked += event.picked
        elif isinstance(event, Prefilled) and isinstance(last, Prefilled):
            self._pending[-1] = event
        else:
            self._pending.append(event)
        self._wake.set()

    async def get(self) -> WorkEvent:
        """The next event; waits for it."""
        await self.peek()
        return self.take()

    async def peek(self) -> WorkEvent:
        """The next event, which stays the channel's; waits for it."""
        while not self._pending:
            self._wake.clear()
            await self._wake.wait()
        return self._pending[0]

    def take(self) -> WorkEvent:
        """The event that was peeked at, and what has been merged into it since."""
        event = self._pending.popleft()
        self.ended = isinstance(event, Ended | Failed)
        return event

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed = True
        while self._pending:
            self._drop(self._pending.popleft())

    def _drop(self, event: WorkEvent) -> None:
        if isinstance(event, NodeAt):
            self._let_go(event.node)


class Outlet:
    """Carries all events of a step in one call to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batch: list[tuple[Channel, WorkEvent]] = []

    def emit_to(self, channel: Channel) -> Callable[[WorkEvent], None]:
        """The `emit` of one work. Runs on the engine thread."""
        return lambda event: self._batch.append((channel, event))

    def flush(self) -> None:
        """Ends a step. Runs on the engine thread."""
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:  # the loop is closed: the server is gone and nobody waits
            return


def _deliver(batch: list[tuple[Channel, WorkEvent]]) -> None:
    for channel, event in batch:
        channel.put(event)
