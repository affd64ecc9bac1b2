"""Names of snapshots over their state: made, used, changed, ended, and where a store is durable, told to its journal.

Owns the lock around tree, names and bookkeeping, which is never held across I/O. Which names exist and when they end
is the registry's (`kvcache.snapshots`); how notes reach the disk the journal's.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvcache.chains import transplant
from kvcache.changes import Change, ChangeLog
from kvcache.errors import StoreError
from kvcache.inventory import ListedModel
from kvcache.journal import Journal, Loaded, snapshot_of
from kvcache.keys import KeyRing
from kvcache.layout import CacheLayout
from kvcache.media import MediaTag
from kvcache.note_codec import snapshot_key
from kvcache.origin import Origin
from kvcache.pinned import PinnedBytes
from kvcache.reading_notes import Whole
from kvcache.records import RecordKind
from kvcache.snapshots import (
    GoneReason,
    LostSnapshot,
    NotDurableSnapshot,
    PinnedBytesLimit,
    Snapshot,
    SnapshotBusy,
    SnapshotRegistry,
    TakenSnapshotId,
    UnknownSnapshot,
    images_of,
    new_call_id,
    origins_behind,
)
from kvcache.stock import Stock
from kvcache.store import TieredStore
from kvcache.store_dir import boot_id
from kvcache.tree import Node

log = logging.getLogger(__name__)

TOLD_NAMES = 20  # of lost snapshots, in the log; `kvfork store check` tells all
SHARED = "*"  # whose prefixes those of all are, where owners share them; no owner has this name
LINEAGE_LIMIT = 1000  # ancestors remembered by name
_MARKED = re.compile(r"(s[0-9a-v]{26})-m([0-9]{1,10})")  # an id with an opening, see `new_snapshot_id`


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What one owner may hold, and for how long. Times in seconds."""

    max_snapshots: int = 10_000
    max_pinned: int = 100
    max_pinned_bytes: int | None = None  # of state, each record once; None: no limit
    default_ttl: float = 3600.0
    max_ttl: float = 7 * 24 * 3600.0


DEFAULT_LIMITS = CacheLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """What a cache over a durable store needs to know of it."""

    ring: KeyRing
    instance: str
    opening: int
    # What the fingerprint was made of, for a later start to tell.
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How to keep a new snapshot."""

    snapshot_id: str = ""
    ttl: float | None = None
    pinned: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    durable: bool = False  # `make_durable` follows
    lineage: tuple[str, ...] = ()  # where it has no parent here: what it was derived from elsewhere
    origins: tuple[Origin, ...] = ()  # likewise, of its tokens


class MediaKeeper(Protocol):
    """Who has the files of images: told which of them snapshots need. Called under the cache's lock; must not block."""

    def keep(self, owner: str, tags: Collection[MediaTag]) -> None:
        """One more snapshot has these images."""
        ...

    def let_go(self, owner: str, tags: Collection[MediaTag]) -> None:
        """One snapshot fewer."""
        ...

    def file_of(self, owner: str, tag: MediaTag) -> bytes | None:
        """The file, as it was sent."""
        ...

    def found(self, owner: str, tag: MediaTag, file: bytes) -> None:
        """A durable store has this one from before a restart; `keep` follows."""
        ...


