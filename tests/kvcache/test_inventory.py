"""A durable store knows what it should hold: what is missing is told, refused or kept for, and never overwritten."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from durable_worlds import MASTER, DurableWorld
from tiny_worlds import LAYOUTS, prompt_of

from kvcache.errors import StoreUnusable
from kvcache.inventory import HEAD, DirectoryList, Inventory, ListedModel, MemoryList, decode_list, encode_list
from kvcache.keys import decode_list_key
from kvcache.records import ListedName
from kvcache.snapshots import LostSnapshot, UnknownSnapshot
from kvcache.store_dir import StoreFile, decode_store_file
from service.cli import main
from service.open_store import KeySource, OpenStore, open_store

LAYOUT = LAYOUTS["all"]
GOLDEN = Path(__file__).parent / "golden"
NAMES = {f"name-{n}": prompt_of(300 + 50 * n, seed=n) for n in range(4)}
KEY = bytes(range(32))


@contextmanager
def opened(path: Path, *, source: KeySource | None = None) -> Iterator[DurableWorld]:
    store = open_store(path, source or KeySource())
    world = world_of(store)
    try:
        yield world
    finally:
        world.cache.close()
        store.close()


def world_of(store: OpenStore, **more: object) -> DurableWorld:
    directory = store.directory
    return DurableWorld(
        LAYOUT,
        directory.storage(),
        store.ring,
        opening=directory.openings,
        store_id=directory.store_id,
        inventory=store.inventory,
        now=time.time(),
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with four durable snapshots in several segments."""
    path = tmp_path_factory.mktemp("made") / "store"
    with opened(path) as world:
        for name, tokens in NAMES.items():
            world.keep(world.run(tokens).nodes[len(tokens)], name, pinned=name == "name-1", labels=(("n", name),))
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def check(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """What `kvfork store check` says."""
    capsys.readouterr()
    code = main(["store", "check", "--store-dir", str(path)])
    return code, capsys.readouterr().out


def everything_is_there(world: DurableWorld) -> None:
    assert {name: world.restored(name) for name in world.handles if name in NAMES} == {
        name: len(tokens) for name, tokens in NAMES.items()
    }
    assert {name: world.handles[name] for name in NAMES} == {
        name: (tokens, {"n": name}, name == "name-1") for name, tokens in NAMES.items()
    }


def deleted(file: Path) -> None:
    file.unlink()


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def cut_to_its_header(file: Path) -> None:
    os.truncate(file, 64)


def emptied_behind_its_header(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:64] + bytes(len(data) - 64))


