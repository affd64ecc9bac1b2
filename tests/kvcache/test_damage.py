"""Durable stores whose files were damaged: less is there, or an error says why; never something else."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from durable_worlds import CrashStorage, DurableWorld, ring_at
from tiny_worlds import LAYOUTS, prompt_of

from kvcache.errors import StoreUnusable
from kvcache.format import RECORD_HEADER, SEGMENT_HEADER, TRAILER_BYTES
from kvcache.keys import KeyRing
from kvcache.records import NoteId, RecordId
from kvcache.scan import Found, scan_records
from kvcache.snapshots import LostSnapshot

LAYOUT = LAYOUTS["all"]
PROMPT = prompt_of(600)
OTHER = prompt_of(400, seed=2)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return ring_at(tmp_path / "keys")


@pytest.fixture
def image(ring: KeyRing) -> dict[int, bytes]:
    """The segments of a store with two durable snapshots, without the list of them."""
    storage = CrashStorage()
    world = DurableWorld(LAYOUT, storage, ring)
    first = world.keep(world.run(PROMPT).nodes[600], "first-one", labels=(("v", "1"),))
    world.keep(world.run(OTHER).nodes[400], "second-one", parent=first)
    world.cache.update(first, labels={"v": "2"})
    world.settle()
    return {number: data for number, data in storage.images(0)["killed"].items() if number >= 0}


def reopened(image: dict[int, bytes], ring: KeyRing) -> DurableWorld:
    return DurableWorld(LAYOUT, CrashStorage(image), ring, opening=2)


def scanned(data: bytes) -> list[Found]:
    def read(offset: int, buffer: memoryview) -> int:
        part = data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    return list(scan_records(read, len(data)).found)


def shape_of(world: DurableWorld) -> dict[str, int]:
    """Names, and how far each can be restored; every byte read was compared."""
    shape = {name: world.restored(name) for name in sorted(world.handles)}
    for name, (tokens, labels, _) in world.handles.items():
        assert tokens == (PROMPT if name == "first-one" else OTHER)
        assert labels in ([{"v": "1"}, {"v": "2"}] if name == "first-one" else [{}])
    return shape


WHOLE = {"first-one": 600, "second-one": 400}


def places(data: bytes) -> list[tuple[str, int]]:
    """One offset of every class in each record, and in the segment header."""
    fields = {
        "magic": 0,
        "version": 4,
        "kind": 5,
        "flags": 6,
        "key id": 8,
        "length": 12,
        "key": 16,
        "nonce": 48,
        "crc": 60,
    }
    found = [
        (f"segment {name}", at)
        for name, at in (("magic", 0), ("version", 4), ("number", 8), ("store", 12), ("ns", 28), ("crc", 60))
    ]
    for record in scanned(data):
        found += [(f"{record.header.record} {name}", record.offset + at) for name, at in fields.items()]
        payload = record.header.payload_bytes
        start = record.offset + RECORD_HEADER.size
        found += [(f"{record.header.record} payload", start + payload // 2)] if payload else []
        found.append((f"{record.header.record} trailer", start + payload + TRAILER_BYTES // 2))
    return found


def test_an_undamaged_store_is_whole(image: dict[int, bytes], ring: KeyRing) -> None:
    assert len(image) > 1
    assert shape_of(reopened(image, ring)) == WHOLE


def test_a_flipped_bit_anywhere_costs_something_and_falsifies_nothing(image: dict[int, bytes], ring: KeyRing) -> None:
    tried = 0
    for number, data in image.items():
        for what, at in places(data):
            damaged = bytearray(data)
            damaged[at] ^= 1 << (at % 8)
            world = reopened({**image, number: bytes(damaged)}, ring)
            shape = shape_of(world)
            world.cache.sweep()
            assert all(shape.get(name, 0) <= end for name, end in WHOLE.items())
            torn = number == max(image) and at >= scanned(data)[-1].offset  # cannot be told from a torn write
            assert world.store.stats().corrupt or shape == WHOLE or torn, what
            tried += 1
    assert tried > 100


def test_a_file_cut_anywhere_keeps_what_lies_before(image: dict[int, bytes], ring: KeyRing) -> None:
    for number, data in image.items():
        ends = [0, SEGMENT_HEADER.size - 1, SEGMENT_HEADER.size]
        for record in scanned(data):
            ends += [
                record.offset + 1,
                record.offset + RECORD_HEADER.size,
                record.offset + record.header.record_bytes - 1,
            ]
        for end in ends:
            world = reopened({**image, number: data[:end]}, ring)
            shape = shape_of(world)
            assert set(shape) <= set(WHOLE)
            world.keep(world.run(prompt_of(300, seed=9)).nodes[300], "made-after")
            assert world.restored("made-after") == 300


def test_two_records_in_each_others_place_are_both_found(image: dict[int, bytes], ring: KeyRing) -> None:
    """A record does not know where it lies; a header does not fit another's payload."""
    for number, data in image.items():
        for a in scanned(data):
            for b in scanned(data):
                if a.offset < b.offset and a.header.record_bytes == b.header.record_bytes:
                    size = a.header.record_bytes
                    whole = bytearray(data)
                    whole[a.offset : a.offset + size] = data[b.offset : b.offset + size]
                    whole[b.offset : b.offset + size] = data[a.offset : a.offset + size]
                    assert shape_of(reopened({**image, number: bytes(whole)}, ring)) == WHOLE
                    payloads = bytearray(data)
                    head = RECORD_HEADER.size
                    payloads[a.offset + head : a.offset + size] = data[b.offset + head : b.offset + size]
                    assert shape_of(reopened({**image, number: bytes(payloads)}, ring)) != {}


