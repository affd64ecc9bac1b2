"""How many of one owner's calls have the model at a time. Owns the lines in which an owner's further calls wait.

The scheduler's queue is one for all, first come, first served: whoever fills it shuts out everybody else. So each owner
has at most `limit` calls there or on the model, and its others wait here, in order, behind nobody else's. How many may
wait is not decided here: the door counts an owner's calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from service.events import Event, Finished, Started
from service.request import GenerateCall

C = TypeVar("C")
R = TypeVar("R")


@dataclass(slots=True)
class _Line:
    inside: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Gate:
    """Runs on the event loop."""

    def __init__(self, limit: int) -> None:
        """`limit` 0: nobody waits."""
        self._limit = limit
        self._lines: dict[str, _Line] = {}

    def inside(self, owner: str) -> int:
        """Calls of `owner` that the model has."""
        return self._lines[owner].inside if owner in self._lines else 0

    def waiting(self, owner: str) -> int:
        """Calls of `owner` that wait for their turn."""
        return len(self._lines[owner].waiting) if owner in self._lines else 0

    def takes(self, owner: str, count: int) -> bool:
        """Whether so many more calls of `owner` would not wait."""
        return not self._limit or self.inside(owner) + count <= self._limit

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[float]:
        """A place for the length of the block; gives the seconds that it took to get one."""
        line = self._lines.setdefault(owner, _Line())
        waited = 0.0
        if self._limit and line.inside >= self._limit:
            since = time.monotonic()
            place = asyncio.get_running_loop().create_future()
            line.waiting.append(place)
            try:
                await place  # whoever leaves hands its place on: `inside` stays as it is
            except asyncio.CancelledError:
                if not place.cancelled():
                    self._leave(owner, line)  # it was handed on to a call that is no more
                elif place in line.waiting:  # else whoever left meanwhile has passed over it
                    line.waiting.remove(place)
                raise
            waited = time.monotonic() - since
        else:
            line.inside += 1
        try:
            yield waited
        finally:
            self._leave(owner, line)

    def _leave(self, owner: str, line: _Line) -> None:
        while line.waiting:
            place = line.waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        line.inside -= 1
        if not line.inside:
            del self._lines[owner]

    def unary(self, serve: Callable[[C, str], Coroutine[Any, Any, R]]) -> Callable[[C, str], Coroutine[Any, Any, R]]:
        """`serve`, in turn."""

        async def in_turn(call: C, owner: str) -> R:
            async with self.turn(owner):
                return await serve(call, owner)

        return in_turn

    def generate(
        self, serve: Callable[[GenerateCall, str], AsyncIterator[Event]]
    ) -> Callable[[GenerateCall, str], AsyncIterator[Event]]:
        """The same for a stream; the wait counts as time in the queue, and goes off the deadline."""

        async def in_turn(call: GenerateCall, owner: str) -> AsyncIterator[Event]:
            async with self.turn(owner) as waited:
                if waited and call.deadline is not None:
                    call = replace(call, deadline=max(0.0, call.deadline - waited))
                async with aclosing(serve(call, owner)) as events:  # type: ignore[type-var]  # a generator in fact
                    async for event in events:
                        match event:
                            case Started() if waited:
                                yield replace(event, queue_seconds=event.queue_seconds + waited)
                            case Finished() if waited:
                                timing = replace(event.timing, queue=event.timing.queue + waited)
                                yield replace(event, timing=timing)
                            case _:
                                yield event

        return in_turn
