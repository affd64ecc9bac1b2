"""Names that a call makes and does not come to tell: whatever it waits for when it ends, none of them stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.naming import Naming
from service.request import Durability, SaveOptions
from service.work import NodeAt
from tests.kvcache.tiny_worlds import prompt_of
from tests.service.exchange_rig import NOTHING_LEFT, Instance, durable_world, until

ENDS = (300, 500, 700)


@pytest.mark.parametrize("durable_one", range(len(ENDS)), ids=["the first", "the second", "the last"])
def test_a_call_that_is_cancelled_while_one_of_its_names_is_written_leaves_none(
    tmp_path: Path, durable_one: int
) -> None:
    async def story() -> None:
        world = durable_world(tmp_path)
        with Instance(world) as here:
            nodes = world.run(prompt_of(700), keep=ENDS).nodes
            options = [SaveOptions(durability=Durability.MEMORY)] * len(ENDS)
            options[durable_one] = SaveOptions(snapshot_id="chosen-name", durability=Durability.DISK)

            async def call() -> None:
                assert here.rt.loaded is not None and here.rt.handles is not None
                with Naming(here.rt.loaded, here.rt.handles, "a", None) as names:
                    await names.add_all([(nodes[end], each) for end, each in zip(ENDS, options, strict=True)])

            task = asyncio.ensure_future(call())
            await until(lambda: "chosen-name" in here.names, "the name, whose state waits to be written")
            assert len(here.names) == durable_one + 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert here.names == []
            world.settle()
            assert here.names == [] and here.left() == NOTHING_LEFT

    asyncio.run(story())


def test_a_name_that_was_told_or_there_before_stays_when_the_call_fails() -> None:
    async def story() -> None:
        with Instance() as here:
            nodes = here.world.run(prompt_of(700), keep=ENDS).nodes
            here.world.save(here.world.cache.hold(nodes[300]), "there-before")

            async def call() -> None:
                assert here.rt.loaded is not None and here.rt.handles is not None
                with Naming(here.rt.loaded, here.rt.handles, "a", None) as names:
                    await names.add(nodes[300], SaveOptions(snapshot_id="there-before"))
                    told = NodeAt(nodes[500], "", final=False)
                    view, _ = await names.try_save(told, SaveOptions(snapshot_id="told-name"))
                    assert view is not None
                    names.told(view.name)
                    await names.add(nodes[700], SaveOptions(snapshot_id="untold-name"))
                    raise RuntimeError

            with pytest.raises(RuntimeError):
                await call()
            assert here.names == ["there-before", "told-name"] and here.left() == NOTHING_LEFT

    asyncio.run(story())
