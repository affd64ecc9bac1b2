"""How text gets into a context whose last turn may still be open: tries in order, taken at the server's word."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kvfork_client import Generation, InputLike, Message
    from kvfork_client.blocking import Event

R = TypeVar("R")


def closing(messages: Sequence[Message]) -> list[Message]:
    """The same turns behind a turn that was stopped before its end: an empty assistant message ends it."""
    from kvfork_client import Message

    return [Message.assistant(""), *messages]


def first_taken(attempts: Sequence[Callable[[], R]]) -> tuple[int, R]:
    """The first attempt that the chat template lets through, and its index. Raises the last one's error."""
    from kvfork_client import TemplateNotAppendable, TurnOpen

    for index, attempt in enumerate(attempts[:-1]):
        try:
            return index, attempt()
        except (TurnOpen, TemplateNotAppendable):
            continue
    return len(attempts) - 1, attempts[-1]()


def admitted(generation: Generation) -> tuple[Generation, Iterator[Event]]:
    """A generation that the server has taken, and all its events. Raises the error by which it refused."""
    events = generation.events()
    return generation, itertools.chain([next(events)], events)


def appended(messages: InputLike) -> list[InputLike]:
    """What to append, as it is and behind an open turn; raw text has the one form only."""
    from kvfork_client import Message

    if isinstance(messages, list) and all(isinstance(message, Message) for message in messages):
        return [messages, closing(messages)]
    return [messages]
