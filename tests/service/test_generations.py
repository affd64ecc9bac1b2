"""Generations over a real engine, read one event at a time: a caller may leave at any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from service.app import loader
from service.config import Config
from service.core import Core
from service.events import Event, Finished, Marked, ModelState
from service.models.resolve import resolve
from service.request import (
    CreateSnapshotCall,
    GenerateCall,
    Landmark,
    Mark,
    Output,
    RawInput,
    Sampling,
    SaveOptions,
    Stopping,
    TokenPart,
)

pytestmark = [pytest.mark.mlx]

PROMPT, ANSWER = 300, 20


def call(snapshot_id: str, *, min_tokens_per_delta: int) -> GenerateCall:
    return GenerateCall(
        input=RawInput(parts=(TokenPart(tuple(range(5, 5 + PROMPT))),)),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=ANSWER, ignore_eos=True),
        output=Output(min_tokens_per_delta=min_tokens_per_delta),
        save=SaveOptions(snapshot_id=snapshot_id),
        save_on_cancel=True,
    )


@asynccontextmanager
async def ready_core(folder: Path) -> AsyncIterator[Core]:
    config = Config(scratch_dir=folder, memory_bytes=64 << 20, disk_bytes=64 << 20)
    core = Core(config, "tiny-llama", loader(config, resolve("tiny-llama"), "tiny-llama"))
    await core.start()
    core.load()
    try:
        while core.models()[0].state is not ModelState.READY:  # noqa: ASYNC110  as a client sees it
            await asyncio.sleep(0.01)
        yield core
    finally:
        await core.close()


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_whenever_a_caller_leaves_the_state_that_it_asked_for_gets_its_name(tmp_path: Path, pieces: int) -> None:
    async def left_behind(core: Core, number: int) -> bool:
        """Leaves after so many events, with all of the rest waiting to be read; False: there were not as many."""
        events = core.generate(call(f"left-{number}", min_tokens_per_delta=pieces), "a")
        for _ in range(number):
            if await anext(events, None) is None:
                return False
            await asyncio.sleep(0.02)  # while the engine goes on
        await events.aclose()
        await asyncio.wait_for(core.until_named(f"snapshots/left-{number}", "a"), 30)
        snapshot = core.get_snapshot(f"snapshots/left-{number}", "a")
        assert PROMPT // 256 * 256 <= snapshot.token_count <= PROMPT + ANSWER
        return True

    async def story() -> None:
        async with ready_core(tmp_path) as core:
            number = 1
            while await left_behind(core, number):
                number += 1
            assert number > 2

    asyncio.run(story())


PLACES = (100, 100, 280, None)  # None: the prompt's end
CHOSEN = "chosen-mark"


def marking(*, save: bool, chosen: bool) -> GenerateCall:
    """Keeps places on the way under names that the server picks, and one that the caller did."""
    names = [""] * (len(PLACES) - 1) + [CHOSEN if chosen else ""]
    at = [Mark(token_count=place) if place else Mark(landmark=Landmark.PROMPT_END) for place in PLACES]
    marks = tuple(replace(mark, options=SaveOptions(snapshot_id=name)) for mark, name in zip(at, names, strict=True))
    kept = SaveOptions(snapshot_id="chosen-end" if chosen else "") if save else None
    return replace(call("", min_tokens_per_delta=8), marks=marks, save=kept, save_on_cancel=False)


@pytest.mark.parametrize("chosen", [False, True], ids=["names of the server", "chosen names"])
@pytest.mark.parametrize("behind", [False, True], ids=["from scratch", "marks within a parent"])
def test_whenever_a_caller_leaves_it_has_heard_of_every_name_that_stays(
    tmp_path: Path, behind: bool, chosen: bool
) -> None:
    def listed(core: Core) -> list[str]:
        snapshots = core.list_snapshots("a", after=None, limit=100, labels={}, parent="")
        return sorted({snapshot.name for snapshot in snapshots} - {"snapshots/the-parent"})

    async def left_behind(core: Core, number: int) -> bool:
        """Leaves while the event of this number is handed to it; False: there were not as many."""
        wanted = marking(save=True, chosen=chosen)
        if behind:
            wanted = replace(wanted, parent="snapshots/the-parent", input=None)
        events = core.generate(wanted, "a")
        told: list[str] = []
        event: Event | None = None
        for _ in range(number):
            if isinstance(event, Marked | Finished) and event.snapshot is not None:
                told.append(event.snapshot.name)  # who asks for the next one has it
            event = await anext(events, None)
            await asyncio.sleep(0.02)  # while the engine goes on
        await events.aclose()
        assert listed(core) == sorted(told)
        if event is None:
            assert len(told) == len(PLACES) + 1, "it was there to the end"
            return False
        for name in told:
            await core.delete_snapshot(name, "a", descendants=False, stop_active=False, allow_missing=False)
        return True

    async def story() -> None:
        async with ready_core(tmp_path) as core:
            parent = call("", min_tokens_per_delta=1).input
            kept = SaveOptions(snapshot_id="the-parent")
            await core.create_snapshot(CreateSnapshotCall(input=parent, options=kept), "a")
            number = 1
            while await left_behind(core, number):
                number += 1
            assert number > len(PLACES) + 2

    asyncio.run(story())
