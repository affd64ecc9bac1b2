"""Snapshots between two caches: what travels, what is refused, and that nothing is left of what was given up."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from tiny_worlds import LAYOUTS, World, prompt_of

from kvcache.cache import Keep
from kvcache.errors import CutExport, DamagedExport, ExportError, ForeignKey
from kvcache.export import Arrived, ExchangeKey, Exporter, Importer
from kvcache.manifest import Item, ItemId, Manifest
from kvcache.records import RecordId, RecordKind
from kvcache.snapshots import Snapshot
from kvcache.travel import Arrival, pack

KEY = ExchangeKey(bytes(range(32)))


def exported(world: World, snapshot: Snapshot, *, have: Iterable[ItemId] = (), key: ExchangeKey = KEY) -> bytes:
    """The whole of an export but for what the other side has."""
    departure = world.cache.depart(snapshot)
    packed = pack(snapshot, departure, "model", {})
    writer = Exporter(key, packed.manifest)
    have = set(have)
    parts = [bytes(part) for part in writer.opening()]
    sent = [(index, item) for index, item in enumerate(packed.items) if item.id not in have]
    for index, _ in sent:
        (payload,) = world.store.fetch_now([departure.records[index]]).payloads
        parts += [bytes(part) for part in writer.record(index, payload, piece=7)]
    world.cache.departed(departure)
    data = b"".join(parts)
    assert writer.size(sum(item.size for _, item in sent), len(sent)) == len(data)
    return data


def taken_in(
    world: World, data: bytes, *, owner: str = "a", name: str = "imported", piece: int = 50, key: ExchangeKey = KEY
) -> tuple[Snapshot, list[Item]]:
    """The snapshot that came, and the records that came with it."""
    reader = Importer(key)
    arrival: Arrival | None = None
    taken: list[Item] = []
    try:
        for at in range(0, len(data), piece):
            for part in reader.feed(data[at : at + piece]):
                if isinstance(part, Manifest):
                    arrival = world.cache.arrive(owner, part)
                    continue
                assert isinstance(part, Arrived) and arrival is not None
                item = arrival.manifest.items[part.index]
                result = world.cache.take(arrival, item, part.payload, patient=True)
                while result.may_pass:
                    world.store.run_pending()
                    result = world.cache.take(arrival, item, part.payload, patient=True)
                assert result.held, result
                taken.append(item)
        reader.finish()
        assert arrival is not None
        lacking = world.cache.lacking(arrival)
        if lacking:
            raise CutExport(str(lacking[0]))
        snapshot = world.cache.add_snapshot(owner, arrival.end, Keep(snapshot_id=name), parent=None)
    except BaseException:
        if arrival is not None:
            world.cache.arrived(arrival, forget=True)
        raise
    world.cache.arrived(arrival, forget=False)
    return snapshot, taken


GOLDEN = Path(__file__).parent / "golden" / "export_v1.kvx"


NEWEST = GOLDEN.with_name("export_v1_origins.kvx")  # its note says more since; what it said is where it was


def golden_export() -> bytes:
    """The same bytes each time, as long as the format is the same."""
    here = World(LAYOUTS["all"])
    snapshot = here.save(here.run(prompt_of(300, seed="golden")).nodes[300], "golden-export", labels=(("a", "b"),))
    return exported(here, snapshot)


def test_an_export_is_written_byte_for_byte_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/format.md, section 10: whoever has to change the file raises the version."""
    monkeypatch.setattr("kvcache.names.new_call_id", lambda: "call")  # it is drawn at random
    assert golden_export() == NEWEST.read_bytes()


@pytest.mark.parametrize("file", [GOLDEN, NEWEST], ids=lambda file: file.name)
def test_exports_of_version_1_stay_readable(file: Path) -> None:
    there = World(LAYOUTS["all"])
    snapshot, taken = taken_in(there, file.read_bytes())
    assert list(snapshot.node.all_tokens()) == prompt_of(300, seed="golden") and len(taken) == 6
    note = manifest_of(file.read_bytes()).snapshot
    assert (note.id, note.owner, note.model, note.labels) == ("golden-export", "", "model", {"a": "b"})


