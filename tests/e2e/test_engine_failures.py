"""A model thread that dies, is ended, hangs or is slow: calls end, health says so, and what can go on goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb

from tests.e2e import inside
from tests.e2e.live import (
    PATIENCE,
    LiveServer,
    generate,
    greedy,
    prompt_of,
    raw,
    refused,
    until,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "kvfork.v1.InferenceService"
ENDLESS = 20_000


class Hurt:
    """A server with a window, a snapshot in it, and a call that runs."""

    def __init__(self, *flags: str) -> None:
        self.server = LiveServer("tiny-gemma3", *flags, inside=True)
        self.question = greedy(raw(prompt_of(300, 1)), tokens=20)
        self.expected = generate(self.server, self.question).ids
        self.snapshot = self.server.inference.CreateSnapshot(
            inference_pb.CreateSnapshotRequest(input=raw(prompt_of(700, 2)))
        ).snapshot
        self.child = greedy(raw(prompt_of(10, 3)), parent=self.snapshot.name, tokens=20)
        self.child_ids = generate(self.server, self.child).ids
        self.health: list[int] = []
        self._watch = HealthStub(self.server.channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        threading.Thread(target=self._follow, daemon=True).start()
        until(lambda: self.health, what="the first status")

    def _follow(self) -> None:
        try:
            for reply in self._watch:
                self.health.append(reply.status)
        except grpc.RpcError:
            pass

    def running(self, seed: int) -> Iterator[inference_pb.GenerateResponse]:
        stream = self.server.inference.Generate(greedy(raw(prompt_of(20, seed)), tokens=ENDLESS), timeout=PATIENCE)
        next(event for event in stream if event.HasField("delta"))
        return stream

    def hurt(self, token: int) -> Iterator[inference_pb.GenerateResponse]:
        return self.server.inference.Generate(greedy(raw([*prompt_of(20, 5), token]), tokens=5), timeout=PATIENCE)

    def serves_as_before(self) -> None:
        """Nothing of the failure is left: the same tokens, the snapshot at no cost, no row, no hold."""
        until(lambda: len(self.health) >= 3 and self.health[-1] == SERVING, what="health to turn and return")
        assert generate(self.server, self.question).ids == self.expected
        child = generate(self.server, self.child)
        assert child.ids == self.child_ids
        assert (child.usage.cached_tokens, child.usage.recomputed_tokens) == (700, 0)
        kept = self.server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=self.snapshot.name)).snapshot
        assert (kept.token_count, kept.active_uses) == (700, 0)
        self.server.idle()
        left = self.server.report()
        for name in ("sequences", "scheduled", "rows", "row_bytes", "running", "saving", "pinned", "held", "uses"):
            assert left[name] == 0, (name, left)

    def close(self) -> None:
        self._watch.cancel()
        self.server.close()


@pytest.fixture
def hurt() -> Iterator[Callable[..., Hurt]]:
    made: list[Hurt] = []

    def make(*flags: str) -> Hurt:
        made.append(Hurt(*flags))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("way", [inside.DIES, inside.ENDS], ids=["raises", "is ended"])
def test_a_thread_that_died_is_started_anew_and_snapshots_survive(hurt: Callable[..., Hurt], way: int) -> None:
    world = hurt()
    running = [world.running(seed) for seed in (11, 12)]
    ends = [refused(lambda stream=stream: list(stream)) for stream in [world.hurt(way), *running]]
    for end in ends:
        assert (end.code, end.reason) == ("UNAVAILABLE", "ENGINE_DOWN")
        assert end.retry_seconds is None  # any of them may be what it died of
    world.serves_as_before()
    assert world.health == [SERVING, NOT_SERVING, SERVING]
    assert "it is started anew (1 of 3)" in world.server.log.read_text()


def test_calls_that_waited_are_told_to_try_again(hurt: Callable[..., Hurt]) -> None:
    world = hurt("--max-batch", "1")
    running = world.running(11)
    ill = world.hurt(inside.DIES)
    until(lambda: world.server.stats().queued_calls == 1, what="a call to wait")
    waiting = world.server.inference.Generate(greedy(raw(prompt_of(20, 6)), tokens=5), timeout=PATIENCE)
    until(lambda: world.server.stats().queued_calls == 2, what="two calls to wait")
    running.cancel()
    end = refused(lambda: ill)
    assert (end.code, end.retry_seconds) == ("UNAVAILABLE", None)
    end = refused(lambda: waiting)
    assert (end.code, end.reason) == ("UNAVAILABLE", "ENGINE_DOWN") and end.retry_seconds
    world.serves_as_before()


def test_a_thread_that_keeps_dying_is_left_alone_and_health_says_so(hurt: Callable[..., Hurt]) -> None:
    world = hurt("--engine-restarts", "1")
    assert refused(lambda: world.hurt(inside.DIES)).reason == "ENGINE_DOWN"
    until(lambda: len(world.health) >= 3, what="health to return")
    assert refused(lambda: world.hurt(inside.DIES)).reason == "ENGINE_DOWN"
    until(lambda: "restart the server" in world.server.log.read_text(), what="the complaint")
    until(lambda: world.health[-1] == NOT_SERVING, what="health to turn")
    whole = HealthStub(world.server.channel).Check(health_pb2.HealthCheckRequest(service=""))
    assert whole.status == NOT_SERVING
    end = refused(lambda: generate(world.server, world.question))
    assert (end.code, end.reason) == ("UNAVAILABLE", "ENGINE_DOWN") and end.retry_seconds
    # What needs no model is answered all the same.
    assert world.server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=world.snapshot.name))
    assert world.server.terminate() == 0


def test_a_model_that_loads_only_at_the_second_try_is_waited_for(hurt: Callable[..., Hurt]) -> None:
    world = hurt()
    assert refused(lambda: world.hurt(inside.DIES_AND_STAYS)).reason == "ENGINE_DOWN"
    until(lambda: "could not be loaded" in world.server.log.read_text(), what="the failed load")
    world.serves_as_before()


def test_a_step_that_takes_too_long_costs_its_calls_and_no_more(hurt: Callable[..., Hurt]) -> None:
    world = hurt("--watchdog-seconds", "1")
    running = world.running(11)
    # They do not wait for it: nothing lets it go before they have ended.
    ends = [refused(lambda stream=stream: list(stream)) for stream in (world.hurt(inside.SLEEPS), running)]
    assert [(end.code, end.reason) for end in ends] == [("UNAVAILABLE", "ENGINE_DOWN")] * 2
    until(lambda: NOT_SERVING in world.health, what="health to turn")
    assert refused(lambda: generate(world.server, world.question)).reason == "ENGINE_DOWN"
    world.server.release.touch()
    world.serves_as_before()
    assert world.health == [SERVING, NOT_SERVING, SERVING]


def test_a_thread_that_never_comes_back_does_not_keep_the_server_from_ending(hurt: Callable[..., Hurt]) -> None:
    world = hurt("--watchdog-seconds", "1")
    end = refused(lambda: world.hurt(inside.HANGS))
    assert (end.code, end.reason) == ("UNAVAILABLE", "ENGINE_DOWN")
    until(lambda: world.health[-1] == NOT_SERVING, what="health to turn")
    assert refused(lambda: generate(world.server, world.question)).reason == "ENGINE_DOWN"
    assert world.server.terminate() == 0
    assert "the process ends without it" in world.server.log.read_text()
    assert world.server.left_behind() == []


@pytest.mark.parametrize("token", [inside.SPOILS, inside.NANS], ids=["raises", "no numbers"])
def test_a_row_that_fails_is_told_so_and_the_others_go_on(hurt: Callable[..., Hurt], token: int) -> None:
    world = hurt()
    server = world.server
    beside = server.inference.Generate(world.question, timeout=PATIENCE)
    next(beside)
    secret = prompt_of(20, 7)
    ways: list[Callable[[], object]] = [
        lambda: world.hurt(token),
        lambda: server.inference.Generate(greedy(raw([token, 9, 9]), parent=world.snapshot.name), timeout=PATIENCE),
    ]
    if token == inside.SPOILS:  # what a snapshot is made of is not sampled
        append = inference_pb.ForkBranch(append=raw([*secret, token]))
        fork = inference_pb.ForkRequest(parent=world.snapshot.name, branches=[inference_pb.ForkBranch(), append])
        create = inference_pb.CreateSnapshotRequest(input=raw([*secret, token]))
        ways += [lambda: server.inference.CreateSnapshot(create), lambda: server.inference.Fork(fork)]
    before = len(list_of(server))
    for way in ways:
        end = refused(way)
        assert (end.code, end.reason) == ("INTERNAL", "ROW_FAILED"), end
        assert end.metadata.keys() == {"row", "call", "position", "incident"} and end.metadata["call"] == "prefill"
        assert "RequestInfo" in end.kinds and end.retry_seconds is None and "as planned" not in end.text
        assert end.metadata["incident"] in server.log.read_text()
    assert [i for event in beside for i in event.delta.token_ids] == world.expected
    assert len(list_of(server)) == before, "nothing was made"
    assert world.health == [SERVING], "a row is no engine"
    assert generate(server, world.question).ids == world.expected
    server.idle()
    left = server.report()
    for name in ("sequences", "scheduled", "rows", "row_bytes", "running", "saving", "pinned", "held", "uses"):
        assert left[name] == 0, (name, left)


def list_of(server: LiveServer) -> list[str]:
    return [s.name for s in server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots]
