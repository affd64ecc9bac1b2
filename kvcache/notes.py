"""Where a durable store's notes lie: records that describe others. Owns which version of a note counts.

A note is never evicted, and small but for an image's file. A later handle, or the tombstone of its key, replaces an
earlier one; a node's note and a file never change. Used on the I/O thread alone, which makes room beforehand.
"""

from __future__ import annotations

import logging

from kvcache.errors import RecordError
from kvcache.records import Note, NoteId, NoteKind
from kvcache.segments import Extent, SegmentLog

log = logging.getLogger(__name__)

_FIXED = (NoteKind.NODE, NoteKind.MEDIA)
_OTHER = {NoteKind.SNAPSHOT: NoteKind.TOMBSTONE, NoteKind.TOMBSTONE: NoteKind.SNAPSHOT}


class NoteBook:
    """Places of all notes that count."""

    def __init__(self, segments: SegmentLog) -> None:
        self._segments = segments
        self._places: dict[NoteId, Extent] = {}
        self._tombstones: set[NoteId] = set()

    def __len__(self) -> int:
        return len(self._places)

    def ids(self) -> list[NoteId]:
        """From the oldest to the newest."""
        return list(self._places)

    def place(self, note: NoteId) -> Extent | None:
        return self._places.get(note)

    def adopt(self, note: NoteId, extent: Extent) -> None:
        """Take over what an earlier opening wrote."""
        self._places[note] = extent
        if note.kind is NoteKind.TOMBSTONE:
            self._tombstones.add(note)

    def write(self, note: Note) -> None:
        """Append a note, and let the version before it go. OSError, FormatError or DiskFull: nothing has changed."""
        there = self._places.get(note.id)
        if there is not None and note.id.kind in _FIXED and not self._segments.is_suspect(there):
            return
        extent = self._segments.append(note.id, note.payload, note.key_id)
        before = [self._places.pop(note.id, None)]
        if note.id.kind in _OTHER:
            before.append(self._places.pop(NoteId(note.id.key, _OTHER[note.id.kind]), None))
        self.adopt(note.id, extent)
        for outdated in before:
            if outdated is not None:
                self._segments.release(outdated)

    def forget(self, note: NoteId) -> None:
        extent = self._places.pop(note, None)
        if extent is not None:
            self._segments.release(extent)

    def copy_on(self, note: NoteId, extent: Extent) -> None:
        """Write a note again at the log's end, if it still counts there."""
        if self._places.get(note) != extent:
            return
        try:
            self._places[note] = self._segments.copy_on(note, extent)
        except RecordError as error:
            log.warning("dropped a note: %s", error)
            del self._places[note]
        self._segments.release(extent)

    def lay_to_rest(self) -> None:
        """Forget tombstones that no outdated handle is left to be held down by."""
        for note in [n for n in self._tombstones if n not in self._places or not self._segments.is_haunted(n.key)]:
            self._tombstones.discard(note)
            self.forget(note)
