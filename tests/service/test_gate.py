"""The gate: an owner has so many places, its others wait in order, and no place is ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvcache.receipt import Usage
from service.events import Event, Finished, FinishReason, Started, Timing
from service.gate import Gate
from service.request import GenerateCall


class Calls:
    """Calls through a gate; each stays until it is let go."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.order: list[str] = []
        self.doors: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str) -> None:
        self.doors[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._call(name))
        await self.settle()

    async def go(self, name: str) -> None:
        self.doors[name].set()
        await self.tasks[name]
        await self.settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.tasks[name]
        await self.settle()

    async def _call(self, name: str) -> None:
        async with self.gate.turn(name[0]):
            self.order.append(name)
            await self.doors[name].wait()

    @staticmethod
    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_an_owner_waits_for_itself_alone_and_in_order():
    async def story() -> None:
        calls = Calls(Gate(2))
        for name in ("a1", "a2", "a3", "a4", "b1"):
            await calls.come(name)
        assert calls.order == ["a1", "a2", "b1"]
        assert (calls.gate.inside("a"), calls.gate.waiting("a")) == (2, 2)
        await calls.go("a2")
        assert calls.order == ["a1", "a2", "b1", "a3"]
        await calls.go("a1")
        await calls.come("a5")
        assert calls.order[-1] == "a4"
        for name in ("a3", "a4", "a5", "b1"):
            await calls.go(name)
        assert calls.order[-1] == "a5"
        assert (calls.gate.inside("a"), calls.gate.inside("b"), calls.gate._lines) == (0, 0, {})

    asyncio.run(story())


def test_a_call_that_is_given_up_takes_no_place_with_it():
    async def story() -> None:
        calls = Calls(Gate(1))
        for name in ("a1", "a2", "a3", "a4"):
            await calls.come(name)
        await calls.cancel("a2")  # while it waits
        calls.doors["a1"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calls.tasks["a3"].cancel()  # perhaps with the place in its hand already
        await asyncio.gather(calls.tasks["a3"], return_exceptions=True)
        await calls.settle()
        assert calls.order[-1] == "a4"
        await calls.cancel("a4")  # while it runs
        assert calls.gate._lines == {}
        await calls.come("a5")
        assert calls.order[-1] == "a5"
        await calls.go("a5")

    asyncio.run(story())


@pytest.mark.parametrize("steps", range(6))
def test_a_place_handed_to_a_call_that_is_cancelled_at_that_moment_goes_on(steps: int):
    async def story() -> None:
        calls = Calls(Gate(1))
        for name in ("a1", "a2", "a3"):
            await calls.come(name)
        calls.doors["a1"].set()
        for _ in range(steps):
            await asyncio.sleep(0)
        calls.tasks["a2"].cancel()
        await asyncio.gather(calls.tasks["a2"], return_exceptions=True)
        await calls.settle()
        assert calls.order[-1] == "a3"
        await calls.go("a3")
        assert calls.gate._lines == {}

    asyncio.run(story())


def test_calls_that_all_end_at_once_leave_nothing_behind():
    async def story() -> None:
        calls = Calls(Gate(2))
        for number in range(20):
            await calls.come(f"a{number}")
        for task in calls.tasks.values():  # in one turn of the loop, those inside first
            task.cancel()
        ended = await asyncio.gather(*calls.tasks.values(), return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError] * 20
        assert calls.gate._lines == {}

    asyncio.run(story())


def test_no_limit_lets_everybody_in():
    async def story() -> None:
        calls = Calls(Gate(0))
        for number in range(20):
            await calls.come(f"a{number}")
        assert len(calls.order) == 20 == calls.gate.inside("a")
        for name in list(calls.doors):
            await calls.go(name)
        assert calls.gate._lines == {}

    asyncio.run(story())


def test_the_wait_is_queue_time_and_goes_off_the_deadline():
    asked: list[GenerateCall] = []
    usage = Usage(prompt_tokens=1, cached_tokens=0, recomputed_tokens=0, new_tokens=1, completion_tokens=0)

    async def serve(call: GenerateCall, owner: str) -> AsyncIterator[Event]:
        asked.append(call)
        yield Started(generation="g", instance="i", prompt_tokens=1, seed=1, queue_seconds=1.0)
        await asyncio.sleep(0.02)
        yield Finished(reason=FinishReason.EOS, usage=usage, timing=Timing(queue=1.0))

    async def story() -> None:
        served = Gate(1).generate(serve)

        async def run() -> list[Event]:
            return [event async for event in served(GenerateCall(deadline=10.0), "a")]

        first, second = await asyncio.gather(run(), run())
        assert isinstance(first[0], Started) and isinstance(second[0], Started)
        assert isinstance(second[1], Finished)
        assert first[0].queue_seconds == 1.0 and asked[0].deadline == 10.0
        waited = second[0].queue_seconds - 1.0
        assert waited > 0
        assert second[1].timing.queue == second[0].queue_seconds
        assert asked[1].deadline == pytest.approx(10.0 - waited)

    asyncio.run(story())
