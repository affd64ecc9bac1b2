"""Payloads of notes. Owns their bytes, and that they are checked before anybody believes them; pure.

Nodes are named by their content: a payload that does not give its own key is damage.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS, BlockKey, block_key, root_key, token_bytes, tokens_of
from kvcache.errors import FormatError
from kvcache.media import MediaTag
from kvcache.origin import Origin
from kvcache.records import KEY_BYTES
from kvcache.snapshots import ORIGIN_LIMIT, Snapshot
from kvcache.tree import Node

NODE_HEAD = struct.Struct("<32s32sHH")  # parent, node whose FULL record is read (or zero), schedule bytes, tokens
NO_NODE = bytes(KEY_BYTES)  # where a node could be named
SNAPSHOT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNote:
    """What is written of a node."""

    parent: BlockKey
    borrows: BlockKey | None
    schedule: bytes
    tokens: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotNote:
    """What is written of a snapshot. Times in Unix seconds."""

    id: str
    owner: str
    model: str
    node: BlockKey
    lineage: tuple[str, ...]
    origins: tuple[Origin, ...]
    created: float
    last_use: float
    ttl: float
    expires: float
    pinned: bool
    labels: dict[str, str]
    revision: int = 0


def snapshot_key(fingerprint: str, owner: str, snapshot_id: str) -> bytes:
    """The key of a handle's notes: a digest, so that headers show neither owner nor id."""
    return hashlib.sha256(b"kvfork handle v1" + root_key(fingerprint, owner) + snapshot_id.encode()).digest()


def media_key(fingerprint: str, owner: str, tag: MediaTag) -> bytes:
    """The key of an image's file: another owner's copy of it has another."""
    return hashlib.sha256(b"kvfork media v1" + root_key(fingerprint, owner) + tag).digest()


def encode_node(node: Node) -> bytes:
    assert node.parent is not None
    borrows = node.borrows.key if node.borrows is not None else NO_NODE
    head = NODE_HEAD.pack(node.parent.key, borrows, len(node.schedule), len(node.tokens))
    return head + node.schedule + token_bytes(node.tokens)


def decode_node(payload: bytes, key: BlockKey) -> NodeNote:
    """FormatError if the payload is not that of the node of this key."""
    if len(payload) < NODE_HEAD.size:
        raise FormatError("shorter than a node's head")
    parent, borrows, schedule_bytes, count = NODE_HEAD.unpack_from(payload)
    if not 0 < count <= BLOCK_TOKENS or len(payload) != NODE_HEAD.size + schedule_bytes + 4 * count:
        raise FormatError("lengths of a node do not add up")
    schedule = payload[NODE_HEAD.size : NODE_HEAD.size + schedule_bytes]
    tokens = tokens_of(payload[NODE_HEAD.size + schedule_bytes :])
    if block_key(BlockKey(parent), tokens, schedule) != key:
        raise FormatError("a node's content does not give its key")
    return NodeNote(
        parent=BlockKey(parent),
        borrows=BlockKey(borrows) if borrows != NO_NODE else None,
        schedule=schedule,
        tokens=tokens,
    )


def encode_snapshot(snapshot: Snapshot, fingerprint: str) -> bytes:
    revision = {"revision": snapshot.revision} if snapshot.revision else {}
    return json.dumps(
        {
            "v": SNAPSHOT_VERSION,
            "id": snapshot.id,
            "owner": snapshot.owner,
            "model": fingerprint,
            "node": snapshot.node.key.hex(),
            "lineage": snapshot.lineage,
            "origins": [[origin.call, origin.start] for origin in snapshot.origins],
            "created": snapshot.created,
            "last_use": snapshot.last_use,
            "ttl": snapshot.ttl,
            "expires": snapshot.expires,
            "pinned": snapshot.pinned,
            "labels": snapshot.labels,
            **revision,
        },
        separators=(",", ":"),
    ).encode()


def decode_snapshot(payload: bytes) -> SnapshotNote:
    """FormatError if the payload is not a snapshot's."""
    try:
        entry = json.loads(payload)
        if entry["v"] != SNAPSHOT_VERSION:
            raise FormatError(f"version {entry['v']!r} of a snapshot, this reader knows {SNAPSHOT_VERSION}")
        texts = [entry["id"], entry["owner"], entry["model"], *entry["lineage"], *entry["labels"].values()]
        numbers = [float(entry[name]) for name in ("created", "last_use", "ttl", "expires")]
        node = bytes.fromhex(entry["node"])
        pinned = entry["pinned"]
        revision = entry.get("revision", 0)  # of a snapshot whose state is as it was made there is none
        # A note of before there were any has none: nobody else is known to share its tokens.
        origins = [Origin(call, start) for call, start in entry.get("origins") or [[entry["id"], 0]]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise FormatError(f"not a snapshot: {type(error).__name__}") from None
    if not all(isinstance(text, str) for text in texts) or not isinstance(pinned, bool) or len(node) != KEY_BYTES:
        raise FormatError("not a snapshot: a field has the wrong type")
    if type(revision) is not int or not 0 <= revision < 1 << 32:
        raise FormatError("not a snapshot: its revision is no number")
    starts = [origin.start for origin in origins]
    right = all(isinstance(origin.call, str) and type(origin.start) is int for origin in origins)
    if not right or len(starts) > ORIGIN_LIMIT or starts[0] < 0 or starts != sorted(set(starts)):
        raise FormatError("not a snapshot: the origins of its tokens are not in order")
    if any(number != number or abs(number) == float("inf") for number in numbers):
        raise FormatError("not a snapshot: a time is no number")
    return SnapshotNote(
        id=entry["id"],
        owner=entry["owner"],
        model=entry["model"],
        node=BlockKey(node),
        lineage=tuple(entry["lineage"]),
        origins=tuple(origins),
        created=numbers[0],
        last_use=numbers[1],
        ttl=numbers[2],
        expires=numbers[3],
        pinned=pinned,
        labels=dict(entry["labels"]),
        revision=revision,
    )
