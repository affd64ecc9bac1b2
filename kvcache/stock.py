"""The tree of blocks with what the store holds of it. Owns how long nodes live; knows nothing of names or prompts.

A node goes as soon as nothing holds it and no record of it is left; a tail's records go with its last hold. Not
thread-safe: `kvcache.cache` holds the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.blocks import BLOCK_TOKENS
from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.eviction import Place
from kvcache.layout import CacheLayout
from kvcache.receipt import MissReason
from kvcache.records import Loss, RecordId, RecordKind, Tier
from kvcache.restore import RestorePlan, disk_tokens, may_stand, needed, plan_restore
from kvcache.store import TieredStore
from kvcache.thinning import Boundary, surplus_states, surplus_windows
from kvcache.tree import BlockTree, Node

_REASONS = {
    Loss.EVICTED: MissReason.EVICTED,
    Loss.NOT_WRITTEN: MissReason.NOT_WRITTEN,
    Loss.CORRUPT: MissReason.CORRUPT,
}


class Stock:
    """Nodes, and which of their records are there."""

    def __init__(self, store: TieredStore, layout: CacheLayout) -> None:
        self.store = store
        self.layout = layout
        self.tree = BlockTree()

    def has(self, record: RecordId) -> bool:
        return self.store.locate(record) is not None

    def restorable(self, node: Node) -> bool:
        here = may_stand(node, self.layout)
        return here and all(self.has(record) for record, _ in needed(node.path(), self.layout, logits=False))

    def records_of(self, node: Node) -> list[RecordId]:
        """What makes the end of `node` usable, next-token logits included."""
        return [record for record, _ in needed(node.path(), self.layout, logits=True)]

    def place_of(self, node: Node) -> Place:
        """What the store has to know of a node to judge what its records are worth."""
        assert node.parent is not None
        before = node.borrows if node.borrows is not None else node.parent
        kinds = self.layout.kinds if node.borrows is None else ()
        reach: list[bytes] = []
        here: Node = node.parent
        while here.parent is not None and here.end > node.end - self.layout.window:
            reach.append(here.key)
            here = here.parent
        parent = before.key if before.parent is not None else None
        return Place(key=node.key, parent=parent, end=node.end, kinds=kinds, reach=tuple(reach))

    def why_missing(self, path: Sequence[Node], position: int, known: int) -> MissReason | None:
        """Why one stands on `path` at `position` only, and not further on up to `known`; None: all of it is there."""
        path = [node for node in path if node.end <= known]
        if not path or path[-1].end <= position:
            return None
        if RecordKind.STATE in self.layout.kinds:
            # What the deepest place lacks is the cause: boundaries before it may have been thinned for good reason.
            for record, _ in reversed(needed(path, self.layout, logits=False)):
                owner = self.tree.get(record.key)
                if owner is not None and not self.has(record):
                    return owner.why_lost(record.kind) or MissReason.NOT_WRITTEN
            return None
        for node in path:
            missing = [kind for kind in self.layout.kinds if not self.has(RecordId(node.source, kind))]
            if node.end > position and missing:
                return node.why_lost(missing[0]) or MissReason.NOT_WRITTEN
        return None

    def why_not(self, node: Node) -> MissReason:
        """Why one cannot stand at the end of `node`, from the deepest record that is missing; NONE if one can."""
        for record, _ in reversed(needed(node.path(), self.layout, logits=False)):
            owner = self.tree.get(record.key)
            if not self.has(record):
                return (owner.why_lost(record.kind) if owner is not None else None) or MissReason.NOT_WRITTEN
        return MissReason.NONE

    def plan(self, path: Sequence[Node], *, target: int, more_follows: bool) -> RestorePlan | None:
        """The deepest position at or before `target` of which everything is stored."""
        return plan_restore(path, self.layout, self.has, target=target, more_follows=more_follows)

    def disk_tokens(self, plan: RestorePlan) -> int:
        tiers = [self.store.locate(record) or Tier.DISK for record in plan.records]
        return disk_tokens(plan, tiers)

    def exclusive_bytes(self, node: Node) -> int:
        total = 0
        here = node
        while here.parent is not None and here.holds <= 1 and len(here.children) <= (0 if here is node else 1):
            if here is not node and here.holds > 0:
                break
            for kind in (*self.layout.kinds, RecordKind.LOGITS):
                total += self.store.size(RecordId(here.key, kind)) or 0
            here = here.parent
        return total

    def follow(self, node: Node) -> Node:
        """Holds a node for a run that goes on from it: nothing of it is evicted meanwhile, nor what that stands on."""
        node.holds += 1
        node.followed += 1
        if node.followed == 1 and node.parent is not None:
            self.store.guard(self.place_of(node))
        return node

    def unfollow(self, node: Node) -> None:
        node.followed -= 1
        assert node.followed >= 0, node
        if node.followed == 0 and node.parent is not None:
            self.store.unguard(node.key)
        self.unhold(node)

    def unhold(self, node: Node) -> None:
        node.holds -= 1
        assert node.holds >= 0, node
        if node.holds == 0 and node.is_tail:
            # A tail serves its snapshot alone; full blocks stay, as long as the store keeps them.
            self.store.delete([RecordId(node.key, kind) for kind in (*self.layout.kinds, RecordKind.LOGITS)])
        self.prune(node)

    def prune(self, node: Node) -> None:
        todo = [node]
        while todo:
            here = todo.pop()
            if here.parent is None or here.holds or here.children or self.tree.get(here.key) is not here:
                continue
            if any(self.has(RecordId(here.key, kind)) for kind in (*self.layout.kinds, RecordKind.LOGITS)):
                continue
            todo += self.tree.discard(here)
            if here.borrows is not None:
                self.unhold(here.borrows)

    def forget_lost(self) -> None:
        """Takes note of records that the store gave up."""
        for record, why in self.store.drain_lost().items():
            node = self.tree.get(record.key)
            if node is not None:
                node.note_lost(record.kind, _REASONS[why])
                self.prune(node)

    def kept(self, node: Node) -> None:
        """Takes note that records of `node` were stored: what was lost once is there again."""
        for kind in RecordKind:
            if node.why_lost(kind) is not None and self.has(RecordId(node.key, kind)):
                node.note_kept(kind)

    def thin(self, newest: Node, checkpoints: Checkpoints) -> None:
        """Gives up what the chain that ends at the boundary `newest` has too much of."""
        through = checkpoints.policy is CheckpointPolicy.THROUGH
        has_state = RecordKind.STATE in self.layout.kinds
        if newest.is_tail or (through and not (has_state and checkpoints.state_spacing)):
            return
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
        surplus: list[RecordId] = []
        if has_state:
            blocks = surplus_states(chain, checkpoints.state_spacing if through else None)
            surplus += [RecordId(path[block - 1].key, RecordKind.STATE) for block in blocks]
        if not through and RecordKind.WINDOW in self.layout.kinds:
            blocks = surplus_windows(chain, self.layout.window)
            surplus += [RecordId(path[block - 1].key, RecordKind.WINDOW) for block in blocks]
        surplus = [record for record in surplus if self.has(record)]
        self.forget_lost()
        for record in surplus:
            node = self.tree.get(record.key)
            assert node is not None
            node.note_lost(record.kind, MissReason.THINNED)
        self.store.delete(surplus)
        for record in self.store.drain_lost():  # of no use without what was thinned
            node = self.tree.get(record.key)
            if node is not None:
                node.note_lost(record.kind, MissReason.THINNED)
                self.prune(node)
