"""What a snapshot is made of while it travels between instances. Owns the bytes of its manifest; pure.

The notes of a durable snapshot (`kvcache.note_codec`), of a chain that is nobody's: its keys begin with the root of an
owner without a name, so that two instances mean the same by them whoever owns the snapshot here or there. Behind them a
list of what state there is of it. Mirror of docs/format.md, section 10.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NewType

from kvcache.blocks import BlockKey, root_key
from kvcache.chains import build_chain, nodes_of, transplant
from kvcache.errors import ExportError, FormatError
from kvcache.format import MAX_PAYLOAD_BYTES
from kvcache.media import MediaTag, spans_of
from kvcache.note_codec import SnapshotNote, decode_node, decode_snapshot, encode_node, encode_snapshot, media_key
from kvcache.records import KEY_BYTES, NoteKind, RecordId, RecordKind
from kvcache.schedule import trimmed_schedule
from kvcache.snapshots import Snapshot
from kvcache.tree import BlockTree, Node

NOBODY = ""  # the owner of chains that travel; no owner has this name

ItemId = NewType("ItemId", bytes)
"""33 bytes: the key that an item has in a chain that is nobody's, and its kind."""

_HEAD = struct.Struct("<III")  # bytes of the snapshot's note, nodes, items
_NODE = struct.Struct("<32sI")  # key, bytes of its note
_ITEM = struct.Struct("<32sB3xI")  # key, kind, bytes

Kind = RecordKind | NoteKind
KINDS: Mapping[int, Kind] = {
    kind.value: kind for kind in (RecordKind.FULL, RecordKind.WINDOW, RecordKind.STATE, RecordKind.LOGITS)
} | {NoteKind.MEDIA.value: NoteKind.MEDIA}


@dataclass(frozen=True, slots=True)
class Item:
    """A record of the snapshot's state, or the file of an image in it."""

    key: bytes
    kind: Kind
    size: int  # bytes

    @property
    def id(self) -> ItemId:
        return ItemId(self.key + bytes((self.kind,)))

    def __str__(self) -> str:
        what = "image" if self.kind is NoteKind.MEDIA else self.kind.name.lower()
        return f"{what} {self.key[:8].hex()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A snapshot on its way. `end` is the end of its chain, in a tree of its own."""

    snapshot: SnapshotNote
    end: Node
    items: tuple[Item, ...]

    @property
    def fingerprint(self) -> str:
        """The model's whose state it is."""
        return self.snapshot.model


def nobodys(snapshot: Snapshot, end: Node, fingerprint: str) -> tuple[Snapshot, dict[BlockKey, Node]]:
    """`snapshot`, which stands on `end`, on a chain of nobody's; and that chain's nodes by the keys they have here."""
    tree = BlockTree()
    made = transplant(end, tree, tree.root(root_key(fingerprint, NOBODY)))
    return replace(snapshot, owner=NOBODY, node=made[end.key]), made


def image_key(fingerprint: str, tag: MediaTag) -> bytes:
    """The key of an image's file on its way."""
    return media_key(fingerprint, NOBODY, tag)


def images_of(manifest: Manifest) -> dict[bytes, MediaTag]:
    """The images in a snapshot on its way, by the keys of their files."""
    tags = {span.tag for span in spans_of(manifest.end.all_tokens())}
    return {image_key(manifest.fingerprint, tag): tag for tag in tags}


def encode_manifest(snapshot: Snapshot, fingerprint: str, items: Sequence[Item]) -> bytes:
    """Of a snapshot as `nobodys` gives it."""
    note = encode_snapshot(snapshot, fingerprint)
    nodes = nodes_of(snapshot.node)
    parts = [_HEAD.pack(len(note), len(nodes), len(items)), note]
    for node in nodes:
        payload = encode_node(node)
        parts += [_NODE.pack(node.key, len(payload)), payload]
    parts += [_ITEM.pack(item.key, item.kind, item.size) for item in items]
    return b"".join(parts)


def decode_manifest(data: bytes) -> Manifest:
    """ExportError if the bytes do not add up to a snapshot: a chain without gaps, and items of its nodes alone."""
    try:
        return _decode(data)
    except struct.error:
        raise ExportError("has a manifest that is shorter than it says") from None
    except ExportError:
        raise
    except FormatError as error:
        raise ExportError(f"has a damaged manifest: {error}") from None


def _decode(data: bytes) -> Manifest:
    note_bytes, node_count, item_count = _HEAD.unpack_from(data)
    at = _HEAD.size + note_bytes
    snapshot = decode_snapshot(data[_HEAD.size : at])
    notes = {}
    for _ in range(node_count):
        key, size = _NODE.unpack_from(data, at)
        at += _NODE.size + size
        note = notes[BlockKey(key)] = decode_node(data[at - size : at], BlockKey(key))
        if note.schedule[:1] == b"T" and (note.borrows is None or note.schedule != trimmed_schedule(note.borrows)):
            raise ExportError("has a block that was cut and does not say from which")
        if note.schedule[:1] != b"T" and note.borrows is not None:
            raise ExportError("has a block that was not cut and reads from another")
    root = root_key(snapshot.model, NOBODY)
    end = build_chain(BlockTree(), snapshot.node, notes, (root,), dict.fromkeys(notes, 0))
    if end is None or snapshot.owner != NOBODY:
        raise ExportError("has a manifest whose chain has gaps")
    chain = nodes_of(end)
    if len(chain) != len(notes):
        raise ExportError("has a manifest with nodes that its snapshot does not need")
    items = []
    for _ in range(item_count):
        key, kind, size = _ITEM.unpack_from(data, at)
        at += _ITEM.size
        if kind not in KINDS or not 0 < size <= MAX_PAYLOAD_BYTES:
            raise ExportError("has a manifest that names a record that there cannot be")
        items.append(Item(key, KINDS[kind], size))
    if at != len(data) or len({item.id for item in items}) < len(items):
        raise ExportError("has a manifest with more in it than it says")
    keys = {node.key for node in chain}
    if any(item.kind is not NoteKind.MEDIA and item.key not in keys for item in items):
        raise ExportError("has a manifest that names records of another chain")
    return Manifest(snapshot=snapshot, end=end, items=tuple(items))


def record_of(item: Item, node: Node) -> RecordId:
    """The record that an item is where its chain has `node` for its key."""
    assert isinstance(item.kind, RecordKind)
    return RecordId(node.key, item.kind)


assert KEY_BYTES == 32, "as the structs above have it"
