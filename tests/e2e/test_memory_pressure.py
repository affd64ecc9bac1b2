"""Thirty conversations where there is room for three: limits hold, names live, and receipts say what it cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import LiveServer, adds_up, generate, greedy, prompt_of, raw, refusal_of, refused

MEMORY, DISK = 1 << 20, 8 << 20
MODELS = ("tiny-gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-llama", "tiny-qwen3_5")))
COUNT = 30


def crowd(server: LiveServer, seed: int) -> None:
    """Enough other conversations to push everything older out."""
    for i in range(12):
        generate(server, greedy(raw(prompt_of(1030, seed + i)), tokens=2, save=pb.SnapshotOptions()))


@pytest.fixture(scope="module", params=MODELS)
def tight(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """A server with room for a few conversations."""
    with LiveServer(request.param, "--memory-bytes", str(MEMORY), "--disk-bytes", str(DISK)) as server:
        yield server


@pytest.fixture
def roomy(tight: LiveServer, cold_server_for: Callable[[str], LiveServer]) -> LiveServer:
    """The same model with room for all."""
    return cold_server_for(tight.model().name.removeprefix("models/"))


def question(i: int, **more: object) -> inference_pb.GenerateRequest:
    return greedy(raw(prompt_of(300 + 23 * i, 400 + i)), tokens=6, **more)


@pytest.mark.slow
def test_thirty_conversations_in_the_room_of_three(tight: LiveServer, roomy: LiveServer) -> None:
    names: dict[int, str] = {}
    for i in range(COUNT):
        answer = generate(tight, question(i, save=pb.SnapshotOptions(labels={"turn": "1"})))
        assert answer.ids == generate(roomy, question(i)).ids
        if not answer.finished.save_error_reason:
            names[i] = answer.finished.snapshot.name
        assert tight.stats().disk_bytes <= DISK
    stats = tight.stats()
    assert stats.evictions > 0
    assert stats.memory_snapshots + stats.disk_snapshots + stats.token_snapshots == len(names)
    assert len(names) >= COUNT - 3

    order = list(names)
    random.Random(1).shuffle(order)
    evicted = 0
    for i in order:
        length = 300 + 23 * i + 6
        before = tight.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=names[i])).snapshot
        answer = generate(tight, greedy(raw(prompt_of(7, i)), parent=names[i], tokens=6))
        usage = answer.usage
        assert (usage.prompt_tokens, usage.new_tokens) == (length + 7, 7)
        if before.residency == pb.RESIDENCY_TOKENS:
            assert usage.recomputed_tokens > 0
            evicted += usage.miss_reason == pb.MISS_REASON_EVICTED
        else:
            assert usage.recomputed_tokens < 256
        context = [*tokens_of(tight, names[i]), *prompt_of(7, i)]
        assert answer.ids == generate(roomy, greedy(raw(context), tokens=6)).ids
        assert tight.stats().disk_bytes <= DISK
    assert evicted > 0


def test_memory_stays_within_its_limit(tight: LiveServer) -> None:
    worst = 0
    for i in range(COUNT):
        generate(tight, greedy(raw(prompt_of(900, 500 + i)), tokens=4, save=pb.SnapshotOptions()))
        worst = max(worst, tight.stats().memory_bytes)
    assert tight.stats().memory_limit_bytes == MEMORY
    assert worst <= MEMORY


def test_pinned_state_survives_pressure(tight: LiveServer) -> None:
    pinned = tight.inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(
            input=raw(prompt_of(600, 600)), options=pb.SnapshotOptions(pinned=True, snapshot_id="pinned-under-pressure")
        )
    ).snapshot.name
    crowd(tight, 610)
    usage = generate(tight, greedy(raw([9]), parent=pinned, tokens=2)).usage
    tight.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=pinned))
    assert (usage.cached_tokens, usage.recomputed_tokens) == (600, 0)


def test_what_was_computed_again_is_kept_again(tight: LiveServer) -> None:
    name = generate(tight, greedy(raw(prompt_of(700, 640)), tokens=4, save=pb.SnapshotOptions())).finished.snapshot.name
    crowd(tight, 650)
    again = generate(tight, greedy(raw([9]), parent=name, tokens=2)).usage
    assert again.recomputed_tokens == 704 - again.cached_tokens > 0
    once_more = generate(tight, greedy(raw([9]), parent=name, tokens=2)).usage
    assert (once_more.cached_tokens, once_more.recomputed_tokens) == (704, 0)


def test_a_receipt_does_not_call_evicted_state_cached(tight: LiveServer) -> None:
    """A copy of a snapshot whose state is gone computes it, and so does the way back to it."""
    root = generate(tight, greedy(raw(prompt_of(700, 670)), tokens=4, save=pb.SnapshotOptions())).finished.snapshot.name
    child = generate(tight, greedy(raw([9]), parent=root, tokens=4, save=pb.SnapshotOptions())).finished.snapshot.name
    crowd(tight, 680)
    fork = tight.inference.Fork(inference_pb.ForkRequest(parent=root, branches=[inference_pb.ForkBranch()]))
    crowd(tight, 6800)
    back = tight.inference.Rollback(inference_pb.RollbackRequest(source=child, ancestor=root))
    for usage, made in ((back.usage, back.snapshot), (fork.usage, fork.snapshots[0])):
        adds_up(usage)
        assert usage.recomputed_tokens == 704 - usage.cached_tokens
        assert usage.cached_tokens < 256, f"{made.name}: nothing of it is stored"
        assert made.residency != pb.RESIDENCY_TOKENS


def test_creations_are_kept_or_refused_with_a_time_to_retry(tight: LiveServer) -> None:
    made = 0
    for i in range(10):
        request = inference_pb.CreateSnapshotRequest(input=raw(prompt_of(1800, 700 + i)))
        try:
            reply = tight.inference.CreateSnapshot(request)
        except grpc.RpcError as error:
            refusal = refusal_of(error)
            assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL") and refusal.retry_seconds
            continue
        adds_up(reply.usage)
        made += 1
    assert made >= 5


def test_calls_wait_for_the_memory_that_rows_have_reserved_and_one_too_large_is_refused(llama: LiveServer) -> None:
    """A thousand bytes a token: rows of about 1,200 tokens, and room for two, the second with what kept state lends."""
    requests = [greedy(raw(prompt_of(900, 800 + i)), tokens=20) for i in range(9)]
    expected = [generate(llama, request).ids for request in requests]
    with LiveServer("tiny-llama", "--active-bytes", "2MiB", "--memory-bytes", "1MiB") as server:
        assert server.model().bytes_per_token == 1024
        with ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(lambda request: generate(server, request), requests))
        assert [answer.ids for answer in answers] == expected
        assert max(answer.started.queue_time.ToMicroseconds() for answer in answers) > 0
        refusal = refused(lambda: generate(server, greedy(raw(prompt_of(3000, 1)), tokens=100)))
        assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "ACTIVE_MEMORY")
        assert refusal.metadata == {"needBytes": str(3356 * 1024), "limitBytes": str(3 << 20)}
        assert refusal.retry_seconds is None
        assert len(generate(server, greedy(raw(prompt_of(2700, 1)), tokens=50)).ids) == 50


def tokens_of(server: LiveServer, name: str) -> list[int]:
    request = snapshot_pb.GetSnapshotRequest(name=name, include_tokens=True)
    return list(server.snapshots.GetSnapshot(request).token_ids)
