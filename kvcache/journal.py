"""What a durable store knows of snapshots: notes written, and read again at start. Owns which, when and in what order.

A snapshot is on disk as three things, each safe before the next is written: the records of its state, the notes of its
nodes (tokens and what they follow) with the files of its images, and its own note. So whatever is found at start is
whole.

Called by `kvcache.cache` in its lock; only the store's I/O thread calls back.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcache.chains import nodes_of
from kvcache.errors import StoreError
from kvcache.media import MediaTag
from kvcache.note_codec import SnapshotNote, encode_node, encode_snapshot, media_key, snapshot_key
from kvcache.reading_notes import read_notes
from kvcache.records import ListedName, Note, NoteId, NoteKind, RecordId
from kvcache.snapshots import Snapshot, images_of
from kvcache.store import TieredStore
from kvcache.tree import BlockTree, Node

log = logging.getLogger(__name__)

USE_SECONDS = 60.0  # a use that only pushes the expiry out is written once in this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a start found. `expired`: snapshots whose time was over. `media`: (owner, tag, file) of every image.

    `lost`: owner and id, by key, of those that should be there and are not, or of which something is not there.
    `given_up`: handles of which something is not there, and which the list does not name.
    """

    snapshots: tuple[Snapshot, ...]
    media: tuple[tuple[str, MediaTag, bytes], ...]
    expired: int
    lost: Mapping[bytes, tuple[str, str]]
    given_up: int


