"""Exports and imports of one process: what each holds, what it leaves when it ends otherwise, and what it counts."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcache.export import Arrived
from kvcache.keys import KeyRing
from kvcache.manifest import Item
from kvcache.media import MediaKey, symbols, tag_for
from kvcache.names import new_snapshot_id
from kvcache.receipt import MissReason
from kvcache.records import Buffer, PutResult, RecordId, RecordKind
from kvcache.snapshots import TOMBSTONE_SECONDS, NotDurableSnapshot, UnknownSnapshot
from kvcache.travel import Arrival
from service.config import Config
from service.errors import ExchangeQuota, ExportIncomplete, InvalidField, StoreFull
from service.images.uploads import digest_of
from service.request import Durability
from tests.images.pictures import png
from tests.kvcache.durable_worlds import MASTER, STORE_ID
from tests.kvcache.tiny_worlds import LAYOUTS, World, prompt_of
from tests.service.exchange_rig import NOTHING_LEFT, Instance, after_a_crash, durable_world, until


def saved(instance: Instance, length: int = 700, name: str = "made", *, decode: int = 0, **keep: object) -> None:
    world = instance.world
    world.save(world.run(prompt_of(length), decode=decode).nodes[length], name, **keep)


def test_a_snapshot_goes_from_one_to_the_other() -> None:
    async def story() -> None:
        with Instance() as here, Instance() as there:
            saved(here, 700)
            data = await here.whole("made")
            taken = await there.take([data[at : at + 999] for at in range(0, len(data), 999)])
            assert (taken.snapshot.name, taken.snapshot.token_count, taken.held_records) == ("snapshots/made", 700, 0)
            assert there.world.run(prompt_of(700)).receipt == (700, 0, 0)
            assert here.left() == there.left() == NOTHING_LEFT

    asyncio.run(story())


def test_an_import_that_is_cancelled_while_it_is_written_leaves_no_name(tmp_path: Path) -> None:
    async def story() -> None:
        world = durable_world(tmp_path)
        with Instance() as here, Instance(world) as there:
            saved(here)
            data = await here.whole("made")
            task = asyncio.ensure_future(there.take([data], durability=Durability.DISK))
            await until(lambda: there.names == ["made"], "the name, whose state waits to be written")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert there.names == []
            world.settle()
            assert there.names == [] and there.left() == NOTHING_LEFT

    asyncio.run(story())


def test_a_durable_name_that_lost_its_state_is_on_disk_again_once_it_came_again(tmp_path: Path) -> None:
    async def story() -> None:
        world = durable_world(tmp_path)
        with Instance() as here, Instance(world) as there:
            saved(here)
            data = await here.whole("made")
            world.store.start()
            assert (await there.take([data], durability=Durability.DISK)).snapshot.durable
            world.store.trim(memory_bytes=0, disk_bytes=0)
            assert after_a_crash(world, tmp_path).restored("made") == 0
            again = await there.take([data], durability=Durability.DISK)
            assert again.snapshot.durable and again.held_records == 0
            assert after_a_crash(world, tmp_path).restored("made") == 700

    asyncio.run(story())


def test_state_that_comes_to_a_pinned_name_counts_among_the_pinned_bytes() -> None:
    async def story() -> None:
        with Instance() as here, Instance() as there:
            saved(here)
            data = await here.whole("made")
            here.world.starve()
            tokens_only = await here.whole("made")
            cache = there.world.cache
            assert (await there.take([tokens_only], pinned=True)).received_bytes == 0
            assert cache.pinned_bytes("a") == 0
            whole = await there.take([data])
            assert whole.snapshot.pinned and cache.pinned_bytes("a") == whole.received_bytes > 0

    asyncio.run(story())


@pytest.mark.parametrize(("decode", "moves"), [(0, True), (30, False)], ids=["prefilled", "generated"])
def test_a_prefilled_name_takes_prefilled_state_alone(decode: int, moves: bool) -> None:
    async def story() -> None:
        with Instance() as here, Instance() as there:
            world = here.world
            tokens = prompt_of(700)
            # A call that ended at 300 makes another chain of the same tokens.
            world.save(world.run(tokens, keep=() if decode else (300,), decode=decode).nodes[700], "made")
            saved(there)
            own = there.find("made").node
            there.world.starve()
            taken = await there.take([await here.whole("made")])
            stands = there.find("made").node
            assert (stands.key != own.key) == moves and there.world.cache.stands(stands) == moves
            assert list(stands.all_tokens()) == tokens and taken.snapshot.token_count == 700
            assert there.left() == NOTHING_LEFT

    asyncio.run(story())


def test_a_lineage_of_elsewhere_means_no_name_here_that_only_has_the_same_id() -> None:
    async def story() -> None:
        with Instance() as here, Instance() as there:
            for name, length, parent in (("base", 300, None), ("child", 500, "base")):
                node = here.world.run(prompt_of(length)).nodes[length]
                here.world.save(node, name, parent=here.find(parent) if parent else None)
            child = await here.whole("child")
            unrelated = there.world.save(there.world.run(prompt_of(2_000, seed=2)).nodes[2_000], "base")
            assert (await there.take([child])).snapshot.parent == ""
            cache = there.world.cache
            came = there.find("child")
            assert cache.abandoned_by(came, 100) == [came]
            assert cache.descendants(unrelated) == []
            cache.delete(unrelated)
            cache.delete(came)
            # The name is taken after the import.
            assert (await there.take([child])).snapshot.parent == "snapshots/base"
            there.world.now += 1
            unrelated = there.world.save(there.world.run(prompt_of(2_000, seed=2)).nodes[2_000], "base")
            came = there.find("child")
            assert cache.abandoned_by(came, 100) == [came]
            assert cache.descendants(unrelated) == []
            cache.delete(unrelated)
            # The very ancestor has come, before or after.
            await there.take([await here.whole("base")])
            base = there.find("base")
            assert cache.descendants(base) == [came]
            assert cache.abandoned_by(came, 100) == [came, base]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("evicted", "reason"), [(True, MissReason.EVICTED), (False, MissReason.CORRUPT)], ids=["evicted", "damaged"]
)
def test_what_is_lost_while_it_is_exported_is_called_what_it_is(evicted: bool, reason: MissReason) -> None:
    async def story() -> None:
        with Instance() as here:
            saved(here)
            node, world = here.find("made").node, here.world
            if not evicted:
                world.store.trim(memory_bytes=0)
                world.store.flush(0.0)
            pieces = here.export("made")
            await anext(pieces)
            if evicted:
                world.lose(node, RecordKind.FULL)
            else:
                for data in world.storage.segments.values():
                    data[:] = bytes(len(data))
                world.store.start()
            with pytest.raises(ExportIncomplete):
                _ = [piece async for piece in pieces]
            world.cache.sweep()
            lost = next(each for each in node.path() if world.store.locate(RecordId(each.key, RecordKind.FULL)) is None)
            assert lost.why_lost(RecordKind.FULL) is reason
            assert here.left() == NOTHING_LEFT

    asyncio.run(story())


def test_what_is_longer_than_the_context_is_refused_before_it_is_looked_at() -> None:
    async def story() -> None:
        with Instance() as here, Instance(context_tokens=699) as there:
            saved(here)
            data = await here.whole("made")
            for call in (there.take([data]), there.exchange.check_import(data, "a")):
                with pytest.raises(InvalidField) as refused:
                    await call
                assert refused.value.reason == "CONTEXT_OVERFLOW"
                assert refused.value.metadata == {"promptTokens": "700", "contextTokens": "699"}
            assert there.world.tree == {} and there.left() == NOTHING_LEFT
        with Instance(context_tokens=700) as there:
            assert (await there.take([data])).snapshot.token_count == 700

    asyncio.run(story())


def test_an_owner_whose_first_key_cannot_be_written_is_told_that_the_store_takes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        with Instance() as here, Instance(durable_world(tmp_path)) as there:
            saved(here)
            data = await here.whole("made")
            shutil.rmtree(tmp_path / "keys")
            with pytest.raises(StoreFull) as refused:
                await there.take([data])
            assert "key could not be written" in refused.value.text
            assert there.world.tree == {} and there.left() == NOTHING_LEFT

    asyncio.run(story())


class SlowRing(KeyRing):
    """Writes an owner's first key when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STORE_ID, MASTER)
        self.asked, self.let = threading.Event(), threading.Event()

    def id_of(self, owner: str) -> int:
        self.asked.set()
        assert self.let.wait(5.0), "whoever lets it was held up"
        return super().id_of(owner)


