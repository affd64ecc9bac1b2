"""What the notes of a durable store say of its snapshots. Owns which of them are whole; pure.

A snapshot is whole if all that it stands on is there: its nodes down to its owner's root, and the files of its images.
Whole or not is a matter of what was found now: a file that is put back makes it whole again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvcache.blocks import BlockKey, root_key
from kvcache.chains import build_chain
from kvcache.errors import FormatError
from kvcache.media import MediaTag
from kvcache.note_codec import NodeNote, SnapshotNote, decode_node, decode_snapshot, media_key, snapshot_key
from kvcache.records import NoteId, NoteKind
from kvcache.snapshots import images_of
from kvcache.tree import BlockTree, Node

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A snapshot with all that it stands on; its node is held once for it."""

    note: SnapshotNote
    key: bytes
    node: Node
    images: Mapping[MediaTag, bytes]  # the files


@dataclass(frozen=True, slots=True, kw_only=True)
class NotesRead:
    """All notes of one model, judged."""

    whole: tuple[Whole, ...]
    expired: tuple[bytes, ...]  # keys of handles whose time is over
    broken: Mapping[bytes, SnapshotNote]  # by key: handles of which something is not there
    unreadable: tuple[bytes, ...]  # keys of handles whose own note says nothing
    key_ids: Mapping[bytes, int]  # of every handle found
    useless: tuple[NoteId, ...]  # notes that no snapshot that is whole needs


def read_notes(
    notes: Iterable[tuple[NoteId, bytes, int]],
    fingerprint: str,
    owners: Iterable[str],
    tree: BlockTree,
    *,
    shared: str,
    now: float,
) -> NotesRead:
    """Builds the nodes of every snapshot in `tree`. A snapshot stands on prefixes of its owner, or of `shared`.

    `notes`: each with its payload and its sealing key; `owners` are all that may have any, `shared` among them.
    """
    roots = {root_key(fingerprint, owner): owner for owner in owners}
    nodes: dict[BlockKey, NodeNote] = {}
    files: dict[bytes, bytes] = {}
    handles: dict[bytes, SnapshotNote] = {}
    key_ids: dict[bytes, int] = {}
    keys: dict[BlockKey, int] = {}
    unreadable: list[bytes] = []
    useless: list[NoteId] = []
    for note, payload, key_id in notes:
        try:
            if note.kind is NoteKind.NODE:
                nodes[BlockKey(note.key)] = decode_node(payload, BlockKey(note.key))
                keys[BlockKey(note.key)] = key_id
            elif note.kind is NoteKind.MEDIA:
                files[note.key] = payload
            elif note.kind is NoteKind.SNAPSHOT:
                key_ids[note.key] = key_id
                handle = decode_snapshot(payload)
                if note.key != snapshot_key(fingerprint, handle.owner, handle.id):
                    raise FormatError("the note of another handle")
                handles[note.key] = handle
        except FormatError as error:
            log.warning("passed over %s: %s", note, error)
            if note.kind is NoteKind.SNAPSHOT:
                unreadable.append(note.key)
            else:
                useless.append(note)
    whole: list[Whole] = []
    expired: list[bytes] = []
    broken: dict[bytes, SnapshotNote] = {}
    for key, handle in handles.items():
        if handle.expires <= now and not handle.pinned:
            expired.append(key)
            continue
        node = build_chain(tree, handle.node, nodes, roots, keys)
        if node is None or roots[node.ancestor_at(0).key] not in (handle.owner, shared):
            broken[key] = handle
            continue
        images = {tag: files.get(media_key(fingerprint, handle.owner, tag)) for tag in _tags(node)}
        found = {tag: file for tag, file in images.items() if file is not None}
        if len(found) < len(images):
            broken[key] = handle
            continue
        node.holds += 1
        whole.append(Whole(note=handle, key=key, node=node, images=found))
    needed = {media_key(fingerprint, one.note.owner, tag) for one in whole for tag in one.images}
    useless += [NoteId(key, NoteKind.NODE) for key in nodes if tree.get(key) is None]
    useless += [NoteId(key, NoteKind.MEDIA) for key in files if key not in needed]
    return NotesRead(
        whole=tuple(whole),
        expired=tuple(expired),
        broken=broken,
        unreadable=tuple(unreadable),
        key_ids=key_ids,
        useless=tuple(useless),
    )


def model_of(notes: Iterable[tuple[NoteId, bytes, int]]) -> str:
    """The fingerprint that snapshots' notes of one model give; "" if none says."""
    return next((handle.model for handle in _handles(notes)), "")


def _handles(notes: Iterable[tuple[NoteId, bytes, int]]) -> Iterator[SnapshotNote]:
    for note, payload, _ in notes:
        if note.kind is NoteKind.SNAPSHOT:
            try:
                yield decode_snapshot(payload)
            except FormatError:
                continue


def _tags(node: Node) -> set[MediaTag]:
    return {span.tag for span in images_of(node)}