def manifest_of(data: bytes) -> Manifest:
    return next(part for part in Importer(KEY).feed(data) if isinstance(part, Manifest))


def holdings(world: World) -> object:
    return (world.tree, sorted(world.store.held()), [s.id for s in world.cache.all_snapshots()])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.parametrize(("length", "decode"), [(700, 0), (700, 30), (512, 0), (40, 0)])
def test_a_snapshot_is_restored_elsewhere_whole_and_with_its_logits(
    layout: str, owner: str, length: int, decode: int
) -> None:
    here, there = World(LAYOUTS[layout]), World(LAYOUTS[layout])
    tokens = prompt_of(length)
    snapshot = here.save(here.run(tokens, keep=(300,), decode=decode).nodes[length], "original")
    data = exported(here, snapshot)
    copy, taken = taken_in(there, data, owner=owner)
    assert list(copy.node.all_tokens()) == tokens
    assert len(taken) == len(manifest_of(data).items)
    lookup = there.cache.lookup(owner, tokens, base=copy.node, keep=())
    assert lookup.plan is not None and lookup.plan.logits and lookup.position == length
    there.check_read(lookup, tokens, there.store.fetch_now(lookup.plan.records))
    there.cache.release(lookup)


def test_a_cold_run_of_the_other_owner_goes_on_from_what_came() -> None:
    """Keys are computed for the owner here: a prompt of the same tokens finds the state, another owner's does not."""
    here, there = World(LAYOUTS["full"]), World(LAYOUTS["full"])
    tokens = prompt_of(600)
    taken_in(there, exported(here, here.save(here.run(tokens).nodes[600], "original")), owner="b")
    assert there.run(tokens, owner="b").receipt == (600, 0, 0)
    assert there.run(tokens, owner="a").receipt == (0, 0, 600)


def test_only_what_is_missing_travels() -> None:
    here, there = World(LAYOUTS["all"]), World(LAYOUTS["all"])
    shared, longer = prompt_of(600), prompt_of(600) + prompt_of(500, seed=2)
    first = here.save(here.run(shared).nodes[600], "first")
    second = here.save(here.run(longer).nodes[1100], "second")
    taken_in(there, exported(here, first), name="first-here")
    have = there.cache.held_of("a", manifest_of(exported(here, second)))
    _, taken = taken_in(there, exported(here, second, have=have), name="second-here")
    everything = manifest_of(exported(here, second)).items
    assert {item.id for item in taken} == {item.id for item in everything} - have
    # Two whole blocks were there already; of their windows only the second is within reach of the end.
    assert sorted(item.kind.name for item in everything if item.id in have) == ["FULL", "FULL"]
    have = there.cache.held_of("a", manifest_of(exported(here, second)))
    again, taken = taken_in(there, exported(here, second, have=have), name="again")
    assert taken == [] and list(again.node.all_tokens()) == longer


def test_asking_what_is_held_changes_nothing() -> None:
    here, there = World(LAYOUTS["all"]), World(LAYOUTS["all"])
    data = exported(here, here.save(here.run(prompt_of(300)).nodes[300], "original"))
    there.run(prompt_of(300))
    before = (there.tree, list(there.cache._tree._roots), sorted(there.store.held()))
    assert len(there.cache.held_of("a", manifest_of(data))) == 6
    assert there.cache.held_of("b", manifest_of(data)) == set()
    assert (there.tree, list(there.cache._tree._roots), sorted(there.store.held())) == before


def test_a_cut_block_takes_along_what_it_reads_from() -> None:
    here, there = World(LAYOUTS["full"]), World(LAYOUTS["full"])
    tokens = prompt_of(512)
    node = here.run(tokens).nodes[512]
    piece = here.cache.cut(node, 300)
    assert piece is not None and piece.borrows is not None
    copy, _ = taken_in(there, exported(here, here.save(piece, "piece")), owner="b")
    assert copy.node.borrows is not None and copy.node.borrows.key != piece.borrows.key
    assert there.cache.stands(copy.node) and list(copy.node.all_tokens()) == tokens[:300]
    there.cache.delete(copy)
    there.forget_everything()
    assert there.tree == {}


