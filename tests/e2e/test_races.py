"""Hundreds of calls that end at the worst moment; afterwards the server holds what it held before, by its own count."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, LiveServer, generate, greedy, prompt_of, raw, refusal_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20
ENDLESS = 20_000
WORKERS = 8
CALLS = ("sequences", "scheduled", "rows", "row_bytes", "running", "saving", "pinned", "held", "uses")
MODELS = ("tiny-llama", "tiny-gemma3-w64", "tiny-qwen3_5")


@pytest.fixture(scope="module", params=MODELS)
def raced(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Small tiers, so that they are full before anything is measured."""
    flags = ("--max-batch", "4", "--max-queue", "64", "--memory-bytes", "8MiB", "--disk-bytes", "64MiB")
    with LiveServer(request.param, *flags, inside=True) as server:
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda i: generate(server, greedy(raw(prompt_of(600, i)), tokens=30)), range(120)))
        yield server


@pytest.fixture
def unharmed(raced: LiveServer) -> Iterator[LiveServer]:
    """Afterwards: the same tokens, no row, hold, task or file left, and no more memory than a few pages."""
    raced.idle()
    question = greedy(raw(prompt_of(300, 1)), tokens=12)
    expected = generate(raced, question).ids
    raced.idle()
    before, memory = raced.report(), raced.resident_bytes
    yield raced
    raced.idle()
    assert generate(raced, question).ids == expected
    until(lambda: all(raced.report()[name] == 0 for name in CALLS), what="rows and holds to go", patience=20)
    until(lambda: raced.report()["tasks"] <= before["tasks"], what="tasks to end", patience=20)
    until(lambda: raced.report()["files"] <= before["files"] + 2, what="files to be closed", patience=20)
    after = raced.report()
    assert after["threads"] <= before["threads"] + 2
    assert after["mlx_bytes"] <= before["mlx_bytes"] + 4 * MIB
    assert raced.resident_bytes <= memory + 48 * MIB
    assert raced.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots == []


def many(run: Callable[[int], str], count: int) -> Counter[str]:
    with ThreadPoolExecutor(WORKERS) as pool:
        return Counter(pool.map(run, range(count)))


def test_1000_races_between_cancel_and_the_end(unharmed: LiveServer) -> None:
    picked = random.Random(4)
    questions = [greedy(raw(prompt_of(length, 9)), tokens=8) for length in (20, 300)]
    expected = [generate(unharmed, question).ids for question in questions]
    began = time.monotonic()
    many(lambda i: str(len(list(unharmed.inference.Generate(questions[i % 2], timeout=PATIENCE)))), 4 * WORKERS)
    usual = (time.monotonic() - began) / 4

    def race(i: int) -> str:
        stream = unharmed.inference.Generate(questions[i % 2], timeout=PATIENCE)
        timer = threading.Timer(picked.uniform(0, 2 * usual), stream.cancel)
        timer.start()
        ids: list[int] = []
        finished = 0
        try:
            for event in stream:
                assert not finished, "something came after the end"
                ids += event.delta.token_ids
                finished += event.HasField("finished")
        except grpc.RpcError as error:
            assert ids == expected[i % 2][: len(ids)]
            return refusal_of(error).code
        finally:
            timer.cancel()
        assert finished == 1 and ids == expected[i % 2]
        return "finished"

    ends = many(race, 1000)
    assert set(ends) == {"finished", "CANCELLED"}, ends


def test_300_aborted_streams(unharmed: LiveServer) -> None:
    """The whole connection goes, in the queue, in prefill, in decode."""
    picked = random.Random(5)

    def abort(i: int) -> str:
        channel = grpc.insecure_channel(unharmed.address, options=[("grpc.use_local_subchannel_pool", 1)])
        call = channel.unary_stream(
            "/kvfork.v1.InferenceService/Generate",
            request_serializer=inference_pb.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb.GenerateResponse.FromString,
        )
        stream = call(greedy(raw(prompt_of(picked.choice([5, 700, 4000]), i)), tokens=ENDLESS))
        wanted = picked.choice(["nothing", "started", "delta"])
        try:
            if wanted != "nothing":
                next(event for event in stream if event.WhichOneof("event") == wanted)
        finally:
            channel.close()
        return wanted

    assert many(abort, 300).total() == 300


def test_50_abandoned_call_objects(unharmed: LiveServer) -> None:
    for i in range(50):
        stream = unharmed.inference.Generate(greedy(raw(prompt_of(40, 100 + i)), tokens=ENDLESS))
        if i % 2:
            next(event for event in stream if event.HasField("started"))
        del stream  # the client library cancels what nobody holds


def test_500_deadlines_of_1_to_200_ms(unharmed: LiveServer) -> None:
    picked = random.Random(6)

    def limited(i: int) -> str:
        save = {"save": pb.SnapshotOptions(snapshot_id=f"kept-late-{i}"), "save_on_cancel": True} if i % 5 == 0 else {}
        request = greedy(
            raw(prompt_of(picked.choice([5, 300, 3000]), i)), tokens=picked.choice([1, 8, ENDLESS]), **save
        )
        try:
            list(unharmed.inference.Generate(request, timeout=picked.uniform(0.001, 0.2)))
        except grpc.RpcError as error:
            return refusal_of(error).code
        return "finished"

    ends = many(limited, 500)
    assert set(ends) <= {"finished", "DEADLINE_EXCEEDED"}, ends
    unharmed.idle()
    until(lambda: unharmed.report()["saving"] == 0, what="saves to end")
    for snapshot in unharmed.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(page_size=200)).snapshots:
        unharmed.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=snapshot.name))
