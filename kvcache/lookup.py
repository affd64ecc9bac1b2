"""What is known of a prompt, and from where to go on. Owns matching a prompt to stored prefixes; reads, never writes.

Behind an explicit parent any state may be used; by content, only what a cold run of the very same cuts would make. Not
thread-safe: `kvcache.cache` holds the lock, and pins what a plan names.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.blocks import BLOCK_TOKENS, as_array, block_key
from kvcache.media import MediaSpan
from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind
from kvcache.restore import RestorePlan
from kvcache.schedule import after_image, cut_by_image, is_decoded, prefill_schedule, replay_cuts, whole_spans
from kvcache.stock import Stock
from kvcache.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is known of a prompt, and from where to go on. Release it with `PrefixCache.release`: as it was returned."""

    plan: RestorePlan | None
    known: int  # tokens that were computed once, whether or not their state can be used
    miss_reason: MissReason  # why `plan` stops short of `known`
    replay: tuple[int, ...] = ()  # cuts of the parent's own run, to make again where it is computed again
    kept: tuple[Node, ...] = ()  # places asked for that are stored already, at or before the position

    @property
    def position(self) -> int:
        """Tokens whose state can be restored."""
        return self.plan.position if self.plan else 0

    def without_state(self) -> Lookup:
        """The same, as if nothing could be read."""
        return replace(self, plan=None, kept=(), miss_reason=MissReason.CORRUPT)


class Matcher:
    """Finds where a run may begin."""

    def __init__(self, stock: Stock, *, share_decoded: bool) -> None:
        self._stock = stock
        self._share_decoded = share_decoded

    def behind(self, tokens: Sequence[int], base: Node) -> Lookup:
        """From an explicit parent, of which `tokens` are a continuation."""
        path = base.path()
        plan = self._stock.plan(path, target=base.end, more_follows=len(tokens) > base.end)
        position = plan.position if plan else 0
        replay = [cut for node in path for cut in replay_cuts(node.start, node.schedule)] + [base.end]
        return Lookup(
            plan=plan,
            known=base.end,
            miss_reason=MissReason.NONE if position == base.end else self._why(path, position, base.end),
            replay=tuple(replay),
        )

    def by_content(self, root: Node, tokens: Sequence[int], keep: set[int]) -> Lookup:
        """From the blocks behind `root` that a cold run over `tokens` would make."""
        tokens = as_array(tokens)
        whole = whole_spans(tokens, self._stock.layout)
        stops = sorted({after_image(whole, place) for place in keep if place < len(tokens)})
        path = self._follow(root, tokens, stops, whole)
        target = path[-1].end if path else 0
        deepest = next((node for node in reversed(path) if not node.is_tail), root)
        further, known = self._stock.tree.known_prefix(deepest, tokens)
        seen = deepest.end + len(further) * BLOCK_TOKENS  # whole blocks that were computed once, in whatever way
        kept: list[Node] = []
        for place in sorted(keep - {len(tokens)}):
            node = self._kept_at(root, path, tokens, stops, whole, place)
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
        position = plan.position if plan else 0
        known = max(known, position)
        reason = MissReason.NONE
        if position < known:
            exact_end = path[-1].end if path else 0
            reason = MissReason.PROVENANCE if seen > exact_end else self._why(path, position, known)
        return Lookup(
            plan=plan,
            known=known,
            miss_reason=reason,
            kept=tuple(node for node in kept if node.end <= position)
            + ((plan.nodes[-1],) if plan and position in keep and position == len(tokens) else ()),
        )

    def _kept_at(
        self,
        root: Node,
        path: Sequence[Node],
        tokens: array[int],
        stops: Sequence[int],
        whole: Sequence[MediaSpan],
        place: int,
    ) -> Node | None:
        """The node that stands at `place` with logits, if all of it is stored."""
        depth, inside = divmod(place, BLOCK_TOKENS)
        if depth > len(path):
            return None
        base = path[depth - 1] if depth else root
        node: Node | None = base
        if inside:
            start = base.end
            cuts = [*_between(stops, start, place), *cut_by_image(whole, start, place)]
            node = self._stock.tree.get(block_key(base.key, tokens[start:place], prefill_schedule(start, place, cuts)))
        if node is None or node.parent is None:
            return None
        stored = self._stock.restorable(node) and self._stock.has(RecordId(node.key, RecordKind.LOGITS))
        return node if stored else None

    def _follow(self, root: Node, tokens: array[int], stops: Sequence[int], whole: Sequence[MediaSpan]) -> list[Node]:
        """The chain of known nodes that this very schedule would make."""
        path: list[Node] = []
        node, tree = root, self._stock.tree
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            end = start + len(block)
            cuts = [*_between(stops, start, end), *cut_by_image(whole, start, end)]
            following = tree.get(block_key(node.key, block, prefill_schedule(start, end, cuts)))
            if following is None and self._share_decoded and len(block) == BLOCK_TOKENS:
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
