"""Exports and imports of one process: what each holds, what it leaves when it ends otherwise, and what it counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.request import Durability
from tests.kvcache.tiny_worlds import prompt_of
from tests.service.exchange_rig import Instance, durable_world, until

NOTHING = (0, 0, 0)


def saved(instance: Instance, length: int = 700, name: str = "made", **keep: object) -> None:
    world = instance.world
    world.save(world.run(prompt_of(length)).nodes[length], name, **keep)


def test_a_snapshot_goes_from_one_to_the_other() -> None:
    async def story() -> None:
        with Instance() as here, Instance() as there:
            saved(here, 700)
            data = await here.whole("made")
            taken = await there.take([data[at : at + 999] for at in range(0, len(data), 999)])
            assert (taken.snapshot.name, taken.snapshot.token_count, taken.held_records) == ("snapshots/made", 700, 0)
            assert there.world.run(prompt_of(700)).receipt == (700, 0, 0)
            assert here.left() == there.left() == NOTHING

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
            assert there.names == [] and there.left() == NOTHING

    asyncio.run(story())
