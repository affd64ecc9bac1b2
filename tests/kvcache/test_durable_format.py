"""Bytes of a durable store: version 1 kept for ever, and decoders that answer anything with a result or an error."""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from pathlib import Path

import pytest
from durable_worlds import MASTER, STORE_ID, CrashStorage, DurableWorld
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_worlds import LAYOUTS, prompt_of

from kvcache.blocks import BlockKey, block_key, root_key
from kvcache.errors import FormatError, StoreUnusable
from kvcache.format import RECORD_HEADER, SEGMENT_HEADER, decode_segment_header
from kvcache.inventory import HEAD as LIST_HEAD
from kvcache.inventory import MAGIC, Inventory, decode_list
from kvcache.keys import OwnerKey, OwnerSeal, decode_owners
from kvcache.note_codec import (
    NODE_HEAD,
    NodeNote,
    SnapshotNote,
    decode_node,
    decode_snapshot,
    encode_node,
    encode_snapshot,
)
from kvcache.origin import Origin
from kvcache.records import NoteKind, RecordKind
from kvcache.recovery import read_segments
from kvcache.scan import Scan, scan_records
from kvcache.seal import sequence_of
from kvcache.snapshots import Snapshot
from kvcache.storage import MemoryStorage
from kvcache.store_dir import Identity, StoreFile, decode_store_file
from kvcache.tree import BlockTree

GOLDEN = Path(__file__).parent / "golden" / "durable_v1"
NEWEST = GOLDEN.with_name("durable_v1_origins")  # notes say more since; what they said is where it was
TOKENS = prompt_of(300, seed="golden")
NOW = 1000.0
KEY = bytes(range(100, 132))
KEY_ID = 0x01020304


class FixedRing:
    """The one owner key that the golden files were sealed with."""

    list_key = bytes(32)

    def check(self, inventory: Inventory) -> None:
        inventory.add_owner(KEY_ID, "a")

    def key(self, key_id: int) -> bytes | None:
        return KEY if key_id == KEY_ID else None

    def id_of(self, owner: str) -> int:
        return KEY_ID

    def owners(self) -> list[str]:
        return ["a"]


def golden_world(storage: CrashStorage, opening: int) -> DurableWorld:
    return DurableWorld(LAYOUTS["all"], storage, FixedRing(), opening=opening)  # type: ignore[arg-type]


def write_golden(world: DurableWorld) -> None:
    """What the golden segments hold: two names, one of them changed, the other deleted."""
    kept = world.keep(world.run(TOKENS).nodes[300], "kept", labels=(("k", "v"),), pinned=True)
    gone = world.keep(world.cache.hold(kept.node), "gone", parent=kept)
    world.cache.update(kept, labels={"k": "w"})
    world.cache.delete(gone)
    world.settle()


def golden_segments(folder: Path = GOLDEN) -> dict[int, bytes]:
    return {int(file.stem[-8:]): file.read_bytes() for file in sorted(folder.glob("segment-*.kv"))}


def scan_of(data: bytes) -> Scan:
    def read(offset: int, buffer: memoryview) -> int:
        part = data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    return scan_records(read, len(data))


@pytest.mark.parametrize("folder", [GOLDEN, NEWEST], ids=lambda folder: folder.name)
def test_segments_of_version_1_stay_readable(folder: Path) -> None:
    world = golden_world(CrashStorage(golden_segments(folder)), opening=8)
    assert world.handles == {"kept": (TOKENS, {"k": "w"}, True)}
    assert world.restored("kept") == 300
    snapshot = world.cache.snapshot("a", "kept")
    assert (snapshot.created, snapshot.ttl, snapshot.expires) == (NOW, 3600.0, NOW + 3600.0)
    assert snapshot.origins == (Origin("kept" if folder is GOLDEN else "call", 0),)
    assert world.store.stats().corrupt == 0


def test_segments_are_written_as_they_always_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.names.new_call_id", lambda: "call")  # it is drawn at random
    storage = CrashStorage()
    write_golden(golden_world(storage, opening=7))
    written = {n: data for n, data in storage.images(0)["power cut"].items() if n >= 0}
    assert written == golden_segments(NEWEST)


