"""The prefix cache: the one class that the service uses. Owns what is asked under its lock, and what stays pinned.

    tokens ─► lookup ─► RestorePlan ─► fetch (I/O thread) ─► state
    state  ─► commit ─► node + records ─► snapshot handle

Runs without MLX and gRPC. Matching a prompt is `kvcache.lookup`, places on a prefix `kvcache.places`, names and their
lifetimes `kvcache.names`, nodes over records `kvcache.stock`. The lock guards all of them and is never held across
I/O, so that a fork or a rollback on the event loop waits for no decode step and no disk.

Invariants: a plan names only records that the store holds at that moment, pinned until the plan is released; a
snapshot's node outlives the snapshot; evicting state never ends a handle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcache.blocks import BlockKey, block_key, root_key
from kvcache.checkpoints import Checkpoints
from kvcache.layout import CacheLayout
from kvcache.lookup import Lookup, Matcher
from kvcache.manifest import Item, ItemId, Manifest, record_of
from kvcache.names import (
    DEFAULT_LIMITS,
    SHARED,
    CacheLimits,
    Durable,
    Keep,
    MediaKeeper,
    NamedSnapshots,
    new_snapshot_id,
)
from kvcache.places import Places, SnapshotState
from kvcache.receipt import MissReason
from kvcache.records import Buffer, PutResult, RecordId, RecordKind, Tier
from kvcache.schedule import is_decoded
from kvcache.snapshots import Snapshot
from kvcache.store import TieredStore
from kvcache.travel import Arrival, Departure, Travel, records_here
from kvcache.tree import Node

__all__ = [
    "CacheLimits",
    "Commit",
    "Durable",
    "Keep",
    "Lookup",
    "PrefixCache",
    "SnapshotState",
    "new_snapshot_id",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Result of handing over the state at one place."""

    node: Node
    lost: PutResult | None  # the first record that was not accepted, if any


