"""Each RPC over a real server: what the core is asked, what the client gets back, and how a call ends early."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, field_mask_pb2
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2

from service.config import Config
from service.errors import ExportDamaged
from service.events import Bookmark, Changed, Gone, ModelState, ModelView, Synced, Watched, WhyGone
from service.request import Branch, ExportCall, ForkCall, GenerateCall, RollbackCall, SaveOptions, SnapshotChange
from service.rpc import mapping_out
from service.rpc.listen import CannotListen
from service.rpc.server import EXIT_CANNOT_LISTEN, RpcServer, serve

from .conftest import (
    FINISHED,
    LIMITS,
    STARTED,
    ScriptedCore,
    Serving,
    delta,
    drained,
    eventually,
    run,
    serving,
    snapshot,
)

PARENT = pb.GenerateRequest(parent="snapshots/a")


async def forever() -> None:
    await asyncio.Event().wait()


# One RPC after the other.


def test_generate_streams_the_cores_events_in_order():
    async def story():
        async with serving() as s:
            messages = await drained(s.inference.Generate(PARENT, timeout=20))
            assert [message.WhichOneof("event") for message in messages] == ["started", "delta", "finished"]
            assert messages[1].delta.text == "Hi"
            [(method, call, owner)] = s.core.calls
            assert (method, owner) == ("generate", "local")
            assert 0 < call.deadline < 25  # gRPC rounds it up a little
            assert call == GenerateCall(parent="snapshots/a", deadline=call.deadline)
            assert (s.core.ended, s.core.running) == (["finished"], 0)

    run(story)


def test_the_derivations_ask_the_core_and_return_its_answer():
    async def story():
        async with serving() as s:
            was_running = [
                (await s.inference.StopGeneration(pb.StopGenerationRequest(generation=name))).was_running
                for name in ("generations/g1", "generations/other")
            ]
            assert was_running == [True, False]
            created = await s.inference.CreateSnapshot(pb.CreateSnapshotRequest(parent="snapshots/a"))
            assert (created.snapshot.name, created.marked[0].name) == ("snapshots/one", "snapshots/mark")
            forked = await s.inference.Fork(pb.ForkRequest(parent="snapshots/a", branches=[pb.ForkBranch()] * 2))
            assert [view.name for view in forked.snapshots] == ["snapshots/child-0", "snapshots/child-1"]
            rolled = await s.inference.Rollback(pb.RollbackRequest(source="snapshots/a", token_count=3))
            assert (rolled.snapshot.name, list(rolled.released)) == ("snapshots/short", ["snapshots/a"])
            counted = await s.inference.CountTokens(pb.CountTokensRequest(parent="snapshots/a"))
            assert (counted.total_tokens, counted.text) == (5, "abc")
            fork_call = ForkCall(parent="snapshots/a", branches=(Branch(), Branch()))
            assert s.core.calls[3] == ("fork", fork_call, "local")
            assert s.core.calls[4] == ("rollback", RollbackCall(source="snapshots/a", token_count=3), "local")

    run(story)


def test_snapshots_are_read_changed_and_dropped():
    core = ScriptedCore(snapshots=[snapshot("snapshots/a")])

    async def story():
        async with serving(core) as s:
            plain = await s.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name="snapshots/a"))
            assert (plain.snapshot.name, list(plain.token_ids)) == ("snapshots/a", [])
            full = await s.snapshots.GetSnapshot(
                snapshot_pb.GetSnapshotRequest(name="snapshots/a", include_tokens=True)
            )
            assert list(full.token_ids) == [11, 12, 13]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name="snapshots/b"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

            core.calls.clear()
            await s.snapshots.UpdateSnapshot(
                snapshot_pb.UpdateSnapshotRequest(
                    snapshot=types_pb2.Snapshot(name="snapshots/a", pinned=True),
                    update_mask=field_mask_pb2.FieldMask(paths=["pinned"]),
                )
            )
            extended = await s.snapshots.ExtendSnapshots(
                snapshot_pb.ExtendSnapshotsRequest(
                    names=["snapshots/a", "snapshots/gone"], ttl=duration_pb2.Duration(seconds=60)
                )
            )
            assert ([view.name for view in extended.snapshots], list(extended.missing)) == (
                ["snapshots/a"],
                ["snapshots/gone"],
            )
            deleted = await s.snapshots.DeleteSnapshot(
                snapshot_pb.DeleteSnapshotRequest(name="snapshots/a", descendants=True, allow_missing=True)
            )
            assert list(deleted.deleted) == ["snapshots/a"]
            assert core.calls == [
                ("update_snapshot", SnapshotChange(name="snapshots/a", pinned=True), "local"),
                ("extend_snapshots", ("snapshots/a", "snapshots/gone"), 60.0, "local"),
                ("delete_snapshot", "snapshots/a", "local", True, False, True),
            ]

    run(story)


def test_pages_tell_every_snapshot_once_and_in_order():
    # Equal times, so that the name has to break the tie.
    names = [f"snapshots/s{number:03}" for number in range(7)]
    core = ScriptedCore(snapshots=[snapshot(name, create_time=1000.125) for name in reversed(names)])

    async def story():
        async with serving(core) as s:
            seen, sizes, token = [], [], ""
            while True:
                page = await s.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(page_size=3, page_token=token))
                seen += [view.name for view in page.snapshots]
                sizes.append(len(page.snapshots))
                token = page.next_page_token
                if not token:
                    break
            assert (seen, sizes) == (names, [3, 3, 1])
            whole = await s.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(page_size=7))
            assert (len(whole.snapshots), whole.next_page_token) == (7, "")

    run(story)


def test_pages_of_models():
    views = [ModelView(name=f"models/{letter}", state=ModelState.READY) for letter in "cab"]

    async def story():
        async with serving(ScriptedCore(model_views=views)) as s:
            first = await s.info.ListModels(server_pb.ListModelsRequest(page_size=2))
            assert [model.name for model in first.models] == ["models/a", "models/b"]
            rest = await s.info.ListModels(server_pb.ListModelsRequest(page_size=2, page_token=first.next_page_token))
            assert ([model.name for model in rest.models], rest.next_page_token) == (["models/c"], "")

    run(story)


def test_the_process_tells_about_itself():
    async def story():
        async with serving() as s:
            info = await s.info.GetServerInfo(server_pb.GetServerInfoRequest())
            assert (info.instance, info.boot_id, info.version, list(info.features)) == ("i1", "b1", "0.1.0", ["marks"])
            assert (info.limits.max_request_bytes, info.limits.max_ttl.seconds) == (LIMITS.max_request_bytes, 3600)
            assert (await s.info.GetModel(server_pb.GetModelRequest())).model.name == "models/tiny"
            assert (await s.info.GetCacheStats(server_pb.GetCacheStatsRequest())).stats.checkpoint_interval == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.info.GetModel(server_pb.GetModelRequest(name="models/other"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(story)


def test_a_watch_writes_each_kind_of_message_and_ends_with_the_server():
    async def story():
        watched = [
            Watched(Changed(snapshot("snapshots/one")), ""),
            Watched(Synced(), "t1"),
            Watched(Gone("snapshots/two", WhyGone.EXPIRED), "t2"),
            Watched(Bookmark(), "t3"),
        ]
        async with serving(ScriptedCore(watched=watched)) as s:
            request = snapshot_pb.WatchSnapshotsRequest(labels={"a": "b"}, resume_token="t0")
            watch = s.snapshots.WatchSnapshots(request)
            told = [await watch.read() for _ in watched]
            assert s.core.calls[-1] == ("watch_snapshots", "local", {"a": "b"}, "t0")
            stopping = asyncio.ensure_future(s.server.stop(5.0))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            await stopping
        assert told == [
            snapshot_pb.WatchSnapshotsResponse(changed=mapping_out.write_snapshot(snapshot("snapshots/one"))),
            snapshot_pb.WatchSnapshotsResponse(synced=snapshot_pb.Synced(), resume_token="t1"),
            snapshot_pb.WatchSnapshotsResponse(
                gone=snapshot_pb.Gone(name="snapshots/two", reason=snapshot_pb.GONE_REASON_EXPIRED), resume_token="t2"
            ),
            snapshot_pb.WatchSnapshotsResponse(bookmark=snapshot_pb.Bookmark(), resume_token="t3"),
        ]
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert b"SERVER_DRAINING" in rpc_status.from_call(caught.value).SerializeToString()

    run(story)


def test_an_export_is_written_piece_by_piece_and_what_is_in_it_comes_first():
    async def story():
        async with serving() as s:
            request = snapshot_pb.ExportSnapshotRequest(name="snapshots/one", manifest_only=True, held=[b"h" * 33])
            told = await drained(s.snapshots.ExportSnapshot(request))
            assert s.core.calls[-1] == (
                "export_snapshot",
                ExportCall(name="snapshots/one", manifest_only=True, held=frozenset({b"h" * 33})),
                "local",
            )
            assert s.core.running == 0
        summary = snapshot_pb.ExportSummary(
            snapshot=mapping_out.write_snapshot(snapshot("snapshots/one")),
            records=2,
            held_records=1,
            bytes=6,
            state_tokens=4,
        )
        assert told == [
            snapshot_pb.ExportSnapshotResponse(data=b"abc", summary=summary),
            snapshot_pb.ExportSnapshotResponse(data=b"def"),
        ]

    run(story)


def test_an_import_is_read_message_by_message():
    async def story():
        async with serving() as s:
            messages = [
                snapshot_pb.ImportSnapshotRequest(options={"snapshot_id": "came-over"}, data=b"a"),
                snapshot_pb.ImportSnapshotRequest(data=b"b"),
                snapshot_pb.ImportSnapshotRequest(),
            ]
            reply = await s.snapshots.ImportSnapshot(iter(messages))
            assert s.core.calls[-1] == ("import_snapshot", SaveOptions(snapshot_id="came-over"), "local")
            assert s.core.imported == [b"a", b"b", b""]
            check = await s.snapshots.CheckImport(snapshot_pb.CheckImportRequest(manifest=b"m"))
            assert s.core.calls[-1] == ("check_import", b"m", "local")
        assert reply == snapshot_pb.ImportSnapshotResponse(
            snapshot=mapping_out.write_snapshot(snapshot("snapshots/came")),
            received_records=3,
            received_bytes=3,
            held_records=1,
        )
        assert check == snapshot_pb.CheckImportResponse(held=[b"h" * 33], missing_records=2, missing_bytes=7)

    run(story)


async def refused_import(s: Serving, messages: Any) -> tuple[str, bytes]:
    """(code, what the details hold) of an import that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await s.snapshots.ImportSnapshot(messages)
    status = rpc_status.from_call(caught.value)
    assert status is not None
    return caught.value.code().name, status.SerializeToString()


