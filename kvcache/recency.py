"""Which record goes next. Owns recency order and nothing else: no bytes, no tiers, no pins, no locks.

Exact least-recently-used order at O(1) per use: a use only notes the new tick, and the heap learns of it when that
member comes up. A member may be added with any tick, so records that change tier keep their age.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class RecencyQueue(Generic[T]):
    """Members by the tick of their last use; ticks grow with every use anywhere."""

    def __init__(self) -> None:
        self._ticks: dict[T, int] = {}
        self._heap: list[tuple[int, int, T]] = []  # tick, tie-break (members need not be ordered), member
        self._tie = itertools.count()

    def __len__(self) -> int:
        return len(self._ticks)

    def __contains__(self, member: T) -> bool:
        return member in self._ticks

    def add(self, member: T, tick: int) -> None:
        self._ticks[member] = tick
        heapq.heappush(self._heap, (tick, next(self._tie), member))
        if len(self._heap) > 2 * len(self._ticks) + 64:  # mostly members discarded since
            self._heap = [(tick, next(self._tie), member) for member, tick in self._ticks.items()]
            heapq.heapify(self._heap)

    def touch(self, member: T, tick: int) -> None:
        """Note a use; of no effect on what is not a member."""
        if member in self._ticks:
            self._ticks[member] = tick

    def discard(self, member: T) -> None:
        self._ticks.pop(member, None)

    def pop_oldest(self) -> T | None:
        """Remove and return the member used longest ago."""
        while self._heap:
            noted, _, member = self._heap[0]
            tick = self._ticks.get(member)
            if tick is None:
                heapq.heappop(self._heap)
            elif tick != noted:
                heapq.heapreplace(self._heap, (tick, next(self._tie), member))
            else:
                heapq.heappop(self._heap)
                del self._ticks[member]
                return member
        return None
