"""Rows of one batch: each gets the tokens that it would have got alone, and its own knobs touch no neighbour."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import GREEDY, PATIENCE, LiveServer, generate, greedy, prompt_of, raw

VOCABULARY = 512
HELLO = raw("Hello there, how is the river?")


def knobs(**sampling: float) -> pb.Sampling:
    return pb.Sampling(**{"temperature": 0, **sampling})


def scores(top: int) -> inference_pb.OutputOptions:
    return inference_pb.OutputOptions(token_ids=True, top_logprobs=top)


# -- neighbours -----------------------------------------------------------------------------------------------------

SIX = [
    greedy(raw(prompt_of(5, 301)), tokens=40),
    greedy(raw(prompt_of(300, 302)), tokens=25),
    greedy(raw(prompt_of(40, 303)), tokens=60, sampling=pb.Sampling(temperature=1.0, seed=7)),
    greedy(raw(prompt_of(40, 303)), tokens=60, sampling=pb.Sampling(temperature=0.8, top_p=0.9, seed=8)),
    greedy(raw(prompt_of(700, 304)), tokens=30, sampling=pb.Sampling(temperature=1.2, top_k=40, min_p=0.02, seed=9)),
    greedy(raw(prompt_of(90, 305)), tokens=50, sampling=knobs(repetition_penalty=1.3, presence_penalty=0.5)),
]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3", "tiny-qwen3_5"])
def test_six_rows_together_say_what_each_says_alone(server_for: Callable[[str], LiveServer], model: str) -> None:
    server = server_for(model)
    alone = [generate(server, request).ids for request in SIX]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda request: generate(server, request).ids, SIX)) == alone
        assert list(pool.map(lambda request: generate(server, request).ids, reversed(SIX))) == alone[::-1]


def test_a_row_is_not_disturbed_by_neighbours_that_come_and_go(server: LiveServer) -> None:
    request = greedy(raw(prompt_of(200, 306)), tokens=120, sampling=pb.Sampling(temperature=1.0, seed=3))
    alone = generate(server, request).ids
    with ThreadPoolExecutor(3) as pool:
        together = pool.submit(lambda: generate(server, request).ids)
        others = [pool.submit(generate, server, greedy(raw(prompt_of(60 * i, 310 + i)), tokens=7)) for i in range(1, 9)]
        assert together.result(PATIENCE) == alone
        assert all(other.result(PATIENCE) for other in others)


# -- seeds ----------------------------------------------------------------------------------------------------------


def test_a_seed_names_a_text_and_another_seed_another_text(server: LiveServer) -> None:
    def text(**sampling: float) -> list[int]:
        return generate(server, greedy(HELLO, tokens=30, sampling=pb.Sampling(temperature=1.0, **sampling))).ids

    texts = [text(seed=seed) for seed in (0, 1, 2**31, 2**32 - 1)]
    assert texts == [text(seed=seed) for seed in (0, 1, 2**31, 2**32 - 1)]
    assert len({tuple(ids) for ids in texts}) == 4


def test_the_seed_that_the_server_drew_gives_the_text_again(server: LiveServer) -> None:
    unseeded = generate(server, greedy(HELLO, tokens=30, sampling=pb.Sampling(temperature=1.0)))
    seed = unseeded.started.seed
    again = generate(server, greedy(HELLO, tokens=30, sampling=pb.Sampling(temperature=1.0, seed=seed)))
    assert again.ids == unseeded.ids


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30])
def test_a_low_temperature_is_greedy(server: LiveServer, temperature: float) -> None:
    ids = generate(server, greedy(HELLO, tokens=12, sampling=pb.Sampling(temperature=temperature, seed=1))).ids
    assert ids == generate(server, greedy(HELLO, tokens=12)).ids


@pytest.mark.parametrize("temperature", [1e-38, 1e-45])
def test_the_lowest_temperatures_are_greedy(server: LiveServer, temperature: float) -> None:
    ids = generate(server, greedy(HELLO, tokens=12, sampling=pb.Sampling(temperature=temperature, seed=1))).ids
    assert ids == generate(server, greedy(HELLO, tokens=12)).ids


@pytest.mark.parametrize("only_one", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999}])
def test_filters_that_leave_one_token_are_greedy(server: LiveServer, only_one: dict[str, float]) -> None:
    sampling = pb.Sampling(temperature=1.0, seed=5, **only_one)
    assert (
        generate(server, greedy(HELLO, tokens=12, sampling=sampling)).ids
        == generate(server, greedy(HELLO, tokens=12)).ids
    )


# -- scores ---------------------------------------------------------------------------------------------------------


def test_log_probabilities_are_sane(server: LiveServer) -> None:
    answer = generate(server, greedy(HELLO, tokens=15, output=scores(20)))
    assert len(answer.logprobs) == 15
    for entry in answer.logprobs:
        tops = [top.logprob for top in entry.top]
        assert len(entry.top) == 20 and tops == sorted(tops, reverse=True)
        assert (entry.token_id, entry.logprob) == (entry.top[0].token_id, entry.top[0].logprob)
        assert all(value <= 0 for value in tops)
        assert sum(math.exp(value) for value in tops) <= 1 + 1e-5
        assert len({top.token_id for top in entry.top}) == 20
    assert [entry.token_id for entry in answer.logprobs] == answer.ids
    assert (
        b"".join(entry.token_bytes for entry in answer.logprobs)
        .decode(errors="replace")
        .startswith(answer.text.rstrip("\ufffd")[:5])
    )


def test_zero_alternatives_still_give_the_tokens_own_score(server: LiveServer) -> None:
    bare = generate(server, greedy(HELLO, tokens=8, output=scores(0))).logprobs
    full = generate(server, greedy(HELLO, tokens=8, output=scores(3))).logprobs
    assert [entry.logprob for entry in bare] == [entry.logprob for entry in full]
    assert all(not entry.top for entry in bare)
    assert generate(server, greedy(HELLO, tokens=8)).logprobs == []


def test_scores_are_those_before_temperature(server: LiveServer) -> None:
    hot = greedy(HELLO, tokens=1, output=scores(20), sampling=pb.Sampling(temperature=2.0, seed=1))
    cold = greedy(HELLO, tokens=1, output=scores(20))
    assert generate(server, hot).logprobs[0].top == generate(server, cold).logprobs[0].top


# -- knobs ----------------------------------------------------------------------------------------------------------


def test_a_bias_forces_a_token_and_forbids_one(server: LiveServer) -> None:
    forced = knobs()
    forced.logit_bias[77] = 100
    assert generate(server, greedy(HELLO, tokens=6, sampling=forced)).ids == [77] * 6
    plain = generate(server, greedy(HELLO, tokens=6)).ids
    without = knobs()
    without.logit_bias[plain[0]] = -100
    assert plain[0] not in generate(server, greedy(HELLO, tokens=6, sampling=without)).ids


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 2.0}, {"frequency_penalty": 3.0}, {"presence_penalty": 5.0}]
)
def test_a_penalty_brings_variety(server: LiveServer, penalty: dict[str, float]) -> None:
    loop = knobs()
    loop.logit_bias[77] = 6
    penalised = knobs(**penalty)
    penalised.logit_bias[77] = 6
    plain = generate(server, greedy(HELLO, tokens=30, sampling=loop)).ids
    varied = generate(server, greedy(HELLO, tokens=30, sampling=penalised)).ids
    assert varied.count(77) < plain.count(77)


# -- ends -----------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_token_borders_ends_the_text_before_it(server: LiveServer) -> None:
    whole = generate(server, greedy(HELLO, tokens=40))
    pieces = [delta.text for delta in whole.deltas if delta.text]
    index = next(i for i in range(3, len(pieces) - 1) if len(pieces[i]) > 1 and len(pieces[i + 1]) > 1)
    stop = pieces[index][-1] + pieces[index + 1][0]
    before = whole.text[: whole.text.index(stop)]
    for include in (False, True):
        stopping = pb.Stopping(max_tokens=40, ignore_eos=True, stop=["never said", stop], include_stop=include)
        answer = generate(server, greedy(HELLO, stopping=stopping))
        assert answer.finished.reason == inference_pb.FINISH_REASON_STOP and answer.finished.stop == stop
        assert answer.text == before + (stop if include else "")
        assert answer.ids == whole.ids[: len(answer.ids)]


def test_stop_ids_end_a_text_and_least_tokens_put_them_off(server: LiveServer) -> None:
    ids = generate(server, greedy(HELLO, tokens=20)).ids
    stop = ids[4]
    first = ids.index(stop)
    stopping = pb.Stopping(max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    answer = generate(server, greedy(HELLO, stopping=stopping))
    assert (answer.finished.reason, answer.finished.stop_token_id) == (inference_pb.FINISH_REASON_STOP, stop)
    assert answer.ids == ids[: first + 1] and answer.usage.completion_tokens == first + 1
    stopping.min_tokens = first + 2
    later = generate(server, greedy(HELLO, stopping=stopping))
    assert later.ids[: first + 2] == ids[: first + 2]


def test_eos_ends_a_text_unless_told_otherwise(server: LiveServer) -> None:
    eos = server.model().eos_token_ids[0]
    wishful = knobs()
    wishful.logit_bias[eos] = 100
    answer = generate(server, greedy(HELLO, sampling=wishful, stopping=pb.Stopping(max_tokens=9)))
    assert (answer.finished.reason, answer.ids, answer.text) == (inference_pb.FINISH_REASON_EOS, [eos], "")
    answer = generate(server, greedy(HELLO, sampling=wishful, stopping=pb.Stopping(max_tokens=9, min_tokens=5)))
    assert (answer.finished.reason, answer.ids) == (inference_pb.FINISH_REASON_EOS, [eos] * 5)
    answer = generate(server, greedy(HELLO, sampling=wishful, stopping=pb.Stopping(max_tokens=9, ignore_eos=True)))
    assert (answer.finished.reason, answer.ids) == (inference_pb.FINISH_REASON_MAX_TOKENS, [eos] * 9)


def test_a_snapshot_after_a_stop_goes_on_as_if_there_had_been_none(server: LiveServer) -> None:
    whole = generate(server, greedy(HELLO, tokens=30))
    stop = whole.ids[9]
    cut = whole.ids.index(stop) + 1
    stopping = pb.Stopping(max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    answer = generate(server, greedy(HELLO, stopping=stopping, save=pb.SnapshotOptions()))
    rest = generate(server, greedy(None, parent=answer.finished.snapshot.name, tokens=30 - cut))
    assert answer.ids + rest.ids == whole.ids
    assert rest.usage.recomputed_tokens == 0


def test_large_deltas_say_the_same_as_small_ones(server: LiveServer) -> None:
    small = generate(server, greedy(HELLO, tokens=30))
    output = inference_pb.OutputOptions(token_ids=True, min_tokens_per_delta=11)
    large = generate(server, greedy(HELLO, tokens=30, output=output, sampling=GREEDY))
    assert (large.ids, large.text) == (small.ids, small.text)
    assert [delta.token_count >= 11 for delta in large.deltas[:-1]] == [True] * (len(large.deltas) - 1)
    assert len(large.deltas) <= 3


def test_text_is_whole_characters_however_tokens_cut_them(server: LiveServer) -> None:
    """Bytes of a four-byte character one token each: nothing is shown before it is whole, and nothing after it lost."""
    count = server.inference.CountTokens(
        inference_pb.CountTokensRequest(input=raw("🌊"), include_rendered=True), timeout=PATIENCE
    )
    wave = list(count.token_ids)
    assert len(wave) > 1
    for cut in range(1, len(wave)):
        sampling = knobs()
        sampling.logit_bias[wave[cut]] = 100
        answer = generate(server, greedy(raw("x", wave[:cut]), tokens=1, sampling=sampling))
        assert answer.ids == [wave[cut]]
        assert answer.text == ("🌊" if cut == len(wave) - 1 else "\ufffd") or answer.text == ""
    wild = generate(server, greedy(raw("🌊🙂é"), tokens=200, sampling=pb.Sampling(temperature=5.0, seed=11)))
    assert len(wild.ids) == 200 and wild.text.strip("\ufffd")