def test_an_import_that_is_refused_half_way_says_why_and_is_let_go_of():
    async def story():
        core = ScriptedCore(failing_pieces={b"bad": ExportDamaged("no", metadata={"record": "full 01"})})
        async with serving(core) as s:

            async def endless():
                yield snapshot_pb.ImportSnapshotRequest(data=b"good")
                while True:
                    yield snapshot_pb.ImportSnapshotRequest(data=b"bad")
                    await asyncio.sleep(0.01)

            code, details = await refused_import(s, endless())
            assert code == "DATA_LOSS" and b"EXPORT_DAMAGED" in details and b"full 01" in details
            assert s.core.imported == [b"good", b"bad"] and s.core.running == 0
            late = [snapshot_pb.ImportSnapshotRequest(), snapshot_pb.ImportSnapshotRequest(options={})]
            code, details = await refused_import(s, iter(late))
            assert code == "INVALID_ARGUMENT" and b"options" in details
            assert (await refused_import(s, iter([])))[0] == "INVALID_ARGUMENT"
            wrong = snapshot_pb.ImportSnapshotRequest(options={"snapshot_id": "No"})
            code, details = await refused_import(s, iter([wrong]))
            assert code == "INVALID_ARGUMENT" and b"options.snapshot_id" in details

    run(story)


