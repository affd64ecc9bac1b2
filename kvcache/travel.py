"""Snapshots that leave for another instance, and those that come from one. Owns what is sent of a snapshot and where it
goes; knows nothing of how it travels. Not thread-safe: `kvcache.cache` holds the lock.

What leaves is every token of the prefix with the way it was computed, and the records that make its deepest stored
place usable. So a snapshot whose state was evicted, or a part of it, travels as what it is: the other side computes the
rest when it is used, as this one would have to. What comes is put under keys that are computed here, for the owner
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvcache.blocks import BlockKey
from kvcache.chains import transplant
from kvcache.manifest import Item, ItemId, Manifest, encode_manifest, image_key, images_of, nobodys, record_of
from kvcache.media import MediaTag
from kvcache.records import NoteKind, RecordId, RecordKind
from kvcache.snapshots import Snapshot
from kvcache.stock import Stock
from kvcache.tree import BlockTree, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A snapshot that leaves. Its records are pinned until it is let go of."""

    node: Node
    position: int  # tokens whose state leaves with it
    records: tuple[RecordId, ...]
    sizes: tuple[int, ...]  # bytes of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What is sent of a departure."""

    manifest: bytes
    items: tuple[Item, ...]
    sources: tuple[RecordId | bytes, ...]  # where each item's bytes are: a record, or an image's file itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A snapshot that comes. Its nodes are in use until it is let go of, so that nothing of it is evicted meanwhile."""

    manifest: Manifest
    end: Node  # here, of the owner here
    nodes: Mapping[BlockKey, Node]  # by the keys that the manifest's items have
    images: Mapping[bytes, MediaTag]
    taken: list[RecordId] = field(default_factory=list)  # that were not here before


class Travel:
    """Over the nodes and records of one cache."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock

    def depart(self, snapshot: Snapshot) -> Departure:
        """Pins; pairs with `departed`."""
        node = snapshot.node
        node.holds += 1
        while True:
            position, records = self._going(node)
            self._stock.store.pin(records)
            sizes = [size for size in map(self._stock.store.size, records) if size is not None]
            if len(sizes) == len(records):
                return Departure(node=node, position=position, records=tuple(records), sizes=tuple(sizes))
            self._stock.store.unpin(records)  # the store evicts on a thread of its own: one went before the pin

    def _going(self, node: Node) -> tuple[int, list[RecordId]]:
        """How far the state of `node` goes at this moment, and the records that it takes."""
        plan = self._stock.plan(node.path(), target=node.end, more_follows=True)
        if plan is None:
            return 0, []
        logits = RecordId(node.key, RecordKind.LOGITS)
        with_logits = plan.position == node.end and self._stock.has(logits)
        return plan.position, [*plan.records, *([logits] if with_logits else [])]

    def departed(self, departure: Departure) -> None:
        """Lets go of what was pinned; once."""
        self._stock.store.unpin(departure.records)
        self._stock.unhold(departure.node)

    def held(self, wanted: Mapping[ItemId, RecordId]) -> set[ItemId]:
        """Those of which the record is here already. Changes nothing."""
        return {item for item, record in wanted.items() if self._stock.has(record)}

    def arrive(self, manifest: Manifest, root: Node) -> Arrival:
        """Makes the chain under `root`. Pairs with `arrived`."""
        nodes = transplant(manifest.end, self._stock.tree, root)
        for node in nodes.values():
            self._stock.follow(node)
        return Arrival(manifest=manifest, end=nodes[manifest.end.key], nodes=nodes, images=images_of(manifest))

    def lacking(self, arrival: Arrival) -> list[Item]:
        """Items whose records are not here, images' files left out."""
        return [item for item, record in _records(arrival.manifest, arrival.nodes) if not self._stock.has(record)]

    def arrived(self, arrival: Arrival, *, forget: bool) -> None:
        """Lets go of what was in use; once. `forget`: and of what came, where nobody else has come to need it."""
        tree = self._stock.tree
        taken: dict[bytes, list[RecordId]] = {}
        for record in arrival.taken if forget else ():
            taken.setdefault(record.key, []).append(record)
        # A piece before the block that it reads from, what follows before what it follows.
        for node in sorted(arrival.nodes.values(), key=lambda node: (node.borrows is not None, node.end), reverse=True):
            self._stock.unfollow(node)
            if node.key in taken and tree.get(node.key) is node and not node.holds and not node.children:
                self._stock.store.delete(taken[node.key])
                self._stock.prune(node)


def pack(snapshot: Snapshot, departure: Departure, fingerprint: str, files: Mapping[MediaTag, bytes]) -> Packed:
    """What travels of a snapshot; `files` has every image of it. Pure: chains never change, so no lock is needed."""
    travelling, nodes = nobodys(snapshot, departure.node, fingerprint)
    items = [
        Item(nodes[BlockKey(record.key)].key, record.kind, size)
        for record, size in zip(departure.records, departure.sizes, strict=True)
    ]
    items += [Item(image_key(fingerprint, tag), NoteKind.MEDIA, len(file)) for tag, file in files.items()]
    manifest = encode_manifest(travelling, fingerprint, items)
    return Packed(manifest=manifest, items=tuple(items), sources=(*departure.records, *files.values()))


def records_here(manifest: Manifest, root: BlockKey) -> dict[ItemId, RecordId]:
    """What a manifest's records are called under the owner of this root. Pure, and needs no lock."""
    scratch = BlockTree()
    nodes = transplant(manifest.end, scratch, scratch.root(root))
    return {item.id: record for item, record in _records(manifest, nodes)}


def _records(manifest: Manifest, nodes: Mapping[BlockKey, Node]) -> Iterator[tuple[Item, RecordId]]:
    """What is a record among the items, with its name where the chain's nodes are `nodes`."""
    for item in manifest.items:
        if item.kind is not NoteKind.MEDIA:
            yield item, record_of(item, nodes[BlockKey(item.key)])