class PrefixCache(NamedSnapshots):
    """Thread-safe. `clock` is monotonic or wall time in seconds, as long as it is always the same."""

    def __init__(
        self,
        store: TieredStore,
        layout: CacheLayout,
        fingerprint: str,
        *,
        limits: CacheLimits = DEFAULT_LIMITS,
        share_decoded: bool = False,
        share_prefixes: bool = False,
        clock: Callable[[], float] = time.time,
        durable: Durable | None = None,
        media: MediaKeeper | None = None,
    ) -> None:
        """With a durable store, `durable` says whose it is; then `clock` is wall time, and snapshots are loaded.

        `share_prefixes`: owners find each other's equal prefixes. Names are their own in any case. `media` has the
        files of images in prefixes.
        """
        super().__init__(store, layout, fingerprint, limits=limits, clock=clock, durable=durable, media=media)
        self.share_decoded = share_decoded
        self.share_prefixes = share_prefixes
        self._tree = self._stock.tree
        self._matcher = Matcher(self._stock, share_decoded=share_decoded)
        self._places = Places(self._stock)
        self._travel = Travel(self._stock)

    @property
    def checkpoints(self) -> Checkpoints:
        """The store's: what it may write is what is worth keeping on the way."""
        return self.store.checkpoints

    def __repr__(self) -> str:
        return f"<PrefixCache snapshots={len(self._snapshots)} nodes={len(self._tree)}>"

    # From tokens to state

    def lookup(self, owner: str, tokens: Sequence[int], *, base: Node | None, keep: Iterable[int]) -> Lookup:
        """Where to go on for `tokens`. `base`: their explicit parent; None: match by content.

        Behind a parent that is its end, or beyond it what an earlier prefill of the same tokens stored.

        `keep` are the places to stand at on the way. Restoring up to the very end is offered with the logits only.
        """
        with self._lock:
            self._stock.forget_lost()
            if base is not None:
                found = self._matcher.behind(tokens, base, set(keep))
            else:
                found = self._matcher.by_content(self._root(owner), tokens, set(keep))
            if found.plan is not None:
                self.store.pin(found.plan.records)
                for node in found.plan.nodes:
                    node.holds += 1
                self.store.touch(reversed(found.plan.records))
            for node in found.kept:  # they are to stand until they are handed out
                self.store.pin(self._stock.records_of(node))
                node.holds += 1
            return found

    def weigh(self, lookup: Lookup) -> tuple[int, int, int]:
        """Of a lookup not yet released: tokens of which some state is on disk, bytes in memory, bytes on disk."""
        if lookup.plan is None:
            return 0, 0, 0
        by_tier = dict.fromkeys(Tier, 0)
        with self._lock:
            for record in lookup.plan.records:
                by_tier[self.store.locate(record) or Tier.DISK] += self.store.size(record) or 0
            return self._stock.disk_tokens(lookup.plan), by_tier[Tier.MEMORY], by_tier[Tier.DISK]

    def note_corrupt(self, record: RecordId) -> None:
        """Lets the next receipt say why `record` is gone. Call it before the lookup that named it is released."""
        with self._lock:
            self._stock.forget_lost()
            node = self._stock.tree.get(record.key)
            if node is not None:
                node.note_lost(record.kind, MissReason.CORRUPT)

    def release(self, lookup: Lookup) -> None:
        """Lets go of what `lookup` pinned and found kept. Call it once, after both were taken or the work given up."""
        with self._lock:
            for node in reversed(lookup.kept):
                self.store.unpin(self._stock.records_of(node))
                self._stock.unhold(node)
            if lookup.plan is not None:
                self.store.unpin(lookup.plan.records)
                for node in reversed(lookup.plan.nodes):
                    self._stock.unhold(node)

    # From state to nodes

    def root(self, owner: str) -> Node:
        """The empty prefix of an owner. With a durable store: OSError if the owner's first key cannot be written."""
        key_id = self._durable.ring.id_of(self._space(owner)) if self._durable is not None else 0
        with self._lock:
            root = self._root(owner)
            root.key_id = key_id
            return root

    @staticmethod
    def root_of(node: Node) -> Node:
        """The empty prefix that `node` goes back to: another than `root` gives, if sharing was otherwise once."""
        return node.ancestor_at(0)

    def wants(self, parent: Node, tokens: Sequence[int], schedule: bytes, *, logits: bool) -> tuple[RecordKind, ...]:
        """The record kinds of a place that are not stored yet, so that nobody copies state for nothing."""
        kinds = self.layout.kinds + ((RecordKind.LOGITS,) if logits else ())
        with self._lock:
            node = self._stock.tree.get(block_key(parent.key, tokens, schedule))
            if node is None:
                return kinds
            return tuple(kind for kind in kinds if not self._stock.has(RecordId(node.key, kind)))

    def commit(
        self,
        parent: Node,
        tokens: Sequence[int],
        schedule: bytes,
        payloads: Mapping[RecordKind, bytes | bytearray],
        *,
        explicit: bool,
        passing: Collection[RecordKind] = (),
        in_memory: Collection[RecordKind] = (),
        patient: bool = False,
    ) -> Commit:
        """Takes over the state behind `parent` + `tokens`. The node is held once for the caller: `let_go` it.

        `passing`: kinds that nobody asked for, whatever `explicit` says of the others. `in_memory`: kinds that go to
        disk for want of memory only. `patient`: if some of it is not
        accepted, `put` will be called with the same payloads.
        """
        with self._lock:
            self._stock.forget_lost()
            node = self._stock.tree.add(parent, tokens, schedule)
            node.holds += 1
        lost = self.put(node, payloads, explicit=explicit, passing=passing, in_memory=in_memory, patient=patient)
        return Commit(node=node, lost=lost)

    def put(
        self,
        node: Node,
        payloads: Mapping[RecordKind, Buffer],
        *,
        explicit: bool,
        passing: Collection[RecordKind] = (),
        in_memory: Collection[RecordKind] = (),
        patient: bool = False,
    ) -> PutResult | None:
        """Hands state of a held node to the store; may be repeated. The first refusal that matters, if any."""
        lost: PutResult | None = None
        refused: list[RecordKind] = []
        self.follow(node)  # so that none of it makes room for the rest
        for kind, payload in payloads.items():
            asked = explicit and kind not in passing
            result = self.store.put(
                RecordId(node.key, kind),
                payload,
                explicit=asked,
                key_id=node.key_id,
                patient=asked and patient,
                in_memory=kind in in_memory,
            )
            if not result.held:
                refused.append(kind)
                if lost is None and asked == explicit:
                    lost = result
        with self._lock:  # a run and an import may be at the same node
            for kind in refused:
                node.note_lost(kind, MissReason.NOT_WRITTEN)
            self.store.arrange([self._stock.place_of(node)])
            self._stock.kept(node)
            self._stock.unfollow(node)
        return lost

    def thin(self, newest: Node) -> None:
        """Gives up what the chain that ends at the boundary `newest` has too much of; call it as a run moves there."""
        with self._lock:
            self._stock.thin(newest, self.checkpoints)

    def hold(self, node: Node) -> Node:
        """Keeps `node` known; pairs with `let_go`."""
        with self._lock:
            node.holds += 1
        return node

    def let_go(self, node: Node) -> None:
        with self._lock:
            self._stock.unhold(node)

    def follow(self, node: Node) -> Node:
        """`hold` for a run that goes on from `node`: what is stored of it is in use. Pairs with `unfollow`."""
        with self._lock:
            return self._stock.follow(node)

    def unfollow(self, node: Node) -> None:
        with self._lock:
            self._stock.unfollow(node)

    # Places on a known prefix

    def cut(self, node: Node, position: int) -> Node | None:
        """A node that ends exactly at `position` of `node`'s prefix and needs no compute, held once; None: no such."""
        with self._lock:
            return self._places.cut(node, position)

    def hold_base(self, node: Node, position: int) -> Node:
        """The deepest place on `node`'s path before `position` that can be restored, else the root. Held once."""
        with self._lock:
            return self._places.hold_base(node, position)

    def checkpoints_before(self, node: Node, position: int) -> int:
        """The deepest stored position at or before `position` on `node`'s path, kept tails included; 0 if none.

        What lies between it and `position` is what a branch there costs: tokens computed again.
        """
        with self._lock:
            return self._places.checkpoints_before(node, position)

    def why_recomputed(self, node: Node, position: int) -> MissReason:
        """Why a branch at `position` costs more than the grid's share; NONE if it does not."""
        with self._lock:
            self._stock.forget_lost()
            return self._places.why_recomputed(node, position)

    def stands(self, node: Node) -> bool:
        """Whether all that standing at the end of `node` takes is stored."""
        with self._lock:
            return self._stock.restorable(node)

    def ready(self, node: Node) -> bool:
        """Whether a call may go on from the end of `node`, with or without input, for one token at most."""
        with self._lock:
            return self._places.ready(node)

    def follow_lost_source(self, node: Node) -> Node | None:
        """Of a cut whose state is lost, the block to compute again for it, followed; None: there is no such."""
        with self._lock:
            self._stock.forget_lost()
            source = self._places.lost_source(node)
            return None if source is None else self._stock.follow(source)

    def why_not(self, node: Node) -> MissReason:
        """Why nobody can stand at the end of `node`; NONE if one can."""
        with self._lock:
            self._stock.forget_lost()
            return self._stock.why_not(node)

    def regain(self, snapshot: Snapshot, node: Node) -> None:
        """State of the handle's tokens has come, at `node`: it is the handle's where its own is gone, or was this.

        Decoded state of elsewhere is not: what goes on from it gives other bits than the handle's own did.
        """
        with self._lock:
            if node is snapshot.node:
                if not self._places.state_of(snapshot).on_disk:
                    self.rehome(snapshot, node)  # counts it as pinned, and writes it, where the handle is
                return
            decoded = any(is_decoded(here.schedule) for here in node.path())
            if not decoded and self._stock.restorable(node) and not self._stock.restorable(snapshot.node):
                self.rehome(snapshot, node)

    def state_of(self, snapshot: Snapshot) -> SnapshotState:
        """Where the state behind a name is now."""
        with self._lock:
            return self._places.state_of(snapshot)

    def stored_tokens(self, node: Node) -> tuple[int, int]:
        """How much of `node`'s prefix can be restored, and of how much of that some layer's state is on disk."""
        with self._lock:
            return self._places.stored_tokens(node)

    # To and from other instances

    def depart(self, snapshot: Snapshot) -> Departure:
        """What there is of a snapshot's state, pinned: to be packed, and sent. Pairs with `departed`."""
        with self._lock:
            self._stock.forget_lost()
            return self._travel.depart(snapshot)

    def departed(self, departure: Departure) -> None:
        with self._lock:
            self._travel.departed(departure)

    def held_of(self, owner: str, manifest: Manifest) -> set[ItemId]:
        """Records of a manifest that are here already, for this owner. Changes nothing."""
        wanted = records_here(manifest, self._root_key(owner))
        with self._lock:
            return self._travel.held(wanted)

    def arrive(self, owner: str, manifest: Manifest) -> Arrival:
        """Makes room in the tree for a snapshot that comes. Pairs with `arrived`. OSError as `root` has it."""
        root = self.root(owner)
        with self._lock:
            self._stock.forget_lost()
            return self._travel.arrive(manifest, root)

    def take(self, arrival: Arrival, item: Item, payload: Buffer, *, patient: bool) -> PutResult:
        """Takes a record of it over. `patient`: what `may_pass` is given again once the store has written something."""
        node = arrival.nodes[BlockKey(item.key)]
        record = record_of(item, node)
        here = self.store.locate(record) is not None
        lost = self.put(node, {record.kind: payload}, explicit=True, patient=patient)
        if lost is not None:
            return lost
        if here:
            return PutResult.EXISTS
        arrival.taken.append(record)
        return PutResult.STORED

    def lacking(self, arrival: Arrival) -> list[Item]:
        """Its records that are not here."""
        with self._lock:
            return self._travel.lacking(arrival)

    def arrived(self, arrival: Arrival, *, forget: bool) -> None:
        """It is named, or given up. `forget`: what came of it goes, as far as nobody else has come to need it."""
        with self._lock:
            self._travel.arrived(arrival, forget=forget)

    def _root(self, owner: str) -> Node:
        return self._tree.root(self._root_key(owner))

    def _root_key(self, owner: str) -> BlockKey:
        return root_key(self.fingerprint, self._space(owner))

    def _space(self, owner: str) -> str:
        return SHARED if self.share_prefixes else owner
