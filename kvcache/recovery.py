"""Rebuilding the index of a durable store from its segment files. Owns which of several records of a name counts.

Pure but for the storage. The records of one store, one model, in all its segments: a later one replaces an earlier one
of the same name, and a tombstone the handle of the same key. Later means sealed later (`seal.sequence_of`), not lying
further on, so that neither cleaning nor an old file put back changes the answer. After a power cut a header may be
there without its payload; so where there is a choice, only a record that verifies replaces another.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcache.errors import FormatError, StoreUnusable
from kvcache.format import SEGMENT_HEADER, RecordHeader, decode_segment_header
from kvcache.records import Name, NoteId, NoteKind
from kvcache.scan import Scan, scan_records
from kvcache.seal import Fill, Scratch, Seal, sequence_of
from kvcache.storage import Storage
from kvcache.store_dir import Identity

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Generic[Place]):
    """What was found, from the oldest to the newest, and what was not."""

    records: dict[Name, tuple[Place, int]]  # where, and under which key
    damaged: int = 0  # stretches that no header describes, and whole segments without a right one
    cut_bytes: int = 0  # of torn writes
    unreadable: int = 0  # records whose key was destroyed
    missing: Mapping[int, str] = field(default_factory=dict)  # listed segments, and what is wrong with each
    damaged_segments: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One record that counts."""

    segment: int
    offset: int
    length: int
    key_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """All records that count, and the places of handles that do not any more."""

    records: dict[Name, Found]
    ghosts: list[tuple[int, bytes]]  # segment and key of outdated handles
    damaged_segments: set[int]
    missing: dict[int, str]  # of the listed segments those that are not there as they were, and what is wrong
    damaged: int
    cut_bytes: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One of several records of a name."""

    order: tuple[int, int]
    segment: int
    offset: int
    header: RecordHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A segment of another model, or of nobody: there is no telling whose it is."""

    size: int
    namespace: bytes | None


