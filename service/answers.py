"""From the store's callbacks to the event loop. Owns the one way to wait for an answer that another thread gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def answered(order: Callable[[Callable[[T], None]], None]) -> T:
    """Gives `order` what to call with its answer, from any thread and once, and waits for that.

    An answer to a caller that has left is dropped.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def arrived(value: T) -> None:
        if not answer.done():
            answer.set_result(value)

    def from_there(value: T) -> None:
        loop.call_soon_threadsafe(arrived, value)

    order(from_there)
    return await answer
