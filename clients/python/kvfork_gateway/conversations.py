"""Which snapshots continue which token sequences. Owns the table, its bounds and what has to be let go of; pure.

A conversation is known by the token ids that the server's own template makes of it, never by its messages: whatever a
client leaves out or spells otherwise, a snapshot is used only where its tokens are a prefix of what is asked for now.
Of a prompt the table holds a digest, of an answer the ids, so that a history that repeats an answer up to some token
can go on from there. A line of answers keeps its last two: the end, and the place to try the last turn again from.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)
N = TypeVar("N", bound=Hashable)

GRID = 256  # tokens between places that the server keeps on its own
_ENTRY_BYTES = 1024  # of an entry besides its answer, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much is remembered. What is beyond goes, least recently used first."""

    entries: int = 4096
    entries_per_caller: int = 64
    total_bytes: int = 32 * 2**20  # of the gateway's memory; the server's state is under the server's own budgets
    ttl: float = 1800.0  # seconds without use


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Generic[N]):
    """One answered prompt. `prompt` and `end` name the snapshots at both ends of the answer; None for none.

    The answer begins where the turns end: what the template writes to open it belongs to it, since a later rendering
    may open it otherwise.
    """

    model: str
    images: tuple[bytes, ...]  # SHA-256 of each in the prompt, in order
    prompt_tokens: int
    prompt_digest: bytes
    answer: array[int]
    prompt: N | None
    end: N | None
    follows: int | None = None  # the entry that this one went on from

    @property
    def snapshots(self) -> tuple[N, ...]:
        """The names that there are."""
        return tuple(name for name in (self.end, self.prompt) if name is not None)

    @property
    def size(self) -> int:
        return _ENTRY_BYTES + len(self.answer) * self.answer.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Generic[N]):
    """Where to go on: behind `tokens` tokens of `snapshot`, to be rolled back to first if `cut`.

    `prompt` is the place to fall back to if the cut cannot be made.
    """

    entry: int
    snapshot: N
    tokens: int
    cut: bool = False
    prompt: N | None = None
    prompt_tokens: int = 0

    @property
    def uncut(self) -> Place[N] | None:
        """Where to go on if nothing is to be made for it."""
        if not self.cut:
            return self
        if self.prompt is None:
            return None
        return Place(entry=self.entry, snapshot=self.prompt, tokens=self.prompt_tokens)


@dataclass(slots=True)
class _Entry(Generic[C, N]):
    caller: C
    kept: Kept[N]
    expires: float


@dataclass(slots=True)
class _Caller(Generic[N]):
    entries: set[int] = field(default_factory=set)
    by_prompt: dict[tuple[str, bytes], set[int]] = field(default_factory=dict)
    uses: Counter[N] = field(default_factory=Counter)  # of each snapshot, by entries


