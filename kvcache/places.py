"""Places on a known prefix: where it can be cut without compute, and where the state behind it is.

Owns what rollback and fork may stand on. Not thread-safe: `kvcache.cache` holds the lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind, Tier
from kvcache.restore import needed
from kvcache.schedule import is_decoded, trimmed_schedule
from kvcache.snapshots import Snapshot
from kvcache.stock import Stock
from kvcache.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotState:
    """Where a snapshot's state is at this moment."""

    restorable: int  # deepest position that can be restored
    missing: int  # tokens that the dearest next use computes again, beside the last one, which no logits are kept for
    disk_tokens: int  # of them: tokens of which some layer's state is on disk
    checkpointed: int  # deepest full-block boundary that can be restored
    exclusive_bytes: int
    on_disk: bool  # of a durable snapshot: all that standing at its end takes


class Places:
    """Answers about stored places; `cut` may add a node that borrows from a longer one."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock

    def cut(self, node: Node, position: int) -> Node | None:
        """A node that ends exactly at `position` of `node`'s prefix and needs no compute; None if there is none.

        Held once for the caller. That is a node on the path, a kept tail in the same place, or, where every layer
        keeps every token, a block trimmed to size.
        """
        path = node.path()
        base = node.ancestor_at(position)
        if base.end == position:
            found: Node | None = base if self._stock.restorable(base) else None
        else:
            through = next(n for n in path if n.start < position <= n.end)
            head = through.tokens[: position - through.start]
            found = through if through.end == position and self._stock.restorable(through) else None
            if found is None:
                # A tail made in passing (a mark, a snapshot) lies on this path if the block went on from it.
                for tail in base.children:
                    if tail.end == position and tail.tokens == head and self._passes(tail, through):
                        found = tail if self._stock.restorable(tail) else found
            stored = self._stock.has(RecordId(through.source, RecordKind.FULL)) and self._stock.restorable(base)
            if found is None and self._stock.layout.trimmable and stored:
                found = self._stock.tree.add(base, head, trimmed_schedule(through.source))
                if found.borrows is None:
                    # A piece of a piece reads from the block that both are cut from: nobody has to walk a chain.
                    found.borrows = through.borrows or through
                    found.borrows.holds += 1
        if found is not None:
            found.holds += 1
        return found

    def ready(self, node: Node) -> bool:
        """Whether any call may go on from the end of `node`: with input at no cost, without it for one token at most.

        That one is the price of a cut, or of decode, where every layer keeps every token and the logits are missing.
        """
        if not self._stock.restorable(node):
            return False
        cheap = self._stock.layout.trimmable and is_decoded(node.schedule)
        return cheap or self._stock.has(RecordId(node.key, RecordKind.LOGITS))

    def lost_source(self, node: Node) -> Node | None:
        """Of a cut whose state is lost: the block that it was cut from, if prefill brings that back as it was."""
        source = node.borrows
        if source is None or self._stock.restorable(node):
            return None
        path = source.path()
        plan = self._stock.plan(path, target=source.end, more_follows=True)
        position = plan.position if plan else 0
        return None if any(is_decoded(here.schedule) for here in path if here.end > position) else source

    def hold_base(self, node: Node, position: int) -> Node:
        """The deepest place on `node`'s path before `position` that can be restored, else the root. Held once."""
        stored = self.checkpoints_before(node, position)
        found = self.cut(node, stored) if stored else None
        if found is None:
            found = node.ancestor_at(0)
            found.holds += 1
        return found

    def checkpoints_before(self, node: Node, position: int) -> int:
        """The deepest stored position at or before `position` on `node`'s path, kept tails included; 0 if none."""
        path = [here for here in node.path() if here.start < position]
        whole = [here for here in path if here.end <= position]
        target = whole[-1].end if whole else 0
        plan = self._stock.plan(whole, target=target, more_follows=True)
        best = plan.position if plan else 0
        for here in reversed(path):
            if here.end <= best:
                break
            assert here.parent is not None
            for tail in here.parent.children:
                if tail.is_tail and best < tail.end <= position and self._passes(tail, here):
                    best = tail.end if self._stock.restorable(tail) else best
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

    def why_recomputed(self, node: Node, position: int) -> MissReason:
        """Why no state stands at the last boundary or kept place before `position`; NONE if one does."""
        stored = self.checkpoints_before(node, position)
        return self._stock.why_missing(node.path(), stored, position) or MissReason.NONE

    def state_of(self, snapshot: Snapshot) -> SnapshotState:
        """Where the state behind a name is now."""
        path = snapshot.node.path()
        end = snapshot.node.end
        plan = self._stock.plan(path, target=end, more_follows=True)
        full = [node for node in path if not node.is_tail]
        position = plan.position if plan else 0
        missing = end - position
        if not missing and not self.ready(snapshot.node):
            bare = self._stock.plan(path, target=end, more_follows=False)
            missing = end - (bare.position if bare else 0)
        grid = self._stock.plan(full, target=full[-1].end, more_follows=True) if full else None
        return SnapshotState(
            restorable=position,
            missing=missing,
            disk_tokens=self._stock.disk_tokens(plan) if plan else 0,
            checkpointed=grid.position if grid else 0,
            exclusive_bytes=self._stock.exclusive_bytes(snapshot.node),
            on_disk=snapshot.durable
            and all(
                self._stock.store.locate(record) is Tier.DISK
                for record, _ in needed(path, self._stock.layout, logits=False)
            ),
        )

    def stored_tokens(self, node: Node) -> tuple[int, int]:
        """How much of `node`'s prefix can be restored, and of how much of that some layer's state is on disk."""
        plan = self._stock.plan(node.path(), target=node.end, more_follows=True)
        return (plan.position, self._stock.disk_tokens(plan)) if plan else (0, 0)
