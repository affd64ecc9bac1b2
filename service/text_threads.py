"""The threads that make tokens of text. Owns how many of them one owner's calls may have, and when their work ends.

The tokenizer lets go of the GIL, so that one caller's megabytes do not hold up the others' words; that they do not take
all threads either is seen to here. A place is a call's until the thread is done with it, however early its caller left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from service.gate import Gate
from service.text.waiting import while_waited_for

T = TypeVar("T")


class TextThreads:
    """Runs on the event loop; `work` on a thread."""

    def __init__(self, count: int, *, share: int) -> None:
        """`share`: the most of `count` threads that one owner's calls have at a time; its others wait in a line."""
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="text")
        self._gate = Gate(share)
        self._under_way: dict[asyncio.Task[Any], threading.Event] = {}

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """What `work` gives. If the caller is cancelled, `waiting.go_on` raises inside of it, and nobody hears."""
        given_up = threading.Event()
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._gate.turn(owner))  # a caller who leaves the line takes its work along
            task = asyncio.ensure_future(self._on_thread(place.pop_all(), work, given_up))
        self._under_way[task] = given_up
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def close(self) -> None:
        """Gives up all that is under way. What does not listen goes on, and is for nobody."""
        for given_up in self._under_way.values():
            given_up.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, place: AsyncExitStack, work: Callable[[], T], given_up: threading.Event) -> T:
        async with place:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: while_waited_for(given_up, work)
            )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._under_way[task]
        if not task.cancelled():
            task.exception()  # seen, also where the caller has left