class NamedSnapshots:
    """The part of the cache that callers' names go through. Thread-safe."""

    def __init__(
        self,
        store: TieredStore,
        layout: CacheLayout,
        fingerprint: str,
        *,
        limits: CacheLimits,
        clock: Callable[[], float],
        durable: Durable | None,
        media: MediaKeeper | None = None,
    ) -> None:
        assert store.durable == (durable is not None)
        self.store = store
        self.layout = layout
        self.fingerprint = fingerprint
        self.limits = limits
        self._clock = clock
        self._lock = threading.RLock()
        self._stock = Stock(store, layout)
        self._snapshots = SnapshotRegistry(
            max_per_owner=limits.max_snapshots, max_pinned=limits.max_pinned, forget=self._forget
        )
        self._pinned = PinnedBytes(store.size)
        self._changes = ChangeLog(2 * limits.max_snapshots)  # one call can drop all that an owner has
        self._tell: Callable[[str], None] = lambda owner: None
        self.ended: Counter[GoneReason] = Counter()  # names, since the start
        self._durable = durable
        self._media = media
        self._journal: Journal | None = None
        self.lost: Mapping[bytes, tuple[str, str]] = {}  # by key: owner and id of durable snapshots that are not there
        if durable is not None:
            self._journal = Journal(store, fingerprint, self._stock.tree, clock, self._file_of)
            loaded = self._journal.load(durable.ring.owners(), shared=SHARED)
            found = loaded.snapshots
            self.lost = loaded.lost
            inventory, namespace = store.listing
            inventory.add_model(namespace, ListedModel(fingerprint=fingerprint, parts=durable.parts))
            self._tell_lost(loaded)
            if media is not None:
                for owner, tag, file in loaded.media:
                    media.found(owner, tag, file)
            self._journal.adopt(found)
            store.arrange(self._stock.place_of(node) for node in self._stock.tree)
            for snapshot in found:
                self._snapshots.restore(snapshot)
                self._keep_media(snapshot)
                self.store.claim(self._stock.records_of(snapshot.node))
                if snapshot.pinned:
                    self._pin(snapshot)

    def add_snapshot(self, owner: str, node: Node, keep: Keep, *, parent: Snapshot | None, call: str = "") -> Snapshot:
        """Names the prefix that ends at `node`. `call` brought its tokens beyond the parent; empty: one of its own did.

        Raises TakenSnapshotId, SnapshotLimit or PinnedBytesLimit; then nothing has changed.
        """
        assert node.parent is not None, "the empty prefix has no name"
        now = self._clock()
        ttl = min(keep.ttl if keep.ttl is not None else self.limits.default_ttl, self.limits.max_ttl)
        elsewhere = tuple(origin for origin in keep.origins if origin.start < node.end) if parent is None else ()
        snapshot = Snapshot(
            id=keep.snapshot_id or self._new_id(durable=keep.durable),
            owner=owner,
            node=node,
            images=images_of(node),
            lineage=(*parent.lineage, parent.id)[-LINEAGE_LIMIT:] if parent else (),
            origins=elsewhere or origins_behind(parent, node.end, call or new_call_id()),
            created=now,
            last_use=now,
            ttl=ttl,
            expires=now + ttl,
            pinned=keep.pinned,
            labels=dict(keep.labels),
        )
        with self._lock:
            self._snapshots.expire(now)
            if parent is None:
                snapshot.lineage = self._snapshots.known_lineage(owner, node, keep.lineage[-LINEAGE_LIMIT:])
            if snapshot.pinned and not self._snapshots.taken(owner, snapshot.id):
                self._check_pin(snapshot)
            self._snapshots.add(snapshot)
            self._log(snapshot.owner, Change(snapshot.id, None, snapshot.labels))
            self._keep_media(snapshot)
            node.holds += 1
            self.store.claim(self._stock.records_of(node))
            if snapshot.pinned:
                self._pin(snapshot)
        return snapshot

    def check_room(self, owner: str, *, count: int, pinned: int) -> None:
        """Raises SnapshotLimit if so many more snapshots would not fit, PinnedBytesLimit if nothing more may be pinned.

        What a snapshot keeps is known once it is made: another one may be refused then.
        """
        with self._lock:
            self._snapshots.expire(self._clock())
            self._snapshots.check_room(owner, count=count, pinned=pinned)
            most, have = self.limits.max_pinned_bytes, self._pinned.of(owner)
            if pinned and most is not None and have >= most:
                raise PinnedBytesLimit("", limit=most, have=have, more=0)

    def pinned_bytes(self, owner: str) -> int:
        """State that the owner's pins keep from eviction."""
        with self._lock:
            return self._pinned.of(owner)

    def snapshot(self, owner: str, snapshot_id: str) -> Snapshot:
        """Raises UnknownSnapshot or GoneSnapshot."""
        with self._lock:
            return self._find(owner, snapshot_id)

    def use(self, owner: str, snapshot_id: str) -> Snapshot:
        """The snapshot, counted as in use until `unuse`: it neither expires nor can be deleted unawares."""
        with self._lock:
            snapshot = self._find(owner, snapshot_id)
            snapshot.uses += 1
            self._touch(snapshot)
            return snapshot

    def unuse(self, snapshot: Snapshot) -> None:
        with self._lock:
            snapshot.uses -= 1
            self._touch(snapshot)

    def snapshots(self, owner: str) -> list[Snapshot]:
        """Oldest first."""
        with self._lock:
            self._snapshots.expire(self._clock())
            return self._snapshots.of(owner)

    def all_snapshots(self) -> list[Snapshot]:
        with self._lock:
            self._snapshots.expire(self._clock())
            return list(self._snapshots)

    def descendants(self, snapshot: Snapshot) -> list[Snapshot]:
        with self._lock:
            return self._snapshots.descendants(snapshot)

    def abandoned_by(self, source: Snapshot, cut: int) -> list[Snapshot]:
        """What a rollback of `source` to `cut` gives up: unpinned snapshots with the very tokens that it drops."""
        with self._lock:
            return self._snapshots.abandoned_by(source, cut)

    def delete(self, snapshot: Snapshot, reason: GoneReason = GoneReason.DELETED, *, in_use_ok: bool = False) -> None:
        """Ends a name. Raises SnapshotBusy while calls read from it, unless `in_use_ok`."""
        with self._lock:
            if snapshot.uses and not in_use_ok:
                raise SnapshotBusy(snapshot.id, snapshot.uses)
            self._snapshots.drop(snapshot, reason, self._clock())

    def update(
        self,
        snapshot: Snapshot,
        *,
        labels: Mapping[str, str] | None = None,
        expires: float | None = None,
        ttl: float | None = None,
        pinned: bool | None = None,
    ) -> None:
        """Changes what can change.

        Raises SnapshotLimit or PinnedBytesLimit on one pin too many; then nothing has changed.
        """
        with self._lock:
            if pinned and not snapshot.pinned:
                self._snapshots.check_room(snapshot.owner, count=0, pinned=1, snapshot_id=snapshot.id)
                self._check_pin(snapshot)
                self._pin(snapshot)
            if pinned is False and snapshot.pinned:
                self._unpin(snapshot)
            if pinned is not None:
                snapshot.pinned = pinned
            before = snapshot.labels
            if labels is not None:
                snapshot.labels = dict(labels)
            now = self._clock()
            if ttl is not None:
                snapshot.ttl = min(ttl, self.limits.max_ttl)
                snapshot.expires = now + snapshot.ttl
            if expires is not None:
                snapshot.expires = min(expires, now + self.limits.max_ttl)
            self._changed(snapshot)
            self._log(snapshot.owner, Change(snapshot.id, before, snapshot.labels))

    def extend(self, snapshot: Snapshot, ttl: float | None) -> None:
        """More time from now on; never less than promised."""
        with self._lock:
            if ttl is not None:
                snapshot.ttl = min(ttl, self.limits.max_ttl)
            snapshot.expires = max(snapshot.expires, self._clock() + snapshot.ttl)
            self._changed(snapshot)
            self._log(snapshot.owner, Change(snapshot.id, snapshot.labels, snapshot.labels))

    def when_changed(self, tell: Callable[[str], None]) -> None:
        """`tell` is called with the owner after each change of its names, under the lock, on any thread: no waiting."""
        self._tell = tell

    def changes_head(self, owner: str) -> int:
        """The place in the owner's log of changes behind all that has happened so far."""
        with self._lock:
            self._snapshots.expire(self._clock())
            return self._changes.head(owner)

    def changes_since(self, owner: str, place: int, most: int) -> list[Change]:
        """Up to `most` changes from `place` on, oldest first. Raises PlacePassed if the log has moved on."""
        with self._lock:
            return self._changes.since(owner, place, most)

    def state_changed(self, snapshot: Snapshot) -> None:
        """Somebody saw that the state behind a name is elsewhere now; of no effect on a name that is gone."""
        with self._lock:
            if not self._snapshots_gone(snapshot):
                self._log(snapshot.owner, Change(snapshot.id, snapshot.labels, snapshot.labels))

    def rehome(self, snapshot: Snapshot, node: Node) -> None:
        """Lets a handle whose state was computed again stand on the new state. The tokens are the same.

        State under another key came about in another way: it is a new revision, and whoever holds the handle is told.
        """
        with self._lock:
            if self._snapshots_gone(snapshot):
                return
            if node is snapshot.node:
                if snapshot.pinned:
                    self._pinned.told(snapshot.owner, self._stock.records_of(node))
                self._record_move(snapshot)  # what was computed again is to be on disk again
                return
            assert node.end == snapshot.node.end and node.content == snapshot.node.content
            pinned = snapshot.pinned
            if pinned:
                self._unpin(snapshot)
            old, snapshot.node = snapshot.node, node
            snapshot.revision += 1
            node.holds += 1
            self.store.claim(self._stock.records_of(node))
            self.store.disclaim(self._stock.records_of(old))
            if pinned:
                self._pin(snapshot)
            self._record_move(snapshot)
            self._log(snapshot.owner, Change(snapshot.id, snapshot.labels, snapshot.labels))
            self._stock.unhold(old)

    def sweep(self) -> None:
        """Ends what is over and forgets what the store lost; call it now and then."""
        with self._lock:
            self._snapshots.expire(self._clock())
            self._stock.forget_lost()
            if self._journal is not None:
                self._journal.sweep()

    def make_durable(self, snapshot: Snapshot, done: Callable[[StoreError | None], None]) -> None:
        """Brings a snapshot to disk with its state. `done` is told the error, or None once it survives a power cut.

        It runs on the store's I/O thread and must not block. Until then the snapshot is in use.
        """
        assert self._journal is not None, "the store is ephemeral"

        def safe(error: StoreError | None) -> None:
            with self._lock:
                if error is None and not snapshot.durable:
                    snapshot.durable = True
                    if not self._snapshots_gone(snapshot):
                        self._log(snapshot.owner, Change(snapshot.id, snapshot.labels, snapshot.labels))
                snapshot.uses -= 1
            done(error)

        with self._lock:
            snapshot.uses += 1
            snapshot.recorded = True
            records = self._stock.records_of(snapshot.node)
            logits = [record for record in records if record.kind is RecordKind.LOGITS]  # a boundary may have none
            self._journal.save(snapshot, records[: len(records) - len(logits)], logits, safe)

    def carry(self, other: Whole, root: Node, done: Callable[[StoreError | None], None]) -> Snapshot:
        """A durable snapshot of another fingerprint becomes one of this, under `root`, without state.

        `done` is told the error, or None once it is on disk; it must not block. Raises TakenSnapshotId.
        """
        assert self._journal is not None, "the store is ephemeral"
        note = other.note
        with self._lock:
            if self._snapshots.taken(note.owner, note.id):
                raise TakenSnapshotId(note.id, f"snapshot id {note.id} is taken")
            node = transplant(other.node, self._stock.tree, root)[other.node.key]
            node.holds += 1
            snapshot = snapshot_of(note, node)
            if self._media is not None:
                for tag, file in other.images.items():
                    self._media.found(note.owner, tag, file)
            self._snapshots.restore(snapshot)
            self._keep_media(snapshot)
            self.store.claim(self._stock.records_of(node))
            if snapshot.pinned:
                self._pin(snapshot)
            self._log(note.owner, Change(note.id, None, snapshot.labels))
            self._journal.save(snapshot, (), (), done)
        return snapshot

    def settle(self, done: Callable[[StoreError | None], None]) -> None:
        """Calls back once every change so far is on disk, or has failed; at once if nothing ever is."""
        if self._journal is None:
            done(None)
        else:
            self._journal.settle(done)

    def close(self) -> None:
        """Writes what a durable store still has to learn, and closes the store."""
        with self._lock:
            if self._journal is not None:
                self._journal.finish(self._snapshots)
        self.store.close()

    # REQUIRES: lock is held

    def _find(self, owner: str, snapshot_id: str) -> Snapshot:
        try:
            return self._snapshots.find(owner, snapshot_id, self._clock())
        except UnknownSnapshot:
            if self.lost and snapshot_key(self.fingerprint, owner, snapshot_id) in self.lost:
                raise LostSnapshot(snapshot_id) from None
            opening = opening_of(snapshot_id)
            if self._durable is not None and opening is not None and opening < self._durable.opening:
                raise NotDurableSnapshot(snapshot_id, boot_id(self._durable.instance, opening)) from None
            raise

    @staticmethod
    def _tell_lost(loaded: Loaded) -> None:
        if loaded.given_up:
            log.warning("%d durable snapshots were given up: something of each was not there", loaded.given_up)
        if not loaded.lost:
            return
        names = sorted(loaded.lost.values())
        told = [f"{id} of {owner}" for owner, id in names[:TOLD_NAMES]]
        told += [f"and {len(names) - TOLD_NAMES} more"] if len(names) > TOLD_NAMES else []
        log.warning(
            "%d durable snapshots are lost: %s. Calls that name them are answered with SNAPSHOT_LOST. End the server "
            "and put back the files that are missing or damaged, or give the names up: kvfork store forget-lost",
            len(names),
            ", ".join(told),
        )

    def _new_id(self, *, durable: bool) -> str:
        marked = self._durable is not None and not durable
        return new_snapshot_id(opening=self._durable.opening if marked and self._durable is not None else None)

    def _touch(self, snapshot: Snapshot) -> None:
        snapshot.touch(self._clock())
        if self._journal is not None and snapshot.recorded:
            self._journal.used(snapshot)

    def _changed(self, snapshot: Snapshot) -> None:
        if self._journal is not None and snapshot.recorded:
            self._journal.changed(snapshot)

    def _record_move(self, snapshot: Snapshot) -> None:
        if self._journal is not None and snapshot.recorded:
            self._journal.moved(snapshot, self._stock.records_of(snapshot.node))

    def _snapshots_gone(self, snapshot: Snapshot) -> bool:
        return not self._snapshots.has(snapshot)

    def _log(self, owner: str, change: Change) -> None:
        self._changes.add(owner, change)
        self._tell(owner)

    def _forget(self, snapshot: Snapshot, reason: GoneReason) -> None:
        """Called by the registry, in the lock, when a name ends."""
        self.ended[reason] += 1
        self._log(snapshot.owner, Change(snapshot.id, snapshot.labels, None, reason))
        if snapshot.pinned:
            self._unpin(snapshot)
        self.store.disclaim(self._stock.records_of(snapshot.node))
        if self._journal is not None and snapshot.recorded:
            self._journal.gone(snapshot)
            snapshot.recorded = False  # whoever still holds it writes no more
        if self._media is not None and snapshot.media:
            self._media.let_go(snapshot.owner, snapshot.media)
        self._stock.unhold(snapshot.node)

    def _check_pin(self, snapshot: Snapshot) -> None:
        most = self.limits.max_pinned_bytes
        if most is None:
            return
        have = self._pinned.of(snapshot.owner)
        more = self._pinned.more(snapshot.owner, self._stock.records_of(snapshot.node))
        if have + more > most:
            raise PinnedBytesLimit(snapshot.id, limit=most, have=have, more=more)

    def _pin(self, snapshot: Snapshot) -> None:
        records = self._stock.records_of(snapshot.node)
        self.store.pin(records)
        self._pinned.add(snapshot.owner, records)

    def _unpin(self, snapshot: Snapshot) -> None:
        records = self._stock.records_of(snapshot.node)
        self.store.unpin(records)
        self._pinned.remove(snapshot.owner, records)

    def _keep_media(self, snapshot: Snapshot) -> None:
        if self._media is not None and snapshot.media:
            self._media.keep(snapshot.owner, snapshot.media)

    def _file_of(self, owner: str, tag: MediaTag) -> bytes | None:
        return self._media.file_of(owner, tag) if self._media is not None else None


def new_snapshot_id(*, opening: int | None = None) -> str:
    """128 random bits, in the alphabet that callers' ids have.

    `opening`: the durable store's, for a snapshot that is not durable: a later opening can tell what became of it.
    """
    number = int.from_bytes(secrets.token_bytes(16), "big")
    alphabet = "0123456789abcdefghijklmnopqrstuv"
    mark = f"-m{opening}" if opening is not None else ""
    return "s" + "".join(alphabet[number >> shift & 31] for shift in range(125, -1, -5)) + mark


def opening_of(snapshot_id: str) -> int | None:
    """The opening that `new_snapshot_id` was given, if any."""
    match = _MARKED.fullmatch(snapshot_id)
    return int(match[2]) if match else None


def without_opening(snapshot_id: str) -> str:
    """The id without an opening that is another store's: it tells nothing here."""
    match = _MARKED.fullmatch(snapshot_id)
    return match[1] if match else snapshot_id