def test_a_sender_that_stops_is_not_waited_for_for_ever():
    async def story():
        async with serving(request_seconds=0.2) as s:

            async def stops():
                yield snapshot_pb.ImportSnapshotRequest(data=b"a")
                await asyncio.sleep(60)

            code, details = await refused_import(s, stops())
            assert code == "RESOURCE_EXHAUSTED" and b"SLOW_SENDER" in details
            await eventually(lambda: s.core.running == 0)

    run(story)


def test_messages_without_data_are_no_sign_of_life():
    async def story():
        async with serving(request_seconds=0.3) as s:

            async def empty():
                yield snapshot_pb.ImportSnapshotRequest(data=b"a")
                for _ in range(100):
                    await asyncio.sleep(0.05)
                    yield snapshot_pb.ImportSnapshotRequest()

            code, details = await refused_import(s, empty())
            assert code == "RESOURCE_EXHAUSTED" and b"SLOW_SENDER" in details
            await eventually(lambda: s.core.running == 0)

    run(story)


def test_a_sender_goes_on_as_long_as_it_brings_data():
    async def story():
        async with serving(request_seconds=1.0) as s:

            async def slow():
                for _ in range(15):
                    await asyncio.sleep(0.1)
                    yield snapshot_pb.ImportSnapshotRequest(data=b"a")

            await s.snapshots.ImportSnapshot(slow())
            assert s.core.imported == [b"a"] * 15

    run(story)


