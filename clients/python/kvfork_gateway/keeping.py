"""Snapshots that the gateway keeps so that conversations go on from them. Owns their making, use and release.

`conversations` decides which; here is what that takes of the server. What cannot be let go of expires by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import kvfork_client as kv

from .completion import Completion
from .conversations import Bounds, Conversations, Kept, Place, digest

LABELS = {"kvfork-gateway": "reuse"}
"""Of the snapshots that are kept."""

_PASSING_SECONDS = 60.0  # to live, of a snapshot that one call goes on from
_LET_GO_AT_ONCE = 8  # deletions, which count among the caller's calls
_SETTLE_SECONDS = 5.0  # for deletions under way


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot's name, and the server that holds it; "" where nobody said."""

    name: str
    instance: str

    @classmethod
    def of(cls, snapshot: kv.AsyncSnapshot) -> Held:
        return cls(snapshot.name, snapshot.instance)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a digest of the token, and a client that calls in its name."""

    key: bytes
    client: kv.AsyncClient = field(compare=False, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked of the model: the input, and the ids that the server's template makes of it.

    `ids` None: behind a parent of the caller's own, whose tokens are not looked at. `images`: SHA-256 of each.
    `turns_end`: how many of the ids there are before what opens the answer.
    """

    input: kv.InputLike
    ids: tuple[int, ...] | None = None
    images: tuple[bytes, ...] = ()
    turns_end: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a call begins: `given` behind `parent`, of `tokens`. `passing` are names to let go of when it has ended."""

    parent: Held | kv.AsyncSnapshot | None
    given: kv.InputLike | None
    tokens: int = 0
    passing: tuple[Held, ...] = ()


class Keeper:
    """For one event loop. `close` lets go of all."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._conversations: Conversations[Caller, Held] = Conversations(bounds)
        self._tasks: dict[asyncio.Task[None], Caller] = {}  # deletions under way, and in whose name
        self._slots = asyncio.Semaphore(_LET_GO_AT_ONCE)
        self._closed = False
        self.limit(bounds.ttl)

    def limit(self, most_seconds: float) -> None:
        """No snapshot is asked to live longer than that; what is kept is counted on no longer either. 0: no limit."""
        ttl = min(self._bounds.ttl, most_seconds or self._bounds.ttl)
        self.options = kv.SaveOptions(ttl=ttl, labels=LABELS)
        self.passing_options = kv.SaveOptions(ttl=min(_PASSING_SECONDS, ttl), labels=LABELS)
        self._conversations.ttl = ttl

    def find(self, prompt: Prompt, model: kv.ModelInfo, caller: Caller) -> Place[Held] | None:
        """The place furthest on in a prompt."""
        if prompt.ids is None:
            return None
        return self._conversations.find(
            caller, model.name, prompt.ids, prompt.images, trimmable=model.trimmable, now=time.monotonic()
        )

    async def stand_at(self, place: Place[Held], prompt: Prompt, caller: Caller) -> Start:
        """Goes there. Raises KVForkError, as for a snapshot that is gone by now."""
        assert prompt.ids is not None
        parent = place.snapshot
        tokens = place.tokens
        passing: tuple[Held, ...] = ()
        if place.cut:
            source = caller.client.routed(instance=parent.instance).snapshot(parent.name)
            cut = await source.rollback(
                token_count=place.tokens, rounding=kv.Rounding.DOWN, options=self.passing_options
            )
            parent, tokens, passing = Held.of(cut), cut.token_count, (Held.of(cut),)
            if tokens < place.prompt_tokens and place.prompt is not None:
                parent, tokens = place.prompt, place.prompt_tokens
        return Start(parent=parent, given=kv.raw(kv.tokens(prompt.ids[tokens:])), tokens=tokens, passing=passing)

    def forget(self, place: Place[Held]) -> None:
        """The snapshots there are of no use."""
        self._let_go(self._conversations.drop(place.entry))

    def give_up(self, caller: Caller) -> bool:
        """Lets go of all that is kept for a caller. False if that is nothing."""
        gone = self._conversations.drop_all(caller)
        self._let_go(gone)
        return bool(gone)

    def remember(
        self,
        completion: Completion,
        caller: Caller,
        prompt: Prompt,
        model: kv.ModelInfo,
        *,
        place: Place[Held] | None,
        shared: kv.AsyncSnapshot | None,
    ) -> None:
        """What later turns can go on from: the end of each answer, and its beginning also where no answer came.

        `place` is where the call went on from. The beginning is `shared`, or what each choice has marked. After `close`
        they are let go of at once.
        """
        assert prompt.ids is not None
        beginning, opening = prompt.ids[: prompt.turns_end], array("I", prompt.ids[prompt.turns_end :])
        prompt_digest = digest(beginning)
        there = _kept_at(place, prompt.turns_end)  # where the call went on from there or further, nothing was marked
        for stream in completion.streams:
            marked = shared or stream.generation.marks.get(0)
            began = stream.generation.started is not None  # else it may be that very place that is gone
            start = Held.of(marked) if marked is not None else there if began else None
            finished = stream.choice.finished
            end = finished.snapshot if finished is not None else None
            if start is None and end is None:
                continue
            kept = Kept(
                model=model.name,
                images=prompt.images,
                prompt_tokens=prompt.turns_end,
                prompt_digest=prompt_digest,
                answer=opening + stream.choice.ids if end is not None else array("I"),
                prompt=start,
                end=Held.of(end) if end is not None else None,
                follows=place.entry if place is not None else None,
            )
            self._let_go(self._conversations.add(caller, kept, time.monotonic()))
        if self._closed:
            self._let_go(self._conversations.clear())

    def release(self, caller: Caller, snapshots: Iterable[Held]) -> None:
        """In the background: nobody waits for it."""
        self._let_go((caller, held) for held in snapshots)

    async def close(self) -> None:
        """Lets go of all that is kept, as far as the server still hears of it in time."""
        self._closed = True
        self._let_go(self._conversations.clear())
        await self.settle()
        for task in self._tasks:
            task.cancel()

    async def settle(self, caller: Caller | None = None) -> None:
        """Waits for what is being let go of now, of one caller's or of all, for a few seconds."""
        waited = [task for task, whose in self._tasks.items() if caller is None or whose == caller]
        if waited:
            await asyncio.wait(waited, timeout=_SETTLE_SECONDS)

    def _let_go(self, gone: Iterable[tuple[Caller, Held]]) -> None:
        for caller, held in gone:
            task = asyncio.get_running_loop().create_task(self._delete(caller.client, held))
            self._tasks[task] = caller
            task.add_done_callback(self._tasks.pop)

    async def _delete(self, client: kv.AsyncClient, held: Held) -> None:
        async with self._slots:
            with contextlib.suppress(kv.KVForkError):
                await client.delete_snapshot(held, allow_missing=True, timeout=30.0)


def _kept_at(place: Place[Held] | None, tokens: int) -> Held | None:
    """The snapshot behind so many tokens that a place is known to have."""
    if place is None:
        return None
    if place.cut:
        return place.prompt if place.prompt_tokens == tokens else None
    return place.snapshot if place.tokens == tokens else None
