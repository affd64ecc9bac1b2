"""The end of a server: what still works while it drains, what signals mean, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub

from service.config import Config
from service.errors import Draining
from service.rpc.server import EXIT_OK, serve

from .conftest import FINISHED, STARTED, ScriptedCore, delta, drained, eventually, run, snapshot

ROOT = Path(__file__).parents[2]


class DrainingCore(ScriptedCore):
    """Ends its running generation through `finish_running`, as the real core does."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.may_finish = asyncio.Event()  # the test's hand on how long draining takes
        super().__init__(script=(STARTED, delta("Hi"), self.finish.wait, FINISHED), snapshots=[snapshot("snapshots/a")])

    def start_draining(self) -> None:
        super().start_draining()
        self.failing["generate"] = Draining("the server drains")

    async def finish_running(self, timeout: float) -> None:
        await super().finish_running(timeout)
        await self.may_finish.wait()
        self.finish.set()
        await eventually(lambda: self.running == 0)


@asynccontextmanager
async def ending(server: asyncio.Task[int]) -> AsyncIterator[None]:
    """Sees that the server has ended before the loop does, also when the story fails."""
    try:
        yield
    finally:
        server.cancel()
        await asyncio.wait([server])


def test_a_drain_lets_running_work_end_and_refuses_new_work_with_a_status():
    async def story():
        core = DrainingCore()
        ready: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        config = Config(address="127.0.0.1:0", drain_seconds=7.0)
        server = asyncio.ensure_future(serve(core, config, ready=ready.set_result))
        [address] = await ready
        async with ending(server), grpc.aio.insecure_channel(address) as channel:
            inference, health = InferenceServiceStub(channel), HealthStub(channel)
            running = inference.Generate(pb.GenerateRequest(parent="snapshots/a"))
            assert [(await running.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
            watch = health.Watch(health_pb2.HealthCheckRequest(service="kvfork.v1.InferenceService"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

            os.kill(os.getpid(), signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            # New work is refused by a status, old work can still be looked at and stopped.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drained(inference.Generate(pb.GenerateRequest(parent="snapshots/a")))
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the server drains")
            got = await SnapshotServiceStub(channel).GetSnapshot(snapshot_pb.GetSnapshotRequest(name="snapshots/a"))
            assert got.snapshot.name == "snapshots/a"
            await inference.StopGeneration(pb.StopGenerationRequest(generation=STARTED.generation))

            core.may_finish.set()
            assert (await running.read()).WhichOneof("event") == "finished"
            assert await running.read() is grpc.aio.EOF
            assert await running.code() is grpc.StatusCode.OK
            assert await server == EXIT_OK
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drained(inference.Generate(pb.GenerateRequest(parent="snapshots/a")))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        order = [call[0] for call in core.calls if call[0] in ("start_draining", "finish_running")]
        assert order == ["start_draining", "finish_running"]
        assert ("finish_running", 7.0) in core.calls
        assert core.ended == ["finished"]

    run(story)


def test_a_cancelled_server_closes_its_listener_and_frees_its_calls():
    async def story():
        inside = asyncio.Event()

        async def forever() -> None:
            inside.set()
            await asyncio.Event().wait()

        core = ScriptedCore(script=(STARTED, forever))
        ready: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        server = asyncio.ensure_future(serve(core, Config(address="127.0.0.1:0"), ready=ready.set_result))
        [address] = await ready
        async with ending(server), grpc.aio.insecure_channel(address) as channel:
            call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(parent="snapshots/a"))
            await call.read()
            reading = asyncio.ensure_future(call.read())
            await inside.wait()
            server.cancel()
            with pytest.raises(grpc.aio.AioRpcError):
                await reading
            with pytest.raises(asyncio.CancelledError):
                await server
        assert core.ended == ["cancelled"]

    run(story)


CHILD = """
    import asyncio, sys
    from pathlib import Path
    from service.config import Config
    from service.rpc.server import serve
    from tests.rpc.conftest import ScriptedCore

    class Stuck(ScriptedCore):
        async def finish_running(self, timeout):
            print("draining", flush=True)
            await asyncio.sleep(600)

    core = Stuck() if sys.argv[2] == "stuck" else ScriptedCore()
    config = Config(address="127.0.0.1:0", unix_socket=Path(sys.argv[1]))
    sys.exit(asyncio.run(serve(core, config, ready=lambda addresses: print("ready", flush=True))))
"""


def child(path: Path, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(path), kind],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_the_process_well_and_leaves_nothing(tmp_path: Path, number: signal.Signals):
    path = tmp_path / "kvfork.sock"
    with child(path, "sound") as process:
        assert path.exists()
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_a_stuck_drain_at_once(tmp_path: Path):
    path = tmp_path / "kvfork.sock"
    with child(path, "stuck") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
