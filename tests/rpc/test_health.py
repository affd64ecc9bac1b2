"""grpc.health.v1: the names follow what the core says, for those who ask, list and watch."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthStub

from service.events import ModelState, ModelView
from service.rpc.health import INFERENCE, NAMES, PROCESS, SERVER, SNAPSHOTS, observe

from .conftest import ScriptedCore, run, serving

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


def model(state: ModelState) -> list[ModelView]:
    return [ModelView(name="models/m", state=state)]


@pytest.mark.parametrize(
    ("core", "serving_names"),
    [
        (ScriptedCore(), {PROCESS, INFERENCE, SNAPSHOTS, SERVER}),
        (ScriptedCore(model_views=model(ModelState.LOADING)), {PROCESS, SNAPSHOTS, SERVER}),
        # A thread that loads may not report yet.
        (ScriptedCore(model_views=model(ModelState.LOADING), alive=False), {PROCESS, SNAPSHOTS, SERVER}),
        (ScriptedCore(model_views=model(ModelState.FAILED), alive=False), {SNAPSHOTS, SERVER}),
        (ScriptedCore(model_views=model(ModelState.FAILED), alive=False, opened=False), {SERVER}),
        (ScriptedCore(alive=False), {SNAPSHOTS, SERVER}),
        (ScriptedCore(draining=True), set()),
    ],
    ids=["ready", "loading", "loading, no thread", "failed", "store refused", "stuck", "draining"],
)
def test_what_each_name_is_worth(core, serving_names):
    assert {name for name, value in observe(core).items() if value} == serving_names


async def listed(stub: HealthStub) -> dict[str, int]:
    reply = await stub.List(pb.HealthListRequest())
    return {name: status.status for name, status in reply.statuses.items()}


async def until(stub: HealthStub, name: str, status: int) -> None:
    while (await stub.Check(pb.HealthCheckRequest(service=name))).status != status:  # noqa: ASYNC110  a prober polls
        await asyncio.sleep(0.01)


def test_check_and_list_tell_the_same():
    async def story():
        async with serving(ScriptedCore(model_views=model(ModelState.LOADING))) as s:
            stub = HealthStub(s.channel)
            statuses = await listed(stub)
            assert statuses == {PROCESS: SERVING, INFERENCE: NOT_SERVING, SNAPSHOTS: SERVING, SERVER: SERVING}
            for name, status in statuses.items():
                assert (await stub.Check(pb.HealthCheckRequest(service=name))).status == status
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(pb.HealthCheckRequest(service="kvfork.v1.Nothing"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(story)


def test_health_follows_the_engine_down_and_up_again():
    async def story():
        async with serving() as s:
            stub = HealthStub(s.channel)
            watch = stub.Watch(pb.HealthCheckRequest(service=INFERENCE))
            assert (await watch.read()).status == SERVING
            for alive, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
                s.core.alive = alive
                assert (await watch.read()).status == status
                await until(stub, PROCESS, status)
                await until(stub, SNAPSHOTS, SERVING)
            s.core.alive = True
            s.core.model_views = model(ModelState.LOADING)
            await until(stub, PROCESS, SERVING)
            s.core.model_views = model(ModelState.READY)
            assert (await watch.read()).status == SERVING
            watch.cancel()

    run(story)


def test_a_watch_of_an_unknown_name_stays_open():
    async def story():
        async with serving() as s:
            watch = HealthStub(s.channel).Watch(pb.HealthCheckRequest(service="kvfork.v1.Nothing"))
            assert (await watch.read()).status == UNKNOWN
            more = asyncio.ensure_future(watch.read())
            s.core.alive = False
            await until(HealthStub(s.channel), INFERENCE, NOT_SERVING)
            assert not more.done()
            watch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await more

    run(story)


def test_a_core_that_cannot_be_asked_is_not_serving(caplog):
    async def story():
        async with serving() as s:
            stub = HealthStub(s.channel)
            s.core.failing["models"] = RuntimeError("secret")
            await until(stub, INFERENCE, NOT_SERVING)
            assert set((await listed(stub)).values()) == {NOT_SERVING}
            del s.core.failing["models"]
            await until(stub, INFERENCE, SERVING)  # the watchdog lives on

    run(story)
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_a_server_that_stops_tells_its_watchers_and_lets_them_go():
    async def story():
        async with serving() as s:
            watches = [HealthStub(s.channel).Watch(pb.HealthCheckRequest(service=name)) for name in NAMES]
            assert [(await watch.read()).status for watch in watches] == [SERVING] * 4
            await s.server.drain(linger=0)
            await s.server.stop(grace=None)
            for watch in watches:
                assert (await watch.read()).status == NOT_SERVING

    run(story)
