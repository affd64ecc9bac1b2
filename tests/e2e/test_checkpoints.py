"""Policies, budget and thinning through the running server: what is written, what receipts and stats say of it."""

from __future__ import annotations

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import LiveServer, adds_up, generate, greedy, prompt_of, raw, refusal_of

PROMPT = 2_700


def create(server: LiveServer, tokens: int, seed: int = 1) -> inference_pb.CreateSnapshotResponse:
    return server.inference.CreateSnapshot(inference_pb.CreateSnapshotRequest(input=raw(prompt_of(tokens, seed))))


def roll_back(server: LiveServer, name: str, to: int, **more: object) -> inference_pb.RollbackResponse:
    return server.inference.Rollback(inference_pb.RollbackRequest(source=name, token_count=to, **more))


def test_off_writes_nothing_and_handles_work_from_memory() -> None:
    with LiveServer("tiny-gemma3", "--checkpoints", "off") as server:
        made = create(server, 900).snapshot
        assert made.residency == pb.RESIDENCY_MEMORY
        first = generate(server, greedy(None, parent=made.name, tokens=8, save=pb.SnapshotOptions()))
        assert (first.usage.cached_tokens, first.usage.disk_tokens) == (900, 0)
        assert first.finished.snapshot.residency == pb.RESIDENCY_MEMORY
        forgotten = generate(server, greedy(raw(prompt_of(900, 2)), tokens=4))
        again = generate(server, greedy(raw(prompt_of(900, 2)), tokens=4))
        assert again.ids == forgotten.ids and again.usage.cached_tokens == 0
        stats = server.stats()
        assert stats.checkpoint_policy == "off"
        assert (stats.disk_bytes, stats.disk_limit_bytes, stats.written_today_bytes, stats.checkpoints_written) == (
            0, 0, 0, 0,
        )  # fmt: skip


def test_marks_writes_what_a_snapshot_needs_and_a_daily_budget_of_nothing_leaves_the_rest_out() -> None:
    with LiveServer("tiny-gemma3", "--checkpoints", "marks") as marks:
        generate(marks, greedy(raw(prompt_of(900)), tokens=2))
        assert marks.stats().written_today_bytes == 0
        made = create(marks, 900, seed=2).snapshot
        assert generate(marks, greedy(None, parent=made.name, tokens=2)).usage.cached_tokens == 900
    with LiveServer("tiny-gemma3", "--daily-write-bytes", "0") as frugal:
        generate(frugal, greedy(raw(prompt_of(900)), tokens=2))
        stats = frugal.stats()
        assert stats.checkpoints_skipped["write_budget"] > 0
        assert (stats.daily_write_limit_bytes, stats.written_today_bytes) == (0, 0)
        made = create(frugal, 900, seed=2).snapshot
        assert generate(frugal, greedy(None, parent=made.name, tokens=2)).usage.cached_tokens == 900


def test_a_thinned_chain_tells_what_a_branch_would_cost_and_the_receipt_what_it_did() -> None:
    with LiveServer("tiny-qwen3_5", "--state-spacing", "2") as server:
        name = create(server, PROMPT).snapshot.name
        for place, stored in ((1_900, 1_536), (2_304, 2_304)):  # of 10 blocks 4, 6, 8, 9 and 10 have theirs
            if place > stored:
                with pytest.raises(grpc.RpcError) as caught:
                    roll_back(server, name, place, max_recompute_tokens=0)
                refusal = refusal_of(caught.value)
                assert refusal.reason == "RECOMPUTE_LIMIT"
                assert refusal.metadata["needed"] == str(place - stored)
                assert refusal.metadata["nearestCheckpoint"] == str(stored)
            usage = roll_back(server, name, place).usage
            if place > stored:
                adds_up(usage)
            assert (usage.cached_tokens, usage.recomputed_tokens) == (stored, place - stored)
            assert usage.grid_tokens == place % 256
            reason = pb.MISS_REASON_THINNED if place > stored else pb.MISS_REASON_UNSPECIFIED
            assert usage.miss_reason == reason
        whole = server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name)).snapshot
        assert whole.residency != pb.RESIDENCY_TOKENS
