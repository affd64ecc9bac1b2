"""Calls of models that know of no tools, one of which knows nothing at all: the official client, real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from service.models import resolve
from tests.e2e.live import LiveServer
from tests.e2e.templates import with_template
from tests.gateway.live import LiveGateway
from tests.gateway.test_gateway_agents import TOOLS_TEMPLATE
from tests.text import chat_templates

pytestmark = pytest.mark.mlx

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "born": {"type": "integer", "minimum": 1800, "maximum": 1999},
    },
    "required": ["name", "born"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "person", "description": "Keep a person.", "parameters": PERSON}},
    {"type": "function", "function": {"name": "nothing"}},
]
ASK: Any = [{"role": "user", "content": "Who wrote the first program?"}]
QUIET = {"3": -100}
"""No `<think>` of the tiny models' tokenizer: by chance, one in two would reason up to its limit first, as it may."""
NAMED: Any = {"type": "function", "function": {"name": "person"}}


def held(call: Any, name: str = "person") -> None:
    assert call.type == "function" and call.id and call.function.name == name
    made = json.loads(call.function.arguments)
    jsonschema.validate(made, {**PERSON, "additionalProperties": False})


def test_chance_weights_call_what_they_are_told_to(client: openai.OpenAI) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {"model": "small", "messages": ASK, "tools": TOOLS, "seed": seed}
        asked |= {"temperature": 1.0, "logit_bias": QUIET}
        answer = client.chat.completions.create(**asked, tool_choice=NAMED, max_tokens=200)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls or ()
        held(call)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        either = client.chat.completions.create(**asked, tool_choice="required", max_tokens=200)
        assert either.choices[0].finish_reason == "tool_calls"
        (called,) = either.choices[0].message.tool_calls or ()
        assert called.function.name in ("person", "nothing")


def test_a_stream_has_the_same_calls(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": ASK, "tools": TOOLS, "temperature": 0}
    asked |= {"tool_choice": NAMED, "max_tokens": 200, "logit_bias": QUIET}
    answer = client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls or ()
    chunks = [chunk for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert {part.index for part in parts} == {0} and parts[0].id and parts[0].type == "function"
    assert "".join(part.function.name or "" for part in parts if part.function) == "person"
    assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_wherever_the_limit_cuts_no_markup_is_said(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    asked["logit_bias"] = QUIET
    whole = client.chat.completions.create(**asked, max_tokens=200).usage
    assert whole is not None
    for limit in range(1, whole.completion_tokens - 1, 11):
        if stream:
            chunks = [c for c in client.chat.completions.create(**asked, max_tokens=limit, stream=True) if c.choices]
            said = [chunk.choices[0].delta for chunk in chunks]
            assert not any(delta.content for delta in said)
            called = [call for delta in said for call in delta.tool_calls or ()]
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            (choice,) = client.chat.completions.create(**asked, max_tokens=limit).choices
            assert (choice.message.content or "", choice.finish_reason) == ("", "length")
            called = list(choice.message.tool_calls or ())
        assert len(called) <= (limit > 40)  # nothing, or what was whole before its closing mark
        for call in called:
            held(call)


def test_a_result_comes_back_and_the_prompt_grows_at_its_end(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "tools": TOOLS, "temperature": 0, "logit_bias": QUIET}
    first = client.chat.completions.create(**asked, messages=ASK, tool_choice=NAMED, max_tokens=200)
    message = first.choices[0].message
    (call,) = message.tool_calls or ()
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "kept"}
    grown = [*ASK, message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(**asked, messages=grown, max_tokens=3)
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    # The call reads as it was written, and the tools stand where they stood: nothing of the first is read again.
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.total_tokens - 1
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_what_cannot_be_called_is_refused_by_name(client: openai.OpenAI) -> None:
    def refused(**asked: Any) -> tuple[str | None, str | None]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="small", messages=ASK, max_tokens=1, **asked)
        return caught.value.param, caught.value.code

    other: Any = {"type": "function", "function": {"name": "other"}}
    assert refused(tools=TOOLS, tool_choice=other) == ("tool_choice.function.name", "invalid_value")
    assert refused(tools=[]) == ("tools", "invalid_value")
    assert refused(tool_choice="required") == ("tool_choice", "invalid_value")
    wrong: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    assert refused(tools=[wrong], tool_choice="required") == ("tools", "invalid_value")


# What these libraries send by default where a structured answer is asked for, recorded from their releases.
BODIES = json.loads(Path(__file__).with_name("structured_bodies.json").read_text())


@pytest.mark.parametrize("library", BODIES)
def test_what_libraries_send_for_structured_answers_is_answered_so(client: openai.OpenAI, library: str) -> None:
    body = {**BODIES[library], "max_tokens": 300, "temperature": 0, "logit_bias": {**QUIET, "6": 100}}  # short strings
    made: Any = client.post("/chat/completions", body=body, cast_to=object)
    (choice,) = made["choices"]
    if "response_format" in body:
        schema, text = body["response_format"]["json_schema"]["schema"], choice["message"]["content"]
    else:
        (call,) = choice["message"]["tool_calls"]
        (tool,) = [one for one in body["tools"] if one["function"]["name"] == call["function"]["name"]]
        schema, text = tool["function"]["parameters"], call["function"]["arguments"]
        assert choice["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(text), {"additionalProperties": False, **schema})


@pytest.mark.slow
def test_the_default_chat_model_calls_a_tool_and_reads_the_result(server_for: Callable[[str], LiveServer]) -> None:
    add = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
    tools: Any = [{"type": "function", "function": {"name": "add", "description": "Adds two.", "parameters": add}}]
    messages: Any = [{"role": "user", "content": "What is 3 plus 4?"}]
    asked: dict[str, Any] = {"model": "smollm2", "tools": tools, "temperature": 0, "max_tokens": 60}
    with LiveGateway(server_for("smollm2")) as gateway, gateway.client() as client:
        answer = client.chat.completions.create(**asked, messages=messages, tool_choice="required")
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})
        # Shown how twice, it chooses so by itself.
        shown: Any = []
        for a, b in ((1, 2), (5, 4)):
            made = {"id": f"shown-{a}", "type": "function"}
            made["function"] = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
            shown += [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": f"shown-{a}", "content": str(a + b)},
                {"role": "assistant", "content": f"It is {a + b}."},
            ]
        chosen = client.chat.completions.create(**asked, messages=[*shown, *messages])
        assert chosen.choices[0].finish_reason == "tool_calls"
        (call,) = chosen.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
        said = chosen.choices[0].message.model_dump(exclude_none=True)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        further = client.chat.completions.create(**asked, messages=[*shown, *messages, said, result])
        assert "7" in (further.choices[0].message.content or "")
        assert further.usage.prompt_tokens_details.cached_tokens >= chosen.usage.total_tokens - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["template", "no system turn"])
def test_models_of_other_habits_are_held_as_well(tmp_path: Path, kind: str) -> None:
    template = {"template": TOOLS_TEMPLATE, "no system turn": chat_templates.MISTRAL}[kind]
    model = with_template(resolve("tiny-llama"), tmp_path / "tiny-other", template)
    with LiveServer(model) as server, LiveGateway(server) as gateway, gateway.client() as client:
        asked: dict[str, Any] = {"model": "tiny-other", "messages": ASK, "tools": TOOLS, "logit_bias": QUIET}
        answer = client.chat.completions.create(**asked, tool_choice=NAMED, max_tokens=200)
        (call,) = answer.choices[0].message.tool_calls or ()
        held(call)
        free = client.chat.completions.create(**asked, max_tokens=5)
        assert free.choices[0].finish_reason in ("length", "stop")
