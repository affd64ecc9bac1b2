"""Durable snapshots of other fingerprints: how many there are, why they do not fit, and what must stay for them. Pure.

A fingerprint is made of parts (`ListedModel.parts`): those that make the model what it is, and those that decide the
last bits of its state. Where only the latter differ, tokens mean the same, and a snapshot can be carried over: its name
and tokens stay, its state is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvcache.chains import nodes_of
from kvcache.inventory import Inventory, ListedModel
from kvcache.note_codec import media_key
from kvcache.reading_notes import Whole, model_of, read_notes
from kvcache.records import ListedName, Name, NoteId, NoteKind, RecordId, RecordKind
from kvcache.recovery import OtherModel
from kvcache.tree import BlockTree

SAME_MODEL = ("weights", "tokenizer", "template")  # parts without which tokens mean something else
_DIGESTS = (*SAME_MODEL, "settings")  # parts that are told as digests: nobody learns anything from them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshots:
    """The durable snapshots of one model, found in its segments."""

    namespace: bytes
    fingerprint: str  # "" if nothing tells
    parts: Mapping[str, str]  # empty if they were not noted
    whole: tuple[Whole, ...]
    expired: tuple[bytes, ...]  # keys of those whose time is over
    keep: frozenset[int]  # segments that the pinned ones need

    @property
    def pinned(self) -> int:
        return sum(one.note.pinned for one in self.whole)


def snapshots_of(
    other: OtherModel, inventory: Inventory, owners: Iterable[str], *, shared: str, now: float
) -> ModelSnapshots:
    """What the segments of another model hold. Its pinned snapshots need no segment once the list names them no more.

    A model that the list does not know yet is listed, with its snapshots: OSError.
    """
    known = inventory.models().get(other.namespace)
    fingerprint = known.fingerprint if known is not None else model_of(other.notes)
    read = read_notes(other.notes, fingerprint, owners, BlockTree(), shared=shared, now=now)
    if known is None and fingerprint:
        notes = {**read.broken, **{one.key: one.note for one in read.whole}}
        names = {k: ListedName(namespace=other.namespace, owner=note.owner, id=note.id) for k, note in notes.items()}
        inventory.add_names(names)
        inventory.add_model(other.namespace, ListedModel(fingerprint=fingerprint, parts={}))
    listed = inventory.names().keys()
    pinned = [one for one in read.whole if one.note.pinned and one.key in listed]
    return ModelSnapshots(
        namespace=other.namespace,
        fingerprint=fingerprint,
        parts=known.parts if known is not None else {},
        whole=read.whole,
        expired=read.expired,
        keep=_segments_of(pinned, other, fingerprint),
    )


def _segments_of(snapshots: Collection[Whole], other: OtherModel, fingerprint: str) -> frozenset[int]:
    """Segments with anything that these stand on, and with what says that something in those is outdated."""
    keep: set[int] = set()
    for one in snapshots:
        keys = [node.key for node in nodes_of(one.node)]
        needs: list[Name] = [NoteId(one.key, NoteKind.SNAPSHOT), *(NoteId(key, NoteKind.NODE) for key in keys)]
        needs += [NoteId(media_key(fingerprint, one.note.owner, tag), NoteKind.MEDIA) for tag in one.images]
        needs += [RecordId(key, kind) for key in keys for kind in RecordKind]
        keep |= {other.places[name] for name in needs if name in other.places}
    more = True
    while more:
        outdated = {key for number, key in other.ghosts if number in keep}
        newest = [NoteId(key, kind) for key in outdated for kind in (NoteKind.SNAPSHOT, NoteKind.TOMBSTONE)]
        also = {other.places[name] for name in newest if name in other.places} - keep
        keep |= also
        more = bool(also)
    return frozenset(keep)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which parts of a fingerprint differ, in words; empty if none does or the parts of one are not known."""
    if not before or not now:
        return []
    told: list[str] = []
    for part in dict.fromkeys([*now, *before]):
        old, new = before.get(part, "none"), now.get(part, "none")
        if old != new:
            told.append(f"{part} differs" if part in _DIGESTS else f"{part} was {old}, is {new}")
    return told


def why(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The same as one text."""
    if not before or not now:
        return "what differs is not known: the version that made them did not note it"
    return ", ".join(differences(before, now)) or "nothing that was noted differs"


def refusal(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Why snapshots cannot be carried over; "" if they can."""
    if not before or not now:
        return "it is not known whether it is the same model: the version that made them did not note it"
    other = [part for part in SAME_MODEL if before.get(part) != now.get(part)]
    return f"{' and '.join(other)} differ: it is another model" if other else ""