def test_a_key_that_is_written_slowly_holds_up_nobody_and_nothing_stays_of_a_caller_that_left(tmp_path: Path) -> None:
    async def story() -> None:
        ring = SlowRing(tmp_path / "keys")
        with Instance() as here, Instance(durable_world(tmp_path, ring)) as there:
            saved(here)
            task = asyncio.ensure_future(there.take([await here.whole("made")]))
            await until(ring.asked.is_set, "the key to be asked for")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            ring.let.set()
            await asyncio.get_running_loop().shutdown_default_executor()  # the thread has arrived
            assert ring.owners() == ["a"]
            await until(lambda: there.world.tree == {}, "the arrival to be let go of")
            assert there.left() == NOTHING_LEFT and there.names == []

    asyncio.run(story())


class Message(bytearray):
    """Can be watched."""


def test_a_message_with_many_records_is_taken_one_record_at_a_time_and_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        worlds = [World(LAYOUTS["full"], memory=50_000_000, queue=20_000_000) for _ in range(2)]
        with Instance(worlds[0]) as here, Instance(worlds[1]) as there:
            saved(here, 2_048)
            data = await here.whole("made")
            cache, take = there.world.cache, there.world.cache.take
            alive: list[int] = []

            def counted(arrival: Arrival, item: Item, payload: Buffer, *, patient: bool) -> PutResult:
                alive.append(sum(isinstance(each, Arrived) for each in gc.get_objects()))
                return take(arrival, item, payload, patient=patient)

            monkeypatch.setattr(cache, "take", counted)
            messages = [Message(data)]
            watched = weakref.ref(messages[0])

            async def sent() -> AsyncIterator[bytes]:
                yield messages.pop()
                gc.collect()
                assert watched() is None, "the first message, while the next is waited for"

            taken = await there.take(sent())
            assert taken.received_records == 9 and alive == [1] * 9
            assert there.world.run(prompt_of(2_048)).receipt == (2_048, 0, 0)

    asyncio.run(story())