@pytest.mark.parametrize("layout", ["full", "all"])
def test_what_lost_state_travels_as_tokens_and_what_is_left(layout: str) -> None:
    here, there = World(LAYOUTS[layout]), World(LAYOUTS[layout])
    tokens = prompt_of(700)
    nodes = here.run(tokens, keep=(512,)).nodes
    snapshot = here.save(nodes[700], "original")
    here.lose(nodes[700], RecordKind.FULL)
    copy, _ = taken_in(there, exported(here, snapshot))
    assert list(copy.node.all_tokens()) == tokens
    assert there.cache.state_of(copy).restorable == here.cache.state_of(snapshot).restorable == 512
    here.starve()
    copy, taken = taken_in(there, exported(here, snapshot), name="tokens-only")
    assert taken == [] and list(copy.node.all_tokens()) == tokens


def test_every_flipped_byte_is_refused_and_nothing_of_it_is_kept() -> None:
    here, there = World(LAYOUTS["all"]), World(LAYOUTS["all"])
    data = exported(here, here.save(here.run(prompt_of(300)).nodes[300], "original"))
    there.save(there.run(prompt_of(300, seed=9)).nodes[300], "own")
    before = holdings(there)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(ExportError):
            taken_in(there, bytes(broken), piece=300)
        assert holdings(there) == before, at


def test_a_damaged_record_is_named() -> None:
    here, there = World(LAYOUTS["all"]), World(LAYOUTS["all"])
    data = exported(here, here.save(here.run(prompt_of(300)).nodes[300], "original"))
    items = manifest_of(data).items
    at = len(data)
    for item in reversed(items):
        at -= 32 + item.size
        broken = bytearray(data)
        broken[at] ^= 1
        with pytest.raises(DamagedExport) as error:
            taken_in(there, bytes(broken))
        assert error.value.part == str(item)
        at -= 4


def test_every_end_that_comes_too_soon_is_refused() -> None:
    here, there = World(LAYOUTS["all"]), World(LAYOUTS["all"])
    data = exported(here, here.save(here.run(prompt_of(300)).nodes[300], "original"))
    for end in range(len(data)):
        with pytest.raises(CutExport):
            taken_in(there, data[:end], piece=1000)
        assert there.tree == {} and there.store.held() == []
    taken_in(there, data)


def test_an_end_within_what_comes_behind_a_record_names_no_record_that_was_there() -> None:
    here, there = World(LAYOUTS["all"]), World(LAYOUTS["all"])
    data = exported(here, here.save(here.run(prompt_of(300)).nodes[300], "original"))
    with pytest.raises(CutExport) as error:
        taken_in(there, data + b"\0")
    assert error.value.part == f"what comes behind {manifest_of(data).items[-1]}"


def test_what_is_wrong_with_a_manifest_is_said_of_the_export() -> None:
    """`ExportError`s go on a sentence that begins with what was sent."""
    there = World(LAYOUTS["all"])
    for manifest in (b"{}", b"garbage" * 10, bytes(100)):
        with pytest.raises(ExportError, match=r"^has a "):
            taken_in(there, b"".join(Exporter(KEY, manifest).opening()))


def test_records_can_neither_change_places_nor_come_from_another_export() -> None:
    here, there = World(LAYOUTS["full"]), World(LAYOUTS["full"])
    snapshot = here.save(here.run(prompt_of(512)).nodes[512], "original")
    data = exported(here, snapshot)
    first, _, logits = manifest_of(data).items
    frame = 4 + first.size + 32
    opening = len(data) - 2 * frame - (4 + logits.size + 32)
    one, two = data[opening : opening + frame], data[opening + frame : opening + 2 * frame]
    rest = data[opening + 2 * frame :]
    here.cache.update(snapshot, labels={"other": "export"})
    other = exported(here, snapshot)
    for forged in (data[:opening] + two + one + rest, other[: len(other) - len(rest)] + rest, data + rest):
        with pytest.raises(DamagedExport):
            taken_in(there, forged)
    assert there.tree == {}
    taken_in(there, data)


