"""Looks after the model thread. Owns when its works are given up and when it is started anew; the loop does both.

    what it sees                what happens
    one step takes too long     its calls end with an error and health turns; nothing can end a thread that hangs inside
                                the model, so it is left alone: should it come back, it serves on, and health with it
    the thread has died         its calls have ended with an error; a new thread loads the model again, at most so often
                                in a period, later each time. Then the process has to be replaced, and health says so

What survives a new thread: every snapshot and everything in the store, since these are host bytes, handed over after
the step that made them had gone well. What is dropped: the working state of the calls that ran.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from service.loop import EngineLoop

log = logging.getLogger("kvfork.watchdog")

PERIOD = 600.0  # seconds over which restarts are counted
PATIENCE = 5.0  # seconds before the second restart in a period, before the third twice that, and so on


class Watchdog:
    """`look` runs on the event loop, every now and then."""

    def __init__(
        self,
        loop: EngineLoop,
        restart: Callable[[], None],
        *,
        stuck_after: float,
        restarts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`restart` gives `loop` a new thread; at most `restarts` times in a PERIOD."""
        self._loop = loop
        self._restart = restart
        self._stuck_after = stuck_after
        self._most = restarts
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._complained = False

    async def run(self) -> None:
        """Looks until cancelled, often enough that nobody waits much longer than `stuck_after`."""
        while True:
            await asyncio.sleep(min(0.25, self._stuck_after / 4))
            try:
                self.look()
            except Exception:  # a watchdog that died would leave the next failure unseen
                log.exception("the model thread could not be looked after")

    def look(self) -> None:
        """Does what is due."""
        ended = self._loop.give_up(self._stuck_after)
        if ended:
            log.error(
                "the model has been in one step for more than %g s: %d calls were ended. If it does not come back, "
                "the server must be restarted",
                self._stuck_after,
                ended,
            )
        if not self._loop.has_failed:
            self._complained = False
            return
        now = self._clock()
        while self._restarts and now - self._restarts[0] >= PERIOD:
            self._restarts.popleft()
        if len(self._restarts) >= self._most:
            if not self._complained:
                log.error("the model thread died %d times in a while: restart the server", len(self._restarts) + 1)
                self._complained = True
            return
        if self._restarts and now - self._restarts[-1] < PATIENCE * len(self._restarts):
            return
        self._restarts.append(now)
        log.warning("the model thread has died; it is started anew (%d of %d)", len(self._restarts), self._most)
        self._restart()
