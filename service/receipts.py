"""The receipts of calls that give state more names: what stood, what was mended, what a fork's branches cost."""

from __future__ import annotations

from dataclasses import replace

from kvcache.cache import PrefixCache
from kvcache.media import image_positions
from kvcache.receipt import Usage, lost_to_grid
from kvcache.snapshots import Snapshot
from kvcache.tree import Node


def untouched(cache: PrefixCache, node: Node) -> Usage:
    """The receipt of a call that moved a name and no tensor: the state that stands there, and nothing read."""
    _, disk = cache.stored_tokens(node)
    return Usage(
        prompt_tokens=node.end,
        cached_tokens=node.end,
        image_tokens=image_positions(node.all_tokens()),
        memory_tokens=node.end - disk,
        disk_tokens=disk,
    )


def mended_cut(mended: Usage, parent: Snapshot) -> Usage:
    """The receipt of a cut that stands again, since the longer block that it was cut from was computed again."""
    end = parent.token_count
    cached = min(end, mended.cached_tokens)
    disk = min(cached, mended.disk_tokens)
    return replace(
        mended,
        prompt_tokens=end,
        cached_tokens=cached,
        recomputed_tokens=end - cached,
        image_tokens=image_positions(parent.node.all_tokens()),
        memory_tokens=cached - disk,
        disk_tokens=disk,
        grid_tokens=lost_to_grid(cached, end, kept=end),
    )


def fork_usage(usages: list[Usage], *, parent_tokens: int, parent_images: int) -> Usage:
    """Over all branches that added tokens, at least one; the parent, with so many image positions, counts once.

    A branch like an earlier one is restored beyond its parent: then more is cached than the parent has.
    """
    dearest = max(usages, key=lambda u: u.recomputed_tokens)
    prompt = parent_tokens + sum(u.prompt_tokens - parent_tokens for u in usages)
    new = sum(u.new_tokens for u in usages)
    cached = prompt - dearest.recomputed_tokens - new
    # Each tells of the parent, which may change its tier in between: the branch counts that read most of it from disk.
    of_parent = [min(u.disk_tokens, parent_tokens) for u in usages]
    beyond = sum(u.disk_tokens - part for u, part in zip(usages, of_parent, strict=True))
    disk = min(cached, max(of_parent) + beyond)
    return replace(
        dearest,
        prompt_tokens=prompt,
        cached_tokens=cached,
        new_tokens=new,
        image_tokens=parent_images + sum(u.image_tokens - parent_images for u in usages),
        memory_tokens=cached - disk,
        disk_tokens=disk,
        disk_bytes_read=sum(u.disk_bytes_read for u in usages),
        diverged_at=min((u.diverged_at for u in usages if u.diverged_at is not None), default=None),
    )
