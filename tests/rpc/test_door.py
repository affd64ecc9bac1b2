"""The door: who gets in, what the others hear, and what any caller may take of the server before a handler runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb

from service.auth.tokens import new_token
from service.rpc.door import OPEN_WAITING

from .conftest import ScriptedCore, Serving, drained, eventually, run, serving
from .wire import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    Wire,
    call_headers,
    frame,
    message_head,
)

METADATA = tuple[tuple[str, str], ...]
HEALTH = "/grpc.health.v1.Health/Check"
INFO = "/kvfork.v1.ServerService/GetServerInfo"


class Owners:
    """A tokens file for alice, bob and the admin ops, and what each of them sends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens"
        made = {name: new_token(name, admin=name == "ops") for name in ("alice", "bob", "ops")}
        self.tokens = {name: token for name, (token, _) in made.items()}
        self.path.write_text("".join(f"{line}\n" for _, line in made.values()))

    def __getitem__(self, name: str) -> METADATA:
        return (("authorization", f"Bearer {self.tokens[name]}"),)


@pytest.fixture
def owners(tmp_path: Path) -> Owners:
    return Owners(tmp_path)


async def ended(call: Any) -> Any:
    """The reply, or all messages."""
    return await (drained(call) if hasattr(call, "__aiter__") else call)


async def refusal(call: Any) -> tuple[str, str]:
    """(code, reason) of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended(call)
    status = rpc_status.from_call(caught.value)
    assert status is not None and status.code == caught.value.code().value[0]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return caught.value.code().name, info.reason


async def code_of(call: Any) -> str:
    """How a call ends."""
    try:
        await ended(call)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


# Every method of the contract, called in somebody's name.
CALLS: dict[str, Callable[[Serving, METADATA], Any]] = {
    "Generate": lambda s, m: s.inference.Generate(pb.GenerateRequest(parent="snapshots/one"), metadata=m),
    "StopGeneration": lambda s, m: s.inference.StopGeneration(
        pb.StopGenerationRequest(generation="generations/g1"), metadata=m
    ),
    "CreateSnapshot": lambda s, m: s.inference.CreateSnapshot(
        pb.CreateSnapshotRequest(parent="snapshots/one"), metadata=m
    ),
    "Fork": lambda s, m: s.inference.Fork(
        pb.ForkRequest(parent="snapshots/one", branches=[pb.ForkBranch()]), metadata=m
    ),
    "Rollback": lambda s, m: s.inference.Rollback(
        pb.RollbackRequest(source="snapshots/one", token_count=1), metadata=m
    ),
    "CountTokens": lambda s, m: s.inference.CountTokens(pb.CountTokensRequest(parent="snapshots/one"), metadata=m),
    "GetSnapshot": lambda s, m: s.snapshots.GetSnapshot(
        snapshot_pb.GetSnapshotRequest(name="snapshots/one"), metadata=m
    ),
    "ListSnapshots": lambda s, m: s.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(), metadata=m),
    "UpdateSnapshot": lambda s, m: s.snapshots.UpdateSnapshot(
        snapshot_pb.UpdateSnapshotRequest(
            snapshot={"name": "snapshots/one", "pinned": True}, update_mask={"paths": ["pinned"]}
        ),
        metadata=m,
    ),
    "ExtendSnapshots": lambda s, m: s.snapshots.ExtendSnapshots(
        snapshot_pb.ExtendSnapshotsRequest(names=["snapshots/one"]), metadata=m
    ),
    "DeleteSnapshot": lambda s, m: s.snapshots.DeleteSnapshot(
        snapshot_pb.DeleteSnapshotRequest(name="snapshots/one"), metadata=m
    ),
    "WatchSnapshots": lambda s, m: s.snapshots.WatchSnapshots(snapshot_pb.WatchSnapshotsRequest(), metadata=m),
    "ExportSnapshot": lambda s, m: s.snapshots.ExportSnapshot(
        snapshot_pb.ExportSnapshotRequest(name="snapshots/one"), metadata=m
    ),
    "CheckImport": lambda s, m: s.snapshots.CheckImport(snapshot_pb.CheckImportRequest(), metadata=m),
    "ImportSnapshot": lambda s, m: s.snapshots.ImportSnapshot(
        iter([snapshot_pb.ImportSnapshotRequest(data=b"x")]), metadata=m
    ),
    "GetServerInfo": lambda s, m: s.info.GetServerInfo(server_pb.GetServerInfoRequest(), metadata=m),
    "ListModels": lambda s, m: s.info.ListModels(server_pb.ListModelsRequest(), metadata=m),
    "GetModel": lambda s, m: s.info.GetModel(server_pb.GetModelRequest(), metadata=m),
    "GetCacheStats": lambda s, m: s.info.GetCacheStats(server_pb.GetCacheStatsRequest(), metadata=m),
    "TrimCache": lambda s, m: s.info.TrimCache(server_pb.TrimCacheRequest(), metadata=m),
}


def test_no_method_is_forgotten():
    every = {
        method.name
        for module in (pb, snapshot_pb, server_pb)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(CALLS) == every


@pytest.mark.parametrize("method", CALLS)
def test_without_a_good_token_no_method_is_reached(method: str, owners: Owners):
    async def story() -> None:
        async with serving(tokens=owners.path) as s:
            assert await refusal(CALLS[method](s, ())) == ("UNAUTHENTICATED", "TOKEN_MISSING")
            wrong = (("authorization", "Bearer kvf_wrong"),)
            assert await refusal(CALLS[method](s, wrong)) == ("UNAUTHENTICATED", "TOKEN_UNKNOWN")
            assert s.core.calls == []

    run(story)


def test_each_call_runs_in_the_name_that_its_token_gives(owners: Owners):
    """What the core is asked carries the owner, whatever the method; those that name nothing of an owner's do not."""

    async def story() -> None:
        core = ScriptedCore()
        core.snapshots = []
        core.end_watches()
        async with serving(core, tokens=owners.path) as s:
            for method, call in CALLS.items():
                for owner in ("alice", "bob"):
                    before = len(core.calls)
                    code = await code_of(call(s, owners[owner]))
                    # A watch that its server ends says UNAVAILABLE.
                    assert code in ("OK", "NOT_FOUND", "PERMISSION_DENIED", "UNAVAILABLE"), (method, code)
                    asked = core.calls[before:]
                    if method in ("GetServerInfo", "ListModels", "GetModel", "TrimCache"):
                        assert not any(owner in call[1:] for call in asked), (method, asked)
                    elif method != "WatchSnapshots" or asked:
                        assert asked and all(owner in call[1:] for call in asked), (method, asked)

    run(story)


