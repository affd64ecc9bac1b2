"""Imports, exports and copies as the client makes them, and what becomes of an import that ends otherwise than well."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from contract_peer import Peer, refuse
from flavours import Flavour
from kvfork.v1 import types_pb2 as types
from kvfork_client import AsyncClient, Cancelled, Client, DeadlineExceeded, Internal, SaveOptions, SnapshotIdTaken

DATA = [b"snapshots/plan-0001\n", b"abc"]


def test_options_that_make_no_message_are_refused_before_anything_is_sent(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    with pytest.raises(ValueError, match="finite"):
        flavour.do(client.import_snapshot, DATA, options=SaveOptions(ttl=float("nan")))
    assert peer.seen == []
    assert flavour.do(client.import_snapshot, DATA).snapshot.name == "snapshots/plan-0001"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_an_export_may_be_given_whole(peer: Peer, flavour: Flavour, kind: Callable[[bytes], Any]) -> None:
    taken = flavour.do(flavour.client(peer.address).import_snapshot, kind(b"".join(DATA)))
    assert taken.snapshot.name == "snapshots/plan-0001" and taken.snapshot.token_count == 3


def test_a_closed_client_takes_no_import_as_it_takes_no_other_call(peer: Peer) -> None:
    client = Client(peer.address)
    client.close()
    for call in (client.check_import, lambda manifest: client.import_snapshot([manifest])):
        with pytest.raises(ValueError, match="Cannot invoke RPC"):
            call(b"snapshots/plan-0001")


@pytest.mark.parametrize(
    "error",
    [
        grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), "of the source"),
        asyncio.InvalidStateError("of the source"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_data_raise_comes_out_as_it_is_and_ends_the_import(
    peer: Peer, flavour: Flavour, error: Exception
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def script(requests: Any, context: Any) -> Any:
        assert context.add_callback(ended.set)
        begun.set()
        assert ended.wait(10)  # nothing else ends it
        raise ConnectionAbortedError

    def source() -> Iterator[bytes]:
        yield DATA[0]
        assert begun.wait(10)
        raise error

    peer.scripts["ImportSnapshot"] = script
    with pytest.raises(type(error)) as caught:
        flavour.do(flavour.client(peer.address).import_snapshot, source())
    assert caught.value is error
    assert ended.wait(10)


def test_a_copy_takes_one_server_on_each_side_whoever_a_proxy_would_ask(peer: Peer, flavour: Flavour) -> None:
    """Calls that name no instance may come anywhere: one says which, and the others name that one."""
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    with Peer() as other:
        here, there = flavour.client(peer.address), flavour.client(other.address)
        copied = flavour.do(here.copy_snapshot, "snapshots/plan-0001", there)
        assert copied.snapshot.name == "snapshots/plan-0001" and other.contents == peer.contents
        assert routes(peer) == [("ExportSnapshot", None), ("ExportSnapshot", "peer")]
        calls = ["CheckImport", "ImportSnapshot"]
        assert routes(other) == [("GetServerInfo", None), *((call, "peer") for call in calls)]
        del other.seen[:], other.metadata[:]
        flavour.do(here.copy_snapshot, "snapshots/plan-0001", there.routed(instance="b"))
        assert routes(other) == [(call, "b") for call in calls]


def routes(peer: Peer) -> list[tuple[str, str | None]]:
    return [(name, said.get("x-kvfork-instance")) for (name, _), said in zip(peer.seen, peer.metadata, strict=True)]


def test_a_refusal_is_heard_while_the_data_go_on(peer: Peer, flavour: Flavour) -> None:
    def script(requests: Any, context: Any) -> None:
        next(requests)
        refuse(context, "ALREADY_EXISTS", "SNAPSHOT_ID_TAKEN")

    peer.scripts["ImportSnapshot"] = script
    with pytest.raises(SnapshotIdTaken):
        flavour.do(flavour.client(peer.address).import_snapshot, itertools.repeat(b"more", 1_000_000))


def test_a_client_that_is_closed_ends_an_import_that_sends(peer: Peer, runner: asyncio.Runner) -> None:
    async def story() -> None:
        client = AsyncClient(peer.address)

        async def source() -> AsyncIterator[bytes]:
            yield DATA[0]
            await client.close()
            yield DATA[1]

        with pytest.raises(Cancelled, match="closed"):
            await client.import_snapshot(source())

    runner.run(asyncio.wait_for(story(), 30))


class Lost(grpc.Future):
    """What gRPC now and then makes of a call whose deadline passes while it sends: it never ends."""

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "waited for ever"
        raise grpc.FutureTimeoutError

    def cancel(self) -> bool:
        return True

    cancelled = running = done = exception = traceback = add_done_callback = None


def test_an_import_whose_end_is_lost_ends_with_its_deadline_and_lets_its_client_go(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(peer.address, timeout=0.1) as client:
        channel, waits = client._connection.channel, threading.Event()
        ended = channel.close

        def close() -> None:
            assert waits.wait(10)
            ended()

        class Method:
            def future(self, *_: Any, **__: Any) -> Lost:
                return Lost()

        monkeypatch.setattr(channel, "stream_unary", lambda path: Method())
        monkeypatch.setattr(channel, "close", close)
        with pytest.raises(DeadlineExceeded):
            client.routed(instance="peer").import_snapshot(DATA)
    waits.set()


class CutWhileWriting:
    """What grpc.aio now and then makes of a call whose deadline passes while it writes."""

    async def write(self, _request: bytes) -> None:
        await asyncio.sleep(0.1)
        raise BufferError("one of gRPC's own kinds")

    def __await__(self) -> Any:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core")
        yield

    def cancel(self) -> None: ...


@pytest.mark.parametrize(("timeout", "told"), [(0.05, DeadlineExceeded), (30.0, Internal)])
def test_a_deadline_that_cuts_a_write_is_no_failure_of_the_server(
    peer: Peer, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, timeout: float, told: type[Exception]
) -> None:
    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            channel = client._connection.open()
            monkeypatch.setattr(channel, "stream_unary", lambda path: lambda **_: CutWhileWriting())
            with pytest.raises(told):
                await client.import_snapshot(DATA, timeout=timeout)

    runner.run(asyncio.wait_for(story(), 30))
