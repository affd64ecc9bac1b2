"""A deadline that is shorter than the prompt's prefill: what a try computes is kept, and the next one begins there."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb

from tests.e2e.live import LiveServer, Refusal, answer_of, generate, greedy, prompt_of, raw, refusal_of

pytestmark = [pytest.mark.mlx]

TRIES = 30
PACE = 0.4  # seconds a block, at best
BLOCKS = 16
SECONDS = 10 * PACE  # of each try


def slow(tmp_path: Path, *flags: str) -> LiveServer:
    """A server that prefills a block in PACE seconds at best, and knows it."""
    pace = tmp_path / "pace"
    pace.write_text(str(PACE))
    live = LiveServer("tiny-gemma3", *flags, module="tests.e2e.paced", env={"TESTS_PACE": str(pace)})
    generate(live, greedy(raw(prompt_of(300, 1)), tokens=1))
    return live


def tries(live: LiveServer, request: inference_pb.GenerateRequest) -> tuple[list[Refusal], inference_pb.Finished]:
    """Makes the same call with the same deadline until it goes well: how it failed before, and its end."""
    failed: list[Refusal] = []
    while True:
        try:
            return failed, answer_of(live.inference.Generate(request, timeout=SECONDS)).finished
        except grpc.RpcError as error:
            failed.append(refusal_of(error))
            assert len(failed) < TRIES, failed
        live.idle()


@pytest.mark.slow
def test_tries_with_the_same_deadline_that_is_too_short_come_to_the_prompts_end(tmp_path: Path) -> None:
    with slow(tmp_path) as live:
        request = greedy(raw(prompt_of(256 * BLOCKS, 2)), tokens=2)
        failed, finished = tries(live, request)
        assert len(failed) >= 1 and {one.code for one in failed} == {"DEADLINE_EXCEEDED"}
        assert {one.reason for one in failed} == {""}  # none was refused: each was begun, and cut off
        assert finished.usage.cached_tokens >= 256


def test_where_nothing_would_be_kept_a_call_that_cannot_end_in_time_is_refused(tmp_path: Path) -> None:
    with slow(tmp_path, "--checkpoints", "marks") as live:
        before = live.stats().prompt_tokens
        request = greedy(raw(prompt_of(256 * BLOCKS, 3)), tokens=2)
        with pytest.raises(grpc.RpcError) as caught:
            answer_of(live.inference.Generate(request, timeout=SECONDS))
        assert refusal_of(caught.value).reason == "DEADLINE_UNMET"
        live.idle()
        assert live.stats().prompt_tokens == before