def test_what_concerns_all_is_for_admins(owners: Owners):
    async def story() -> None:
        async with serving(tokens=owners.path, admins=("bob",)) as s:
            trim = server_pb.TrimCacheRequest(memory_bytes=5)
            refused = await refusal(s.info.TrimCache(trim, metadata=owners["alice"]))
            assert refused == ("PERMISSION_DENIED", "ADMIN_REQUIRED")
            assert not hasattr(s.core, "trimmed")
            own = await s.info.GetCacheStats(server_pb.GetCacheStatsRequest(), metadata=owners["alice"])
            assert (own.owner, own.stats.memory_bytes) == ("alice", 0)
            for admin in ("ops", "bob"):  # named in the file, and in the settings
                await s.info.TrimCache(trim, metadata=owners[admin])
                assert s.core.trimmed == (5, None)
                whole = await s.info.GetCacheStats(server_pb.GetCacheStatsRequest(), metadata=owners[admin])
                assert whole.owner == "" and whole.stats.memory_bytes > 0

    run(story)


def test_without_authentication_whoever_connects_is_local_and_admin():
    async def story() -> None:
        async with serving() as s:
            await s.info.TrimCache(server_pb.TrimCacheRequest(disk_bytes=7), metadata=(("authorization", "Bearer x"),))
            await s.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest())
            assert s.core.trimmed == (None, 7)
            assert s.core.calls[-1][:2] == ("list_snapshots", "local")

    run(story)


def test_health_is_open_and_nothing_else_is_told_to_strangers(owners: Owners):
    async def story() -> None:
        async with serving(tokens=owners.path) as s:
            check = s.channel.unary_unary(HEALTH)
            assert await check(b"") == health_pb2.HealthCheckResponse(status=1).SerializeToString()
            unknown = s.channel.unary_unary("/kvfork.v1.InferenceService/NoSuchMethod")
            assert await refusal(unknown(b"")) == ("UNAUTHENTICATED", "TOKEN_MISSING")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"", metadata=owners["alice"])
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            reflect = reflection_pb2_grpc.ServerReflectionStub(s.channel).ServerReflectionInfo
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            assert await refusal(reflect(iter([asked]))) == ("UNAUTHENTICATED", "TOKEN_MISSING")
            told = [reply async for reply in reflect(iter([asked]), metadata=owners["alice"])]
            assert "kvfork.v1.InferenceService" in str(told)
        async with serving(tokens=owners.path, reflection=False) as s:
            reflect = reflection_pb2_grpc.ServerReflectionStub(s.channel).ServerReflectionInfo
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [reply async for reply in reflect(iter([asked]), metadata=owners["alice"])]
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(story)