def test_a_sender_that_goes_away_ends_the_import():
    async def story():
        async with serving() as s:
            call = s.snapshots.ImportSnapshot()
            await call.write(snapshot_pb.ImportSnapshotRequest(data=b"a"))
            await eventually(lambda: s.core.running == 1)
            call.cancel()
            await eventually(lambda: s.core.running == 0)

    run(story)


def test_records_that_no_server_names_are_refused_in_an_export():
    async def story():
        async with serving() as s:
            request = snapshot_pb.ExportSnapshotRequest(name="models/x", held=[b"short"])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drained(s.snapshots.ExportSnapshot(request))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            details = rpc_status.from_call(caught.value).SerializeToString()
            assert b"held[0]" in details and b"name" in details
            assert s.core.calls == []

    run(story)


def test_trimming_tells_an_unset_bound_from_zero():
    async def story():
        async with serving() as s:
            reply = await s.info.TrimCache(server_pb.TrimCacheRequest(disk_bytes=0))
            assert s.core.trimmed == (None, 0)
            assert reply.stats.checkpoint_interval == 1

    run(story)


# How a call ends early.


def test_nothing_is_sent_before_the_first_event():
    gate = asyncio.Event()

    async def story():
        async with serving(ScriptedCore(script=(gate.wait, STARTED, FINISHED))) as s:
            call = s.inference.Generate(PARENT)
            headers = asyncio.ensure_future(call.initial_metadata())
            await eventually(lambda: s.core.running == 1)
            await asyncio.sleep(0.05)  # room for headers that must not come
            assert not headers.done()
            gate.set()
            await headers
            await drained(call)

    run(story)


@pytest.mark.parametrize("script", [(forever,), (STARTED, delta("a"), forever)], ids=["queued", "decoding"])
def test_a_client_that_cancels_closes_the_cores_iterator(script):
    async def story():
        async with serving(ScriptedCore(script=script)) as s:
            call = s.inference.Generate(PARENT)
            reading = asyncio.ensure_future(drained(call))
            await eventually(lambda: s.core.running == 1)
            call.cancel()
            await eventually(lambda: s.core.running == 0)
            assert s.core.ended == ["cancelled"]
            with pytest.raises(asyncio.CancelledError):
                await reading
            # The server is as it was.
            s.core.script = (STARTED, FINISHED)
            assert len(await drained(s.inference.Generate(PARENT))) == 2

    run(story)


def test_a_client_that_vanishes_closes_the_cores_iterator():
    async def story():
        async with serving(ScriptedCore(script=(STARTED, forever))) as s:
            async with grpc.aio.insecure_channel(s.addresses[0]) as channel:
                call = channel.unary_stream("/kvfork.v1.InferenceService/Generate")(PARENT.SerializeToString())
                await call.read()
                assert s.core.running == 1
            await eventually(lambda: s.core.running == 0)
            assert s.core.ended == ["cancelled"]

    run(story)


def test_a_deadline_closes_the_cores_iterator():
    async def story():
        async with serving(ScriptedCore(script=(STARTED, forever))) as s:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drained(s.inference.Generate(PARENT, timeout=0.5))
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: s.core.ended == ["cancelled"])

    run(story)


def test_a_unary_call_that_is_cancelled_cancels_the_core():
    class Waiting(ScriptedCore):
        async def fork(self, call, owner):
            self.running += 1
            try:
                await forever()
            finally:
                self.running -= 1

    async def story():
        async with serving(Waiting()) as s:
            call = s.inference.Fork(pb.ForkRequest(parent="snapshots/a", branches=[pb.ForkBranch()]))
            await eventually(lambda: s.core.running == 1)
            call.cancel()
            await eventually(lambda: s.core.running == 0)
            with pytest.raises(asyncio.CancelledError):
                await call

    run(story)


def test_three_hundred_aborted_streams_leave_nothing_behind():
    async def story():
        async with serving(ScriptedCore(script=(STARTED, delta("a"), forever))) as s:
            for _ in range(30):
                calls = [s.inference.Generate(PARENT) for _ in range(10)]
                await asyncio.gather(*(call.read() for call in calls))
                for call in calls:
                    call.cancel()
            await eventually(lambda: s.core.running == 0)
            assert s.core.ended == ["cancelled"] * 300
            s.core.script = (STARTED, FINISHED)
            assert len(await drained(s.inference.Generate(PARENT))) == 2

    run(story)


