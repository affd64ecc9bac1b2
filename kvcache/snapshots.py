"""Snapshot handles. Owns which names exist, whose they are and when they end; knows nothing of records or MLX.

Tokens are the truth, state is a cache: nothing here depends on whether the state behind a name is still stored. Only
expiry, deletion, or a rollback that releases ends a name. Gone names leave a tombstone for an hour, so that a caller
can tell "expired" from "never existed". Not thread-safe: `kvcache.cache` holds the lock.
"""

from __future__ import annotations

import enum
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvcache.media import MediaSpan, MediaTag, spans_of
from kvcache.origin import Origin
from kvcache.tree import Node

TOMBSTONE_SECONDS = 3600.0
TOMBSTONE_LIMIT = 10_000  # of one owner, who can flush nobody else's; the oldest go first
ORIGIN_LIMIT = 1000  # stretches of one prefix that are told apart; the oldest go first


class GoneReason(enum.Enum):
    """Why a name ended; the value is the stable reason that callers see."""

    DELETED = "SNAPSHOT_DELETED"
    ROLLED_BACK = "SNAPSHOT_ROLLED_BACK"
    EXPIRED = "SNAPSHOT_EXPIRED"


class SnapshotError(Exception):
    """Base of what can be wrong with a name."""

    def __init__(self, snapshot_id: str, text: str) -> None:
        super().__init__(text)
        self.snapshot_id = snapshot_id


class UnknownSnapshot(SnapshotError):
    """Never existed, or belongs to somebody else: the two are told apart nowhere."""


class NotDurableSnapshot(UnknownSnapshot):
    """Was made before a restart, and was not to outlive it."""

    def __init__(self, snapshot_id: str, boot_id: str) -> None:
        super().__init__(snapshot_id, f"snapshot {snapshot_id} ended with the process that made it")
        self.boot_id = boot_id


class LostSnapshot(UnknownSnapshot):
    """Should be in the durable store, and is not, or not whole; a file that is put back may bring it back."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(snapshot_id, f"snapshot {snapshot_id} is lost: the store does not hold what it should")


class GoneSnapshot(SnapshotError):
    """Existed once."""

    def __init__(self, snapshot_id: str, reason: GoneReason, when: float) -> None:
        super().__init__(snapshot_id, f"snapshot {snapshot_id} is gone: {reason.value}")
        self.reason = reason
        self.when = when


class TakenSnapshotId(SnapshotError):
    """The chosen id names another snapshot already."""


class SnapshotLimit(SnapshotError):
    """The owner has as many snapshots, or pinned ones, as allowed."""

    def __init__(self, snapshot_id: str, *, limit: int, pinned: bool) -> None:
        what = "pinned snapshots" if pinned else "snapshots"
        super().__init__(snapshot_id, f"the limit of {limit} {what} is reached")
        self.limit = limit
        self.pinned = pinned


class PinnedBytesLimit(SnapshotError):
    """The owner's pins would keep more state than allowed."""

    def __init__(self, snapshot_id: str, *, limit: int, have: int, more: int) -> None:
        text = f"pinned snapshots may keep {limit} bytes of state, they keep {have}, and {more} more were to be pinned"
        super().__init__(snapshot_id, text)
        self.limit = limit
        self.have = have
        self.more = more


class SnapshotBusy(SnapshotError):
    """Calls are reading from it."""

    def __init__(self, snapshot_id: str, uses: int) -> None:
        super().__init__(snapshot_id, f"snapshot {snapshot_id} is in use by {uses} call(s)")
        self.uses = uses


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """A name for the prefix that ends at `node`. The prefix never changes; the times, labels and pin may."""

    id: str
    owner: str
    node: Node
    lineage: tuple[str, ...]  # ids it was derived from, oldest first; they may be gone
    origins: tuple[Origin, ...]  # of its tokens, in order; at least one
    created: float
    last_use: float
    ttl: float  # idle seconds to live
    expires: float  # a promise: never earlier than this
    images: tuple[MediaSpan, ...] = ()  # in the prefix
    pinned: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    revision: int = 0  # how often its state was lost and came back by other calls, so with other last bits
    uses: int = 0
    recorded: bool = False  # a durable store was told of it: its end has to be told as well
    durable: bool = False  # state and name are on disk, and survive a restart

    @property
    def token_count(self) -> int:
        return self.node.end

    @property
    def parent(self) -> str:
        """The id it was derived from, or ""."""
        return self.lineage[-1] if self.lineage else ""

    @property
    def media(self) -> frozenset[MediaTag]:
        """Of the images in the prefix, each once."""
        return frozenset(span.tag for span in self.images)

    def touch(self, now: float) -> None:
        """Counts as use: pushes the expiry out, never in."""
        self.last_use = max(self.last_use, now)
        self.expires = max(self.expires, now + self.ttl)


