"""Retries that are safe: a `request_id` seen before gets the reply it got. Scoped to caller and method.

A call that failed or was cancelled is not remembered: its retry runs anew. Image files are remembered as their digest.
Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

from service.errors import InvalidField, RequestInProgress
from service.events import Delta, Event, Finished, Marked, Started
from service.request import GenerateCall, ImagePart, Input, Part, RawInput, images_of

MEMORY_SECONDS = 600.0
MEMORY_CALLS = 10_000  # of one caller, who can flush nobody else's; the oldest go first
MEMORY_BYTES = 64 * 2**20  # of one caller's calls and replies; a call that is larger by itself is not remembered


class _HasRequestId(Protocol):
    @property
    def request_id(self) -> str: ...


C = TypeVar("C", bound=_HasRequestId)
R = TypeVar("R")

_Key = tuple[str, str, str]  # owner, method, request id


@dataclass(frozen=True, slots=True)
class _Reply:
    when: float
    call: object
    reply: object
    size: int  # bytes of both, about


class _Memory:
    """One caller's replies, oldest first."""

    def __init__(self) -> None:
        self.replies: OrderedDict[_Key, _Reply] = OrderedDict()
        self._size = 0

    def add(self, key: _Key, reply: _Reply) -> None:
        self.drop(key)
        if reply.size > MEMORY_BYTES:
            return
        self.replies[key] = reply
        self._size += reply.size
        while len(self.replies) > MEMORY_CALLS or self._size > MEMORY_BYTES:
            self.drop(next(iter(self.replies)))

    def forget(self, before: float) -> None:
        """Drops what is older."""
        while self.replies and self.replies[oldest := next(iter(self.replies))].when < before:
            self.drop(oldest)

    def drop(self, key: _Key) -> None:
        gone = self.replies.pop(key, None)
        if gone is not None:
            self._size -= gone.size


class Replays:
    """Replies by request id, for ten minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done: dict[str, _Memory] = {}  # by owner
        self._running: dict[_Key, object] = {}

    def unary(
        self, method: str, serve: Callable[[C, str], Coroutine[Any, Any, R]]
    ) -> Callable[[C, str], Coroutine[Any, Any, R]]:
        """`serve`, made safe to retry."""

        async def once(call: C, owner: str) -> R:
            key = (owner, method, call.request_id)
            if not call.request_id:
                return await serve(call, owner)
            asked = await asyncio.to_thread(_slim, call) if _has_files(call) else call
            known = self._known(key, asked)
            if known is not None:
                return known  # type: ignore[return-value]  # what this very method replied
            self._running[key] = asked
            try:
                reply = await serve(call, owner)
            finally:
                del self._running[key]
            self._remember(key, asked, reply)
            return reply

        return once

    def generate(
        self, serve: Callable[[GenerateCall, str], AsyncIterator[Event]]
    ) -> Callable[[GenerateCall, str], AsyncIterator[Event]]:
        """The same for a stream: its replay is Started, the marks, the text in one Delta a channel's run, Finished."""

        async def once(call: GenerateCall, owner: str) -> AsyncIterator[Event]:
            key = (owner, "Generate", call.request_id)
            asked, call = call, replace(call, deadline=None)  # the one field that a retry may change
            if call.request_id and _has_files(call):
                call = await asyncio.to_thread(_slim, call)
            known = self._known(key, call) if call.request_id else None
            if known is not None:
                for event in known:  # type: ignore[attr-defined]  # a list of events, remembered below
                    yield event
                return
            if call.request_id:
                self._running[key] = call
            heard: list[Event] = []
            try:
                async with aclosing(serve(asked, owner)) as events:  # type: ignore[type-var]  # a generator in fact
                    async for event in events:
                        if call.request_id:
                            heard.append(event)
                        yield event
            finally:
                self._running.pop(key, None)
            if call.request_id and heard and isinstance(heard[-1], Finished):
                self._remember(key, call, _condensed(heard))

        return once

    def _known(self, key: _Key, call: object) -> object | None:
        """The reply to the same call, if there was one. Raises while it runs, or if the id meant another call."""
        running = self._running.get(key)
        if running is not None:
            self._check_same(running, call)
            raise RequestInProgress(
                "the first call with this request_id is still running", hint="wait for it, then retry"
            )
        memory = self._done.get(key[0])
        done = memory.replies.get(key) if memory is not None else None
        if done is None or self._clock() - done.when > MEMORY_SECONDS:
            return None
        self._check_same(done.call, call)
        return done.reply

    @staticmethod
    def _check_same(first: object, again: object) -> None:
        if first != again:
            text = "was used for another request; a new request needs a new id"
            raise InvalidField.at("request_id", text, reason="REQUEST_ID_REUSED")

    def _remember(self, key: _Key, call: object, reply: object) -> None:
        size = _size_of(call) + _size_of(reply)
        now = self._clock()
        self._done.setdefault(key[0], _Memory()).add(key, _Reply(now, call, reply, size))
        for owner, memory in list(self._done.items()):
            memory.forget(now - MEMORY_SECONDS)
            if not memory.replies:
                del self._done[owner]