def test_what_the_golden_segments_hold() -> None:
    (data,) = golden_segments().values()
    header = decode_segment_header(data)
    assert (header.number, header.store_id, header.namespace) == (0, STORE_ID, b"model".ljust(32, b"."))
    found = scan_of(data).found
    kinds = [record.header.record.kind for record in found]
    later = {RecordKind.FEATURES, NoteKind.MEDIA}  # kinds that came after these segments were written
    assert set(kinds) == {*RecordKind, *NoteKind} - later
    assert kinds[-1] is NoteKind.TOMBSTONE
    assert {record.header.key_id for record in found} == {KEY_ID}
    assert [sequence_of(record.header.nonce) for record in found] == [(7, n) for n in range(len(found))]


def test_owner_keys_and_store_file_of_version_1_stay_readable() -> None:
    owners = decode_owners((GOLDEN / "owners.json").read_bytes(), STORE_ID, MASTER)
    assert owners == [OwnerKey(id=KEY_ID, owner="a", key=KEY)]
    assert decode_store_file((GOLDEN / "store.json").read_bytes(), GOLDEN) == StoreFile(
        instance=STORE_ID.hex(), openings=7
    )


# Decoders


def node_of(tree: BlockTree) -> bytes:
    parent = tree.root(root_key("model", "a"))
    return encode_node(tree.add(parent, TOKENS[:200], b"P\x20"))


def test_a_node_reads_back_as_it_was() -> None:
    tree = BlockTree()
    key = block_key(root_key("model", "a"), TOKENS[:200], b"P\x20")
    assert decode_node(node_of(tree), key) == NodeNote(
        parent=root_key("model", "a"), borrows=None, schedule=b"P\x20", tokens=array("I", TOKENS[:200])
    )


def test_a_node_is_refused_under_any_other_key_and_after_any_change() -> None:
    payload, key = node_of(BlockTree()), block_key(root_key("model", "a"), TOKENS[:200], b"P\x20")
    with pytest.raises(FormatError):
        decode_node(payload, BlockKey(bytes(32)))
    changeable = range(32, 64)  # whose record is read is no part of a key; the seal protects it
    for at in range(len(payload)):
        changed = bytearray(payload)
        changed[at] ^= 1
        if at not in changeable:
            with pytest.raises(FormatError):
                decode_node(bytes(changed), key)
    for size in range(len(payload)):
        with pytest.raises(FormatError):
            decode_node(payload[:size], key)


def test_a_snapshot_reads_back_as_it_was() -> None:
    tree = BlockTree()
    node = tree.add(tree.root(root_key("model", "a")), TOKENS[:10], b"P")
    snapshot = Snapshot(
        id="id",
        owner="a",
        node=node,
        lineage=("x", "y"),
        origins=(Origin("one", 0), Origin("two", 7)),
        created=1.5,
        last_use=2.5,
        ttl=3.5,
        expires=4.5,
        pinned=True,
        labels={"ä": "ö"},
    )
    assert decode_snapshot(encode_snapshot(snapshot, "model")) == SnapshotNote(
        id="id",
        owner="a",
        model="model",
        node=node.key,
        lineage=("x", "y"),
        origins=(Origin("one", 0), Origin("two", 7)),
        created=1.5,
        last_use=2.5,
        ttl=3.5,
        expires=4.5,
        pinned=True,
        labels={"ä": "ö"},
    )


def test_a_snapshot_of_before_there_were_origins_shares_its_tokens_with_none() -> None:
    assert decode_snapshot(json.dumps(GOOD).encode()).origins == (Origin("i", 0),)


@pytest.mark.parametrize(
    "origins", [[["a", 1], ["b", 1]], [["a", 2], ["b", 1]], [["a", -1]], [["a", True]], [[1, 0]], [["a"]], 7, ["ab"]]
)
def test_origins_out_of_order_are_none(origins: object) -> None:
    with pytest.raises(FormatError):
        decode_snapshot(json.dumps(GOOD | {"origins": origins}).encode())


