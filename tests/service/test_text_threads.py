"""Threads for text: nobody has all of them, and work ends with the call that it is for."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from service.text.waiting import GivenUp, go_on
from service.text_threads import TextThreads

PATIENCE = 20.0


class Work:
    """Long work of many steps, and what became of it."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.step = threading.Event()
        self.steps = 0
        self.gave_up = threading.Event()

    def __call__(self) -> int:
        self.begun.set()
        try:
            while True:
                assert self.step.wait(PATIENCE)
                self.steps += 1
                go_on()
        except GivenUp:
            self.gave_up.set()
            raise


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - threads tell nothing to the loop
        await asyncio.sleep(0.005)


def run(story: Callable[[TextThreads], object]) -> None:
    async def bounded() -> None:
        threads = TextThreads(2, share=1)
        try:
            async with asyncio.timeout(PATIENCE):
                await story(threads)  # type: ignore[misc]
        finally:
            threads.close()

    asyncio.run(bounded())


def test_an_owner_does_not_have_every_thread() -> None:
    async def story(threads: TextThreads) -> None:
        greedy = [Work() for _ in range(5)]
        calls = [asyncio.ensure_future(threads.run("greedy", work)) for work in greedy]
        await until(greedy[0].begun.is_set)
        assert await threads.run("other", lambda: 7) == 7
        assert [work.begun.is_set() for work in greedy] == [True, False, False, False, False]
        for work in greedy:
            work.step.set()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    run(story)


def test_work_ends_with_its_call_and_has_its_place_until_then() -> None:
    async def story(threads: TextThreads) -> None:
        work = Work()
        call = asyncio.ensure_future(threads.run("owner", work))
        await until(work.begun.is_set)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        next_one = asyncio.ensure_future(threads.run("owner", lambda: 7))
        waiting = asyncio.ensure_future(threads.run("owner", work))
        await asyncio.sleep(0.05)
        assert not next_one.done(), "a call that was given up still has the thread"
        waiting.cancel()
        work.step.set()
        assert await next_one == 7
        assert work.gave_up.is_set() and work.steps == 1

    run(story)


def test_work_that_was_given_up_while_it_waited_does_not_begin() -> None:
    async def story(threads: TextThreads) -> None:
        first, second = Work(), Work()
        calls = [asyncio.ensure_future(threads.run("owner", work)) for work in (first, second)]
        await until(first.begun.is_set)
        calls[1].cancel()
        first.step.set()
        calls[0].cancel()
        await asyncio.wait(calls)
        assert await threads.run("owner", lambda: 7) == 7
        assert not second.begun.is_set()

    run(story)


def test_a_call_that_leaves_the_line_takes_its_work_along() -> None:
    async def story(threads: TextThreads) -> None:
        first, second = Work(), Work()
        calls = [asyncio.ensure_future(threads.run("owner", work)) for work in (first, second)]
        await until(first.begun.is_set)
        left = weakref.ref(second)
        del second
        calls[1].cancel()
        await asyncio.wait([calls.pop()])
        gc.collect()
        assert left() is None, "what a caller sent is kept, though nobody waits for it"
        first.step.set()
        calls[0].cancel()
        await asyncio.wait(calls)

    run(story)


def test_what_work_raises_is_its_callers() -> None:
    async def story(threads: TextThreads) -> None:
        def fail() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await threads.run("owner", fail)

    run(story)


def test_the_end_gives_up_what_is_under_way() -> None:
    async def story(threads: TextThreads) -> None:
        work = Work()
        call = asyncio.ensure_future(threads.run("owner", work))
        await until(work.begun.is_set)
        threads.close()
        work.step.set()
        with pytest.raises(GivenUp):
            await call

    run(story)


def test_elsewhere_everything_is_waited_for() -> None:
    go_on()
