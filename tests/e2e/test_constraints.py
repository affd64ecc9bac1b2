"""Text that must have a form, through a real channel: it has it, says how it ended, and touches no neighbour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import types_pb2 as pb
from kvfork_client import Constraint, Sampling, Snapshot, Stopping, regex

from tests.e2e.live import GREEDY, Answer, LiveServer, chat, generate, greedy, prompt_of, raw, refused

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["pilot", "cook", "teacher"]},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 2},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
        "rating": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "null"}]},
    },
    "required": ["name", "age", "role", "skills", "address"],
    "additionalProperties": False,
}  # fmt: skip
"""Bounded everywhere: a text that it fits ends by itself."""

SPEAK = raw("Hello there, how is the river?")


def constrained(given: pb.Input, *, tokens: int = 400, **how: Any) -> inference_pb.GenerateRequest:
    """A request for text of the form that `how` names; `sampling` and `stopping` as usual."""
    sampling, stopping = how.pop("sampling", GREEDY), how.pop("stopping", pb.Stopping(max_tokens=tokens))
    constraint = inference_pb.Constraint(after_reasoning=how.pop("after_reasoning", False), **how.pop("form", how))
    output = inference_pb.OutputOptions(token_ids=True)
    return inference_pb.GenerateRequest(
        input=given, sampling=sampling, stopping=stopping, output=output, constraint=constraint
    )


def of_schema(server: LiveServer, seed: int) -> Answer:
    given = chat(("user", f"Describe person number {seed} as JSON."))
    sampling = pb.Sampling(temperature=1.0, seed=seed)
    return generate(server, constrained(given, json_schema=json.dumps(PERSON), sampling=sampling))


def check_persons(server: LiveServer, count: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: of_schema(server, seed), range(count)))
    for answer in answers:
        # It ended by itself: cut, it would be no whole text.
        assert answer.finished.reason == inference_pb.FINISH_REASON_STOP, answer.text
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in answers}) > count // 2


def test_outputs_of_a_schema_are_valid(server_for: Callable[[str], LiveServer]) -> None:
    check_persons(server_for("smollm2"), 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_outputs_of_a_schema_are_valid(server_for: Callable[[str], LiveServer]) -> None:
    check_persons(server_for("smollm2"), 200)


@pytest.mark.parametrize(
    "model", ["tiny-llama", "tiny-gemma3", "tiny-qwen3_5", pytest.param("gemma3", marks=pytest.mark.slow)]
)
def test_each_kind_of_form_on_each_kind_of_model(server_for: Callable[[str], LiveServer], model: str) -> None:
    server = server_for(model)
    for seed in (1, 2, 3) if model.startswith("tiny") else (1,):
        hot = pb.Sampling(temperature=1.5, seed=seed)
        text = generate(server, constrained(SPEAK, regex=r"[A-Z][a-z]{1,9} (é|漢|🙂)\.", sampling=hot)).text
        assert text[0].isupper() and text[-1] == "."
        choice = inference_pb.Choice(options=["north", "north-east", "south"])
        assert generate(server, constrained(SPEAK, choice=choice, sampling=hot)).text in choice.options
        text = generate(
            server, constrained(SPEAK, lark='start: "(" NUMBER ")"\nNUMBER: /[0-9]{1,4}/', sampling=hot)
        ).text
        assert text[0] + text[-1] == "()" and text[1:-1].isdigit()
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        schema["additionalProperties"] = False
        text = generate(server, constrained(SPEAK, json_schema=json.dumps(schema), sampling=hot)).text
        assert json.loads(text) in ({"a": True}, {"a": False})


# -- how it ends ----------------------------------------------------------------------------------------------------


def test_complete_text_stops_by_itself_and_is_told_from_text_that_was_cut(llama: LiveServer) -> None:
    done = generate(llama, constrained(SPEAK, regex="(abc){4}"))
    assert (done.text, done.finished.reason) == ("abc" * 4, inference_pb.FINISH_REASON_STOP)
    assert done.finished.WhichOneof("matched") is None
    cut = generate(llama, constrained(SPEAK, regex="(abc){4}", tokens=3))
    assert (cut.finished.reason, len(cut.ids)) == (inference_pb.FINISH_REASON_MAX_TOKENS, 3)
    assert done.text.startswith(cut.text)


def test_the_models_end_is_no_text_and_ends_only_what_is_whole(llama: LiveServer) -> None:
    (eos,) = llama.model().eos_token_ids
    wants_to_end = pb.Sampling(temperature=0, logit_bias={eos: 100.0})
    answer = generate(llama, constrained(SPEAK, regex="[ab]{3}[cd]*", sampling=wants_to_end))
    assert re.fullmatch("[ab]{3}[cd]?", answer.text)  # one token may be the last letter and the first of the rest
    assert answer.finished.reason == inference_pb.FINISH_REASON_EOS
    stopping = pb.Stopping(max_tokens=9, ignore_eos=True)
    answer = generate(llama, constrained(SPEAK, regex="[ab]{3}[cd]*", sampling=wants_to_end, stopping=stopping))
    assert (len(answer.ids), answer.finished.reason) == (9, inference_pb.FINISH_REASON_MAX_TOKENS)
    assert eos not in answer.ids
    stopping = pb.Stopping(max_tokens=9, min_tokens=5)
    answer = generate(llama, constrained(SPEAK, regex="[ab]{3}[cd]*", sampling=wants_to_end, stopping=stopping))
    assert (len(answer.ids), answer.finished.reason) == (5, inference_pb.FINISH_REASON_EOS)


def test_stop_strings_and_ids_of_the_request_still_stop(llama: LiveServer) -> None:
    stopping = pb.Stopping(max_tokens=50, stop=["ca"])
    answer = generate(llama, constrained(SPEAK, regex="(abc){4}", stopping=stopping))
    assert (answer.text, answer.finished.stop) == ("ab", "ca")
    turn_start = 1  # "<|im_start|>" of the tiny tokenizer: no text, and no end of the model's
    likes_it = pb.Sampling(temperature=0, logit_bias={turn_start: 100.0})
    stopping = pb.Stopping(max_tokens=50, stop_token_ids=[turn_start])
    answer = generate(llama, constrained(SPEAK, regex="[ab]{2}[cd]*", stopping=stopping, sampling=likes_it))
    assert re.fullmatch("[ab]{2}[cd]?", answer.text) and answer.finished.stop_token_id == turn_start


# -- beside other knobs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        pb.Sampling(temperature=2.0, top_k=1, seed=1),
        pb.Sampling(temperature=2.0, top_p=0.01, min_p=0.9, seed=1),
        pb.Sampling(temperature=0, repetition_penalty=5.0, frequency_penalty=50, presence_penalty=50),
        pb.Sampling(temperature=1.0, seed=2, logit_bias=dict.fromkeys(range(5, 400), -100.0)),
        pb.Sampling(temperature=100, seed=3),
    ],
    ids=["top-k 1", "small top-p", "penalties", "bias", "hot"],
)
def test_the_form_holds_under_every_knob(llama: LiveServer, sampling: pb.Sampling) -> None:
    answer = generate(llama, constrained(SPEAK, regex="[0-9]{3}-[0-9]{3}", sampling=sampling))
    assert answer.finished.reason == inference_pb.FINISH_REASON_STOP
    assert [part.isdigit() and len(part) for part in answer.text.split("-")] == [3, 3]


def test_filters_see_only_what_the_form_allows(llama: LiveServer) -> None:
    plain = generate(llama, greedy(SPEAK, tokens=1))
    others = [token for token in range(5, 260) if token != plain.ids[0]]
    forced = pb.Sampling(temperature=1.0, top_k=1, seed=1, logit_bias=dict.fromkeys(others, -90.0))
    # With top-k before the form nothing would be left: the likeliest token of all is none of it.
    assert generate(llama, constrained(SPEAK, regex="[0-9]{2}", sampling=forced)).text.isdigit()


def test_log_probabilities_are_the_models_own(llama: LiveServer) -> None:
    scores = inference_pb.OutputOptions(token_ids=True, top_logprobs=5)
    free = generate(llama, greedy(SPEAK, tokens=1, output=scores))
    request = constrained(SPEAK, regex="[0-9]{1,3}")
    request.output.CopyFrom(scores)
    held = generate(llama, request)
    assert held.logprobs[0].top == free.logprobs[0].top
    assert held.logprobs[0].logprob < free.logprobs[0].logprob


# -- neighbours, forks, failures ------------------------------------------------------------------------------------

FORMS: list[dict[str, Any]] = [
    {"json_schema": json.dumps(PERSON), "sampling": pb.Sampling(temperature=1.0, seed=5)},
    {"regex": "[a-z ]{10,60}x", "sampling": pb.Sampling(temperature=1.0, seed=6)},
    {"lark": 'start: "[" ("ab" | "cd")* "]"', "tokens": 30},
    {"choice": inference_pb.Choice(options=["one", "two hundred"])},
]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3", "tiny-qwen3_5"])
def test_rows_with_and_without_a_form_say_beside_each_other_what_they_say_alone(
    server_for: Callable[[str], LiveServer], model: str
) -> None:
    server = server_for(model)
    requests = [constrained(raw(prompt_of(30 * i + 5, 600 + i)), **dict(form)) for i, form in enumerate(FORMS)]
    requests += [greedy(raw(prompt_of(50 * i + 5, 610 + i)), tokens=60) for i in range(2)]
    requests += [greedy(raw(prompt_of(9, 620)), tokens=60, sampling=pb.Sampling(temperature=1.0, seed=9))]
    alone = [generate(server, request).ids for request in requests]
    for order in (1, -1):
        with ThreadPoolExecutor(len(requests)) as pool:
            together = list(pool.map(lambda request: generate(server, request).ids, requests[::order]))
        assert together == alone[::order]


def test_children_of_one_fork_have_a_form_each(server: LiveServer) -> None:
    forms = [regex("[a-c]{12}"), regex("[d-f]{12}"), regex("[g-i]{12}"), None]

    def go_on(child: Snapshot, form: Constraint | None) -> str:
        stopping = Stopping(max_tokens=20)
        return child.generate(constraint=form, stopping=stopping, sampling=Sampling(temperature=0)).result().text

    with server.client() as client:
        children = client.create_snapshot("The answer, in one word, is").fork(4)
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(go_on, children, forms))
        assert [set(texts[i]) <= set(letters) for i, letters in enumerate(("abc", "def", "ghi"))] == [True] * 3
        # A form is of one call: the next one from the same place is free of it.
        assert go_on(children[0], None) == texts[3]


DEAD_END = 'start: "a" x\nx: x "b"'


def test_a_form_that_leaves_nothing_ends_its_own_row_alone(llama: LiveServer) -> None:
    neighbour = greedy(raw(prompt_of(70, 640)), tokens=80)
    alone = generate(llama, neighbour).ids
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(generate, llama, neighbour)
        failures = list(
            pool.map(
                lambda n: refused(lambda: llama.inference.Generate(constrained(raw(prompt_of(n, 650)), lark=DEAD_END))),
                (5, 60, 5, 60, 5),
            )
        )
        assert beside.result().ids == alone
    assert {(failure.code, failure.reason) for failure in failures} == {("INVALID_ARGUMENT", "CONSTRAINT_FAILED")}
    llama.idle()


def test_a_replayed_call_is_the_same_and_another_form_is_another_call(llama: LiveServer) -> None:
    request = constrained(SPEAK, regex="[a-z]{5}", sampling=pb.Sampling(temperature=1.0, seed=1))
    request.request_id = "7e57ab1e-0000-4000-8000-000000000001"
    first = generate(llama, request)
    assert generate(llama, request).text == first.text
    request.constraint.regex = "[0-9]{5}"
    assert refused(lambda: llama.inference.Generate(request)).reason == "REQUEST_ID_REUSED"


def test_the_form_holds_only_behind_the_reasoning_where_asked(llama: LiveServer) -> None:
    thinking, done = 3, 4  # "<think>", "</think>" of the tiny tokenizer
    for biased, context in (({thinking: 100.0}, "Say a number."), ({}, "Say a number.<think>")):
        # A token that was picked once is not liked any more.
        hot = pb.Sampling(temperature=1.0, seed=4, frequency_penalty=100, logit_bias={**biased, done: 60.0})
        answer = generate(llama, constrained(raw(context), regex="[0-9]{4}", after_reasoning=True, sampling=hot))
        texts: dict[int, str] = {}
        for delta in answer.deltas:
            texts[delta.channel] = texts.get(delta.channel, "") + delta.text
        assert texts[inference_pb.CHANNEL_UNSPECIFIED].isdigit()
        assert answer.ids.count(done) == 1
        assert (thinking in answer.ids) == bool(biased)
