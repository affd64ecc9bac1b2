"""Generations over a real engine, read one event at a time: a caller may leave at any of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.app import loader
from service.config import Config
from service.core import Core
from service.events import ModelState
from service.models.resolve import resolve
from service.request import GenerateCall, Output, RawInput, Sampling, SaveOptions, Stopping, TokenPart

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


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_whenever_a_caller_leaves_the_state_that_it_asked_for_gets_its_name(tmp_path: Path, pieces: int) -> None:
    config = Config(scratch_dir=tmp_path, memory_bytes=64 << 20, disk_bytes=64 << 20)

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
        core = Core(config, "tiny-llama", loader(config, resolve("tiny-llama"), "tiny-llama"))
        await core.start()
        core.load()
        try:
            while core.models()[0].state is not ModelState.READY:  # noqa: ASYNC110  as a client sees it
                await asyncio.sleep(0.01)
            number = 1
            while await left_behind(core, number):
                number += 1
            assert number > 2
        finally:
            await core.close()

    asyncio.run(story())
