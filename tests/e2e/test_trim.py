"""TrimCache against the running server: state goes, names stay, and the next receipt says what that cost."""

from __future__ import annotations

from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import LiveServer, generate, greedy, prompt_of, raw


def test_trimming_to_nothing_leaves_names_that_still_work() -> None:
    with LiveServer("tiny-gemma3") as server:
        made = server.inference.CreateSnapshot(inference_pb.CreateSnapshotRequest(input=raw(prompt_of(600))))
        before = generate(server, greedy(None, parent=made.snapshot.name, tokens=8))
        assert before.usage.cached_tokens == 600

        stats = server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0)).stats
        assert (stats.memory_bytes, stats.disk_bytes) == (0, 0)
        there = server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=made.snapshot.name)).snapshot
        assert there.residency == pb.RESIDENCY_TOKENS and there.token_count == 600

        after = generate(server, greedy(None, parent=made.snapshot.name, tokens=8))
        assert (after.usage.cached_tokens, after.usage.recomputed_tokens) == (0, 600)
        assert after.usage.miss_reason == pb.MISS_REASON_EVICTED
        assert after.ids == before.ids
        # What was computed again serves the next one.
        assert generate(server, greedy(None, parent=made.snapshot.name, tokens=8)).usage.cached_tokens == 600