def read_segments(
    storage: Storage, seal: Seal, ours: Identity, listed: Container[int] = ()
) -> tuple[dict[int, int], dict[int, Foreign], Census]:
    """Sizes of our segments, the others, and what ours hold. Cuts torn tails off.

    Of those that are `listed` nothing is cut off or removed that would be none of a crash's doing.
    Raises OSError, and StoreUnusable if any record is newer than this opening: nonces would come twice.
    """
    mine: dict[int, int] = {}
    foreign: dict[int, Foreign] = {}
    missing: dict[int, str] = {}
    candidates: dict[object, list[_Candidate]] = {}
    handles: list[tuple[int, bytes]] = []
    damaged_segments: set[int] = set()
    damaged = cut_bytes = unreadable = 0
    cut: list[int] = []
    for number, size in sorted(storage.sizes().items()):
        if size <= SEGMENT_HEADER.size:
            if number in listed:
                missing[number] = f"has {size} bytes left"
            else:
                storage.remove(number)  # torn at its creation, or empty
            continue
        whose = _whose(storage, number, ours)
        if whose is None:
            # No telling whose it is. It counts in the budget and is the first to go.
            foreign[number] = Foreign(size=size, namespace=None)
            damaged += 1
            if number in listed:
                missing[number] = "has no right header any more"
            continue
        scan = scan_records(lambda offset, buffer, n=number: storage.read_into(n, offset, buffer), size)  # type: ignore[misc]
        _refuse_newer(scan, ours)
        if number in listed and not scan.found:
            foreign[number] = Foreign(size=size, namespace=None)
            damaged += 1
            missing[number] = "holds no record any more"
            continue
        if whose != ours.namespace:
            foreign[number] = Foreign(size=size, namespace=whose)
            continue
        if scan.damaged:
            damaged += scan.damaged
            damaged_segments.add(number)
        if scan.end < size:
            cut_bytes += size - scan.end
            cut.append(number)
            storage.truncate(number, scan.end)
            storage.sync(number)
        mine[number] = scan.end
        for record in scan.found:
            header = record.header
            name = header.record
            order = sequence_of(header.nonce)
            if header.flags != seal.flags or not seal.knows(header.key_id):
                unreadable += 1
                continue
            if isinstance(name, NoteId) and name.kind is NoteKind.SNAPSHOT:
                handles.append((number, name.key))
            rank = ("handle", name.key) if isinstance(name, NoteId) and name.kind is not NoteKind.NODE else name
            candidates.setdefault(rank, []).append(_Candidate(order, number, record.offset, header))
    for number in cut:
        if number != max(mine):  # only the newest can have been torn by a killed process
            damaged += 1
            damaged_segments.add(number)
    records: dict[Name, Found] = {}
    alive: set[tuple[int, bytes]] = set()
    haunting = {key for _, key in handles}
    chosen: list[_Candidate] = []
    for several in candidates.values():
        choice, worse = _newest_whole(storage, seal, several)
        chosen.append(choice)
        damaged += worse
    for candidate in sorted(chosen, key=lambda one: one.order):
        number, header = candidate.segment, candidate.header
        name = header.record
        if isinstance(name, NoteId) and name.kind is NoteKind.TOMBSTONE and name.key not in haunting:
            continue  # nothing is left that it would have to speak against
        if isinstance(name, NoteId) and name.kind is NoteKind.SNAPSHOT:
            alive.add((number, name.key))
        records[name] = Found(segment=number, offset=candidate.offset, length=header.record_bytes, key_id=header.key_id)
    return (
        mine,
        foreign,
        Census(
            records=records,
            ghosts=[place for place in handles if place not in alive],
            damaged_segments=damaged_segments,
            missing=missing,
            damaged=damaged,
            cut_bytes=cut_bytes,
            unreadable=unreadable,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """What the segments of one other model hold."""

    namespace: bytes
    sizes: Mapping[int, int]  # of its segments
    notes: list[tuple[NoteId, bytes, int]]  # that verify, with payload and key, from the oldest to the newest
    places: Mapping[Name, int]  # the segment of each record that counts
    ghosts: list[tuple[int, bytes]]  # segment and key of outdated handles
    damaged_segments: set[int]


def missing_segments(storage: Storage, listed: Iterable[int], found: Container[int], census: Census) -> dict[int, str]:
    """Listed segments that are not there as they were, by number, and what is wrong with each."""
    strange = storage.strange()
    gone = {n: strange.get(n, "is missing") for n in listed if n not in found and n not in census.missing}
    return dict(sorted((census.missing | gone).items()))


def read_other(storage: Storage, seal: Seal, theirs: Identity) -> OtherModel:
    """What the segments under another model's `Identity` hold; `storage` is to be one that nothing is changed in."""
    sizes, _, census = read_segments(storage, seal, theirs)
    scratch = Scratch()
    notes: list[tuple[NoteId, bytes, int]] = []
    for name, place in census.records.items():
        if isinstance(name, NoteId):
            fill = _filling(storage, place.segment, place.offset)
            with suppress(FormatError):
                notes.append((name, bytes(seal.open(name, place.length, fill, scratch)), place.key_id))
    return OtherModel(
        namespace=theirs.namespace,
        sizes=sizes,
        notes=notes,
        places={name: place.segment for name, place in census.records.items()},
        ghosts=census.ghosts,
        damaged_segments=census.damaged_segments,
    )


def _refuse_newer(scan: Scan, ours: Identity) -> None:
    """Owners have one key for all models, so the records of every model tell which openings there were."""
    if any(sequence_of(found.header.nonce)[0] >= ours.opening for found in scan.found):
        raise StoreUnusable(
            "the store holds records that are newer than its store.json: one of the two was put back from a copy. "
            "Opening it could seal two records alike; move the segments away, or restore both together"
        )


def _newest_whole(storage: Storage, seal: Seal, candidates: list[_Candidate]) -> tuple[_Candidate, int]:
    """The newest that verifies, or the newest if none does, and how many newer ones do not."""
    if len(candidates) == 1:
        return candidates[0], 0  # verified when it is read
    candidates.sort(key=lambda one: one.order, reverse=True)
    scratch = Scratch()
    for worse, candidate in enumerate(candidates):
        fill = _filling(storage, candidate.segment, candidate.offset)
        try:
            seal.open(candidate.header.record, candidate.header.record_bytes, fill, scratch)
        except FormatError:
            continue
        return candidate, worse
    return candidates[0], 0


def _filling(storage: Storage, segment: int, offset: int) -> Fill:
    """What brings the bytes of the record at `offset`."""

    def fill(at: int, into: memoryview) -> None:
        if storage.read_into(segment, offset + at, into) < len(into):
            raise FormatError("the file ends early")

    return fill


def _whose(storage: Storage, number: int, ours: Identity) -> bytes | None:
    """The namespace of a segment of this store; None if its header is not right."""
    data = memoryview(bytearray(SEGMENT_HEADER.size))
    if storage.read_into(number, 0, data) < len(data):
        return None
    try:
        header = decode_segment_header(data)
    except FormatError:
        return None
    return header.namespace if header.store_id == ours.store_id and header.number == number else None
