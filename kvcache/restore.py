"""Restore planning. Owns which stored records make a prefix usable again; pure.

A restore is whole or not at all: a position is offered only if every record that its layers need is there. A `full`
layer needs every block up to the position, a `window` layer the blocks that its window reaches into, a `state` layer
the value at exactly that position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.layout import CacheLayout
from kvcache.media import ends_inside
from kvcache.records import RecordId, RecordKind, Tier
from kvcache.schedule import is_decoded
from kvcache.tree import Node


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What to read to stand at `position`. `records` are in path order; `blocks` says whose they are."""

    position: int
    nodes: tuple[Node, ...]  # path to the position, the last possibly used in part
    records: tuple[RecordId, ...]
    starts: tuple[int, ...]  # start position of the node of each record
    logits: bool  # the last record holds next-token logits at `position`


def needed(path: Sequence[Node], layout: CacheLayout, *, logits: bool) -> list[tuple[RecordId, int]]:
    """The records, each with its node's start, that make the end of `path` usable."""
    if not path:
        return []
    kinds = layout.kinds
    records: list[tuple[RecordId, int]] = []
    if RecordKind.FULL in kinds:
        records += [(RecordId(n.source, RecordKind.FULL), n.start) for n in path]
    if RecordKind.WINDOW in kinds:
        records += [(RecordId(n.key, RecordKind.WINDOW), n.start) for n in _reach(path, layout)]
    if RecordKind.STATE in kinds:
        records.append((RecordId(path[-1].key, RecordKind.STATE), path[-1].start))
    if logits:
        records.append((RecordId(path[-1].key, RecordKind.LOGITS), path[-1].start))
    return records


def may_stand(node: Node, layout: CacheLayout) -> bool:
    """Whether a run may begin at the end of `node`; not inside an image that the model must see whole."""
    return not (layout.whole_images and ends_inside(node.tokens))


def plan_restore(
    path: Sequence[Node], layout: CacheLayout, has: Callable[[RecordId], bool], *, target: int, more_follows: bool
) -> RestorePlan | None:
    """The deepest usable position at or before `target` on `path`; None if there is none.

    `path` covers `target` and may go on. `more_follows`: tokens will be computed behind `target`, so its logits are
    not needed. Time is linear in the length of the path.
    """
    path = [node for node in path if node.start < target]  # what is lost beyond it does not matter
    usable = len(path)
    if RecordKind.FULL in layout.kinds:
        for i, node in enumerate(path):
            if not has(RecordId(node.source, RecordKind.FULL)):
                usable = i
                break
    if layout.trimmable and usable == len(path) and path:
        return _plan_trimmed(path, layout, has, target=target, more_follows=more_follows)
    for depth in range(usable, 0, -1):
        here = path[:depth]
        end = here[-1].end
        if end > target or not may_stand(here[-1], layout):
            continue
        logits = end == target and not more_follows
        # FULL records were checked above, and the others are those of what window layers reach into.
        wanted = needed(_reach(here, layout), layout, logits=logits)
        if all(has(record) for record, _ in wanted if record.kind is not RecordKind.FULL):
            return _plan(here, layout, end, logits=logits)
    return None


def disk_tokens(plan: RestorePlan, tiers: Sequence[Tier]) -> int:
    """Tokens of `plan` of which some layer's state is on disk; `tiers` says where each record is."""
    from_disk = {
        start
        for start, record, tier in zip(plan.starts, plan.records, tiers, strict=True)
        if tier is Tier.DISK and record.kind is not RecordKind.LOGITS
    }
    return sum(min(n.end, plan.position) - n.start for n in plan.nodes if n.start in from_disk)


def _plan_trimmed(
    path: Sequence[Node], layout: CacheLayout, has: Callable[[RecordId], bool], *, target: int, more_follows: bool
) -> RestorePlan | None:
    """Every layer keeps every token: any position on the path can be cut to.

    Where the logits of a place are missing, the last token is computed again. A prefilled block had them from its own
    calls, which are made again so that the same bits come back.
    """
    logits = not more_follows and path[-1].end == target and has(RecordId(path[-1].key, RecordKind.LOGITS))
    position = target if more_follows or logits else target - 1
    if position < target and path[-1].end == target and not is_decoded(path[-1].schedule):
        position = path[-1].start
    here = [node for node in path if node.start < position]
    return _plan(here, layout, position, logits=logits) if here else None


def _plan(path: Sequence[Node], layout: CacheLayout, position: int, *, logits: bool) -> RestorePlan:
    pairs = needed(path, layout, logits=logits)
    return RestorePlan(
        position=position,
        nodes=tuple(path),
        records=tuple(record for record, _ in pairs),
        starts=tuple(start for _, start in pairs),
        logits=logits,
    )


def _reach(path: Sequence[Node], layout: CacheLayout) -> Sequence[Node]:
    """The end of `path` that window layers reach into, at least its last node; keeps planning linear."""
    begin = path[-1].end - layout.window
    depth = len(path) - 1
    while depth > 0 and path[depth - 1].end > begin:
        depth -= 1
    return path[depth:]
