"""What a model may write that is to call tools, and what it reads of them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from kvfork_client import CallSyntax, Role, ToolCallForm
from kvfork_gateway.calling import OWN, Habit, closed, grammar, plan
from kvfork_gateway.errors import Refused
from kvfork_gateway.request import read
from kvfork_gateway.tools import parse, spelled
from llguidance import LLMatcher, LLTokenizer

TAGS = ToolCallForm(opening="<tool_call>", closing="</tool_call>", syntax=CallSyntax.TAGS)
NAMED = ToolCallForm(opening="<longcat_tool_call>", closing="</longcat_tool_call>", syntax=CallSyntax.JSON)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["city", "place"],
    "$defs": {"Place": {"type": "object", "properties": {"kind": {"enum": ["a", '</parameter>"é']}}, "required": []}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": 'say "é"', "parameters": {"anyOf": [{"enum": [{"a": 1}]}]}}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": closed(WEATHER), 'say "é"': {"const": {"a": 1}}, "now": {"maxProperties": 0}}


def matcher(lark: str) -> LLMatcher:
    made = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(lark: str, text: str) -> bool:
    """Whether the text is whole."""
    row = matcher(lark)
    return all(row.consume_token(byte) for byte in text.encode()) and row.is_accepting()


def walk(lark: str, seed: int) -> str | None:
    """A text of bytes picked at random among those allowed; None if it has no end within bounds."""
    rng, row, said = random.Random(seed), matcher(lark), bytearray()
    for _ in range(2000):
        if row.is_stopped():
            return said.decode()
        mask = row.compute_bitmask()
        fitting = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if row.is_accepting() and (not fitting or rng.random() < 0.5):
            return said.decode()
        plain = [byte for byte in fitting if 32 <= byte < 127 and byte != 92] or fitting
        closing = [byte for byte in plain if chr(byte) in '"}<']
        said.append(rng.choice(closing if closing and rng.random() < 0.3 else plain))
        assert row.consume_token(said[-1])
    return None


@pytest.mark.parametrize("form", [OWN, TAGS, NAMED], ids=["json", "tags", "marks"])
@pytest.mark.parametrize("parallel", [False, True])
def test_whatever_is_picked_is_a_call_with_arguments_of_its_schema(form: ToolCallForm, parallel: bool) -> None:
    lark = grammar(form, TOOLS, required=True, parallel=parallel)
    found = [text for seed in range(60) if (text := walk(lark, seed)) is not None]
    assert len(found) > 50
    seen, most = set(), 0
    for text in found:
        assert text.startswith(form.opening) and text.endswith(form.closing)
        calls = parse(text)
        assert calls, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        seen |= {call.name for call in calls}
        most = max(most, len(calls))
    assert seen == set(SCHEMAS)
    assert (most > 1) == parallel


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "place": {}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (CALL, True),
        (CALL + "\n" + CALL, True),
        ("Is 3 < 4? <tool", True),
        ("Let me see.\n" + CALL, True),
        ("", True),
        (CALL + " and so on", False),
        ("<tool_call> is a mark", False),
        (CALL.replace("weather", "time"), False),
        (CALL.replace('"city"', '"town"'), False),
        (CALL.replace('{"city"', '{"more": 1, "city"'), False),
        (CALL.replace(', "place": {}', ""), False),
        (CALL.replace('"arguments": {', '"arguments":  {'), False),
        (CALL[:-1], False),
    ],
)
def test_a_model_that_may_choose_writes_text_or_whole_calls(text: str, fits: bool) -> None:
    assert accepts(grammar(OWN, TOOLS, required=False, parallel=True), text) == fits


def test_one_call_is_one_call() -> None:
    assert accepts(grammar(OWN, TOOLS, required=False, parallel=False), "So. " + CALL)
    assert not accepts(grammar(OWN, TOOLS, required=False, parallel=False), CALL + "\n" + CALL)
    assert not accepts(grammar(OWN, TOOLS, required=True, parallel=False), "So. " + CALL)


def test_an_answer_with_a_form_has_it_where_nothing_is_called() -> None:
    answer = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    lark = grammar(OWN, TOOLS, required=False, parallel=True, answer=json.dumps(answer))
    assert accepts(lark, '{"sum": 3}') and accepts(lark, CALL)
    assert not accepts(lark, "three") and not accepts(lark, '{"sum": 3, "more": 4}')


def test_what_a_model_writes_in_tags_is_read_with_its_types() -> None:
    lark = grammar(TAGS, TOOLS, required=True, parallel=True)
    city, place = '"</function>"', '{"kind": "</parameter>\\"é"}'
    text = (
        f'<tool_call>\n<function=weather>\n<parameter=city>\n{city[:7]}"\n</parameter>\n'
        f"<parameter=place>\n{place}\n</parameter>\n</function>\n</tool_call>"
    )
    assert accepts(lark, text)
    (call,) = parse(text)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "</func", "place": json.loads(place)})


OBJECT = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}, "properties": {"type": "string"}}}


def test_objects_are_closed_unless_the_schema_opens_them() -> None:
    made = closed(OBJECT)
    assert made["additionalProperties"] is False and made["properties"]["a"]["additionalProperties"] is False
    assert made["properties"]["properties"] == {"type": "string"}
    for opened in (
        {**OBJECT, "additionalProperties": True},
        {"type": "object"},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"enum": [{"properties": {}}]},
    ):
        made = closed(opened)
        assert made.get("additionalProperties", True) is True
        assert {key: value for key, value in made.items() if key != "properties"} == {
            key: value for key, value in opened.items() if key != "properties"
        }


def asked(messages: list[Any], **fields: Any) -> Any:
    return read({"model": "m", "messages": messages, **fields})


QUESTION = {"role": "user", "content": "Warm?"}
NONE = Habit(template=False)


def words(turns: Any) -> list[tuple[Role, str]]:
    return [(turn.role, spelled(turn)) for turn in turns]


def test_a_model_without_tools_reads_them_in_the_first_turn() -> None:
    request = asked([QUESTION], tools=TOOLS)
    first, second = words(plan(request, NONE).turns)
    assert first[0] is Role.SYSTEM and second == (Role.USER, "Warm?")
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in first[1].splitlines()
    told = {"role": "system", "content": "Be brief."}
    ((role, text), _) = words(plan(asked([told, QUESTION], tools=TOOLS), NONE).turns)
    assert role is Role.SYSTEM and text.startswith("Be brief.") and text.endswith(first[1])
    ((role, text),) = words(plan(request, Habit(template=False, system=False)).turns)
    assert role is Role.USER and text == first[1] + "\n\nWarm?"
    # Behind a parent the tools are there already, and so they are where the template writes them.
    behind = asked([QUESTION], tools=TOOLS, kvfork={"parent": "x"})
    assert words(plan(behind, NONE).turns) == [(Role.USER, "Warm?")] and plan(behind, NONE).constraint is not None
    known = plan(request, Habit(template=True))
    assert words(known.turns) == [(Role.USER, "Warm?")] and known.template_tools == tuple(TOOLS)


def test_results_come_back_in_the_order_of_the_calls() -> None:
    def call(name: str) -> Any:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    def result(name: str) -> Any:
        return {"role": "tool", "tool_call_id": name, "content": f"of {name}"}

    messages = [QUESTION, {"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("b"), result("a")]
    turns = words(plan(asked([*messages, QUESTION]), NONE).turns)
    assert [role for role, _ in turns] == [Role.USER, Role.ASSISTANT, Role.USER, Role.USER]
    result_of = "<tool_response>\nof {}\n</tool_response>"
    assert turns[2][1] == result_of.format("a") + "\n" + result_of.format("b")
    assert words(plan(asked(messages), Habit(template=True)).turns)[2:] == [(Role.TOOL, "of b"), (Role.TOOL, "of a")]


def allowed(mode: str, name: str) -> Any:
    tool = {"type": "function", "function": {"name": name}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool]}}


@pytest.mark.parametrize("habit", [NONE, Habit(template=True), Habit(template=True, form=TAGS)])
@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"tool_choice": "required"}, (False, True, False)),
        ({"tool_choice": "required", "parallel_tool_calls": True}, (False, True, True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, (False, True, False)),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, (False, True, False)),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, (False, False, False)),
        ({"parallel_tool_calls": False}, (True, True, False)),
        ({"tool_choice": allowed("auto", "now")}, (True, False, False)),
        ({"tool_choice": allowed("required", "weather")}, (False, True, False)),
    ],
)
def test_a_choice_is_held_by_the_grammar(habit: Habit, fields: Any, fits: tuple[bool, bool, bool]) -> None:
    made = plan(asked([QUESTION], tools=TOOLS, **fields), habit)
    assert made.constraint is not None and made.constraint.lark is not None and made.constraint.after_reasoning
    call = CALL
    if habit.form is TAGS:
        call = (
            '<tool_call>\n<function=weather>\n<parameter=city>\n"Oslo"\n</parameter>\n'
            "<parameter=place>\n{}\n</parameter>\n</function>\n</tool_call>"
        )
    assert tuple(accepts(made.constraint.lark, text) for text in ("Warm.", call, call + "\n" + call)) == fits
    assert made.opening == "<tool_call>"


def test_a_template_that_writes_tools_leaves_the_choice_to_the_model() -> None:
    made = plan(asked([QUESTION], tools=TOOLS), Habit(template=True))
    assert (made.constraint, made.opening) == (None, None)
    none = plan(asked([QUESTION], tools=TOOLS, tool_choice="none"), Habit(template=True))
    assert (none.template_tools, none.constraint) == ((), None)


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: Any = {"type": "object"}
    for _ in range(5000):
        schema = {"items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(Refused) as caught:
        plan(asked([QUESTION], tools=[tool]), NONE)
    assert caught.value.param == "tools"
