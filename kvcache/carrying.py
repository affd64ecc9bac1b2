"""Durable snapshots of other fingerprints at a start: told, kept, and carried over where that was asked for.

Owns what the log says of them. Carrying over: the name, its owner, times, labels, pin, tokens and images become those
of a snapshot of this fingerprint; its state is computed again when it is used. The old one is then no longer kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial

from kvcache.cache import PrefixCache
from kvcache.names import SHARED
from kvcache.other_models import ModelSnapshots, refusal, snapshots_of, why
from kvcache.snapshots import SnapshotError

log = logging.getLogger(__name__)

LEAVES_LITTLE = 1 / 4  # of the disk budget: when less than this is left beside what is kept for others, the log says so


def look_at_others(
    cache: PrefixCache, owners: Iterable[str], parts: Mapping[str, str], *, now: float, carry: bool = False
) -> list[ModelSnapshots]:
    """Sees to the snapshots of other fingerprints, once, before the store is started. OSError.

    `parts`: what this model's fingerprint is made of. `carry`: they are to be carried over as far as that is possible.
    """
    store = cache.store
    inventory, _ = store.listing
    named = {*owners, SHARED}
    found = [snapshots_of(other, inventory, named, shared=SHARED, now=now) for other in store.others()]
    kept = store.keep_others(frozenset().union(*(one.keep for one in found)))
    for one in found:
        if one.whole:
            _tell(cache, one, parts)
            if carry:
                _carry(cache, one, parts)
            elif not refusal(one.parts, parts):
                log.warning("they can be carried over, to be computed again: kvfork serve --carry-over 1")
    if store.disk_budget - kept < store.disk_budget * LEAVES_LITTLE:
        log.warning(
            "pinned snapshots of other models keep %d of the %d bytes that the store may take: carry them over, unpin "
            "or delete them under their own model, or raise --disk-bytes",
            kept,
            store.disk_budget,
        )
    return found


def _tell(cache: PrefixCache, other: ModelSnapshots, parts: Mapping[str, str]) -> None:
    log.warning(
        "%d durable snapshots, %d of them pinned, belong to fingerprint %s and cannot be used under %s: %s. "
        "Pinned ones stay on disk, the others go when room is needed",
        len(other.whole),
        other.pinned,
        other.fingerprint,
        cache.fingerprint,
        why(other.parts, parts),
    )


def _carry(cache: PrefixCache, other: ModelSnapshots, parts: Mapping[str, str]) -> None:
    no = refusal(other.parts, parts)
    if no:
        log.warning("the snapshots of fingerprint %s are not carried over: %s", other.fingerprint, no)
        return
    inventory, _ = cache.store.listing
    listed = inventory.names()
    waiting = {one.key: one.note for one in other.whole if one.key in listed}  # others were carried over before
    left: set[bytes] = set()

    def done(key: bytes, error: Exception | None) -> None:
        """On the I/O thread, once a snapshot is on disk under this fingerprint, or will not be."""
        note = waiting.pop(key)
        try:
            if error is None:
                inventory.drop_names([key])
        except OSError as failed:
            error = failed
        if error is not None:
            left.add(key)
            log.warning("snapshot %s of %s is not carried over: %s", note.id, note.owner, error)
        if not waiting and not left:
            cache.store.release_others(other.keep)

    log.warning("%d snapshots of fingerprint %s are carried over", len(waiting), other.fingerprint)
    for one in other.whole:
        if one.key in listed:
            try:
                cache.carry(one, cache.root(one.note.owner), partial(done, one.key))
            except SnapshotError as error:
                done(one.key, error)
