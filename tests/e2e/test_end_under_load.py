"""The end of a busy server, asked for and not: what each caller hears, and what is there after a restart."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from service.rpc.server import GRACE, LINGER
from tests.e2e.live import PATIENCE, LiveServer, Refusal, generate, greedy, prompt_of, raw, refusal_of, until

pytestmark = [pytest.mark.mlx]

DRAIN = 10.0
ENDLESS = 20_000
STREAMS, QUEUED = 8, 5


@dataclass
class Heard:
    """One caller's stream as far as it was heard."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    finished: inference_pb.Finished | None = None
    refusal: Refusal | None = None


def durable(name: str) -> pb.SnapshotOptions:
    return pb.SnapshotOptions(snapshot_id=name, durability=pb.DURABILITY_DISK)


def listen(server: LiveServer, index: int, began: threading.Semaphore, go_on: threading.Event | None) -> Heard:
    """Reads a generation to its end; with `go_on`, stops after the first message until that is set."""
    heard = Heard(prompt_of(300 + index, index))
    request = greedy(raw(heard.prompt), tokens=ENDLESS, save=durable(f"stream-{index:02}"))
    if go_on is not None:
        request.output.top_logprobs = 20  # a kilobyte a token, so that it matters whether they are read
    stream = server.inference.Generate(request, timeout=PATIENCE * 2)
    try:
        for event in stream:
            heard.ids += event.delta.token_ids
            if event.HasField("started"):
                began.release()
                if go_on is not None:
                    go_on.wait(PATIENCE)
            if event.HasField("finished"):
                heard.finished = event.finished
    except grpc.RpcError as error:
        heard.refusal = refusal_of(error)
    return heard


def serve(store: Path) -> LiveServer:
    flags = ("--store-dir", str(store), "--max-batch", str(STREAMS), "--drain-seconds", str(DRAIN))
    return LiveServer("tiny-gemma3", *flags)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(STREAMS + QUEUED) as made:
        yield made


def go_on(server: LiveServer, name: str) -> tuple[list[int], list[float]]:
    """Greedy tokens behind a snapshot with their log-probabilities; none of its state was computed again."""
    output = inference_pb.OutputOptions(token_ids=True, top_logprobs=3)
    answer = generate(server, greedy(raw([7, 8, 9]), parent=name, tokens=8, output=output))
    assert answer.usage.recomputed_tokens == 0, name
    assert answer.usage.cached_tokens == answer.started.prompt_tokens - 3
    return answer.ids, [
        value for entry in answer.logprobs for value in (entry.logprob, *(t.logprob for t in entry.top))
    ]


def tokens_of(server: LiveServer, name: str) -> tuple[list[int], Any]:
    reply = server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name, include_tokens=True))
    return list(reply.token_ids), reply.snapshot


def test_every_caller_hears_an_end_and_what_was_saved_is_there_after_a_restart(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    began, reads_on = threading.Semaphore(0), threading.Event()
    with serve(tmp_path / "s") as server:
        callers = [pool.submit(listen, server, i, began, reads_on if i == 0 else None) for i in range(STREAMS)]
        for _ in range(STREAMS):
            assert began.acquire(timeout=PATIENCE)
        callers += [pool.submit(listen, server, STREAMS + i, began, None) for i in range(QUEUED)]
        until(lambda: (s := server.stats()).queued_calls == QUEUED and s.decoding_rows == STREAMS, what="a full house")
        server.process.send_signal(signal.SIGTERM)
        timer = threading.Timer(1.0, reads_on.set)  # the slow one wakes up in the middle of it
        timer.start()
        try:
            code = server.process.wait(
                LINGER + DRAIN + GRACE + 15.0
            )  # 15: of model and store to close, on a busy machine
        except subprocess.TimeoutExpired:
            server.kill()
            raise
        finally:
            reads_on.set()
        heard = [caller.result(PATIENCE) for caller in callers]
        assert code == 0
    for caller in heard:
        ended = caller.finished is not None and caller.refusal is None
        retry = caller.refusal is not None and caller.refusal.code == "UNAVAILABLE"
        assert ended or retry, caller.refusal
    saved = [c for c in heard if c.finished is not None and c.finished.HasField("snapshot")]
    assert len(saved) >= STREAMS - 1, [c.finished and c.finished.save_error_reason for c in heard]
    assert all(c.finished is not None and c.finished.snapshot.durable for c in saved)

    with serve(tmp_path / "s") as server:
        first = {}
        for caller in saved:
            assert caller.finished is not None
            told = caller.finished.snapshot
            tokens, found = tokens_of(server, told.name)
            assert tokens == (caller.prompt + caller.ids)[: len(tokens)] and len(tokens) == told.token_count
            assert (found.prefix_hash, found.durable) == (told.prefix_hash, True)
            first[told.name] = go_on(server, told.name)
        server.kill()
    with serve(tmp_path / "s") as server:
        assert {name: go_on(server, name) for name in first} == first


def test_what_was_acknowledged_as_durable_outlives_a_kill_under_load(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    began = threading.Semaphore(0)
    with serve(tmp_path / "s") as server:
        callers = [pool.submit(listen, server, i, began, None) for i in range(STREAMS - 1)]
        for _ in callers:
            assert began.acquire(timeout=PATIENCE)
        kept = {}
        for i in range(4):
            prompt = prompt_of(520 + i, 100 + i)
            request = inference_pb.CreateSnapshotRequest(input=raw(prompt), options=durable(f"kept-{i:04}"))
            made = server.inference.CreateSnapshot(request, timeout=PATIENCE).snapshot
            assert made.durable
            kept[made.name] = prompt
        server.kill()  # at once behind the last answer
        heard = [caller.result(PATIENCE) for caller in callers]
        assert {h.refusal.code for h in heard if h.refusal is not None} == {"UNAVAILABLE"}
        assert all(h.finished is None for h in heard)
    with serve(tmp_path / "s") as server:
        assert {name: tokens_of(server, name)[0] for name in kept} == kept
        after = {name: go_on(server, name) for name in kept}
    with LiveServer("tiny-gemma3") as fresh:
        for name, prompt in kept.items():
            request = inference_pb.CreateSnapshotRequest(
                input=raw(prompt), options=pb.SnapshotOptions(snapshot_id=name.removeprefix("snapshots/"))
            )
            fresh.inference.CreateSnapshot(request, timeout=PATIENCE)
            assert go_on(fresh, name) == after[name], "bit for bit what a cold run gives"
