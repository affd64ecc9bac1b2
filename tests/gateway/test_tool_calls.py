"""Tool calls between a model's own words and the protocol's."""

from __future__ import annotations

import json

import pytest
from kvfork_client import Role
from kvfork_gateway.messages import ToolCall, Turn
from kvfork_gateway.tools import Spellings, parse, spelled

WEATHER = [("weather", {"city": "Oslo", "days": 2})]
FORMS = {
    "json": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "parameters": '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}',
    "array": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]',
    "text in text": '<tool_call>{"name": "weather", "arguments": "{\\"city\\":\\"Oslo\\",\\"days\\":2}"}</tool_call>',
    "tags": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "pythonic": '<|tool_call_start|>[weather(city="Oslo", days=2)]<|tool_call_end|>',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 2}<|call|>',
}


@pytest.mark.parametrize("form", FORMS)
def test_known_forms_are_read(form: str) -> None:
    calls = parse(FORMS[form])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == WEATHER
    assert all(call.id.startswith("call_") for call in calls)


def test_several_calls_in_a_row_are_several() -> None:
    calls = parse(FORMS["json"] + "\n" + FORMS["json"].replace("weather", "time"))
    assert [call.name for call in calls] == ["weather", "time"]
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    "text",
    ["", "<tool_call>", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": "f"', "f(1)", "f(a=g())", "x = 1"],
)
def test_what_is_in_no_form_is_no_call(text: str) -> None:
    assert parse(text) == []


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        f'<tool_call>{{"name": "f", "arguments": {{"x": {DEEP}',
        f"<|tool_call_start|>[f(x={DEEP})]",
        "f" + ".f" * 900 + "(x=1)",
    ],
)
def test_what_is_nested_beyond_reading_is_no_call(text: str) -> None:
    assert parse(text) == []


def test_an_argument_that_is_nested_beyond_reading_is_text() -> None:
    (call,) = parse(FORMS["tags"].replace("Oslo", DEEP))
    assert json.loads(call.arguments) == {"city": DEEP, "days": 2}
    turn = Turn(role=Role.ASSISTANT, content=(), calls=(ToolCall(id="x", name="f", arguments=DEEP),))
    assert json.loads(spelled(turn).splitlines()[1]) == {"name": "f", "arguments": DEEP}


def test_a_turn_reads_as_it_was_written_for_whom_it_was_written() -> None:
    spellings = Spellings()
    calls = tuple(parse(FORMS["tags"]))
    turn = Turn(role=Role.ASSISTANT, content=("Let me see.",), calls=calls)
    spellings.remember("a", calls, "Let me see.", "Let me see.\n\n" + FORMS["tags"])
    assert spellings.spelled("a", turn) == "Let me see.\n\n" + FORMS["tags"]
    assert spellings.spelled("b", turn) == spelled(turn)
    altered = Turn(role=Role.ASSISTANT, content=("Wait.",), calls=calls)
    assert spellings.spelled("a", altered) == spelled(altered)


def test_a_call_that_nobody_has_seen_is_spelled_in_the_commonest_form() -> None:
    turn = Turn(role=Role.ASSISTANT, content=(), calls=(ToolCall(id="x", name="f", arguments='{"a": 1}'),))
    assert spelled(turn) == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_what_is_remembered_is_bounded() -> None:
    spellings = Spellings(entries=2, total_bytes=100)
    turns = []
    for name in "abc":
        turn = Turn(role=Role.ASSISTANT, content=(), calls=(ToolCall(id=name, name=name, arguments="{}"),))
        spellings.remember("x", turn.calls, "", name * 40)
        turns.append(turn)
    assert [spellings.spelled("x", turn) for turn in turns] == [spelled(turns[0]), "b" * 40, "c" * 40]