def test_a_strangers_message_is_not_read(owners: Owners):
    """It has announced 60 MiB and sent nothing of them: the refusal does not wait."""

    async def story() -> None:
        async with serving(tokens=owners.path) as s:
            wire = await Wire.to(s.addresses[0])
            await wire.send(frame(HEADERS, call_headers(INFO), flags=END_HEADERS, stream=1))
            await wire.send(frame(DATA, message_head(60 * 2**20), stream=1))
            answer = await wire.next(HEADERS)
            assert answer is not None and answer[1] == 1 and b"16" in answer[2]  # grpc-status: UNAUTHENTICATED
            await wire.close()

    run(story)


# Limits


def test_a_request_that_does_not_arrive_is_ended_and_others_are_served_meanwhile(owners: Owners):
    async def story() -> None:
        async with serving(tokens=owners.path, request_seconds=0.3) as s:
            extra = [*owners["alice"]]
            wire = await Wire.to(s.addresses[0])
            for number, body in enumerate((b"", message_head(100), message_head(100) + b"x" * 50)):
                stream = 2 * number + 1
                await wire.send(frame(HEADERS, call_headers(INFO, extra), flags=END_HEADERS, stream=stream))
                if body:
                    await wire.send(frame(DATA, body, stream=stream))
            await s.info.GetServerInfo(server_pb.GetServerInfoRequest(), metadata=owners["bob"])
            ended = {(await wire.next(HEADERS))[1] for _ in range(3)}
            assert ended == {1, 3, 5}
            await wire.close()
            # The same in a client's words.
            stalled = s.channel.stream_unary(INFO)(metadata=owners["alice"])
            assert await refusal(_result(stalled)) == ("RESOURCE_EXHAUSTED", "SLOW_SENDER")

    run(story)


async def _result(call: Any) -> Any:
    return await call


def test_a_call_without_a_request_is_refused(owners: Owners):
    async def story() -> None:
        async with serving(tokens=owners.path) as s:
            empty = s.channel.stream_unary(INFO)(iter([]), metadata=owners["alice"])
            assert await refusal(_result(empty)) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            garbage = s.channel.unary_unary(INFO)(b"\xff\xff", metadata=owners["alice"])
            assert await refusal(garbage) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            assert await refusal(s.channel.unary_unary(HEALTH)(b"\xff\xff")) == ("INVALID_ARGUMENT", "INVALID_FIELD")

    run(story)


def test_an_owner_has_so_many_calls_and_another_owner_its_own(owners: Owners):
    async def story() -> None:
        release = asyncio.Event()
        core = ScriptedCore()
        core.script = (*core.script[:1], release.wait, *core.script[1:])
        async with serving(core, tokens=owners.path, max_owner_calls=3) as s:
            request = pb.GenerateRequest(parent="snapshots/one")
            held = [s.inference.Generate(request, metadata=owners["alice"]) for _ in range(3)]
            streams = [aiter(call) for call in held]
            for stream in streams:
                await anext(stream)
            for again in (
                s.inference.Generate(request, metadata=owners["alice"]),
                s.info.GetServerInfo(server_pb.GetServerInfoRequest(), metadata=owners["alice"]),
            ):
                assert await refusal(again) == ("RESOURCE_EXHAUSTED", "CALL_QUOTA")
            await s.info.GetServerInfo(server_pb.GetServerInfoRequest(), metadata=owners["bob"])
            await s.channel.unary_unary(HEALTH)(b"")
            held[0].cancel()
            await eventually(lambda: core.running == 2)
            release.set()
            for stream in streams[1:]:
                assert len(await drained(stream)) == 2
            # Every place is free again, also that of the call that was cancelled.
            again = (drained(s.inference.Generate(request, metadata=owners["alice"])) for _ in range(3))
            assert [len(messages) for messages in await asyncio.gather(*again)] == [3, 3, 3]

    run(story)