class Conversations(Generic[C, N]):
    """Of callers C and what they call snapshots, N. For one thread.

    Times are seconds of one monotonic clock; sizes are estimates.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.ttl = bounds.ttl  # may be set shorter
        self._bounds = bounds
        self._ids = count(1)
        self._entries: OrderedDict[int, _Entry[C, N]] = OrderedDict()  # least recently used first
        self._callers: dict[C, _Caller[N]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self, caller: C, model: str, ids: Sequence[int], images: Sequence[bytes], *, trimmable: bool, now: float
    ) -> Place[N] | None:
        """The place furthest on in `ids` before their last, all of `images` behind it. Counts as use.

        `trimmable`: the model's state can be cut at any token; else only on the grid and where it was kept.
        """
        self._forget_expired(now)
        known = self._callers.get(caller)
        if known is None or len(ids) < 2:
            return None
        tokens = array("I", ids)
        best: Place[N] | None = None
        for entry_id in self._with_prompt_of(known, model, tokens):
            kept = self._entries[entry_id].kept
            # An image further on would have to be sent as ids, which stand for no picture.
            if kept.images != tuple(images):
                continue
            place = _place(entry_id, kept, tokens, trimmable=trimmable)
            # Of two that reach equally far the newer one, and one that needs no cut.
            if place is not None and (best is None or _rank(place) > _rank(best)):
                best = place
        if best is not None:
            self._entries[best.entry].expires = now + self.ttl
            self._entries.move_to_end(best.entry)
        return best

    def add(self, caller: C, kept: Kept[N], now: float) -> list[tuple[C, N]]:
        """Remembers an answer. Returns the snapshots that nothing here needs any more, and whose they are."""
        self._forget_expired(now)
        gone: list[int] = []
        known = self._callers.setdefault(caller, _Caller())
        for other_id in known.by_prompt.get((kept.model, kept.prompt_digest), ()):
            other = self._entries[other_id].kept
            if other.images == kept.images and other.answer == kept.answer[: len(other.answer)]:
                gone.append(other_id)  # the same again, or the beginning of it
        entry_id = next(self._ids)
        self._entries[entry_id] = _Entry(caller, kept, now + self.ttl)
        known.entries.add(entry_id)
        known.uses.update(kept.snapshots)
        known.by_prompt.setdefault((kept.model, kept.prompt_digest), set()).add(entry_id)
        self._bytes += kept.size
        gone += self._outgrown(known, entry_id)
        freed = self._remove(gone)
        return freed + self._shrink(caller)

    def drop(self, entry_id: int) -> list[tuple[C, N]]:
        """Forgets an entry whose snapshot is of no use. Returns what is to be let go of."""
        return self._remove([entry_id])

    def drop_all(self, caller: C) -> list[tuple[C, N]]:
        """Forgets all of a caller's. Returns what is to be let go of."""
        known = self._callers.get(caller)
        return [] if known is None else self._remove(list(known.entries))

    def clear(self) -> list[tuple[C, N]]:
        """Forgets everything. Returns what is to be let go of."""
        return self._remove(list(self._entries))

    def _with_prompt_of(self, known: _Caller[N], model: str, tokens: array[int]) -> list[int]:
        """Entries whose prompt `tokens` begin with, whatever follows."""
        lengths = sorted({self._entries[i].kept.prompt_tokens for i in known.entries})
        hashed, done = hashlib.sha256(), 0
        view = memoryview(tokens)
        found: list[int] = []
        for length in lengths:
            if length >= len(tokens):
                break
            hashed.update(view[done:length])
            done = length
            found += sorted(known.by_prompt.get((model, hashed.digest()), ()))
        return found

    def _outgrown(self, known: _Caller[N], entry_id: int) -> list[int]:
        """The answer before the one that this follows, unless another line goes on from it."""
        before = self._entries[entry_id].kept.follows
        if before is None or before not in known.entries:
            return []
        outgrown = self._entries[before].kept.follows
        if outgrown is None or outgrown not in known.entries:
            return []
        branches = [i for i in known.entries if self._entries[i].kept.follows == outgrown]
        return [outgrown] if branches == [before] else []

    def _shrink(self, caller: C) -> list[tuple[C, N]]:
        """Down to the bounds; the newest entry stays."""
        gone: list[int] = []
        mine = self._callers[caller].entries
        excess = len(mine) - self._bounds.entries_per_caller
        if excess > 0:
            gone += [i for i in self._entries if i in mine][:excess]
        freed = self._remove(gone)
        while len(self._entries) > 1 and (
            len(self._entries) > self._bounds.entries or self._bytes > self._bounds.total_bytes
        ):
            freed += self._remove([next(iter(self._entries))])
        return freed

    def _forget_expired(self, now: float) -> None:
        """Their snapshots expire by themselves: what is used here is used there, and lives as long from then.

        An entry's other snapshot may be over before its entry; whoever comes to that one is told, and drops the entry.
        """
        expired = []
        for entry_id, entry in self._entries.items():
            if entry.expires > now:
                break
            expired.append(entry_id)
        self._remove(expired)

    def _remove(self, gone: Iterable[int]) -> list[tuple[C, N]]:
        freed: list[tuple[C, N]] = []
        for entry_id in gone:
            entry = self._entries.pop(entry_id, None)
            if entry is None:
                continue
            kept, known = entry.kept, self._callers[entry.caller]
            self._bytes -= kept.size
            known.entries.discard(entry_id)
            same = known.by_prompt[kept.model, kept.prompt_digest]
            same.discard(entry_id)
            if not same:
                del known.by_prompt[kept.model, kept.prompt_digest]
            # Choices of one call share the snapshot of their prompt, and one answer's end can be another's prompt.
            for name in kept.snapshots:
                known.uses[name] -= 1
                if not known.uses[name]:
                    del known.uses[name]
                    freed.append((entry.caller, name))
            if not known.entries:
                del self._callers[entry.caller]
        return freed


def digest(ids: Sequence[int]) -> bytes:
    """Of a token sequence."""
    return hashlib.sha256(memoryview(array("I", ids))).digest()


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many both begin with."""
    if one == other:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _rank(place: Place[N]) -> tuple[int, bool, int]:
    return place.tokens, not place.cut, place.entry


def _place(entry: int, kept: Kept[N], tokens: array[int], *, trimmable: bool) -> Place[N] | None:
    """How far on `kept` reaches in `tokens`, its prompt being known to be their beginning."""
    start = kept.prompt_tokens
    last = len(tokens) - 1  # a generation has to be given something to go on with
    same = same_tokens(kept.answer, tokens[start : start + len(kept.answer)])
    end = start + len(kept.answer)
    if kept.end is not None and same == len(kept.answer) and end <= last:
        return Place(entry=entry, snapshot=kept.end, tokens=end)
    cut = min(start + same, last)
    if not trimmable:
        cut -= cut % GRID
    if kept.end is not None and cut > start:
        return Place(
            entry=entry, snapshot=kept.end, tokens=cut, cut=True, prompt=kept.prompt, prompt_tokens=kept.prompt_tokens
        )
    return Place(entry=entry, snapshot=kept.prompt, tokens=start) if kept.prompt is not None else None
