"""Ctrl-C during a generation: the first one ends it cleanly, the second gives up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfork_client import Generation


class Interrupts:
    """Whether Ctrl-C was pressed while this was watched."""

    asked = False


@contextlib.contextmanager
def stop_on_interrupt(generation: Generation) -> Iterator[Interrupts]:
    """Within it, Ctrl-C stops `generation`, whose text, snapshot and receipt then still arrive.

    The stop is sent from a thread of its own: a signal handler interrupts gRPC wherever it is, locks held, and may not
    call back into it. Outside the main thread, which gets all signals, nothing is changed.
    """
    seen = Interrupts()

    def stop() -> None:
        from kvfork_client import KVForkError

        with contextlib.suppress(KVForkError):  # the stream, which goes on being read, tells the same
            generation.stop()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if seen.asked:
            raise KeyboardInterrupt
        seen.asked = True
        threading.Thread(target=stop, daemon=True).start()

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