def test_strangers_who_ask_for_health_slowly_make_room_for_those_who_ask_quickly():
    async def story() -> None:
        async with serving() as s:
            wire = await Wire.to(s.addresses[0])
            for number in range(3 * OPEN_WAITING):
                await wire.send(frame(HEADERS, call_headers(HEALTH), flags=END_HEADERS, stream=2 * number + 1))
            reply = await s.channel.unary_unary(HEALTH)(b"")
            assert health_pb2.HealthCheckResponse.FromString(reply).status == 1
            ended = [(await wire.next(HEADERS))[1] for _ in range(2 * OPEN_WAITING)]
            assert ended == [2 * number + 1 for number in range(2 * OPEN_WAITING)]  # the oldest first
            await wire.close()

    run(story)


def test_strangers_are_told_of_in_the_log_without_filling_it(owners: Owners, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "service")

    async def story() -> None:
        async with serving(tokens=owners.path) as s:
            for _ in range(50):
                call = s.info.GetServerInfo(
                    server_pb.GetServerInfoRequest(), metadata=(("authorization", "Bearer no"),)
                )
                assert (await refusal(call))[1] == "TOKEN_UNKNOWN"

    run(story)
    lines = [record.getMessage() for record in caplog.records if "not let in" in record.getMessage()]
    assert len(lines) == 1 and "TOKEN_UNKNOWN" in lines[0] and "127.0.0.1" in lines[0]


# Connections


def test_a_connection_that_never_speaks_is_closed_and_so_is_one_too_many():
    async def story() -> None:
        async with serving(max_connections=3) as s:
            await s.channel.unary_unary(HEALTH)(b"")  # one
            silent = [await Wire.to(s.addresses[0], greet=False) for _ in range(2)]
            late = await Wire.to(s.addresses[0], greet=False)
            await late.ended()
            await s.channel.unary_unary(HEALTH)(b"")  # who is in is not disturbed
            for wire in silent:
                await wire.ended()  # ten seconds
            for wire in (*silent, late):
                await wire.close()
            other = grpc.aio.insecure_channel(s.addresses[0])
            await other.unary_unary(HEALTH)(b"", wait_for_ready=True)
            await other.close()

    run(story, limit=60.0)


def test_a_flood_of_pings_ends_its_own_connection():
    async def story() -> None:
        async with serving() as s:
            wire = await Wire.to(s.addresses[0])
            await wire.send(frame(PING, b"\x00" * 8) * 5)
            goaway = await wire.next(GOAWAY)
            assert goaway is None or b"too_many_pings" in goaway[2]  # None: all that was left to see is the reset
            await wire.ended()
            await wire.close()
            await s.channel.unary_unary(HEALTH)(b"")

    run(story)


def test_metadata_beyond_the_limit_is_refused_and_the_connection_goes_on(owners: Owners):
    async def story() -> None:
        async with serving(tokens=owners.path) as s:
            for size in (20_000, 200_000):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await s.channel.unary_unary(INFO)(b"", metadata=(*owners["alice"], ("x-big", "a" * size)))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await s.channel.unary_unary(INFO)(b"", metadata=owners["alice"])
            # Headers that never end: CONTINUATION after CONTINUATION.
            wire = await Wire.to(s.addresses[0])

            await wire.send(frame(HEADERS, call_headers(INFO), stream=1))
            piece = b"".join(b"\x00" + bytes([5]) + f"x{n:04}".encode() + bytes([100]) + b"v" * 100 for n in range(140))
            with_rst = asyncio.ensure_future(wire.next(RST_STREAM, HEADERS))
            try:
                for _ in range(2_000):
                    await wire.send(frame(CONTINUATION, piece, stream=1))
                    if with_rst.done():
                        break
            except ConnectionError:
                pass
            await wire.close()
            with_rst.cancel()
            await asyncio.gather(with_rst, return_exceptions=True)
            await s.channel.unary_unary(INFO)(b"", metadata=owners["alice"])

    run(story)


def test_a_connection_has_so_many_streams():
    async def story() -> None:
        async with serving() as s:
            wire = await Wire.to(s.addresses[0])

            settings = await wire.next(SETTINGS)
            assert settings is not None
            pairs = {
                int.from_bytes(settings[2][at : at + 2], "big"): int.from_bytes(settings[2][at + 2 : at + 6], "big")
                for at in range(0, len(settings[2]), 6)
            }
            assert pairs[3] == 200  # SETTINGS_MAX_CONCURRENT_STREAMS
            assert pairs[6] == 16 * 1024  # SETTINGS_MAX_HEADER_LIST_SIZE
            await wire.close()

    run(story)