def test_calls_that_end_early_at_random_moments_end_once_and_leave_nothing():
    rng = random.Random(11)

    async def pause() -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))

    script = (pause, STARTED, *((pause, delta("a")) * 3), FINISHED)

    async def one(s: Serving) -> str:
        end = rng.choice(["by itself", "by deadline", "by cancel"])
        call = s.inference.Generate(PARENT, timeout=rng.uniform(0.001, 0.1) if end == "by deadline" else None)
        if end == "by cancel":
            asyncio.get_running_loop().call_later(rng.uniform(0, 0.1), call.cancel)
        try:
            return "finished" if (await drained(call))[-1].HasField("finished") else "cut short"
        except asyncio.CancelledError:
            return "cancelled"
        except grpc.aio.AioRpcError as error:
            return error.code().name

    async def story():
        async with serving(ScriptedCore(script=script)) as s:
            ends = [end for _ in range(20) for end in await asyncio.gather(*(one(s) for _ in range(25)))]
            assert set(ends) == {"finished", "cancelled", "DEADLINE_EXCEEDED"}
            await eventually(lambda: s.core.running == 0)
            # Every call that reached the core ended there once; a client that heard of the end means a finish there.
            assert len(s.core.ended) == len(s.core.calls) <= 500
            assert s.core.ended.count("finished") >= ends.count("finished")
            s.core.script = (STARTED, FINISHED)
            assert len(await drained(s.inference.Generate(PARENT))) == 2

    run(story)


# Where it listens.


def test_a_second_server_on_the_same_port_does_not_start():
    async def story():
        async with serving() as s:
            config = Config(address=s.addresses[0])
            second = RpcServer(ScriptedCore(), config)
            with pytest.raises(CannotListen, match="another server has it"):
                await second.start()
            heard: list[object] = []
            assert (
                await serve(ScriptedCore(), config, ready=heard.append, begin=lambda: heard.append("begun"))
                == EXIT_CANNOT_LISTEN
            )
            assert heard == []
            for _ in range(10):  # every call still reaches the first
                await drained(s.inference.Generate(PARENT))
            assert len(s.core.ended) == 10

    run(story)


def test_a_unix_socket_serves_its_owner_alone_and_goes_with_the_server(tmp_path: Path):
    path = tmp_path / "run" / "kvfork.sock"

    async def story():
        async with serving(unix_socket=path) as s:
            assert s.addresses[1] == f"unix:{path}"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            async with grpc.aio.insecure_channel(s.addresses[1]) as channel:
                call = channel.unary_unary("/kvfork.v1.ServerService/GetServerInfo")
                info = server_pb.GetServerInfoResponse.FromString(await call(b""))
                assert info.instance == "i1"
        assert list(path.parent.iterdir()) == []

    run(story)


def test_a_socket_file_left_behind_is_replaced(tmp_path: Path):
    path = tmp_path / "kvfork.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def story():
        async with serving(address="", unix_socket=path) as s:
            assert (await s.info.GetServerInfo(server_pb.GetServerInfoRequest())).instance == "i1"

    run(story)


def test_a_socket_that_answers_is_left_alone(tmp_path: Path):
    path = tmp_path / "kvfork.sock"

    async def story():
        async with serving(address="", unix_socket=path) as s:
            inode = path.stat().st_ino
            second = RpcServer(ScriptedCore(), Config(address="127.0.0.1:0", unix_socket=path))
            with pytest.raises(CannotListen, match="another server answers there"):
                await second.start()
            assert path.stat().st_ino == inode
            assert (await s.info.GetServerInfo(server_pb.GetServerInfoRequest())).instance == "i1"

    run(story)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "precious.txt"
    path.write_text("mine")

    async def story():
        with pytest.raises(CannotListen, match="no socket"):
            await RpcServer(ScriptedCore(), Config(address="", unix_socket=path)).start()
        with pytest.raises(CannotListen):
            await RpcServer(ScriptedCore(), Config(address="", unix_socket=path / "below.sock")).start()

    run(story)
    assert path.read_text() == "mine"


def test_a_socket_that_another_server_took_over_is_not_removed(tmp_path: Path):
    path = tmp_path / "kvfork.sock"

    async def story():
        async with serving(address="", unix_socket=path):
            path.unlink()
            path.write_text("somebody else's")
        assert path.read_text() == "somebody else's"

    run(story)


def test_binding_a_socket_leaves_the_umask_as_it_was(tmp_path: Path):
    async def story():
        async with serving(unix_socket=tmp_path / "kvfork.sock"):
            mask = os.umask(0o22)
            os.umask(mask)
            assert mask == before

    before = os.umask(0o22)
    os.umask(before)
    run(story)