def test_places_are_bounded_for_each_owner_and_for_all_and_a_check_takes_one_too() -> None:
    async def story() -> None:
        with Instance() as here, Instance() as there:
            saved(here)
            data = await here.whole("made")
            go_on = asyncio.Event()
            inside: list[str] = []

            async def waits(owner: str) -> AsyncIterator[bytes]:
                inside.append(owner)
                yield data[:100]
                await go_on.wait()
                yield data[100:]

            async def refused(owner: str, limit: int) -> None:
                for call in (there.take([data], owner), there.exchange.check_import(data, owner)):
                    with pytest.raises(ExchangeQuota) as error:
                        await call
                    assert error.value.metadata == {"limit": str(limit)}

            calls = [asyncio.ensure_future(there.take(waits("a"), "a")) for _ in range(4)]
            await until(lambda: len(inside) == 4, "the calls of the first owner")
            await refused("a", 4)
            assert (await there.exchange.check_import(data, "b")).missing_records == 7
            calls += [asyncio.ensure_future(there.take(waits(owner), owner)) for owner in "bcd" for _ in range(4)]
            await until(lambda: len(inside) == 16, "the calls of all owners")
            await refused("e", 16)
            go_on.set()
            taken = await asyncio.gather(*calls)
            assert sorted(inside) == sorted("abcd" * 4)
            assert sum(one.received_records for one in taken) == 4 * 7 and there.names == ["made"] * 4
            assert (await there.take([data], "e")).held_records == 0
            assert there.left() == NOTHING_LEFT

    asyncio.run(story())


