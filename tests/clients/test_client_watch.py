"""The client's watch: events as values, the place to go on from, and every way in which a watch ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest
from contract_peer import Peer, refuse
from flavours import Flavour
from kvfork.v1 import types_pb2 as types
from kvfork_client import (
    AsyncClient,
    Changed,
    Client,
    Gone,
    GoneReason,
    ResumeTokenExpired,
    ServerDraining,
    SnapshotInfo,
    Synced,
    Unavailable,
    WatchOverflow,
)

ALL = [Synced(), Gone("snapshots/old-0001", GoneReason.EXPIRED)]


def read(flavour: Flavour, watch: Any, count: int) -> list[Any]:
    return [flavour.do(watch.__next__ if flavour.runner is None else watch.__anext__) for _ in range(count)]


def test_a_watch_says_what_there_is_and_then_what_happens(peer: Peer, flavour: Flavour) -> None:
    kept = peer.keep("hello", types.SnapshotOptions(snapshot_id="plan-0001", labels={"a": "b"}))
    client = flavour.client(peer.address, timeout=0.001)  # a client's own timeout is not a watch's
    watch = flavour.do(client.watch, labels={"a": "b"})
    (first,) = read(flavour, watch, 1)
    assert isinstance(first, Changed) and isinstance(first.snapshot.info, SnapshotInfo)
    assert (first.snapshot.name, first.snapshot.token_count, watch.resume_token) == (kept.name, 5, "")
    assert read(flavour, watch, 1) == ALL[:1] and watch.resume_token == "t1"
    assert read(flavour, watch, 1) == ALL[1:] and watch.resume_token == "t4", "bookmarks are not shown, but count"
    (request,) = peer.requests("WatchSnapshots")
    assert dict(request.labels) == {"a": "b"} and not request.resume_token
    flavour.do(watch.cancel)


def test_a_watch_goes_on_from_a_token(peer: Peer, flavour: Flavour) -> None:
    peer.keep("hello", types.SnapshotOptions(snapshot_id="plan-0001"))
    client = flavour.client(peer.address)
    watch = flavour.do(client.watch, resume_token="t0")
    assert watch.resume_token == "t0"
    assert read(flavour, watch, 2) == ALL
    assert peer.requests("WatchSnapshots")[0].resume_token == "t0"
    flavour.do(watch.cancel)


def test_a_cancelled_watch_ends_its_loop_and_the_call(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    watch = flavour.do(client.watch)
    assert read(flavour, watch, 2) == ALL
    flavour.do(watch.cancel)
    assert flavour.all(lambda: watch) == []
    until_ended(peer)


def until_ended(peer: Peer) -> None:
    give_up = time.monotonic() + 10
    while "watch" not in peer.ended:
        assert time.monotonic() < give_up, "the server did not see the end of the watch"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        ("OUT_OF_RANGE", "RESUME_TOKEN_EXPIRED", ResumeTokenExpired),
        ("RESOURCE_EXHAUSTED", "WATCH_OVERFLOW", WatchOverflow),
        ("UNAVAILABLE", "SERVER_DRAINING", ServerDraining),
        ("OK", "", Unavailable),  # a watch never ends well
    ],
)
def test_the_end_of_a_watch_is_an_error(peer: Peer, flavour: Flavour, code: str, reason: str, kind: type) -> None:
    def script(request: Any, context: Any) -> Any:
        yield from ()
        if reason:
            refuse(context, code, reason)

    peer.scripts["WatchSnapshots"] = script
    client = flavour.client(peer.address, retry=False)
    watch = flavour.do(client.watch)
    with pytest.raises(kind):
        read(flavour, watch, 1)


def test_another_thread_ends_a_watch_that_waits(peer: Peer) -> None:
    with Client(peer.address) as client:
        watch = client.watch()
        assert [next(watch), next(watch)] == ALL
        timer = threading.Timer(0.05, watch.cancel)
        timer.start()
        assert list(watch) == []
        timer.join()
    until_ended(peer)


def test_leaving_the_block_ends_a_watch(peer: Peer) -> None:
    with Client(peer.address) as client, client.watch() as watch:
        next(watch)
    until_ended(peer)


def test_a_watch_that_nobody_holds_any_more_ends(peer: Peer, runner: asyncio.Runner) -> None:
    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            watch = client.watch()
            await anext(watch)
            del watch
            gc.collect()
            await asyncio.to_thread(until_ended, peer)

    runner.run(story())


def test_a_task_that_is_cancelled_in_a_watch_is_cancelled(peer: Peer, runner: asyncio.Runner) -> None:
    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            watch = client.watch()
            assert [await anext(watch), await anext(watch)] == ALL
            task = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(until_ended, peer)

    runner.run(story())
