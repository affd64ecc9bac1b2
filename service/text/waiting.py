"""Whether anybody still waits for what a thread works on. Between two long steps of it, `go_on` is asked.

A tokenizer or a template cannot be stopped inside of one text, but a call has many: one for each mark, run and image.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_thread = threading.local()


class GivenUp(Exception):
    """The call has ended, or the process ends: nobody will hear."""


def while_waited_for(given_up: threading.Event, work: Callable[[], T]) -> T:
    """Does `work`, in which `go_on` raises once `given_up` is set. On a thread that works on nothing else meanwhile."""
    _thread.given_up = given_up
    try:
        go_on()
        return work()
    finally:
        del _thread.given_up


def go_on() -> None:
    """Raises GivenUp if nobody waits any more; anywhere else it does nothing."""
    given_up: threading.Event | None = getattr(_thread, "given_up", None)
    if given_up is not None and given_up.is_set():
        raise GivenUp
