"""What is known of a prompt, and from where to go on. Owns matching a prompt to stored prefixes; reads, never writes.

Behind an explicit parent any state may be used; by content, only what a cold run of the very same cuts would make. Not
thread-safe: `kvcache.cache` holds the lock, and pins what a plan names.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.blocks import BLOCK_TOKENS, BlockKey, as_array, block_key
from kvcache.media import MediaSpan
from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind
from kvcache.restore import RestorePlan
from kvcache.schedule import (
    after_image,
    continued_schedule,
    cut_by_image,
    is_decoded,
    is_trimmed,
    prefill_schedule,
    replay_cuts,
    whole_spans,
)
from kvcache.stock import Stock
from kvcache.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is known of a prompt, and from where to go on. Release it with `PrefixCache.release`: as it was returned."""

    plan: RestorePlan | None
    known: int
    """Tokens that were computed once, whether or not their state can be used. Behind a parent those up to its end, as
    its handle promises, and of those beyond what stands."""

    miss_reason: MissReason  # why `plan` stops short of `known`
    replay: tuple[int, ...] = ()  # cuts of the parent's own run, to make again where it is computed again
    stands: bool = True  # all state at the parent's end is stored, though its logits may be missing
    own_until: int = 0  # of the parent: up to here its state came about by decode or a cut, which no prefill repeats
    kept: tuple[Node, ...] = ()  # places asked for that are stored already, at or before the position

    @property
    def position(self) -> int:
        """Tokens whose state can be restored."""
        return self.plan.position if self.plan else 0

    @property
    def as_made(self) -> bool:
        """Whether what of the parent is to be computed comes of the very calls that made it, and so has its bits."""
        return self.position >= self.own_until

    def without_state(self) -> Lookup:
        """The same, as if nothing could be read."""
        return replace(self, plan=None, kept=(), miss_reason=MissReason.CORRUPT, stands=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The blocks that a prefill of `tokens` makes: from the root, or behind an explicit parent."""

    tokens: array[int]
    start: Node  # the full block, or root, that the first of them follows
    base: Node | None
    stops: Sequence[int]  # places to keep, in order
    whole: Sequence[MediaSpan]

    def key_of(self, before: Node, end: int) -> BlockKey:
        """Of the block, or tail, that follows `before` up to `end`."""
        start = before.end
        cuts = [*_between(self.stops, start, end), *cut_by_image(self.whole, start, end)]
        if self.base is not None and self.base.is_tail and self.base.start == start:
            cuts = [cut for cut in cuts if cut > self.base.end]
            schedule = continued_schedule(self.base.schedule, start, self.base.end, end, cuts)
        else:
            schedule = prefill_schedule(start, end, cuts)
        return block_key(before.key, self.tokens[start:end], schedule)


class Matcher:
    """Finds where a run may begin."""

    def __init__(self, stock: Stock, *, share_decoded: bool) -> None:
        self._stock = stock
        self._share_decoded = share_decoded

    def behind(self, tokens: Sequence[int], base: Node, keep: set[int]) -> Lookup:
        """From an explicit parent, of which `tokens` are a continuation, or from where such a run has been before."""
        path = base.path()
        replay = [cut for node in path for cut in replay_cuts(node.start, node.schedule)] + [base.end]
        own_until = max((node.end for node in path if is_decoded(node.schedule)), default=0)
        further = self._further(tokens, base, keep)
        if further is not None:
            return replace(further, replay=tuple(replay), own_until=own_until)
        plan = self._stock.plan(path, target=base.end, more_follows=len(tokens) > base.end)
        position = plan.position if plan else 0
        stands = position == base.end or self._stock.restorable(base)
        reason = MissReason.NONE
        if position < base.end and not stands:
            reason = self._why(path, position, base.end)
        elif position < base.end:  # its logits are missing; a cut never had any
            lost = base.why_lost(RecordKind.LOGITS) or MissReason.NOT_WRITTEN
            reason = MissReason.BETWEEN_CHECKPOINTS if is_trimmed(base.schedule) else lost
        return Lookup(
            plan=plan,
            known=base.end,
            miss_reason=reason,
            replay=tuple(replay),
            stands=stands,
            own_until=own_until,
            kept=(base,) if position == len(tokens) and position in keep else (),
        )

    def _further(self, tokens: Sequence[int], base: Node, keep: set[int]) -> Lookup | None:
        """Beyond the parent's end: an earlier prefill of the same tokens behind the same state."""
        line = self._line(tokens, base.parent if base.is_tail else base, base, keep)
        path = self._follow(line)
        if not path or path[-1].end <= base.end:
            return None
        places = {place for place in keep if place > base.end}
        plan, kept, _ = self._deepest(line, path, path[-1].end, places)
        if plan is None or plan.position <= base.end:
            return None
        return Lookup(plan=plan, known=plan.position, miss_reason=MissReason.NONE, kept=kept)

    def by_content(self, root: Node, tokens: Sequence[int], keep: set[int]) -> Lookup:
        """From the blocks behind `root` that a cold run over `tokens` would make."""
        line = self._line(tokens, root, None, keep)
        path = self._follow(line)
        deepest = next((node for node in reversed(path) if not node.is_tail), root)
        further, known = self._stock.tree.known_prefix(deepest, line.tokens)
        seen = deepest.end + len(further) * BLOCK_TOKENS  # whole blocks that were computed once, in whatever way
        plan, kept, path = self._deepest(line, path, path[-1].end if path else 0, keep)
        position = plan.position if plan else 0
        known = max(known, position)
        reason = MissReason.NONE
        if position < known:
            exact_end = path[-1].end if path else 0
            reason = MissReason.PROVENANCE if seen > exact_end else self._why(path, position, known)
        return Lookup(plan=plan, known=known, miss_reason=reason, kept=kept)

    def _line(self, tokens: Sequence[int], start: Node | None, base: Node | None, keep: set[int]) -> _Line:
        assert start is not None, "a tail follows something"
        tokens = as_array(tokens)
        whole = whole_spans(tokens, self._stock.layout)
        stops = sorted({after_image(whole, place) for place in keep if place < len(tokens)})
        return _Line(tokens=tokens, start=start, base=base, stops=stops, whole=whole)

    def _deepest(
        self, line: _Line, path: list[Node], target: int, keep: set[int]
    ) -> tuple[RestorePlan | None, tuple[Node, ...], list[Node]]:
        """The plan to stand as far on as possible, what of `keep` needs no call, and what of `path` counts."""
        tokens = line.tokens
        kept: list[Node] = []
        for place in sorted(keep - {len(tokens)}):
            node = self._kept_at(line, path, place)
            if node is None:
                target = min(target, place - 1)  # it has to be passed again
                break
            kept.append(node)
        plan = None
        while path and plan is None:
            plan = self._stock.plan(path, target=target, more_follows=target < len(tokens))
            if plan is not None and plan.position != plan.nodes[-1].end:
                # Only an explicit handle may stand inside a block: a cold run makes no cut there.
                plan, path = None, path[:-1]
                target = min(target, path[-1].end) if path else 0
            elif plan is None:
                break
        for node in reversed(kept):
            if node.end > (plan.position if plan else 0):
                # A place passed before under this very schedule is nearer than the block before it.
                plan = self._stock.plan(node.path(), target=node.end, more_follows=True) or plan
        if plan is None:
            return None, (), path
        at_end = plan.nodes[-1:] if plan.position == len(tokens) and len(tokens) in keep else ()
        return plan, (*(node for node in kept if node.end <= plan.position), *at_end), path

    def _kept_at(self, line: _Line, path: Sequence[Node], place: int) -> Node | None:
        """The node that stands at `place` with logits, if all of it is stored."""
        depth, inside = divmod(place, BLOCK_TOKENS)
        if depth > len(path):
            return None
        before = path[depth - 1] if depth else line.start.ancestor_at(0)
        node = self._stock.tree.get(line.key_of(before, place)) if inside else before
        if node is None or node.parent is None:
            return None
        stored = self._stock.restorable(node) and self._stock.has(RecordId(node.key, RecordKind.LOGITS))
        return node if stored else None

    def _follow(self, line: _Line) -> list[Node]:
        """The chain of known nodes, from the first one on, that this very schedule would make."""
        path, node = line.start.path(), line.start
        tokens = line.tokens
        for start in range(node.end, len(tokens), BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            following = self._stock.tree.get(line.key_of(node, start + len(block)))
            if following is None and self._share_decoded and line.base is None and len(block) == BLOCK_TOKENS:
                # For implicit matches only: a handle stands for its own state, and nobody else's takes its place.
                following = next((c for c in node.children if is_decoded(c.schedule) and c.tokens == block), None)
            if following is None:
                break
            path.append(following)
            node = following
        return path

    def _why(self, path: Sequence[Node], position: int, known: int) -> MissReason:
        """Why the path could not be used up to `known`."""
        if known - position < BLOCK_TOKENS and (not path or path[-1].end <= position or path[-1].is_tail):
            tail = path[-1] if path and path[-1].end > position else None
            if tail is None or all(tail.why_lost(kind) is None for kind in self._stock.layout.kinds):
                return MissReason.BETWEEN_CHECKPOINTS
        return self._stock.why_missing(path, position, path[-1].end if path else 0) or MissReason.BETWEEN_CHECKPOINTS


def _between(stops: Sequence[int], start: int, end: int) -> Sequence[int]:
    """The stops strictly inside a block; the grid makes no cut there, and an image's end is added by the caller."""
    return stops[bisect_right(stops, start) : bisect_left(stops, end)] if stops else ()
