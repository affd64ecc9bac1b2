"""What a durable store holds, of all its models, beside what it should hold. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvcache.inventory import Inventory
from kvcache.names import SHARED
from kvcache.other_models import ModelSnapshots, snapshots_of
from kvcache.recovery import missing_segments, read_other, read_segments
from kvcache.seal import Seal
from kvcache.storage import ReadOnly, Storage
from kvcache.store_dir import Identity, segment_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """`missing`: listed segments, and what is wrong with each; `lost`: listed names, by key. `wrong` tells it all."""

    models: tuple[ModelSnapshots, ...]
    missing: Mapping[int, str]
    lost: Mapping[bytes, tuple[str, str]]
    wrong: tuple[str, ...]


def survey(
    storage: Storage, seal: Seal, identity: Identity, inventory: Inventory, owners: Iterable[str], *, now: float
) -> Holdings:
    """`identity`: of this opening, whatever its model. Raises OSError, and StoreUnusable as an opening does."""
    still = ReadOnly(storage)
    listed = inventory.segments()
    _, segments, census = read_segments(still, seal, replace(identity, namespace=bytes(32)), listed)
    missing = missing_segments(storage, listed, {*segments}, census)
    named = {*owners, SHARED}
    wrong = [f"{segment_name(number)} {what}" for number, what in missing.items()]
    models: list[ModelSnapshots] = []
    for namespace in dict.fromkeys(s.namespace for s in segments.values() if s.namespace is not None):
        only = {number for number, segment in segments.items() if segment.namespace == namespace}
        other = read_other(ReadOnly(storage, only), seal, replace(identity, namespace=namespace))
        models.append(snapshots_of(other, inventory, named, shared=SHARED, now=now))
        wrong += [f"{segment_name(number)} is damaged in places" for number in sorted(other.damaged_segments)]
    there = {one.key for model in models for one in model.whole} | {key for model in models for key in model.expired}
    lost = {key: (name.owner, name.id) for key, name in inventory.names().items() if key not in there}
    wrong += [f"snapshot {id} of {owner} is lost" for owner, id in sorted(lost.values())]
    return Holdings(models=tuple(models), missing=missing, lost=lost, wrong=tuple(wrong))
