"""What a durable cache keeps over a restart besides state: names, times, pins, deletions; keys; budgets; real files."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from durable_worlds import INSTANCE, MASTER, STORE_ID, CrashStorage, DurableWorld, ring_at
from storage_doubles import FaultyStorage
from tiny_worlds import LAYOUTS, prompt_of

from kvcache.errors import StoreUnusable
from kvcache.keys import (
    KeyRing,
    OwnerSeal,
    drop_own_master_key,
    own_master_key,
    parse_master_key,
    read_key_file,
    replace_own_master_key,
)
from kvcache.layout import CacheLayout
from kvcache.records import NoteKind, Tier
from kvcache.snapshots import NotDurableSnapshot, UnknownSnapshot
from kvcache.store_dir import DirectoryStorage, StoreDirectory

LAYOUT = LAYOUTS["all"]
PROMPT = prompt_of(600)
SECOND_MASTER = bytes(32)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return ring_at(tmp_path / "keys")


def restart(
    world: DurableWorld, ring: KeyRing, opening: int = 2, *, layout: CacheLayout = LAYOUT, **more: object
) -> DurableWorld:
    """Another process over the same files, at the same time of day unless told otherwise."""
    world.cache.close()
    return DurableWorld(layout, world.storage, ring, opening=opening, **{"now": world.now, **more})  # type: ignore[arg-type]


# Names


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layer_kind_is_restored_to_the_end(kind: str, ring: KeyRing) -> None:
    layout = LAYOUTS[kind]
    world = DurableWorld(layout, CrashStorage(), ring)
    kept = world.keep(world.run(PROMPT).nodes[600], "name")
    world.keep(
        world.run([*PROMPT, *prompt_of(100, seed=3)], base=kept.node, decode=60).nodes[700], "decoded", parent=kept
    )
    if layout.trimmable:
        cut = world.cache.cut(kept.node, 333)
        assert cut is not None and cut.borrows is not None
        world.keep(cut, "trimmed", parent=kept)
    again = restart(world, ring, layout=layout)
    # A trimmed block has no logits of its own: its last token is computed for them.
    assert {name: again.restored(name) for name in again.handles} == {
        "name": 600,
        "decoded": 700,
        **({"trimmed": 332} if layout.trimmable else {}),
    }
    assert again.cache.snapshot("a", "decoded").lineage == ("name",)
    # What comes after is shared with what was there: nothing is computed again.
    assert again.run(PROMPT, base=again.cache.snapshot("a", "name").node).receipt == (600, 0, 0)


def test_times_labels_and_pins_are_as_they_were_and_time_goes_on_while_down(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    kept = world.keep(world.run(PROMPT).nodes[600], "kept", ttl=1000.0, labels=(("a", "1"),))
    short = world.keep(world.cache.hold(kept.node), "short", ttl=100.0)
    pinned = world.keep(world.cache.hold(kept.node), "pinned", ttl=10.0, pinned=True)
    world.cache.update(kept, labels={"a": "2", "b": "3"})
    world.cache.extend(short, 200.0)
    again = restart(world, ring, now=world.now + 150.0)
    assert sorted(again.handles) == ["kept", "pinned", "short"]
    found = again.cache.snapshot("a", "kept")
    assert (found.labels, found.ttl, found.expires) == ({"a": "2", "b": "3"}, 1000.0, kept.expires)
    assert again.cache.snapshot("a", "short").expires == short.expires == 1200.0
    assert again.cache.snapshot("a", "pinned").pinned and pinned.pinned
    assert all(again.store._index.is_pinned(record) for record in again.cache._stock.records_of(found.node))
    later = restart(again, ring, 3, now=world.now + 250.0)
    assert sorted(later.handles) == ["kept", "pinned"]
    later.cache.update(later.cache.snapshot("a", "pinned"), pinned=False)
    last = restart(later, ring, 4, now=later.now)
    assert sorted(last.handles) == ["kept"]


def test_a_use_pushes_the_expiry_on_disk_once_a_minute_and_at_the_end(ring: KeyRing) -> None:
    storage = CrashStorage()
    world = DurableWorld(LAYOUT, storage, ring)
    world.keep(world.run(PROMPT).nodes[600], "used", ttl=1000.0)

    def changes_of_a_use() -> int:
        before = storage.changes
        world.cache.unuse(world.cache.use("a", "used"))
        world.store.run_pending()
        return storage.changes - before

    world.now += 59
    assert changes_of_a_use() == 0
    world.now += 1
    assert changes_of_a_use() > 0
    assert changes_of_a_use() == 0
    world.now += 30
    assert changes_of_a_use() == 0
    killed = DurableWorld(LAYOUT, CrashStorage(storage.images(0)["power cut"]), ring, opening=2)
    assert killed.cache.snapshot("a", "used").expires == 1000 + 60 + 1000
    assert restart(world, ring, 2).cache.snapshot("a", "used").expires == 1000 + 90 + 1000


def test_a_name_that_was_not_durable_says_with_which_process_it_ended(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring, opening=4)
    node = world.run(PROMPT).nodes[600]
    lost = world.save(node, "").id
    again = restart(world, ring, 5)
    with pytest.raises(NotDurableSnapshot) as caught:
        again.cache.snapshot("a", lost)
    assert caught.value.boot_id == f"{INSTANCE[:8]}-4"
    for unknown in ("never-was", lost[:-1] + "5", lost[:-1] + "x"):
        with pytest.raises(UnknownSnapshot) as plain:
            again.cache.snapshot("a", unknown)
        assert not isinstance(plain.value, NotDurableSnapshot)


def test_an_id_can_be_used_again_after_it_was_deleted(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    world.cache.delete(world.keep(world.run(PROMPT).nodes[600], "name"))
    world.settle()
    world.keep(world.run(prompt_of(300, seed=5)).nodes[300], "name")
    again = restart(world, ring)
    assert [len(tokens) for tokens, _, _ in again.handles.values()] == [300]
    again.cache.delete(again.cache.snapshot("a", "name"))
    assert restart(again, ring, 3).handles == {}


def test_state_that_is_gone_is_an_error_and_not_a_promise(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    node = world.run(PROMPT).nodes[600]
    snapshot = world.save(node, "name")
    world.starve()
    (error,) = world.order(snapshot)
    assert error is not None and "not held any more" in str(error)
    assert not snapshot.durable
    world.cache.delete(snapshot)
    assert restart(world, ring).handles == {}


def test_evicted_state_costs_state_and_no_name(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    world.keep(world.run(PROMPT).nodes[600], "name")
    world.starve()
    again = restart(world, ring)
    assert list(again.handles) == ["name"]
    assert again.handles["name"][0] == PROMPT
    assert again.restored("name") == 0


def test_state_computed_again_is_durable_again(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    snapshot = world.keep(world.run(PROMPT).nodes[600], "name")
    world.starve()
    ran = world.run(PROMPT, base=snapshot.node)
    world.cache.rehome(snapshot, ran.nodes[600])
    world.settle()
    again = restart(world, ring)
    assert again.restored("name") == 600


# Space


def test_what_nobody_names_is_given_up_at_the_next_start(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    kept = world.keep(world.run(PROMPT).nodes[600], "kept")
    for seed in range(10, 14):
        world.save(world.run(prompt_of(600, seed=seed)).nodes[600], f"memory-{seed}")
    world.store.flush(0.0)
    held = {record.key for record in world.store.held()}
    again = restart(world, ring)
    assert {record.key for record in again.store.held()} == {
        node.key for node in again.cache.snapshot("a", "kept").node.path()
    }
    assert len(held) > len(again.store.held())
    assert len(again.cache._tree) == len(kept.node.path())


def test_deleting_leaves_neither_notes_nor_tombstones_for_ever(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    for seed in range(40):
        world.cache.delete(world.keep(world.run(prompt_of(300, seed=seed)).nodes[300], f"name-{seed}"))
        world.settle()
    notes = world.store._disk.notes
    kinds = [note.kind for note in notes.ids()]
    assert NoteKind.SNAPSHOT not in kinds
    assert kinds.count(NoteKind.NODE) <= 40 * 2  # of blocks that are still cached
    world.forget_everything()
    world.settle()
    world.settle()
    assert NoteKind.NODE not in [note.kind for note in notes.ids()]
    again = restart(world, ring)
    assert again.handles == {}
    assert world.store.stats().file_bytes <= 64_000


def test_another_models_state_is_kept_unseen_counts_and_goes_first(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring, disk=30_000)
    world.keep(world.run(PROMPT).nodes[600], "ours")
    before = world.store.stats().file_bytes
    other = restart(world, ring, 2, model="other", disk=30_000)
    assert other.handles == {}
    assert other.store.stats().file_bytes == before
    other.keep(other.run(PROMPT).nodes[600], "theirs")
    back = restart(other, ring, 3, disk=30_000)
    assert {name: back.restored(name) for name in back.handles} == {"ours": 600}
    both = back.store.stats().file_bytes
    for seed in range(10, 40):
        back.save(back.run(prompt_of(600, seed=seed), keep=[300]).nodes[600], f"memory-{seed}")
        back.store.run_pending()
    assert both < 30_000 and back.store.stats().file_bytes <= 30_000
    assert back.handles.keys() >= {"ours"}
    assert restart(back, ring, 4, model="other", disk=30_000).handles == {}


def test_restarts_do_not_pile_up_files(ring: KeyRing) -> None:
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    for opening in range(2, 12):
        world.keep(world.run(prompt_of(20, seed=opening)).nodes[20], f"name-{opening}")
        world = restart(world, ring, opening)
    assert len(world.handles) == 10
    assert world.store.stats().segments <= 1 + world.store.stats().file_bytes // 2000


# Failing disks


def test_a_disk_that_fails_is_an_error_and_what_was_owed_is_written_later(ring: KeyRing) -> None:
    storage = FaultyStorage(CrashStorage())
    world = DurableWorld(LAYOUT, storage, ring)
    kept = world.keep(world.run(PROMPT).nodes[600], "kept")
    gone = world.keep(world.cache.hold(kept.node), "gone")
    other = world.save(world.run(prompt_of(300, seed=4)).nodes[300], "other")
    storage.broken = True
    world.store.run_pending()
    assert world.order(other)[0] is not None and not other.durable
    world.cache.update(kept, labels={"owed": "yes"})
    world.cache.delete(gone)
    world.settle()
    assert world.store.stats().write_errors > 0
    storage.broken = False
    world.now += 120
    world.settle()
    assert isinstance(storage.inner, CrashStorage)
    after = DurableWorld(LAYOUT, CrashStorage(storage.inner.images(0)["power cut"]), ring, opening=2, now=world.now)
    assert {name: labels for name, (_, labels, _) in after.handles.items()} == {"kept": {"owed": "yes"}}


class ForgetfulStorage(CrashStorage):
    """One sync fails, and what it was to sync never arrives, though the next one says it did."""

    fails = 0

    def sync(self, segment: int) -> None:
        if self.fails:
            self.fails -= 1
            self.lost = segment, bytes(self.segments[segment])
            raise OSError(errno.EIO, "sync fails")
        super().sync(segment)
        if getattr(self, "lost", (None, b""))[0] == segment:
            good, bad = len(self.before), len(self.lost[1])
            self.synced[segment] = self.before + bytes(bad - good) + self.synced[segment][bad:]

    before = b""


def test_nothing_is_built_on_a_segment_whose_sync_failed(ring: KeyRing) -> None:
    storage = ForgetfulStorage()
    world = DurableWorld(LAYOUT, storage, ring)
    snapshot = world.save(world.run(PROMPT).nodes[600], "name")
    storage.before = storage.synced.get(0, b"")
    storage.fails = 1
    assert world.order(snapshot)[0] is not None
    assert world.order(snapshot) == [None]
    image = storage.images(0)["power cut"]
    again = DurableWorld(LAYOUT, CrashStorage(image), ring, opening=2)
    assert again.restored("name") == 600


# Keys


def test_every_owner_has_a_key_and_a_shredded_one_takes_the_data_along(tmp_path: Path) -> None:
    ring = ring_at(tmp_path / "keys")
    storage = CrashStorage()
    world = DurableWorld(LAYOUT, storage, ring)
    world.keep(world.run(PROMPT).nodes[600], "name")
    assert ring.owners() == ["a"]
    old = ring.id_of("a")
    assert ring_at(tmp_path / "keys").id_of("a") == old
    before = (tmp_path / "keys" / "owners.json").read_bytes()
    assert ring.shred("a") and not ring.shred("a")
    assert not OwnerSeal(ring, 9).knows(old)
    again = restart(world, ring_at(tmp_path / "keys"))
    assert again.handles == {} and again.store.held() == []
    again.keep(again.run(prompt_of(300)).nodes[300], "new")
    assert again.restored("new") == 300
    assert ring_at(tmp_path / "keys").id_of("a") != old
    assert json.loads(before)["owners"][0]["wrapped"].encode() not in b"".join(
        file.read_bytes() for file in (tmp_path / "keys").iterdir()
    )


def test_a_new_master_key_opens_what_the_old_one_sealed_and_the_old_one_nothing(tmp_path: Path) -> None:
    ring = ring_at(tmp_path / "keys")
    world = DurableWorld(LAYOUT, CrashStorage(), ring)
    world.keep(world.run(PROMPT).nodes[600], "name")
    records = world.storage.images(0)["killed"]  # type: ignore[attr-defined]
    ring.rewrap(SECOND_MASTER)
    with pytest.raises(StoreUnusable, match="does not open this store"):
        ring_at(tmp_path / "keys")
    again = restart(world, ring_at(tmp_path / "keys", SECOND_MASTER))
    assert again.restored("name") == 600
    assert {n: bytes(d) for n, d in again.storage.segments.items()}.items() >= {
        (n, data) for n, data in records.items() if n >= 0
    }


def test_a_wrong_master_key_is_refused_before_any_owner_exists(tmp_path: Path) -> None:
    ring_at(tmp_path / "keys")
    with pytest.raises(StoreUnusable, match="does not open this store"):
        ring_at(tmp_path / "keys", SECOND_MASTER)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b'{"format": 2}', "have format 2, this program knows 1"),
        (b'{"format": 1, "check": "zz", "owners": []}', "damaged"),
        (b'{"format": 1, "check": "00", "owners": []}', "does not open"),
        (b'{"format": 1, "check": 3, "owners": []}', "damaged"),
    ],
)
def test_a_damaged_key_file_is_named_and_left_alone(tmp_path: Path, text: bytes, says: str) -> None:
    ring_at(tmp_path / "keys")
    file = tmp_path / "keys" / "owners.json"
    file.write_bytes(text)
    with pytest.raises(StoreUnusable, match=says):
        ring_at(tmp_path / "keys")
    assert file.read_bytes() == text


def test_an_owner_key_is_bound_to_its_owner_and_its_store(tmp_path: Path) -> None:
    ring = ring_at(tmp_path / "keys")
    ring.id_of("a")
    ring.id_of("b")
    file = tmp_path / "keys" / "owners.json"
    content = json.loads(file.read_text())
    content["owners"][0]["wrapped"], content["owners"][1]["wrapped"] = (
        content["owners"][1]["wrapped"],
        content["owners"][0]["wrapped"],
    )
    file.write_text(json.dumps(content))
    with pytest.raises(StoreUnusable, match="does not verify"):
        ring_at(tmp_path / "keys")
    with pytest.raises(StoreUnusable, match="does not open this store"):
        KeyRing(tmp_path / "keys", bytes(16), MASTER)


def test_the_stores_own_master_key_is_made_once_replaced_whole_and_missed_aloud(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    first, made = own_master_key(keys, STORE_ID)
    assert made and stat.S_IMODE((keys / "master.key").stat().st_mode) == 0o600
    ring = KeyRing(keys, STORE_ID, first)
    ring.id_of("a")
    assert own_master_key(keys, STORE_ID) == (first, False)
    replace_own_master_key(keys, ring)
    second, _ = own_master_key(keys, STORE_ID)
    assert second != first and KeyRing(keys, STORE_ID, second).owners() == ["a"]
    # A crash between wrapping the keys anew and putting the new master key in place.
    third = bytes(range(1, 33))
    (keys / "master.key.new").touch(mode=0o600)
    (keys / "master.key.new").write_text(third.hex())
    assert own_master_key(keys, STORE_ID) == (second, False)
    KeyRing(keys, STORE_ID, second).rewrap(third)
    assert own_master_key(keys, STORE_ID) == (third, False)
    assert own_master_key(keys, STORE_ID) == (third, False)
    drop_own_master_key(keys)
    with pytest.raises(StoreUnusable, match="master key that was not given"):
        own_master_key(keys, STORE_ID)


def test_a_master_key_is_32_bytes_or_64_digits_in_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "k"
    for data in (MASTER, MASTER.hex().encode(), MASTER.hex().encode() + b"\n"):
        file.write_bytes(data)
        file.chmod(0o600)
        assert read_key_file(file) == MASTER
    for data in (b"", MASTER[:-1], b"z" * 64, MASTER.hex().encode()[:-1]):
        with pytest.raises(StoreUnusable, match="32 bytes or 64 hexadecimal digits"):
            parse_master_key(data, "it")
    file.chmod(0o640)
    with pytest.raises(StoreUnusable, match="can be read by others"):
        read_key_file(file)
    with pytest.raises(StoreUnusable, match="cannot be read: No such file"):
        read_key_file(tmp_path / "none")


# The directory


def test_a_store_directory_is_private_has_one_user_and_counts_its_openings(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store"
    with StoreDirectory(path) as first:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir() if file.is_file()} == {0o600}
        with pytest.raises(StoreUnusable, match=f"is in use by process {os.getpid()}"):
            StoreDirectory(path)
    with StoreDirectory(path) as second:
        assert (second.instance, second.openings) == (first.instance, first.openings + 1)
        assert second.boot_id != first.boot_id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"format": 3, "instance": "x", "openings": 1}', "store format 3, this program knows 2; nothing was changed"),
        (b"", "damaged"),
        (b"null", "damaged"),
        (b'{"format": 1, "instance": "x", "openings": 1}', "damaged"),
        (b'{"format": 1, "instance": "00112233445566778899aabbccddeeff", "openings": -1}', "damaged"),
        (b'{"format": 1, "instance": "00112233445566778899aabbccddeeff", "openings": 4294967295}', "too often"),
    ],
)
def test_a_directory_that_cannot_be_understood_is_refused_and_left_alone(
    tmp_path: Path, text: bytes, says: str
) -> None:
    (tmp_path / "store.json").write_bytes(text)
    for _ in range(2):
        with pytest.raises(StoreUnusable, match=says):
            StoreDirectory(tmp_path)
    assert (tmp_path / "store.json").read_bytes() == text


def test_somebody_elses_directory_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    mode = tmp_path.stat().st_mode
    with pytest.raises(StoreUnusable, match="is not empty and holds no store"):
        StoreDirectory(tmp_path)
    assert tmp_path.stat().st_mode == mode
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(StoreUnusable, match="there is no store at"):
        StoreDirectory(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_a_store_that_a_crash_left_unfinished_can_be_begun_again(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "store.json.new").write_text("{")
    with StoreDirectory(tmp_path) as store:
        assert store.openings == 1


def test_named_segments_stay_and_answer_like_any_other_storage(tmp_path: Path, ring: KeyRing) -> None:
    with StoreDirectory(tmp_path / "s") as directory:
        world = DurableWorld(LAYOUT, directory.storage(), ring)
        kept = world.keep(world.run(PROMPT).nodes[600], "name")
        assert all(world.store.locate(record) is Tier.DISK for record in world.cache._stock.records_of(kept.node))
        world.cache.close()
        files = sorted(file.name for file in (tmp_path / "s" / "segments").iterdir())
        assert files[0] == "segment-00000000.kv"
        assert {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "s" / "segments").iterdir()} == {0o600}
        tokens = b"".join(PROMPT[i].to_bytes(4, "little") for i in range(8))
        assert all(tokens not in file.read_bytes() for file in (tmp_path / "s" / "segments").iterdir())
        again = DurableWorld(LAYOUT, directory.storage(), ring, opening=2)
        assert again.restored("name") == 600
        again.cache.delete(again.cache.snapshot("a", "name"))
        again.forget_everything()
        again.settle()
        again.cache.close()
    storage = DirectoryStorage(tmp_path / "s" / "segments")
    storage.create(99)
    with pytest.raises(FileExistsError):
        storage.create(99)
    storage.write(99, 0, [b"abc", b"", b"def"])
    storage.sync(99)
    storage.truncate(99, 4)
    storage.close()
    buffer = memoryview(bytearray(8))
    assert (storage.read_into(99, 1, buffer), bytes(buffer[:3])) == (3, b"bcd")
    assert storage.sizes()[99] == 4
    storage.remove(99)
    assert 99 not in storage.sizes()
    with pytest.raises(FileNotFoundError):
        storage.read_into(99, 0, buffer)
    storage.close()