def test_segments_in_each_others_place_are_not_believed(image: dict[int, bytes], ring: KeyRing) -> None:
    first, second = sorted(image)[:2]
    world = reopened({**image, first: image[second], second: image[first]}, ring)
    assert world.store.stats().corrupt == 2
    assert set(shape_of(world)) <= set(WHOLE)


def test_an_old_segment_put_back_changes_no_content(ring: KeyRing) -> None:
    storage = CrashStorage()
    world = DurableWorld(LAYOUT, storage, ring)
    first = world.keep(world.run(PROMPT).nodes[600], "first-one", labels=(("v", "1"),))
    second = world.keep(world.run(OTHER).nodes[400], "second-one", parent=first)
    old = storage.images(0)["killed"]
    world.cache.update(first, labels={"v": "2"})
    world.cache.delete(second)
    world.settle()
    now = storage.images(0)["killed"]
    for number in old:
        shape = shape_of(reopened({**now, number: old[number]}, ring))
        assert set(shape) <= set(WHOLE)
        assert shape.get("first-one", 600) == 600
    # As a file of another number it is not even looked at.
    moved = reopened({**now, 77: old[0]}, ring)
    assert moved.store.stats().corrupt == 1
    assert shape_of(moved) == {"first-one": 600}


def test_damage_is_counted_and_logged_once(
    image: dict[int, bytes], ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    number, at = next(
        (number, record.offset + RECORD_HEADER.size)
        for number, data in image.items()
        for record in scanned(data)
        if isinstance(record.header.record, RecordId) and record.header.record.kind.name == "FULL"
    )
    damaged = bytearray(image[number])
    damaged[at] ^= 1
    world = reopened({**image, number: bytes(damaged)}, ring)
    with caplog.at_level(logging.WARNING):
        shapes = [shape_of(world) for _ in range(3)]
    assert shapes[1] == shapes[2] != WHOLE
    assert world.store.stats().corrupt == 1
    assert len([entry for entry in caplog.records if "dropped a cached record" in entry.message]) == 1


def test_a_lost_node_ends_what_stands_on_it_and_nothing_else(
    image: dict[int, bytes], ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    first = next(
        (number, record)
        for number, data in image.items()
        for record in scanned(data)
        if isinstance(record.header.record, NoteId) and record.header.record.kind.name == "NODE"
    )
    number, record = first
    damaged = bytearray(image[number])
    damaged[record.offset + 70] ^= 1
    storage = CrashStorage({**image, number: bytes(damaged)})
    with caplog.at_level(logging.WARNING):
        world = DurableWorld(LAYOUT, storage, ring, opening=2)
    assert shape_of(world) == {"second-one": 400}
    assert sum("1 durable snapshots are lost: first-one of a" in entry.message for entry in caplog.records) == 1
    with pytest.raises(LostSnapshot):
        world.cache.snapshot("a", "first-one")
    caplog.clear()
    again = DurableWorld(LAYOUT, CrashStorage(storage.images(0)["power cut"]), ring, opening=3)
    assert shape_of(again) == {"second-one": 400}
    assert sum("1 durable snapshots are lost: first-one of a" in entry.message for entry in caplog.records) == 1


def test_records_newer_than_the_count_of_openings_are_refused(image: dict[int, bytes], ring: KeyRing) -> None:
    """store.json was put back from a copy: going on would seal two records with one nonce."""
    with pytest.raises(StoreUnusable, match=r"newer than its store\.json"):
        DurableWorld(LAYOUT, CrashStorage(image), ring, opening=1)
    with pytest.raises(StoreUnusable, match=r"newer than its store\.json"):  # an owner has one key for all models
        DurableWorld(LAYOUT, CrashStorage(image), ring, opening=1, model="other")


def test_random_damage_of_any_size(image: dict[int, bytes], ring: KeyRing) -> None:
    rng = random.Random(7)
    for _ in range(60):
        damaged = {number: bytearray(data) for number, data in image.items()}
        for _ in range(rng.randint(1, 4)):
            data = damaged[rng.choice(list(damaged))]
            at = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[at : at + rng.randint(1, 300)] = rng.randbytes(rng.randint(0, 300))
                case 1:
                    del data[at:]
                case _:
                    data[at : at + 100] = bytes(100)
            if not data:
                data.append(0)
        assert set(shape_of(reopened({n: bytes(d) for n, d in damaged.items()}, ring))) <= set(WHOLE)
