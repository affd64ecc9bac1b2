"""The prefix cache: the one class that the service uses. Owns the lock around tree, handles and records.

    tokens ─► lookup ─► RestorePlan ─► fetch (I/O thread) ─► state
    state  ─► commit ─► node + records ─► snapshot handle

Runs without MLX and gRPC. The lock guards tree, handles and bookkeeping and is never held across I/O, so that a fork
or a rollback on the event loop waits for no decode step and no disk.

Invariants: a plan names only records that the store holds at that moment, pinned until the plan is released; a
snapshot's node outlives the snapshot; evicting state never ends a handle.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcache.blocks import BLOCK_TOKENS, block_key, root_key
from kvcache.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy, Checkpoints
from kvcache.errors import StoreError
from kvcache.journal import Journal
from kvcache.keys import KeyRing
from kvcache.layout import CacheLayout
from kvcache.receipt import MissReason
from kvcache.records import PutResult, RecordId, RecordKind, Tier
from kvcache.restore import RestorePlan, disk_tokens, needed, plan_restore
from kvcache.schedule import is_decoded, plan_calls, prefill_schedule, replay_cuts, trimmed_schedule
from kvcache.snapshots import (
    GoneReason,
    NotDurableSnapshot,
    Snapshot,
    SnapshotBusy,
    SnapshotRegistry,
    UnknownSnapshot,
)
from kvcache.store import TieredStore
from kvcache.store_dir import boot_id
from kvcache.thinning import Boundary, surplus_states, surplus_windows
from kvcache.tree import BlockTree, Node

LINEAGE_LIMIT = 1000  # ancestors remembered by name


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What one owner may hold, and for how long. Times in seconds."""

    max_snapshots: int = 10_000
    max_pinned: int = 100
    default_ttl: float = 3600.0
    max_ttl: float = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """What a cache over a durable store needs to know of it."""

    ring: KeyRing
    instance: str
    opening: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How to keep a new snapshot."""

    snapshot_id: str = ""
    ttl: float | None = None
    pinned: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    durable: bool = False  # `make_durable` follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is known of a prompt, and from where to go on. Release it with `PrefixCache.release`."""

    tokens: int  # length of the prompt
    plan: RestorePlan | None
    known: int  # tokens that were computed once, whether or not their state can be used
    miss_reason: MissReason  # why `plan` stops short of `known`
    replay: tuple[int, ...] = ()  # cuts of the parent's own run, to make again where it is computed again
    kept: tuple[Node, ...] = ()  # places asked for that are stored already, at or before the position

    @property
    def position(self) -> int:
        """Tokens whose state can be restored."""
        return self.plan.position if self.plan else 0

    @property
    def diverged_at(self) -> int | None:
        """First position outside every known chain; None if the prompt never left them."""
        return self.known if self.known < self.tokens else None

    def without_state(self) -> Lookup:
        """The same, as if nothing could be read."""
        return replace(self, plan=None, kept=(), miss_reason=MissReason.CORRUPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Result of handing over the state at one place."""

    node: Node
    lost: PutResult | None  # the first record that was not accepted, if any


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotState:
    """Where a snapshot's state is at this moment."""

    restorable: int  # deepest position that can be restored
    disk_tokens: int  # of them: tokens of which some layer's state is on disk
    checkpointed: int  # deepest full-block boundary that can be restored
    exclusive_bytes: int
    on_disk: bool  # of a durable snapshot: all that standing at its end takes


class PrefixCache:
    """Thread-safe. `clock` is monotonic or wall time in seconds, as long as it is always the same."""

    def __init__(
        self,
        store: TieredStore,
        layout: CacheLayout,
        fingerprint: str,
        *,
        limits: CacheLimits = CacheLimits(),
        share_decoded: bool = False,
        clock: Callable[[], float] = time.time,
        durable: Durable | None = None,
        checkpoints: Checkpoints = DEFAULT_CHECKPOINTS,
    ) -> None:
        """With a durable store, `durable` says whose it is; then `clock` is wall time, and snapshots are loaded."""
        assert store.durable == (durable is not None)
        self.store = store
        self.layout = layout
        self.fingerprint = fingerprint
        self.limits = limits
        self.share_decoded = share_decoded
        self.checkpoints = checkpoints
        self._clock = clock
        self._lock = threading.RLock()
        self._tree = BlockTree()
        self._snapshots = SnapshotRegistry(
            max_per_owner=limits.max_snapshots, max_pinned=limits.max_pinned, forget=self._forget
        )
        self._durable = durable
        self._journal: Journal | None = None
        if durable is not None:
            self._journal = Journal(store, fingerprint, self._tree, clock)
            for snapshot in self._journal.load(durable.ring.owners()).snapshots:
                self._snapshots.restore(snapshot)
                if snapshot.pinned:
                    self.store.pin(self._records_of(snapshot))

    def __repr__(self) -> str:
        return f"<PrefixCache snapshots={len(self._snapshots)} nodes={len(self._tree)}>"

    # -- lookup ---------------------------------------------------------------------------------------------------

    def lookup(self, owner: str, tokens: Sequence[int], *, base: Node | None, keep: Iterable[int]) -> Lookup:
        """Where to go on for `tokens`: behind the explicit parent `base`, a prefix of them; None: match by content.

        `keep` are the places to stand at on the way. Restoring up to the very end is offered with the logits only.
        """
        with self._lock:
            self._forget_lost()
            if base is not None:
                found = self._lookup_base(tokens, base)
            else:
                found = self._lookup_chain(owner, tokens, set(keep))
            if found.plan is not None:
                self.store.pin(found.plan.records)
                for node in found.plan.nodes:
                    node.holds += 1
                self.store.touch(reversed(found.plan.records))
            return found

    def _lookup_base(self, tokens: Sequence[int], base: Node) -> Lookup:
        path = base.path()
        plan = plan_restore(path, self.layout, self._has, target=base.end, more_follows=len(tokens) > base.end)
        position = plan.position if plan else 0
        replay = [cut for node in path for cut in replay_cuts(node.start, node.schedule)] + [base.end]
        return Lookup(
            tokens=len(tokens),
            plan=plan,
            known=base.end,
            miss_reason=MissReason.NONE if position == base.end else self._why(path, position, base.end),
            replay=tuple(replay),
        )

    def _lookup_chain(self, owner: str, tokens: Sequence[int], keep: set[int]) -> Lookup:
        root = self._tree.root(root_key(self.fingerprint, owner))
        known_nodes, known = self._tree.known_prefix(root, tokens)
        ends = [call.end for call in plan_calls(0, len(tokens), keep)]
        path = self._follow(root, tokens, ends)
        target = path[-1].end if path else 0
        kept: list[Node] = []
        for place in sorted(keep - {len(tokens)}):
            node = self._kept_at(root, path, tokens, ends, place)
            if node is None:
                target = min(target, place - 1)  # it has to be passed again
                break
            kept.append(node)
        plan = None
        while path and plan is None:
            plan = plan_restore(path, self.layout, self._has, target=target, more_follows=target < len(tokens))
            if plan is not None and plan.position != plan.nodes[-1].end:
                # Only an explicit handle may stand inside a block: a cold run makes no cut there.
                plan, path = None, path[:-1]
                target = min(target, path[-1].end) if path else 0
            elif plan is None:
                break
        for node in reversed(kept):
            if node.end > (plan.position if plan else 0):
                # A place passed before under this very schedule is nearer than the block before it.
                plan = plan_restore(node.path(), self.layout, self._has, target=node.end, more_follows=True) or plan
        position = plan.position if plan else 0
        known = max(known, position)
        reason = MissReason.NONE
        if position < known:
            exact_end = path[-1].end if path else 0
            elsewhere = len(known_nodes) * BLOCK_TOKENS > exact_end
            reason = MissReason.PROVENANCE if elsewhere else self._why(path, position, known)
        return Lookup(
            tokens=len(tokens),
            plan=plan,
            known=known,
            miss_reason=reason,
            kept=tuple(node for node in kept if node.end <= position)
            + ((plan.nodes[-1],) if plan and position in keep and position == len(tokens) else ()),
        )

    def _kept_at(
        self, root: Node, path: Sequence[Node], tokens: Sequence[int], ends: Sequence[int], place: int
    ) -> Node | None:
        """The node that stands at `place` with logits, if all of it is stored."""
        depth, inside = divmod(place, BLOCK_TOKENS)
        if depth > len(path):
            return None
        base = path[depth - 1] if depth else root
        node: Node | None = base
        if inside:
            start = base.end
            cuts = [e for e in ends if start < e < place]
            node = self._tree.get(block_key(base.key, tokens[start:place], prefill_schedule(start, place, cuts)))
        if node is None or node.parent is None:
            return None
        stored = self._restorable(node) and self._has(RecordId(node.key, RecordKind.LOGITS))
        return node if stored else None

    def _follow(self, root: Node, tokens: Sequence[int], ends: Sequence[int]) -> list[Node]:
        """The chain of known nodes that this very schedule would make."""
        path: list[Node] = []
        node = root
        while node.end < len(tokens):
            start, end = node.end, min(node.end + BLOCK_TOKENS, len(tokens))
            inside = ends[bisect_right(ends, start) : bisect_left(ends, end)]
            block = tokens[start:end]
            following = self._tree.get(block_key(node.key, block, prefill_schedule(start, end, inside)))
            if following is None and self.share_decoded and end - start == BLOCK_TOKENS:
                following = next(
                    (c for c in node.children if is_decoded(c.schedule) and list(c.tokens) == list(block)), None
                )
            if following is None:
                break
            path.append(following)
            node = following
        return path

    def _why(self, path: Sequence[Node], position: int, known: int) -> MissReason:
        """Why the path could not be used up to `known`."""
        if known - position < BLOCK_TOKENS and (not path or path[-1].end <= position or path[-1].is_tail):
            tail = path[-1] if path and path[-1].end > position else None
            if tail is None or tail.lost is MissReason.NOT_WRITTEN:
                return MissReason.BETWEEN_CHECKPOINTS
        for node in path:
            if node.end > position and any(not self._has(RecordId(node.source, k)) for k in self.layout.kinds):
                return node.lost
        return MissReason.BETWEEN_CHECKPOINTS

    def note_corrupt(self, record: RecordId) -> None:
        """Lets the next receipt say why `record` is gone. Call it before the lookup that named it is released."""
        with self._lock:
            self._forget_lost()
            node = self._tree.get(record.key)
            if node is not None:
                node.lost = MissReason.CORRUPT

    def release(self, lookup: Lookup) -> None:
        """Lets go of what `lookup` pinned. Call it once, after the state was read or the work was given up."""
        if lookup.plan is None:
            return
        with self._lock:
            self.store.unpin(lookup.plan.records)
            for node in reversed(lookup.plan.nodes):
                self._unhold(node)

    # -- commit ---------------------------------------------------------------------------------------------------

    def root(self, owner: str) -> Node:
        """The empty prefix of an owner. With a durable store: OSError if the owner's first key cannot be written."""
        key_id = self._durable.ring.id_of(owner) if self._durable is not None else 0
        with self._lock:
            root = self._tree.root(root_key(self.fingerprint, owner))
            root.key_id = key_id
            return root

    def wants(self, parent: Node, tokens: Sequence[int], schedule: bytes, *, logits: bool) -> tuple[RecordKind, ...]:
        """The record kinds of a place that are not stored yet, so that nobody copies state for nothing."""
        kinds = self.layout.kinds + ((RecordKind.LOGITS,) if logits else ())
        with self._lock:
            node = self._tree.get(block_key(parent.key, tokens, schedule))
            if node is None:
                return kinds
            return tuple(kind for kind in kinds if not self._has(RecordId(node.key, kind)))

    def commit(
        self,
        parent: Node,
        tokens: Sequence[int],
        schedule: bytes,
        payloads: Mapping[RecordKind, bytes | bytearray],
        *,
        explicit: bool,
        passing: Collection[RecordKind] = (),
        patient: bool = False,
    ) -> Commit:
        """Takes over the state behind `parent` + `tokens`. The node is held once for the caller: `let_go` it.

        `passing`: kinds that nobody asked for, whatever `explicit` says of the others. `patient`: if some of it is not
        accepted, `put` will be called with the same payloads.
        """
        with self._lock:
            self._forget_lost()
            node = self._tree.add(parent, tokens, schedule)
            node.holds += 1
        return Commit(node=node, lost=self.put(node, payloads, explicit=explicit, passing=passing, patient=patient))

    def put(
        self,
        node: Node,
        payloads: Mapping[RecordKind, bytes | bytearray],
        *,
        explicit: bool,
        passing: Collection[RecordKind] = (),
        patient: bool = False,
    ) -> PutResult | None:
        """Hands state of a held node to the store; may be repeated. The first refusal that matters, if any."""
        lost: PutResult | None = None
        for kind, payload in payloads.items():
            asked = explicit and kind not in passing
            result = self.store.put(
                RecordId(node.key, kind), payload, explicit=asked, key_id=node.key_id, patient=asked and patient
            )
            if not result.held:
                node.lost = MissReason.NOT_WRITTEN
                if lost is None and asked == explicit:
                    lost = result
        return lost

    def thin(self, newest: Node) -> None:
        """Gives up what the chain that ends at the boundary `newest` has too much of; call it as a run moves there."""
        through = self.checkpoints.policy is CheckpointPolicy.THROUGH
        has_state = RecordKind.STATE in self.layout.kinds
        if newest.is_tail or (through and not (has_state and self.checkpoints.state_spacing)):
            return
        with self._lock:
            path = newest.path()
            chain = [
                Boundary(
                    here.end // BLOCK_TOKENS,
                    held=here.holds > 0,
                    parts=sum(not child.is_tail for child in here.children) > 1,
                    tails=any(child.is_tail for child in here.children),
                )
                for here in path
            ]
            going: list[RecordId] = []
            if has_state:
                surplus = surplus_states(chain, self.checkpoints.state_spacing if through else None)
                going += [RecordId(path[block - 1].key, RecordKind.STATE) for block in surplus]
            if not through and RecordKind.WINDOW in self.layout.kinds:
                surplus = surplus_windows(chain, self.layout.window)
                going += [RecordId(path[block - 1].key, RecordKind.WINDOW) for block in surplus]
            going = [record for record in going if self._has(record)]
            for record in going:
                node = self._tree.get(record.key)
                assert node is not None
                node.lost = MissReason.THINNED
            self.store.delete(going)

    def hold(self, node: Node) -> Node:
        """Keeps `node` known; pairs with `let_go`."""
        with self._lock:
            node.holds += 1
        return node

    def let_go(self, node: Node) -> None:
        with self._lock:
            self._unhold(node)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def add_snapshot(self, owner: str, node: Node, keep: Keep, *, parent: Snapshot | None) -> Snapshot:
        """Names the prefix that ends at `node`. Raises TakenSnapshotId or SnapshotLimit; then nothing has changed."""
        assert node.parent is not None, "the empty prefix has no name"
        now = self._clock()
        ttl = min(keep.ttl if keep.ttl is not None else self.limits.default_ttl, self.limits.max_ttl)
        lineage = ((*parent.lineage, parent.id) if parent else ())[-LINEAGE_LIMIT:]
        snapshot = Snapshot(
            id=keep.snapshot_id or self._new_id(durable=keep.durable),
            owner=owner,
            node=node,
            lineage=lineage,
            created=now,
            last_use=now,
            ttl=ttl,
            expires=now + ttl,
            pinned=keep.pinned,
            labels=dict(keep.labels),
        )
        with self._lock:
            self._snapshots.expire(now)
            self._snapshots.add(snapshot)
            node.holds += 1
            self.store.claim(self._records_of(snapshot))
            if snapshot.pinned:
                self.store.pin(self._records_of(snapshot))
        return snapshot

    def check_room(self, owner: str, *, count: int, pinned: int) -> None:
        """Raises SnapshotLimit if so many more snapshots would not fit."""
        with self._lock:
            self._snapshots.expire(self._clock())
            self._snapshots.check_room(owner, count=count, pinned=pinned)

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
        """What a rollback of `source` to `cut` gives up."""
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
        """Changes what can change. Raises SnapshotLimit on one pin too many; then nothing has changed."""
        with self._lock:
            if pinned and not snapshot.pinned:
                self._snapshots.check_room(snapshot.owner, count=0, pinned=1, snapshot_id=snapshot.id)
                self.store.pin(self._records_of(snapshot))
            if pinned is False and snapshot.pinned:
                self.store.unpin(self._records_of(snapshot))
            if pinned is not None:
                snapshot.pinned = pinned
            if labels is not None:
                snapshot.labels = dict(labels)
            now = self._clock()
            if ttl is not None:
                snapshot.ttl = min(ttl, self.limits.max_ttl)
                snapshot.expires = now + snapshot.ttl
            if expires is not None:
                snapshot.expires = min(expires, now + self.limits.max_ttl)
            self._changed(snapshot)

    def extend(self, snapshot: Snapshot, ttl: float | None) -> None:
        """More time from now on; never less than promised."""
        with self._lock:
            if ttl is not None:
                snapshot.ttl = min(ttl, self.limits.max_ttl)
            snapshot.expires = max(snapshot.expires, self._clock() + snapshot.ttl)
            self._changed(snapshot)

    def cut(self, node: Node, position: int) -> Node | None:
        """A node that ends exactly at `position` of `node`'s prefix and needs no compute; None if there is none.

        Held once for the caller. That is a node on the path, a kept tail in the same place, or, where every layer
        keeps every token, a block trimmed to size.
        """
        with self._lock:
            path = node.path()
            base = node.ancestor_at(position)
            if base.end == position:
                found: Node | None = base if self._restorable(base) else None
            else:
                through = next(n for n in path if n.start < position <= n.end)
                head = through.tokens[: position - through.start]
                found = through if through.end == position and self._restorable(through) else None
                if found is None:
                    # A tail made in passing (a mark, a snapshot) lies on this path if the block went on from it.
                    for tail in base.children:
                        if tail.end == position and tail.tokens == head and self._passes(tail, through):
                            found = tail if self._restorable(tail) else found
                stored = self._has(RecordId(through.source, RecordKind.FULL)) and self._restorable(base)
                if found is None and self.layout.trimmable and stored:
                    found = self._tree.add(base, head, trimmed_schedule(through.source))
                    if found.borrows is None:
                        found.borrows = through
                        through.holds += 1
            if found is not None:
                found.holds += 1
            return found

    def hold_base(self, node: Node, position: int) -> Node:
        """The deepest place on `node`'s path before `position` that can be restored, else the root. Held once."""
        with self._lock:
            stored = self.checkpoints_before(node, position)
            found = self.cut(node, stored) if stored else None
            return found if found is not None else self.hold(node.ancestor_at(0))

    def checkpoints_before(self, node: Node, position: int) -> int:
        """The deepest stored position at or before `position` on `node`'s path, kept tails included; 0 if none."""
        with self._lock:
            path = [here for here in node.path() if here.start < position]
            whole = [here for here in path if here.end <= position]
            target = whole[-1].end if whole else 0
            plan = plan_restore(whole, self.layout, self._has, target=target, more_follows=True)
            best = plan.position if plan else 0
            for here in reversed(path):
                if here.end <= best:
                    break
                assert here.parent is not None
                for tail in here.parent.children:
                    if tail.is_tail and best < tail.end <= position and self._passes(tail, here):
                        best = tail.end if self._restorable(tail) else best
            return best

    @staticmethod
    def _passes(tail: Node, through: Node) -> bool:
        """Whether `tail` is a state of the same tokens that the run behind `through` may be cut to.

        A prefilled tail always is: it is what a cold run that stops there computes. A decoded one only if the same
        generation made both.
        """
        length = len(tail.tokens)
        if length > len(through.tokens) or tail.tokens != through.tokens[:length]:
            return False
        return not is_decoded(tail.schedule) or tail.schedule == through.schedule

    def state_of(self, snapshot: Snapshot) -> SnapshotState:
        """Where the state behind a name is now."""
        with self._lock:
            path = snapshot.node.path()
            end = snapshot.node.end
            plan = plan_restore(path, self.layout, self._has, target=end, more_follows=True)
            full = [node for node in path if not node.is_tail]
            grid = plan_restore(full, self.layout, self._has, target=full[-1].end, more_follows=True) if full else None
            return SnapshotState(
                restorable=plan.position if plan else 0,
                disk_tokens=self._disk_tokens(plan) if plan else 0,
                checkpointed=grid.position if grid else 0,
                exclusive_bytes=self._exclusive_bytes(snapshot.node),
                on_disk=snapshot.durable
                and all(
                    self.store.locate(record) is Tier.DISK for record, _ in needed(path, self.layout, logits=False)
                ),
            )

    def recompute_tokens(self, node: Node, position: int) -> int:
        """What a branch at `position` of `node`'s prefix would cost now: tokens computed again to stand there."""
        with self._lock:
            path = [here for here in node.path() if here.start < position]
            plan = plan_restore(path, self.layout, self._has, target=position, more_follows=True)
            return position - max(plan.position if plan else 0, self.checkpoints_before(node, position))

    def why_recomputed(self, node: Node, position: int) -> MissReason:
        """Why `recompute_tokens` is more than the grid's share; NONE if it is not."""
        with self._lock:
            stored = self.checkpoints_before(node, position)
            for here in node.path():
                missing = any(not self._has(RecordId(here.source, kind)) for kind in self.layout.kinds)
                if stored < here.end <= position and missing:
                    return here.lost
            return MissReason.NONE

    def stands(self, node: Node) -> bool:
        """Whether all that standing at the end of `node` takes is stored."""
        with self._lock:
            return self._restorable(node)

    def stored_tokens(self, node: Node) -> tuple[int, int]:
        """How much of `node`'s prefix can be restored, and of how much of that some layer's state is on disk."""
        with self._lock:
            plan = plan_restore(node.path(), self.layout, self._has, target=node.end, more_follows=True)
            return (plan.position, self._disk_tokens(plan)) if plan else (0, 0)

    def rehome(self, snapshot: Snapshot, node: Node) -> None:
        """Lets a handle whose state was computed again stand on the new state. The tokens are the same."""
        with self._lock:
            if self._snapshots_gone(snapshot):
                return
            if node is snapshot.node:
                self._record_move(snapshot)  # what was computed again is to be on disk again
                return
            assert node.end == snapshot.node.end and node.content == snapshot.node.content
            pinned = snapshot.pinned
            if pinned:
                self.store.unpin(self._records_of(snapshot))
            old, snapshot.node = snapshot.node, node
            node.holds += 1
            self.store.claim(self._records_of(snapshot))
            if pinned:
                self.store.pin(self._records_of(snapshot))
            self._record_move(snapshot)
            self._unhold(old)

    def sweep(self) -> None:
        """Ends what is over and forgets what the store lost; call it now and then."""
        with self._lock:
            self._snapshots.expire(self._clock())
            self._forget_lost()
            if self._journal is not None:
                self._journal.sweep()

    # -- durable stores -------------------------------------------------------------------------------------------

    def make_durable(self, snapshot: Snapshot, done: Callable[[StoreError | None], None]) -> None:
        """Brings a snapshot to disk with its state. `done` is told the error, or None once it survives a power cut.

        It runs on the store's I/O thread and must not block. Until then the snapshot is in use.
        """
        assert self._journal is not None, "the store is ephemeral"

        def safe(error: StoreError | None) -> None:
            with self._lock:
                snapshot.durable = snapshot.durable or error is None
                snapshot.uses -= 1
            done(error)

        with self._lock:
            snapshot.uses += 1
            snapshot.recorded = True
            records = self._records_of(snapshot)
            logits = [record for record in records if record.kind is RecordKind.LOGITS]  # a boundary may have none
            self._journal.save(snapshot, records[: len(records) - len(logits)], logits, safe)

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

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _find(self, owner: str, snapshot_id: str) -> Snapshot:
        try:
            return self._snapshots.find(owner, snapshot_id, self._clock())
        except UnknownSnapshot:
            opening = opening_of(snapshot_id)
            if self._durable is not None and opening is not None and opening < self._durable.opening:
                raise NotDurableSnapshot(snapshot_id, boot_id(self._durable.instance, opening)) from None
            raise

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
            self._journal.moved(snapshot, self._records_of(snapshot))

    def _has(self, record: RecordId) -> bool:
        return self.store.locate(record) is not None

    def _restorable(self, node: Node) -> bool:
        return all(self._has(record) for record, _ in needed(node.path(), self.layout, logits=False))

    def _records_of(self, snapshot: Snapshot) -> list[RecordId]:
        return [record for record, _ in needed(snapshot.node.path(), self.layout, logits=True)]

    def _snapshots_gone(self, snapshot: Snapshot) -> bool:
        return all(s is not snapshot for s in self._snapshots.of(snapshot.owner))

    def _disk_tokens(self, plan: RestorePlan) -> int:
        tiers = [self.store.locate(record) or Tier.DISK for record in plan.records]
        return disk_tokens(plan, tiers)

    def _exclusive_bytes(self, node: Node) -> int:
        total = 0
        here = node
        while here.parent is not None and here.holds <= 1 and len(here.children) <= (0 if here is node else 1):
            if here is not node and here.holds > 0:
                break
            for kind in (*self.layout.kinds, RecordKind.LOGITS):
                total += self.store.size(RecordId(here.key, kind)) or 0
            here = here.parent
        return total

    def _forget(self, snapshot: Snapshot) -> None:
        """Called by the registry, in the lock, when a name ends."""
        if snapshot.pinned:
            self.store.unpin(self._records_of(snapshot))
        if self._journal is not None and snapshot.recorded:
            self._journal.gone(snapshot)
            snapshot.recorded = False  # whoever still holds it writes no more
        self._unhold(snapshot.node)

    def _unhold(self, node: Node) -> None:
        node.holds -= 1
        assert node.holds >= 0, node
        if node.holds == 0 and node.is_tail:
            # A tail serves its snapshot alone; full blocks stay, as long as the store keeps them.
            self.store.delete([RecordId(node.key, kind) for kind in (*self.layout.kinds, RecordKind.LOGITS)])
        self._prune(node)

    def _prune(self, node: Node) -> None:
        todo = [node]
        while todo:
            here = todo.pop()
            if here.parent is None or here.holds or here.children or self._tree.get(here.key) is not here:
                continue
            if any(self._has(RecordId(here.key, kind)) for kind in (*self.layout.kinds, RecordKind.LOGITS)):
                continue
            todo += self._tree.discard(here)
            if here.borrows is not None:
                self._unhold(here.borrows)

    def _forget_lost(self) -> None:
        """Takes note of records that the store gave up."""
        for record in self.store.drain_evicted():
            node = self._tree.get(record.key)
            if node is not None:
                node.lost = MissReason.EVICTED
                self._prune(node)


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
    match = re.fullmatch(r"s[0-9a-v]{26}-m([0-9]{1,10})", snapshot_id)
    return int(match[1]) if match else None
