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
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

from service.errors import InvalidField, RequestInProgress
from service.events import Delta, Event, Finished, Marked, Started
from service.request import GenerateCall, ImagePart, Input, Part, RawInput, images_of

MEMORY_SECONDS = 600.0
MEMORY_CALLS = 10_000  # of all callers together; the oldest go first


class _HasRequestId(Protocol):
    @property
    def request_id(self) -> str: ...


C = TypeVar("C", bound=_HasRequestId)
R = TypeVar("R")

_Key = tuple[str, str, str]  # owner, method, request id


class Replays:
    """Replies by request id, for ten minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done: OrderedDict[_Key, tuple[float, object, object]] = OrderedDict()  # (when, call, reply)
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
        done = self._done.get(key)
        if done is None or self._clock() - done[0] > MEMORY_SECONDS:
            return None
        self._check_same(done[1], call)
        return done[2]

    @staticmethod
    def _check_same(first: object, again: object) -> None:
        if first != again:
            text = "was used for another request; a new request needs a new id"
            raise InvalidField.at("request_id", text, reason="REQUEST_ID_REUSED")

    def _remember(self, key: _Key, call: object, reply: object) -> None:
        now = self._clock()
        self._done[key] = (now, call, reply)
        self._done.move_to_end(key)
        while self._done:
            oldest = next(iter(self._done.values()))[0]
            if len(self._done) <= MEMORY_CALLS and now - oldest <= MEMORY_SECONDS:
                return
            self._done.popitem(last=False)


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