class Journal:
    """Writes what durable snapshots need, and forgets it when they end."""

    def __init__(
        self,
        store: TieredStore,
        fingerprint: str,
        tree: BlockTree,
        clock: Callable[[], float],
        file_of: Callable[[str, MediaTag], bytes | None] = lambda owner, tag: None,
    ) -> None:
        """`file_of`: an image's file, by owner and tag; None if nobody has it."""
        self._file_of = file_of
        self._store = store
        self._inventory, self._namespace = store.listing
        self._fingerprint = fingerprint
        self._tree = tree
        self._clock = clock
        self._saved: dict[bytes, float] = {}  # handle key: the expiry on disk
        self._owed: dict[bytes, Snapshot | int] = {}  # could not be written yet; an int is a tombstone's sealing key
        self._stands_on: dict[bytes, tuple[NoteId, ...]] = {}  # handle key: the notes that it needs
        self._needed: Counter[NoteId] = Counter()  # by how many handles
        self._idle: set[NoteId] = set()  # notes that no handle needs any more
        self._orders = 0
        self._latest: dict[bytes, int] = {}  # the last order under way for each name: what fails before it is outdated
        self._guard = threading.Lock()  # around what the I/O thread reads or changes: orders, debts, needs

    # Writing

    def save(
        self,
        snapshot: Snapshot,
        records: Iterable[RecordId],
        optional: Iterable[RecordId],
        done: Callable[[StoreError | None], None],
    ) -> None:
        """Brings a snapshot to disk with all that it needs; one of `records` that is not held any more is an error."""
        key = self.key_of(snapshot)
        self._saved[key] = snapshot.expires
        phases = [self._stand(key, snapshot), [self._snapshot_note(snapshot)]]
        self._order(key, list(records), phases, done, optional=list(optional), owe=None)

    def changed(self, snapshot: Snapshot) -> None:
        """Writes what may change about a durable snapshot; again at the next `sweep` if that fails."""
        self._write(self.key_of(snapshot), snapshot, nodes=False)

    def moved(self, snapshot: Snapshot, records: Iterable[RecordId]) -> None:
        """A durable snapshot stands on another node now, with these records as far as they are held."""
        self._write(self.key_of(snapshot), snapshot, nodes=True, records=list(records))

    def used(self, snapshot: Snapshot) -> None:
        """Writes a pushed expiry, not every time."""
        if snapshot.expires - self._saved.get(self.key_of(snapshot), 0.0) >= min(USE_SECONDS, snapshot.ttl / 2):
            self.changed(snapshot)

    def gone(self, snapshot: Snapshot) -> None:
        """The name has ended: it must not come back."""
        key = self.key_of(snapshot)
        self._saved.pop(key, None)
        self._stand(key, None)
        self._write(key, snapshot.node.key_id, nodes=False)

    def sweep(self) -> None:
        """Tries again what failed, and gives up the notes of nodes that nothing on disk refers to."""
        with self._guard:
            owed, self._owed = self._owed, {}
        for key, what in owed.items():
            self._write(key, what, nodes=True)
        if self._idle:
            self._store.forget_notes(self._take_idle)

    def _take_idle(self) -> list[NoteId]:
        """Asked on the I/O thread, after everything ordered before: only what failed may still need a note."""
        with self._guard:
            if self._owed:
                return []
            idle, self._idle = self._idle, set()
            return [note for note in idle if not self._needed[note]]

    def finish(self, snapshots: Iterable[Snapshot]) -> None:
        """Writes every expiry that was pushed out since it was written."""
        for snapshot in snapshots:
            if snapshot.recorded and self._saved.get(self.key_of(snapshot)) != snapshot.expires:
                self.changed(snapshot)

    def settle(self, done: Callable[[StoreError | None], None]) -> None:
        """Calls back when everything ordered before is on disk, or has failed."""
        self._store.persist((), (), done)

    def key_of(self, snapshot: Snapshot) -> bytes:
        return snapshot_key(self._fingerprint, snapshot.owner, snapshot.id)

    def _write(self, key: bytes, what: Snapshot | int, *, nodes: bool, records: Sequence[RecordId] = ()) -> None:
        with self._guard:
            nodes = nodes or key in self._owed
        if isinstance(what, Snapshot):
            self._saved[key] = what.expires
            phases = [self._stand(key, what) if nodes else [], [self._snapshot_note(what)]]
        else:
            phases = [[Note(id=NoteId(key, NoteKind.TOMBSTONE), payload=b"", key_id=what)]]
        self._order(key, (), phases, lambda _: None, optional=records, owe=what)

    def _order(
        self,
        key: bytes,
        records: Sequence[RecordId],
        phases: list[list[Note]],
        done: Callable[[StoreError | None], None],
        *,
        optional: Sequence[RecordId],
        owe: Snapshot | int | None,
    ) -> None:
        """Hands an order to the store, in place of what was owed to this name. If it fails, `owe` is tried again."""
        with self._guard:
            self._owed.pop(key, None)
            self._orders += 1
            number = self._latest[key] = self._orders

        def counted(error: StoreError | None) -> None:
            with self._guard:
                if self._latest.get(key) == number:
                    del self._latest[key]
                    if error is not None and owe is not None:
                        self._owed[key] = owe
            done(error)

        self._store.persist(records, phases, counted, optional=optional)

    def _stand(self, handle: bytes, snapshot: Snapshot | None) -> list[Note]:
        """Notes that a handle needs, and the end of its need for others; written ones are passed over."""
        notes: list[Note] = []
        if snapshot is not None:
            notes = [*self._media_notes(snapshot), *self._node_notes(snapshot.node)]
        before = self._stands_on.pop(handle, ())
        with self._guard:
            for note in notes:
                self._needed[note.id] += 1
            for needed in before:
                self._needed[needed] -= 1
                if not self._needed[needed]:
                    del self._needed[needed]
                    self._idle.add(needed)
        if notes:
            self._stands_on[handle] = tuple(note.id for note in notes)
        return notes

    def _media_notes(self, snapshot: Snapshot) -> list[Note]:
        """The files of the images in a handle's prefix."""
        notes: list[Note] = []
        for tag in snapshot.media:
            file = self._file_of(snapshot.owner, tag)
            if file is not None:
                note = NoteId(media_key(self._fingerprint, snapshot.owner, tag), NoteKind.MEDIA)
                notes.append(Note(id=note, payload=file, key_id=snapshot.node.key_id))
        return notes

    @staticmethod
    def _node_notes(node: Node) -> list[Note]:
        """Of the node and of all that it follows or reads from."""
        return [
            Note(id=NoteId(here.key, NoteKind.NODE), payload=encode_node(here), key_id=here.key_id)
            for here in nodes_of(node)
        ]

    def _snapshot_note(self, snapshot: Snapshot) -> Note:
        return Note(
            id=NoteId(self.key_of(snapshot), NoteKind.SNAPSHOT),
            payload=encode_snapshot(snapshot, self._fingerprint),
            key_id=snapshot.node.key_id,
            name=(snapshot.owner, snapshot.id),
        )

    # Reading

    def load(self, owners: Iterable[str], *, shared: str) -> Loaded:
        """Builds the nodes of every durable snapshot, once, before the store is started. Expired ones are left out.

        Each snapshot's node is held once for it. Records and notes that no snapshot needs are given up, unless some
        snapshot is lost: a file that is put back may make it whole again.
        """
        found = read_notes(self._store.notes(), self._fingerprint, owners, self._tree, shared=shared, now=self._clock())
        whole = {one.key: self._listed(one.note.owner, one.note.id) for one in found.whole}
        broken = {key: self._listed(handle.owner, handle.id) for key, handle in found.broken.items()}
        if self._namespace not in self._inventory.models():
            whole |= broken  # written before there was a list
        self._inventory.add_names(whole)
        ended = {*found.expired}
        lost = {
            key: (name.owner, name.id)
            for key, name in self._inventory.names().items()
            if name.namespace == self._namespace and (key in broken or key not in whole) and key not in ended
        }
        ended |= {*found.broken, *found.unreadable} - lost.keys()  # of which the list knows nothing: given up
        if not lost:
            self._store.forget_notes(lambda: found.useless)
            self._store.delete([record for record in self._store.held() if self._tree.get(record.key) is None])
        for key in ended:
            self._write(key, found.key_ids[key], nodes=False)  # so that the next start need not judge it again
        return Loaded(
            snapshots=tuple(snapshot_of(one.note, one.node) for one in found.whole),
            media=tuple((one.note.owner, tag, file) for one in found.whole for tag, file in one.images.items()),
            expired=len(found.expired),
            lost=lost,
            given_up=len(ended) - len(found.expired),
        )

    def _listed(self, owner: str, snapshot_id: str) -> ListedName:
        return ListedName(namespace=self._namespace, owner=owner, id=snapshot_id)

    def adopt(self, snapshots: Iterable[Snapshot]) -> None:
        """Those that `load` found and that stay, once the files of their images can be asked for again."""
        for snapshot in snapshots:
            key = self.key_of(snapshot)
            self._saved[key] = snapshot.expires
            self._stand(key, snapshot)


def snapshot_of(note: SnapshotNote, node: Node) -> Snapshot:
    """The snapshot that a note describes, standing on `node`."""
    return Snapshot(
        id=note.id,
        owner=note.owner,
        node=node,
        images=images_of(node),
        lineage=note.lineage,
        origins=note.origins,
        created=note.created,
        last_use=note.last_use,
        ttl=note.ttl,
        expires=note.expires,
        pinned=note.pinned,
        labels=note.labels,
        revision=note.revision,
        recorded=True,
        durable=True,
    )
