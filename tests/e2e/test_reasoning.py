"""Reasoning told apart and marked, through a real channel: back to before it, or on from behind it, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import LiveServer, chat, generate, greedy, prompt_of, raw, refused

THINK, DONE = 3, 4  # "<think>", "</think>" of the tiny tokenizer
ANSWER, REASONING = inference_pb.CHANNEL_UNSPECIFIED, inference_pb.CHANNEL_REASONING

START = pb.Mark(landmark=pb.LANDMARK_REASONING_START)
END = pb.Mark(landmark=pb.LANDMARK_REASONING_END)


def thinking(length: int, tokens: int, *, seed: int = 1, **more: Any) -> inference_pb.GenerateRequest:
    """Some reasoning, whose end is likely but once, and an answer."""
    sampling = pb.Sampling(temperature=1.0, seed=seed, frequency_penalty=100, logit_bias={DONE: 3.0})
    return greedy(raw([*prompt_of(length, 700 + seed), THINK]), tokens=tokens, sampling=sampling, **more)


def by_channel(answer: Any) -> list[tuple[int, int, int]]:
    """(channel, first position, tokens), runs of one channel joined."""
    runs: list[tuple[int, int, int]] = []
    for delta in answer.deltas:
        if runs and runs[-1][0] == delta.channel:
            runs[-1] = (delta.channel, runs[-1][1], runs[-1][2] + delta.token_count)
        else:
            runs.append((delta.channel, delta.first_position, delta.token_count))
    return runs


def seed_with(server: LiveServer, length: int, tokens: int, *, after: int) -> tuple[int, int]:
    """(a seed whose reasoning ends behind `after` tokens and before the last, its length with the mark)."""
    for seed in range(1, 200):
        ids = generate(server, thinking(length, tokens, seed=seed)).ids
        if DONE in ids[after:-1] and DONE not in ids[:after]:
            return seed, ids.index(DONE) + 1
    raise AssertionError("no seed ends its reasoning there")


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3", "tiny-qwen3_5"])
@pytest.mark.parametrize(("length", "after"), [(20, 2), (240, 20)], ids=["in a block", "over a border"])
def test_the_state_at_both_ends_of_the_reasoning_is_kept_as_it_passes(
    server_for: Callable[[str], LiveServer], model: str, length: int, after: int
) -> None:
    server = server_for(model)
    seed, reasoning = seed_with(server, length, 60, after=after)
    answer = generate(server, thinking(length, 60, seed=seed, marks=[END, START], save=pb.SnapshotOptions()))
    prompt = length + 1
    assert [(m.mark, m.snapshot.token_count, m.save_error_reason) for m in answer.marked] == [
        (1, prompt, ""),
        (0, prompt + reasoning, ""),
    ]
    channels = by_channel(answer)
    assert channels[:2] == [(REASONING, prompt, reasoning), (ANSWER, prompt + reasoning, 60 - reasoning)]
    end, start = answer.marked[1].snapshot, answer.marked[0].snapshot
    # On from behind the reasoning: nothing of it is computed again, and it says what a cold run says.
    warm = generate(server, greedy(None, parent=end.name, tokens=12))
    assert warm.usage.cached_tokens == warm.usage.prompt_tokens == prompt + reasoning
    cold = generate(server, greedy(raw([*prompt_of(length, 700 + seed), THINK, *answer.ids[:reasoning]]), tokens=12))
    assert warm.ids == cold.ids
    # Back to before the reasoning in one call.
    back = server.inference.Rollback(
        inference_pb.RollbackRequest(source=answer.finished.snapshot.name, ancestor=start.name)
    )
    assert (back.snapshot.token_count, back.usage.recomputed_tokens) == (prompt, 0)


def test_reasoning_that_ends_with_the_last_token_is_marked_too(llama: LiveServer) -> None:
    seed, reasoning = seed_with(llama, 20, 60, after=2)
    for save in (None, pb.SnapshotOptions()):
        answer = generate(llama, thinking(20, reasoning, seed=seed, marks=[END], save=save))
        assert [m.snapshot.token_count for m in answer.marked] == [21 + reasoning]
        assert answer.finished.snapshot.token_count == (21 + reasoning if save is not None else 0)
        assert answer.finished.save_error_reason == ""
        assert {delta.channel for delta in answer.deltas} == {REASONING}


def test_a_mark_that_is_not_reached_is_not_told(llama: LiveServer) -> None:
    never = pb.Sampling(temperature=0, logit_bias={THINK: -100.0, DONE: -100.0})
    open_ = generate(llama, greedy(raw([9, 8, THINK]), tokens=20, sampling=never, marks=[END, START]))
    assert [m.mark for m in open_.marked] == [1]
    none = generate(llama, greedy(raw([9, 8, 7]), tokens=20, sampling=never, marks=[END, START]))
    assert [(m.mark, m.snapshot.token_count) for m in none.marked] == [(1, 3)]
    assert {delta.channel for delta in none.deltas} == {ANSWER}


def test_marks_leave_nothing_behind_when_the_call_is_cancelled(llama: LiveServer) -> None:
    seed, _ = seed_with(llama, 20, 60, after=2)
    stream = llama.inference.Generate(thinking(20, 4000, seed=seed, marks=[END]))
    for event in stream:
        if event.WhichOneof("event") == "marked":
            stream.cancel()
            break
    llama.idle()


def test_a_model_without_marks_around_reasoning_has_no_end_of_it(server_for: Callable[[str], LiveServer]) -> None:
    server = server_for("smollm2")
    given = chat(("user", "Hello"))
    refusal = refused(lambda: server.inference.Generate(greedy(given, marks=[pb.Mark(token_count=1), END])))
    assert (refusal.code, refusal.reason, refusal.fields) == (
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        ("marks[1].landmark",),
    )
    answer = generate(server, greedy(given, marks=[START], tokens=3))
    assert [m.snapshot.token_count for m in answer.marked] == [answer.started.prompt_tokens]


def test_a_replay_tells_the_channels_apart_as_the_first_time(llama: LiveServer) -> None:
    seed, _ = seed_with(llama, 20, 60, after=2)
    request = thinking(20, 60, seed=seed, marks=[END], request_id="7e57ab1e-0000-4000-8000-000000000002")
    first, again = generate(llama, request), generate(llama, request)
    assert by_channel(again) == by_channel(first)
    assert (again.ids, again.text, again.marked) == (first.ids, first.text, first.marked)


def test_a_slow_reader_gets_no_delta_of_two_channels(llama: LiveServer) -> None:
    seed, _ = seed_with(llama, 20, 60, after=2)
    many = inference_pb.OutputOptions(token_ids=True, min_tokens_per_delta=1000)
    gathered, at_once = (
        generate(llama, thinking(20, 60, seed=seed, output=many)),
        generate(llama, thinking(20, 60, seed=seed)),
    )
    assert len(gathered.deltas) == 2
    assert by_channel(gathered) == by_channel(at_once)
    assert [d.text for d in gathered.deltas] == [
        "".join(d.text for d in at_once.deltas if d.channel == channel) for channel in (REASONING, ANSWER)
    ]
