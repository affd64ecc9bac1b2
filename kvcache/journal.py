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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcache.blocks import BlockKey, root_key
from kvcache.chains import build_chain, nodes_of
from kvcache.errors import FormatError, StoreError
from kvcache.media import MediaTag
from kvcache.note_codec import (
    NodeNote,
    SnapshotNote,
    decode_node,
    decode_snapshot,
    encode_node,
    encode_snapshot,
    media_key,
    snapshot_key,
)
from kvcache.records import Note, NoteId, NoteKind, RecordId
from kvcache.snapshots import Snapshot, images_of
from kvcache.store import TieredStore
from kvcache.tree import BlockTree, Node

log = logging.getLogger(__name__)

USE_SECONDS = 60.0  # a use that only pushes the expiry out is written once in this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a start found. `lost`: snapshots whose notes were damaged, `expired`: whose time was over.

    `media`: (owner, tag, file) of every image of theirs.
    """

    snapshots: tuple[Snapshot, ...]
    media: tuple[tuple[str, MediaTag, bytes], ...]
    expired: int
    lost: int


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
        )

    # Reading

    def load(self, owners: Iterable[str], *, shared: str) -> Loaded:
        """Builds the nodes of every durable snapshot, once, before the store is started. Expired ones are left out.

        A snapshot stands on prefixes of its owner, or of `shared`, who may be among `owners`.
        Each snapshot's node is held once for it. Records and notes that no snapshot needs are given up.
        """
        roots = {root_key(self._fingerprint, owner): owner for owner in owners}
        notes: dict[BlockKey, NodeNote] = {}
        files: dict[bytes, bytes] = {}
        media: dict[tuple[str, MediaTag], bytes] = {}
        handles: list[tuple[SnapshotNote, int]] = []
        ended: list[tuple[bytes, int]] = []
        keys: dict[BlockKey, int] = {}
        useless: list[NoteId] = []
        lost = 0
        for note, payload, key_id in self._store.notes():
            try:
                if note.kind is NoteKind.NODE:
                    notes[BlockKey(note.key)] = decode_node(payload, BlockKey(note.key))
                    keys[BlockKey(note.key)] = key_id
                elif note.kind is NoteKind.MEDIA:
                    files[note.key] = payload
                elif note.kind is NoteKind.SNAPSHOT:
                    handle = decode_snapshot(payload)
                    if note.key != snapshot_key(self._fingerprint, handle.owner, handle.id):
                        raise FormatError("the note of another handle")
                    handles.append((handle, key_id))
            except FormatError as error:
                lost += note.kind is NoteKind.SNAPSHOT
                if note.kind is NoteKind.SNAPSHOT:
                    ended.append((note.key, key_id))
                else:
                    useless.append(note)
                log.warning("dropped %s: %s", note, error)
        snapshots: list[Snapshot] = []
        expired = 0
        now = self._clock()
        for handle, key_id in handles:
            if handle.expires <= now and not handle.pinned:
                expired += 1
            elif (node := build_chain(self._tree, handle.node, notes, roots, keys)) is None or roots[
                self._owner(node)
            ] not in (
                handle.owner,
                shared,
            ):
                lost += 1
            else:
                snapshot = _snapshot_of(handle, node)
                wanted = {tag: media_key(self._fingerprint, handle.owner, tag) for tag in snapshot.media}
                if files.keys() >= set(wanted.values()):
                    node.holds += 1
                    snapshots.append(snapshot)
                    media |= {(handle.owner, tag): files[key] for tag, key in wanted.items()}
                    continue
                lost += 1
            ended.append((snapshot_key(self._fingerprint, handle.owner, handle.id), key_id))
        needed = {media_key(self._fingerprint, owner, tag) for owner, tag in media}
        useless += [NoteId(key, NoteKind.NODE) for key in notes if self._tree.get(key) is None]
        useless += [NoteId(key, NoteKind.MEDIA) for key in files if key not in needed]
        if useless:
            self._store.forget_notes(lambda: useless)
        for key, key_id in ended:
            self._write(key, key_id, nodes=False)  # so that the next start need not judge it again
        self._store.delete([record for record in self._store.held() if self._tree.get(record.key) is None])
        if lost:
            log.warning("%d durable snapshots were lost: what described them is damaged", lost)
        return Loaded(
            snapshots=tuple(snapshots),
            media=tuple((owner, tag, file) for (owner, tag), file in media.items()),
            expired=expired,
            lost=lost,
        )

    def adopt(self, snapshots: Iterable[Snapshot]) -> None:
        """Those that `load` found and that stay, once the files of their images can be asked for again."""
        for snapshot in snapshots:
            key = self.key_of(snapshot)
            self._saved[key] = snapshot.expires
            self._stand(key, snapshot)

    @staticmethod
    def _owner(node: Node) -> BlockKey:
        return node.ancestor_at(0).key


def _snapshot_of(note: SnapshotNote, node: Node) -> Snapshot:
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
        recorded=True,
        durable=True,
    )
