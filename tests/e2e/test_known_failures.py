"""Ways in which services of this kind have failed elsewhere, and that no other test here would notice.

The others are spread over the suite: cancels and races in `test_life_cycles` and `test_races`, stops in `test_shutdown`
and `test_end_under_load`, health in `test_engine_failures`, message sizes in tests/rpc.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub

from tests.e2e.live import PATIENCE, ROOT, LiveServer, greedy, prompt_of, raw, refused

pytestmark = [pytest.mark.mlx]

ENDLESS = 20_000


def in_a_process(program: str, *arguments: str) -> str:
    """What a program of its own prints; it must end well, and in time."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.strip()


def test_a_collector_that_runs_at_any_moment_locks_nobody_out(server: LiveServer) -> None:
    """Call objects end in the collector, on whatever thread; a log that is in use there was a deadlock once."""
    told = in_a_process(
        """
        import asyncio, gc, logging, sys, threading
        from kvfork_client import AsyncClient, Stopping

        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
        over = threading.Event()

        def write():
            while not over.is_set():
                logging.getLogger("x").debug("busy")

        async def main():
            async with AsyncClient(sys.argv[1]) as client:
                for i in range(30):
                    generation = client.generate(f"number {i}", stopping=Stopping(max_tokens=40, ignore_eos=True))
                    async for _ in generation:
                        if i % 2:
                            break

        thread = threading.Thread(target=write)
        thread.start()
        gc.set_threshold(1)
        asyncio.run(main())
        over.set()
        thread.join()
        print("ended")
        """,
        server.address,
    )
    assert told == "ended"
    server.idle()


def test_connections_that_are_closed_in_the_middle_leave_no_descriptor(server: LiveServer) -> None:
    open_before = server.open_files
    told = in_a_process(
        """
        import asyncio, os, sys
        from kvfork_client import AsyncClient, Stopping

        def open_now():
            return len(os.listdir("/proc/self/fd"))

        async def once(i):
            async with AsyncClient(sys.argv[1]) as client:
                generation = client.generate(f"number {i}", stopping=Stopping(max_tokens=20_000, ignore_eos=True))
                reading = asyncio.ensure_future(generation.result())
                await asyncio.sleep(0.002 * (i % 10))
                reading.cancel()

        async def main():
            counts = []
            for i in range(200):
                await once(i)
                if i == 49:
                    await asyncio.sleep(0.2)
                    before = open_now()
            for _ in range(300):  # closing takes a moment
                if open_now() <= before + 4:
                    break
                await asyncio.sleep(0.1)
            print(open_now() - before)

        asyncio.run(main())
        """,
        server.address,
    )
    assert int(told) <= 4, "descriptors that 150 connections left"
    server.idle()
    give_up = time.monotonic() + PATIENCE
    while server.open_files > open_before + 4:
        assert time.monotonic() < give_up, (open_before, server.open_files)
        time.sleep(0.05)


def test_a_status_with_details_survives_every_time(server: LiveServer) -> None:
    request = greedy(raw("x"), parent="snapshots/never-was-here")
    get = snapshot_pb.GetSnapshotRequest(name="snapshots/never-was-here")
    for _ in range(100):
        for call in (lambda: server.inference.Generate(request), lambda: server.snapshots.GetSnapshot(get)):
            answer = refused(call)
            assert (answer.code, answer.reason) == ("NOT_FOUND", "SNAPSHOT_NOT_FOUND")
            assert answer.resource == "snapshots/never-was-here"


def test_stubs_live_beside_files_of_the_same_names() -> None:
    """Other packages have a types.proto of their own in the one pool of a process."""
    told = in_a_process(
        """
        from google.protobuf import descriptor_pb2, descriptor_pool
        for name in ("types.proto", "common.proto", "inference_service.proto", "v1/types.proto"):
            file = descriptor_pb2.FileDescriptorProto(name=name, package="somebody.else", syntax="proto3")
            file.message_type.add(name="Message" + name.replace("/", "").split(".")[0])
            descriptor_pool.Default().Add(file) if hasattr(descriptor_pool.Default(), "Add") else (
                descriptor_pool.Default().AddSerializedFile(file.SerializeToString()))
        import grpc_health.v1.health_pb2
        from kvfork.v1 import inference_service_pb2, server_service_pb2, snapshot_service_pb2, types_pb2
        print(types_pb2.Snapshot(name="x").name)
        """
    )
    assert told == "x"


@pytest.mark.slow
def test_2000_cancelled_streams_leave_no_memory_behind() -> None:
    with LiveServer("tiny-gemma3") as server:

        def cancel_some(count: int) -> int:
            for i in range(count):
                stream = server.inference.Generate(greedy(raw(prompt_of(5, i)), tokens=ENDLESS), timeout=PATIENCE)
                next(stream)
                stream.cancel()
            server.idle()
            return server.resident_bytes

        first = cancel_some(500)
        assert cancel_some(2_000) - first < 48 * 2**20


@pytest.mark.slow
def test_a_silent_stream_survives_a_client_that_pings(server: LiveServer) -> None:
    """Most servers answer the third ping without data with a GOAWAY."""
    options = [
        ("grpc.keepalive_time_ms", 11_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(server.address, options=options) as channel:
        watch = SnapshotServiceStub(channel).WatchSnapshots(
            snapshot_pb.WatchSnapshotsRequest(labels={"no": "such"}), timeout=75
        )
        heard: list[str] = []
        ended = refused(lambda: heard.extend(message.WhichOneof("event") for message in watch))
    assert (ended.code, heard) == ("DEADLINE_EXCEEDED", ["synced", "bookmark", "bookmark"]), ended


@pytest.mark.slow
def test_what_is_read_for_60_mib_holds_no_health_check_up(server: LiveServer) -> None:
    """The request is refused in the end; while it is read and parsed, the server answers others."""
    from grpc_health.v1 import health_pb2
    from grpc_health.v1.health_pb2_grpc import HealthStub

    large = inference_pb.CountTokensRequest(input=raw("word " * (12 * 2**20)))
    pending = server.inference.CountTokens.future(large, timeout=PATIENCE)
    health, checks = HealthStub(server.channel), 0
    while not pending.done():
        health.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        checks += 1
        time.sleep(0.05)
    assert checks > 3
    assert pending.exception() is None or pending.exception().code() is not grpc.StatusCode.UNAVAILABLE