GOOD = {
    "v": 1,
    "id": "i",
    "owner": "o",
    "model": "m",
    "node": "00" * 32,
    "lineage": [],
    "created": 1.0,
    "last_use": 1.0,
    "ttl": 1.0,
    "expires": 1.0,
    "pinned": False,
    "labels": {},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MANY = settings(max_examples=4_000, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(max_examples=80, deadline=None)


def answers(decode: object, data: bytes) -> None:
    """Any result, or the one error that callers expect."""
    with suppress(FormatError, StoreUnusable):
        decode(data)  # type: ignore[operator]


@FEW
@given(st.sampled_from(sorted(GOOD)), JSON)
def test_a_snapshot_with_any_field_of_any_type_is_read_or_refused(field: str, value: object) -> None:
    answers(decode_snapshot, json.dumps({**GOOD, field: value}).encode())
    assert decode_snapshot(json.dumps(GOOD).encode()).labels == {}


def check_any_bytes(data: bytes) -> None:
    answers(decode_snapshot, data)
    answers(lambda d: decode_node(d, BlockKey(bytes(32))), data)
    answers(lambda d: decode_node(NODE_HEAD.pack(bytes(32), bytes(32), len(d) % 99, 1) + d, BlockKey(bytes(32))), data)
    answers(lambda d: decode_owners(d, STORE_ID, MASTER), data)
    answers(lambda d: decode_store_file(d, GOLDEN), data)
    answers(lambda d: decode_list(d, KEY), data)
    answers(lambda d: decode_list(LIST_HEAD.pack(MAGIC, 1, bytes(3), 1, bytes(16)) + d, KEY), data)


@FEW
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_decoders_answer_any_bytes(data: bytes) -> None:
    check_any_bytes(data)


PIECES = golden_segments().get(0, b"")
RECORDS = [
    PIECES[found.offset : found.offset + found.header.record_bytes]
    for found in (scan_of(PIECES).found if PIECES else ())
]
HEAD = PIECES[: SEGMENT_HEADER.size]
SEGMENTS = st.lists(
    st.sampled_from(RECORDS or [b""])
    | st.binary(max_size=150)
    | st.sampled_from([b"KVRC", b"KVRC" * 20, bytes(100)])
    | st.sampled_from(RECORDS or [b""]).flatmap(
        lambda record: st.integers(0, len(record)).map(lambda end: record[:end])  # torn
    )
    | st.tuples(st.sampled_from(RECORDS or [b"x"]), st.integers(0, 2000), st.integers(1, 255)).map(
        lambda t: bytes(b ^ t[2] if i == t[1] % len(t[0]) else b for i, b in enumerate(t[0]))  # flipped
    ),
    max_size=6,
).map(b"".join)


def check_any_segment(body: bytes) -> None:
    data = HEAD + body
    scan = scan_of(data)
    at = SEGMENT_HEADER.size
    for found in scan.found:
        assert found.offset >= at
        assert data[found.offset : found.offset + 4] == b"KVRC"
        at = found.offset + found.header.record_bytes
    assert at == scan.end <= len(data)
    storage = MemoryStorage()
    storage.segments[0] = bytearray(data)
    identity = Identity(store_id=STORE_ID, namespace=b"model".ljust(32, b"."), opening=8)
    mine, foreign, census = read_segments(storage, OwnerSeal(FixedRing(), 8), identity)  # type: ignore[arg-type]
    assert sum(mine.values()) + sum(foreign.values()) == len(storage.segments.get(0, b""))
    for found in census.records.values():
        assert found.offset + found.length <= len(data)
    world = golden_world(CrashStorage({0: data}), opening=8)
    for name, (tokens, labels, _) in world.handles.items():
        assert tokens == TOKENS and labels in ({"k": "v"}, {"k": "w"}, {})
        world.restored(name)


@FEW
@given(SEGMENTS)
def test_any_segment_is_scanned_to_its_end_and_believed_only_where_it_verifies(body: bytes) -> None:
    check_any_segment(body)


@pytest.mark.slow
@pytest.mark.timeout(900)
@MANY
@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_decoders_answer_any_bytes_for_long(data: bytes) -> None:
    check_any_bytes(data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@MANY
@given(SEGMENTS)
def test_any_segment_is_scanned_to_its_end_for_long(body: bytes) -> None:
    check_any_segment(body)


def test_a_record_behind_damage_is_found_again() -> None:
    first, second = RECORDS[:2]
    for between in (b"x", bytes(5000), b"KVRC", first[: RECORD_HEADER.size - 1], b"KVRC" + bytes(70)):
        scan = scan_of(HEAD + first + between + second)
        assert [found.offset for found in scan.found] == [64, 64 + len(first) + len(between)]
        assert (scan.damaged, scan.end) == (1, len(HEAD + first + between + second))
    torn = scan_of(HEAD + first + second[:-1])
    assert (len(torn.found), torn.damaged, torn.end) == (1, 0, 64 + len(first))


def test_a_header_across_the_edge_of_the_search_window_is_found() -> None:
    from kvcache.scan import WINDOW_BYTES

    for edge in range(-70, 6):
        body = bytes(WINDOW_BYTES + edge) + RECORDS[0]
        (found,) = scan_of(HEAD + body).found
        assert found.offset == 64 + WINDOW_BYTES + edge