def test_another_key_is_told_from_damage() -> None:
    here, there = World(LAYOUTS["full"]), World(LAYOUTS["full"])
    data = exported(here, here.save(here.run(prompt_of(300)).nodes[300], "original"), key=ExchangeKey(b"k" * 32))
    with pytest.raises(ForeignKey):
        taken_in(there, data)


def test_what_somebody_else_has_come_to_need_stays_when_an_import_is_given_up() -> None:
    here, there = World(LAYOUTS["full"]), World(LAYOUTS["full"])
    data = exported(here, here.save(here.run(prompt_of(600)).nodes[600], "original"))
    reader = Importer(KEY)
    parts = iter(list(reader.feed(data)))
    manifest = next(parts)
    assert isinstance(manifest, Manifest)
    arrival = there.cache.arrive("a", manifest)
    for part in parts:
        assert isinstance(part, Arrived)
        there.cache.take(arrival, manifest.items[part.index], part.payload, patient=True)
    longer = prompt_of(600)[:512] + prompt_of(100, seed=3)
    ran = there.run(longer)
    assert ran.receipt == (512, 0, 100)
    there.save(ran.nodes[612], "other")
    there.cache.arrived(arrival, forget=True)
    assert there.tree == {(0, 256): 1, (256, 512): 1, (512, 612): 1}
    assert there.run(longer).receipt == (612, 0, 0)


def test_an_import_larger_than_the_memory_tier_goes_to_disk_as_it_comes() -> None:
    here, there = World(LAYOUTS["full"]), World(LAYOUTS["full"], memory=200, queue=100)
    tokens = prompt_of(5_000)
    copy, _ = taken_in(there, exported(here, here.save(here.run(tokens).nodes[5_000], "original")))
    lookup = there.cache.lookup("a", tokens, base=copy.node, keep=())
    assert lookup.position == 5_000 and lookup.plan is not None
    there.check_read(lookup, tokens, there.store.fetch_now(lookup.plan.records))
    there.cache.release(lookup)


def test_what_is_being_sent_is_not_evicted() -> None:
    here = World(LAYOUTS["all"])
    snapshot = here.save(here.run(prompt_of(700)).nodes[700], "original")
    departure = here.cache.depart(snapshot)
    here.starve()
    assert here.store.fetch_now(departure.records).ok
    here.cache.delete(snapshot)
    assert here.store.fetch_now(departure.records).ok
    here.cache.departed(departure)
    here.starve()
    assert here.tree == {}


def test_what_is_evicted_before_it_could_be_pinned_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's thread evicts in the middle of a departure: what leaves is what is left."""
    here, there = World(LAYOUTS["full"]), World(LAYOUTS["full"])
    tokens = prompt_of(700)
    nodes = here.run(tokens, keep=(512,)).nodes
    snapshot = here.save(nodes[700], "original")
    pin = here.store.pin

    def late(records: Iterable[RecordId]) -> None:
        monkeypatch.undo()
        here.lose(nodes[700], RecordKind.FULL)
        pin(records)

    monkeypatch.setattr(here.store, "pin", late)
    copy, taken = taken_in(there, exported(here, snapshot))
    assert there.cache.state_of(copy).restorable == 512 and len(taken) == 2
    assert list(copy.node.all_tokens()) == tokens
    assert here.store.stats().pinned == 0


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_behind_a_right_head_are_refused(seed: int) -> None:
    here, there = World(LAYOUTS["all"]), World(LAYOUTS["all"])
    rng = random.Random(seed)
    data = bytearray(exported(here, here.save(here.run(prompt_of(300)).nodes[300], "original")))
    for _ in range(rng.randrange(1, 6)):
        at, size = rng.randrange(len(data)), rng.randrange(1, 200)
        match rng.randrange(3):
            case 0:
                data[at : at + size] = rng.randbytes(size)
            case 1:
                del data[at : at + size]
            case _:
                data[at:at] = rng.randbytes(size)
    with pytest.raises(ExportError):
        taken_in(there, bytes(data), piece=rng.choice([1, 64, 5000]))
    assert there.tree == {} and there.store.held() == []
