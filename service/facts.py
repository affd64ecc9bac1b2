"""What is known of the call that is being served: an id, and the names that it has to do with. Never what was said.

Whoever learns a fact notes it; the log line at the call's end has them all, and so has its trace. On the event loop:
each call is a task of its own, and so has facts of its own.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar

Fact = str | int | float

_current: ContextVar[dict[str, Fact] | None] = ContextVar("facts", default=None)


def begin(**facts: Fact) -> dict[str, Fact]:
    """A new call begins in this task."""
    made: dict[str, Fact] = {"call": secrets.token_hex(8), **facts}
    _current.set(made)
    return made


def note(**facts: Fact) -> None:
    """Adds facts to the call that this task serves, if any; what is empty is left out."""
    current = _current.get()
    if current is not None:
        current.update({name: value for name, value in facts.items() if value != ""})


def known() -> dict[str, Fact]:
    """The facts so far; none outside of a call."""
    return dict(_current.get() or {})