def new_call_id() -> str:
    """What tells the tokens that one call brings from any other's."""
    return secrets.token_hex(12)


def origins_behind(parent: Snapshot | None, end: int, call: str) -> tuple[Origin, ...]:
    """Of a prefix that `call` cut from `parent`, or took further, so that it ends at `end`."""
    known = parent.token_count if parent is not None else 0
    origins = [origin for origin in (parent.origins if parent is not None else ()) if origin.start < end]
    if end > known:
        origins.append(Origin(call, known))
    return tuple(origins[-ORIGIN_LIMIT:])


def images_of(node: Node) -> tuple[MediaSpan, ...]:
    """The images in the prefix that ends at `node`."""
    return tuple(spans_of(node.all_tokens()))


class SnapshotRegistry:
    """Names of all owners."""

    def __init__(self, *, max_per_owner: int, max_pinned: int, forget: Callable[[Snapshot, GoneReason], None]) -> None:
        self._by_id: dict[tuple[str, str], Snapshot] = {}
        self._by_owner: dict[str, dict[str, Snapshot]] = {}
        self._tombs: dict[str, OrderedDict[str, tuple[GoneReason, float]]] = {}
        self._max_per_owner = max_per_owner
        self._max_pinned = max_pinned
        self._forget = forget

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._by_id.values()))

    def find(self, owner: str, snapshot_id: str, now: float) -> Snapshot:
        """The live snapshot. Raises UnknownSnapshot or GoneSnapshot."""
        snapshot = self._by_id.get((owner, snapshot_id))
        if snapshot is not None and self._is_over(snapshot, now):
            self.drop(snapshot, GoneReason.EXPIRED, now)
            snapshot = None
        if snapshot is not None:
            return snapshot
        tombs = self._tombs.get(owner)
        tomb = tombs.get(snapshot_id) if tombs is not None else None
        if tomb is not None and now - tomb[1] < TOMBSTONE_SECONDS:
            raise GoneSnapshot(snapshot_id, tomb[0], tomb[1])
        raise UnknownSnapshot(snapshot_id, f"no snapshot {snapshot_id}")

    def check_room(self, owner: str, *, count: int, pinned: int, snapshot_id: str = "") -> None:
        """Raises SnapshotLimit if `count` more names, `pinned` of them pinned, would be too many."""
        have = self._by_owner.get(owner, {})
        if len(have) + count > self._max_per_owner:
            raise SnapshotLimit(snapshot_id, limit=self._max_per_owner, pinned=False)
        if pinned and sum(s.pinned for s in have.values()) + pinned > self._max_pinned:
            raise SnapshotLimit(snapshot_id, limit=self._max_pinned, pinned=True)

    def taken(self, owner: str, snapshot_id: str) -> bool:
        """Whether the id is a name already."""
        return (owner, snapshot_id) in self._by_id

    def add(self, snapshot: Snapshot) -> None:
        """Raises TakenSnapshotId or SnapshotLimit; then nothing has changed."""
        if self.taken(snapshot.owner, snapshot.id):
            raise TakenSnapshotId(snapshot.id, f"snapshot id {snapshot.id} is taken")
        self.check_room(snapshot.owner, count=1, pinned=int(snapshot.pinned), snapshot_id=snapshot.id)
        self._by_id[snapshot.owner, snapshot.id] = snapshot
        self._by_owner.setdefault(snapshot.owner, {})[snapshot.id] = snapshot
        self._tombs.get(snapshot.owner, OrderedDict()).pop(snapshot.id, None)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes over a snapshot from before a restart, whatever the limits are now."""
        self._by_id[snapshot.owner, snapshot.id] = snapshot
        self._by_owner.setdefault(snapshot.owner, {})[snapshot.id] = snapshot

    def drop(self, snapshot: Snapshot, reason: GoneReason, now: float) -> None:
        """Ends a name. Dropping twice is harmless, to whoever has the name by then as well."""
        if not self.has(snapshot):
            return
        del self._by_id[snapshot.owner, snapshot.id]
        owned = self._by_owner[snapshot.owner]
        del owned[snapshot.id]
        if not owned:
            del self._by_owner[snapshot.owner]
        tombs = self._tombs.setdefault(snapshot.owner, OrderedDict())
        tombs[snapshot.id] = (reason, now)
        while len(tombs) > TOMBSTONE_LIMIT or now - next(iter(tombs.values()))[1] >= TOMBSTONE_SECONDS:
            tombs.popitem(last=False)
        self._forget(snapshot, reason)

    def has(self, snapshot: Snapshot) -> bool:
        """Whether this very snapshot still has its name."""
        return self._by_id.get((snapshot.owner, snapshot.id)) is snapshot

    def of(self, owner: str) -> list[Snapshot]:
        """The owner's snapshots, oldest first."""
        return sorted(self._by_owner.get(owner, {}).values(), key=lambda s: (s.created, s.id))

    def descendants(self, of: Snapshot) -> list[Snapshot]:
        """Snapshots of the same owner derived from `of`, directly or through names that may be gone."""
        return [s for s in self.of(of.owner) if _descends(s, of)]

    def abandoned_by(self, source: Snapshot, cut: int) -> list[Snapshot]:
        """What a rollback of `source` to `cut` gives up: every unpinned snapshot that has the first token dropped.

        It has that very token, from the call that brought it to `source`: then it is on the source's branch or came of
        it, whatever names between them are gone. One that shares the kept prefix alone, or came to the same tokens by a
        call of its own, is not part of it.
        """
        return [s for s in self.of(source.owner) if not s.pinned and _shares(s, source, cut)]

    def known_lineage(self, owner: str, node: Node, lineage: Sequence[str]) -> tuple[str, ...]:
        """Of a lineage from elsewhere what can be meant here: a name of tokens that have nothing of it is left out."""
        named = {id: self._by_id.get((owner, id)) for id in lineage}
        return tuple(id for id, s in named.items() if s is None or _on_one_line(s.node, node))

    def expire(self, now: float) -> list[Snapshot]:
        """Ends every name whose time is over and which nobody uses."""
        over = [s for s in self._by_id.values() if self._is_over(s, now)]
        for snapshot in over:
            self.drop(snapshot, GoneReason.EXPIRED, now)
        return over

    @staticmethod
    def _is_over(snapshot: Snapshot, now: float) -> bool:
        return not snapshot.pinned and snapshot.uses == 0 and snapshot.expires <= now


