"""Events cross from the engine thread to asyncio once a step, in order; a slow reader costs text, not messages."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvcache.blocks import root_key
from kvcache.tree import BlockTree, Node
from service.outbox import Channel, Outlet
from service.plan import Picked
from service.work import Admitted, Failed, NodeAt, Prefilled, Tokens, WorkEvent

TREE = BlockTree()
NODE = TREE.add(TREE.root(root_key("m", "o")), [1, 2, 3], b"P")


def tokens(position: int, text: str) -> Tokens:
    return Tokens(text, position, [Picked(ord(c)) for c in text])


def at_node() -> NodeAt:
    return NodeAt(NODE, "", final=False)


class Freed:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def channel(self) -> Channel:
        return Channel(self.nodes.append)


async def taken(channel: Channel, count: int) -> list[WorkEvent]:
    return [await asyncio.wait_for(channel.get(), 30) for _ in range(count)]


def test_events_come_in_order_and_what_waits_is_merged() -> None:
    async def play() -> None:
        channel = Freed().channel()
        for event in (Admitted(0.5), tokens(3, "ab"), tokens(5, "c"), at_node(), tokens(6, "d"), tokens(7, "e")):
            channel.put(event)
        assert await taken(channel, 4) == [Admitted(0.5), tokens(3, "abc"), at_node(), tokens(6, "de")]
        for event in (Prefilled(256), Prefilled(512), tokens(8, "f"), Prefilled(600)):
            channel.put(event)
        assert await taken(channel, 3) == [Prefilled(512), tokens(8, "f"), Prefilled(600)]

    asyncio.run(play())


def test_a_channel_has_ended_once_its_last_event_was_taken() -> None:
    async def play() -> None:
        channel = Freed().channel()
        for event in (Admitted(0.5), Failed(ValueError())):
            channel.put(event)
        seen = []
        for _ in range(2):
            await taken(channel, 1)
            seen.append(channel.ended)
        assert seen == [False, True]

    asyncio.run(play())


def test_what_was_read_does_not_change_when_more_comes() -> None:
    async def play() -> None:
        channel = Freed().channel()
        channel.put(tokens(0, "a"))
        (first,) = await taken(channel, 1)
        channel.put(tokens(1, "b"))
        assert first == tokens(0, "a")

    asyncio.run(play())


def test_a_reader_waits_for_what_comes_later() -> None:
    async def play() -> None:
        channel = Freed().channel()
        reading = asyncio.create_task(channel.get())
        await asyncio.sleep(0)
        assert not reading.done()
        channel.put(Prefilled(7))
        assert await asyncio.wait_for(reading, 30) == Prefilled(7)

    asyncio.run(play())


def test_nodes_that_nobody_takes_are_let_go_once() -> None:
    async def play() -> None:
        freed = Freed()
        channel = freed.channel()
        channel.put(at_node())
        channel.put(at_node())
        await taken(channel, 1)
        channel.close()
        assert freed.nodes == [NODE]  # the one that was read is its reader's
        channel.put(at_node())
        channel.put(tokens(0, "a"))
        channel.close()
        assert freed.nodes == [NODE, NODE]

    asyncio.run(play())


def test_a_step_wakes_the_loop_once_however_many_rows_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        wakes: list[object] = []
        real = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: (wakes.append(a), real(*a))[1])
        outlet = Outlet(loop)
        channels = [Freed().channel() for _ in range(5)]

        def engine() -> None:
            for step in range(3):
                for channel in channels:
                    outlet.emit_to(channel)(tokens(step, "x"))
                    outlet.emit_to(channel)(Prefilled(step))
                outlet.flush()
                outlet.flush()  # nothing new: no wake-up

        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.to_thread(thread.join)
        for channel in channels:
            steps = [(tokens(step, "x"), Prefilled(step)) for step in range(3)]
            assert await taken(channel, 6) == [event for pair in steps for event in pair]
        assert len([w for w in wakes if getattr(w[0], "__name__", "") == "_deliver"]) == 3

    asyncio.run(play())


def test_a_loop_that_is_gone_is_nobodys_error() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    outlet = Outlet(loop)
    outlet.emit_to(Freed().channel())(Prefilled(1))
    outlet.flush()
    assert outlet._batch == []