def _size_of(value: object) -> int:
    """Bytes that a call or a reply keeps in memory, about: its texts, bytes and numbers."""
    if isinstance(value, str | bytes):
        return 50 + len(value)
    if isinstance(value, tuple | list | frozenset):
        first = next(iter(value), None)
        each = 40 * len(value) if isinstance(first, int | float) else sum(map(_size_of, value))
        return 50 + each
    if isinstance(value, dict):
        return 50 + sum(_size_of(key) + _size_of(item) for key, item in value.items())
    if is_dataclass(value):
        return 50 + sum(_size_of(getattr(value, field.name)) for field in fields(value))
    return 8 + int(getattr(value, "nbytes", 0))  # an array has them


def _has_files(call: object) -> bool:
    inputs = [getattr(call, "input", None), *(branch.append for branch in getattr(call, "branches", ()))]
    return any(image.data is not None for given in inputs for _, image in images_of(given))


def _slim(call: C) -> C:
    """The call with the digest of each image file in its place: what is kept for minutes must not be megabytes."""
    changes: dict[str, Any] = {}
    if getattr(call, "input", None) is not None:
        changes["input"] = _slim_input(call.input)  # type: ignore[attr-defined]
    if hasattr(call, "branches"):
        changes["branches"] = tuple(
            replace(branch, append=_slim_input(branch.append) if branch.append is not None else None)
            for branch in call.branches
        )
    return replace(call, **changes)  # type: ignore[type-var]  # every call is a dataclass


def _slim_input(given: Input) -> Input:
    if isinstance(given, RawInput):
        return replace(given, parts=tuple(_slim_part(part) for part in given.parts))
    messages = [replace(message, parts=tuple(_slim_part(part) for part in message.parts)) for message in given.messages]
    return replace(given, messages=tuple(messages))


def _slim_part(part: Part) -> Part:
    if isinstance(part, ImagePart) and part.data is not None:
        return replace(part, data=None, sha256=hashlib.sha256(part.data).digest())
    return part


def _condensed(events: list[Event]) -> list[Event]:
    kept: list[Event] = [event for event in events if isinstance(event, Started | Marked)]
    runs = groupby((event for event in events if isinstance(event, Delta)), key=lambda delta: delta.channel)
    for channel, run in runs:
        deltas = list(run)
        kept.append(
            Delta(
                text="".join(d.text for d in deltas),
                first_position=deltas[0].first_position,
                token_count=sum(d.token_count for d in deltas),
                token_ids=tuple(t for d in deltas for t in d.token_ids),
                logprobs=tuple(p for d in deltas for p in d.logprobs),
                channel=channel,
            )
        )
    return [*kept, events[-1]]