def _descends(snapshot: Snapshot, of: Snapshot) -> bool:
    """Whether `of` is meant by its id in the lineage, and is not another snapshot that took the name later."""
    if of.id not in snapshot.lineage:
        return False
    return of.created <= snapshot.created or _on_one_line(of.node, snapshot.node)


def _shares(one: Snapshot, other: Snapshot, position: int) -> bool:
    """Whether both have the token at `position`, and all before it, from the same calls."""
    if min(one.token_count, other.token_count) <= position:
        return False
    # Who shares a call shares all that was before it, so the last one that both have decides.
    ends = dict(_ends(other))
    shared = next((min(end, ends[call]) for call, end in reversed(_ends(one)) if call in ends), 0)
    return shared > position and _alike(one.node, other.node, position + 1)


def _ends(snapshot: Snapshot) -> list[tuple[str, int]]:
    """The calls that brought a snapshot's tokens, each with the end of its stretch."""
    ends = [*(origin.start for origin in snapshot.origins[1:]), snapshot.token_count]
    return [(origin.call, end) for origin, end in zip(snapshot.origins, ends, strict=True)]


def _alike(one: Node, other: Node, length: int) -> bool:
    """Whether both prefixes, which are as long at least, begin with the same `length` tokens."""
    one, other = _block_at(one, length - 1), _block_at(other, length - 1)
    assert one.parent is not None and other.parent is not None
    inside = length - one.start
    return one.parent.content == other.parent.content and one.tokens[:inside] == other.tokens[:inside]


def _block_at(node: Node, position: int) -> Node:
    """The node of a prefix that has the token at `position`."""
    while node.start > position:
        assert node.parent is not None
        node = node.parent
    return node


def _on_one_line(one: Node, other: Node) -> bool:
    """Whether the tokens of one begin those of the other."""
    return _alike(one, other, min(one.end, other.end))