PICTURE = png(3)  # 160 × 128


@pytest.mark.parametrize(
    ("file", "limits", "reason"),
    [
        (PICTURE, {}, ""),
        (PICTURE, {"max_image_bytes": len(PICTURE)}, ""),
        (PICTURE, {"max_image_bytes": len(PICTURE) - 1}, "IMAGE_TOO_LARGE"),
        (PICTURE, {"max_image_pixels": 160 * 128}, ""),
        (PICTURE, {"max_image_pixels": 160 * 128 - 1}, "IMAGE_TOO_LARGE"),
        (PICTURE[: len(PICTURE) // 2], {}, "IMAGE_INVALID"),
        (b"no picture at all", {}, "IMAGE_INVALID"),
    ],
    ids=["taken", "as many bytes", "more bytes", "as many pixels", "more pixels", "cut off", "no picture"],
)
def test_images_that_come_pass_the_limits_of_this_server(file: bytes, limits: dict[str, int], reason: str) -> None:
    async def story() -> None:
        key = MediaKey(bytes(32))
        tag, digest = tag_for(key, 20), digest_of(file)
        with Instance() as here, Instance(config=Config(**limits)) as there:
            here.uploads.receive("a", tag, digest, file)
            world = here.world
            tokens = [*prompt_of(300), *symbols(key, 20), *prompt_of(50, seed=2)]
            world.save(world.run(tokens).nodes[370], "made")
            data = await here.whole("made")
            if not reason:
                assert (await there.take([data])).held_records == 0
                assert there.uploads.file_of("a", tag) == file
                upload = there.uploads.find("a", digest)
                assert upload is not None and upload.digests == {digest} and upload.holds == 1
                return
            with pytest.raises(InvalidField) as refused:
                await there.take([data])
            assert refused.value.reason == reason and refused.value.text.startswith("data: image ")
            assert there.uploads.total_bytes == len(there.uploads) == 0
            assert there.world.tree == {} and there.left() == NOTHING_LEFT

    asyncio.run(story())


def test_an_id_does_not_bring_the_opening_of_another_store_along(tmp_path: Path) -> None:
    async def story() -> None:
        world = durable_world(tmp_path)
        with Instance() as here, Instance(world) as there:
            parent, child = new_snapshot_id(opening=1), new_snapshot_id(opening=1)
            first, second = parent.removesuffix("-m1"), child.removesuffix("-m1")
            assert len(first) == len(second) == 27
            saved(here, 300, name=parent)
            here.world.save(here.world.run(prompt_of(700)).nodes[700], child, parent=here.find(parent))
            world.store.start()
            for name in (parent, child):
                await there.take([await here.whole(name)], durability=Durability.DISK)
            again = await there.take([await here.whole(child)])
            assert (again.snapshot.name, again.snapshot.parent) == (f"snapshots/{second}", f"snapshots/{first}")
            assert there.names == sorted([first, second])
            ours = new_snapshot_id(opening=1)  # not durable, and this store's own
            later = after_a_crash(world, tmp_path)  # the next opening
            assert later.restored(second) == 700
            later.cache.delete(later.cache.snapshot("a", second))
            later.now += TOMBSTONE_SECONDS
            with pytest.raises(UnknownSnapshot) as unknown:
                later.cache.snapshot("a", second)
            assert not isinstance(unknown.value, NotDurableSnapshot)
            with pytest.raises(NotDurableSnapshot):
                later.cache.snapshot("a", ours)

    asyncio.run(story())