def replaced_by_a_link(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    shutil.copy(file, elsewhere)
    file.unlink()
    file.symlink_to(elsewhere)


DAMAGES = {
    deleted: "is missing",
    zeroed: "has no right header any more",
    cut_to_its_header: "has 64 bytes left",
    emptied_behind_its_header: "holds no record any more",
    replaced_by_a_link: "is a link",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_segment_that_is_lost_is_told_and_put_back_brings_everything_back(
    damage: Callable[[Path], None], path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(path, capsys)[0] == 0
    segments = sorted(path.glob("segments/*.kv"))
    assert len(segments) > 2
    any_lost = False
    for segment in (segments[0], segments[len(segments) // 2], segments[-1]):
        whole = segment.read_bytes()
        damage(segment)
        left = (segment.is_symlink(), segment.exists() and segment.stat().st_size)
        told = f"{segment.name} {DAMAGES[damage]}"
        code, text = check(path, capsys)
        assert code == 1 and told in text
        caplog.clear()
        for start in range(2):  # what is missing is told as long as it is missing
            with caplog.at_level(logging.WARNING), opened(path) as world:
                lost = NAMES.keys() - world.handles.keys()
                assert told in caplog.text
                for name in lost:
                    with pytest.raises(LostSnapshot):
                        world.cache.snapshot("a", name)
                    assert f"{name} of a" in caplog.text and f"snapshot {name} of a is lost" in text
                with pytest.raises(UnknownSnapshot) as caught:
                    world.cache.snapshot("a", "never-was")
                assert not isinstance(caught.value, LostSnapshot)
                # What goes on meanwhile takes no number and no room of what may come back.
                tokens = prompt_of(600, seed=(segment.name, start))
                world.keep(world.run(tokens).nodes[600], f"meanwhile-{start}")
                world.settle()
                world.cache.delete(world.cache.snapshot("a", f"meanwhile-{start}"))
                world.settle()
                assert (segment.is_symlink(), segment.exists() and segment.stat().st_size) == left
            any_lost = any_lost or bool(lost)
        segment.unlink(missing_ok=True)
        segment.write_bytes(whole)
        caplog.clear()
        with caplog.at_level(logging.WARNING), opened(path) as world:
            everything_is_there(world)
        assert "lost" not in caplog.text
        assert check(path, capsys)[0] == 0
    assert any_lost


def test_a_segment_damaged_inside_is_told_by_name(
    path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = min(path.glob("segments/*.kv"))
    data = bytearray(segment.read_bytes())
    whole = bytes(data)
    data[100:1500] = bytes(1400)
    segment.write_bytes(data)
    assert f"{segment.name} is damaged in places" in check(path, capsys)[1]
    with caplog.at_level(logging.WARNING), opened(path) as world:
        assert f"{segment.name} is damaged in places" in caplog.text
        for name in NAMES.keys() - world.handles.keys():
            with pytest.raises(LostSnapshot):
                world.cache.snapshot("a", name)
    segment.unlink(missing_ok=True)
    segment.write_bytes(whole)
    with opened(path) as world:
        assert {name: handle[0] for name, handle in world.handles.items()} == NAMES


def test_what_is_lost_can_be_given_up(
    path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for segment in path.glob("segments/*.kv"):
        segment.unlink()
    code, text = check(path, capsys)
    assert code == 1 and all(f"snapshot {name} of a is lost" in text for name in NAMES)
    assert main(["store", "forget-lost", "--store-dir", str(path)]) == 0
    assert check(path, capsys) == (0, "nothing is missing\n")
    with caplog.at_level(logging.WARNING), opened(path) as world:
        with pytest.raises(UnknownSnapshot) as caught:
            world.cache.snapshot("a", "name-0")
        assert not isinstance(caught.value, LostSnapshot)
    assert "lost" not in caplog.text


def test_a_lost_name_that_is_made_again_is_that_from_then_on(path: Path) -> None:
    for segment in path.glob("segments/*.kv"):
        segment.unlink()
    with opened(path) as world:
        world.keep(world.run(prompt_of(300, seed="new")).nodes[300], "name-0")
    with opened(path) as world:
        assert world.handles.keys() == {"name-0"}
        assert {id for _, id in world.cache.lost.values()} == NAMES.keys() - {"name-0"}


def test_what_ended_is_not_called_lost(path: Path) -> None:
    with opened(path) as world:
        world.cache.delete(world.cache.snapshot("a", "name-0"))
        world.settle()
    with opened(path) as world:
        assert world.handles.keys() == NAMES.keys() - {"name-0"} and not world.cache.lost
        world.now += 1e6
        world.cache.sweep()  # all but the pinned one expire
        world.settle()
    with opened(path) as world:
        assert world.handles.keys() == {"name-1"} and not world.cache.lost


# Keys and the list itself


def content_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def refused_and_unchanged(path: Path, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The start refuses, `check` reports it, and nothing but the number of openings has changed."""
    before = content_of(path)
    with pytest.raises(StoreUnusable, match=says):
        open_store(path, KeySource())
    assert main(["store", "check", "--store-dir", str(path)]) == 1
    after = content_of(path)
    assert {n for n in before | after if before.get(n) != after.get(n)} <= {"store.json", "lock"}


def test_missing_owner_keys_are_not_made_anew(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, away = path / "keys", path.parent / "away"
    for move in (["owners.json"], ["owners.json", "master.key"], ["owners.json", "../inventory"]):
        away.mkdir()
        for name in move:
            (keys / name).rename(away / Path(name).name)
        refused_and_unchanged(path, r"owners\.json is missing", capsys)
        for name in move:
            (away / Path(name).name).rename(keys / name)
        away.rmdir()
    with opened(path) as world:
        everything_is_there(world)


def test_an_old_copy_of_the_owner_keys_is_refused_until_the_new_one_is_back(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = path / "keys" / "owners.json"
    old = owners.read_bytes()
    with opened(path) as world:
        theirs = world.cache.add_snapshot  # another owner's first snapshot makes a key
        node = world.run(prompt_of(280, seed="b"), owner="b").nodes[280]
        snapshot = world.save(node, "of-b", owner="b")
        assert theirs and world.order(snapshot) == [None]
    new = owners.read_bytes()
    owners.write_bytes(old)
    refused_and_unchanged(path, r"owners\.json lacks the keys of b", capsys)
    owners.write_bytes(new)
    with opened(path) as world:
        everything_is_there(world)
        assert world.cache.snapshot("b", "of-b").token_count == 280
    owners.write_bytes(old)
    assert main(["store", "forget-lost", "--store-dir", str(path)]) == 0  # asked for: what those keys sealed is gone
    with opened(path) as world:
        everything_is_there(world)
        assert not world.cache.lost


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data, old: None, "inventory is missing"),
        (lambda data, old: old, "old copy"),
        (lambda data, old: data[: HEAD.size + 40], "does not verify"),
        (lambda data, old: data[:10], "shorter than its head"),
        (lambda data, old: bytes(len(data)), "not what a store writes"),
        (lambda data, old: data[:60] + bytes([data[60] ^ 1]) + data[61:], "does not verify"),
    ],
)
def test_a_list_that_is_missing_damaged_or_old_is_refused_until_it_is_back(
    damage: Callable[[bytes, bytes], bytes | None], says: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = path / "inventory"
    old = file.read_bytes()
    with opened(path) as world:
        world.keep(world.run(prompt_of(280, seed="more")).nodes[280], "one-more")
    data = file.read_bytes()
    file.unlink()
    if (wrong := damage(data, old)) is not None:
        file.write_bytes(wrong)
    refused_and_unchanged(path, says, capsys)
    file.write_bytes(data)
    with opened(path) as world:
        everything_is_there(world)
    file.unlink()
    assert main(["store", "forget-lost", "--store-dir", str(path)]) == 0
    with opened(path) as world:
        everything_is_there(world)


def test_shredding_and_rotating_keep_the_list(path: Path) -> None:
    assert main(["store", "rotate-key", "--store-dir", str(path)]) == 0
    with opened(path) as world:
        everything_is_there(world)
    assert main(["store", "shred", "--store-dir", str(path), "--owner", "a"]) == 0
    with opened(path) as world:
        assert world.handles == {} and not world.cache.lost


def test_a_store_from_before_the_list_is_opened_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    (path / "keys").mkdir(parents=True, mode=0o700)
    (path / "segments").mkdir()
    for file in (GOLDEN / "durable_v1").iterdir():
        folder = {"owners.json": path / "keys", "store.json": path}.get(file.name, path / "segments")
        shutil.copy(file, folder / file.name)
    key = tmp_path / "key"
    key.write_bytes(MASTER)
    key.chmod(0o600)
    source = KeySource(file=key)
    with opened(path, source=source) as world:
        assert world.handles.keys() == {"kept"}
    assert decode_store_file((path / "store.json").read_bytes(), path).listed == 8
    (path / "segments" / "segment-00000000.kv").unlink()
    with opened(path, source=source) as world, pytest.raises(LostSnapshot):
        world.cache.snapshot("a", "kept")


# The list's bytes

CHANGES = [
    ("segment", 3, "ab" * 32),
    ("owner", 16909060, "a"),
    ("model", "ab" * 32, {"fingerprint": "f", "parts": {"mlx": "1"}}),
    ("name", "cd" * 32, ["ab" * 32, "a", "kept"]),
]


def test_lists_of_version_1_stay_readable() -> None:
    folder = GOLDEN / "durable_v2"
    about = decode_store_file((folder / "store.json").read_bytes(), folder)
    assert about == StoreFile(instance=bytes(range(16)).hex(), openings=8, listed=7)
    key = decode_list_key((folder / "owners.json").read_bytes(), bytes(range(16)), MASTER)
    data = (folder / "inventory").read_bytes()
    opening, changes = decode_list(data, key)
    assert (opening, changes) == (7, [*CHANGES, ("segment", 3, None)])
    assert encode_list(key, 7, [CHANGES, [("segment", 3, None)]], salt=data[12:28]) == data


def test_a_list_is_what_was_told_of_it_after_every_cut_of_its_last_entry() -> None:
    file = MemoryList()
    first = Inventory(file, KEY, 1)
    first.add_segments([1, 2], bytes(32))
    before = file.data
    assert before is not None
    first.add_names({bytes(32): ListedName(namespace=bytes(32), owner="a", id="b")})
    data = file.data
    assert data is not None
    for end in range(len(before), len(data)):
        for rest in (b"", bytes(len(data) - end)):
            file.data = data[:end] + rest
            again = Inventory.read(file, KEY, 2, floor=1)
            assert again.segments() == {1: bytes(32), 2: bytes(32)} and not again.names()
    file.data = data
    assert Inventory.read(file, KEY, 2, floor=1).names().keys() == {bytes(32)}
    for at in range(len(before)):  # what is not the end of a write is damage
        file.data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(StoreUnusable):
            Inventory.read(file, KEY, 2, floor=1)


def test_a_write_that_failed_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    class Failing(DirectoryList):
        fails = False

        def append(self, offset: int, data: bytes) -> None:
            super().append(offset, data[:5] if self.fails else data)
            if self.fails:
                raise OSError("no space left")

    file = Failing(tmp_path)
    written = Inventory(file, KEY, 1)
    written.add_owner(1, "a")
    file.fails = True
    with pytest.raises(OSError, match="no space"):
        written.add_owner(2, "b")
    file.fails = False
    written.add_owner(1, "a")  # no news, but the file is behind
    assert Inventory.read(file, KEY, 2, floor=1).owners() == {1: "a", 2: "b"}


def test_a_list_that_grows_is_written_whole_again(tmp_path: Path) -> None:
    file = DirectoryList(tmp_path)
    written = Inventory(file, KEY, 1)
    model = ListedModel(fingerprint="f", parts={"mlx": "x" * 10_000})
    for n in range(200):
        written.add_model(bytes([n]) * 32, model)
        written.add_segments([n], bytes(32))
        written.drop_segments([n])
    for n in range(1, 200):
        written.add_model(bytes([n]) * 32, ListedModel(fingerprint="f", parts={}))
    again = Inventory.read(file, KEY, 2, floor=1)
    assert again.models() == written.models() and again.segments() == {}
    for n in range(20_000):
        written.add_segments([n % 7], bytes([n % 256]) * 32) if n % 50 == 0 else None
    assert (tmp_path / "inventory").stat().st_size < 3_000_000
