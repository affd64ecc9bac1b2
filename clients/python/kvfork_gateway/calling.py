"""How tool calls are asked of a model: the words in the prompt and the grammar of what it may write. Pure.

Where the chat template writes tools, they are its to write, and a call reads as the model writes it. Where it does not,
the words are ours, in the first turn of the conversation, so that each turn's prompt begins with the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvfork_client import CallSyntax, Constraint, Role, ToolCallForm

from .fields import Object, refuse
from .messages import Turn
from .request import ChatRequest

OWN = ToolCallForm(opening="<tool_call>", closing="</tool_call>", syntax=CallSyntax.JSON)
"""The form of models that have none, as most models write it that have one."""

_INSTRUCTIONS = """\
You can call functions. They are described here, one in each line, with a JSON schema of their arguments:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON inside <tool_call></tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
The result is given to you inside <tool_response></tool_response>."""

# Written as json.dumps writes, which is what models have seen most; with free white space a small one may end in it.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_NO_ARGUMENTS: Object = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """What a model knows of tools. `template`: its chat template writes them; `system`: it takes a system turn."""

    template: bool
    system: bool = True
    form: ToolCallForm = OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """A request as one model is asked it. `opening`: what begins a call in the answer; None: the server tells."""

    turns: tuple[Turn, ...]
    template_tools: tuple[Object, ...] = ()
    constraint: Constraint | None = None
    opening: str | None = None


def needs_habit(request: ChatRequest) -> bool:
    """Whether it matters what the model knows of tools."""
    return bool(request.tools) or any(turn.role is Role.TOOL for turn in request.turns)


def plan(request: ChatRequest, habit: Habit) -> Calling:
    """Raises Refused for tools of which no grammar can be made."""
    tools, choice = request.tools, request.choice
    turns = request.turns if habit.template else _results_as_user(request.turns)
    if not tools:
        return Calling(turns=turns, constraint=request.constraint)
    allowed = [tool for tool in tools if not choice.names or tool["function"]["name"] in choice.names]
    free = habit.template and choice.parallel is not False and not choice.required and len(allowed) == len(tools)
    constraint, opening = None, None
    if not free or request.constraint is not None:
        answer = request.constraint.json_schema if request.constraint is not None else None
        # Several only where that was asked for: a small model, once it calls, goes on calling until its limit.
        several = choice.parallel is True
        text = grammar(habit.form, allowed, required=choice.required, parallel=several, answer=answer)
        constraint, opening = Constraint(lark=text, after_reasoning=True), habit.form.opening
    if habit.template:
        return Calling(turns=turns, template_tools=tools, constraint=constraint, opening=opening)
    if not request.extension.parent:  # whose prompt has them
        turns = _instructed(turns, tools, system=habit.system)
    return Calling(turns=turns, constraint=constraint, opening=opening)


def grammar(
    form: ToolCallForm, tools: Sequence[Object], *, required: bool, parallel: bool, answer: Any | None = None
) -> str:
    """Lark of calls in `form`, or of other text where none is `required`: any, or JSON of the schema `answer`."""
    opening = json.dumps(form.opening)
    more = f' ("\\n" {opening} call)*' if parallel else ""
    if required:
        start = [f"start: {opening} call{more}"]
    elif answer is not None:
        start = [f"start: {opening} call{more} | answer", f"answer: %json {_schema(answer)}"]
    else:
        start = [
            f"start: text | lead call{more}",
            "text: TEXT",
            "TEXT: /(?s:.*)/",
            f"lead[suffix={opening}]: /(?s:.*)/",
        ]
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    calls = [line for i, tool in enumerate(tools) for line in _call(form, i, tool["function"])]
    return "\n".join([*start, f"call: {names}", *calls, ""])


def closed(schema: Any) -> Any:
    """The schema with every object closed that names its properties and does not say what else it may have."""
    try:
        return _closed(schema, alone=not _joins(schema))
    except RecursionError:
        refuse("tools", "a schema is nested too deeply")


def _call(form: ToolCallForm, index: int, function: Object) -> Iterator[str]:
    """The rules of one function's call, from behind what opens it."""
    arguments = closed(function.get("parameters") or _NO_ARGUMENTS)
    name, closing = str(function["name"]), form.closing
    if form.syntax is CallSyntax.TAGS and _fits_tags(name, arguments):
        pieces = [_quoted(f"\n<function={name}>\n")]
        shared = {key: arguments[key] for key in ("$defs", "definitions") if key in arguments}
        rules = []
        for place, (key, schema) in enumerate(arguments["properties"].items()):
            rule = f"argument_{index}_{place}"
            value = {**schema, **shared} if isinstance(schema, dict) else schema
            rules.append(f'{rule}: {_quoted(f"<parameter={key}>{chr(10)}")} {rule}_value "\\n</parameter>\\n"')
            rules.append(f"{rule}_value: %json {_schema(value)}")
            pieces.append(rule if key in arguments.get("required", ()) else f"{rule}?")
        yield f"call_{index}: {' '.join(pieces)} {_quoted(f'</function>{chr(10)}{closing}')}"
        yield from rules
        return
    lead = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    closer = f"}}\n{closing}"
    yield f"call_{index}: {_quoted(lead)} arguments_{index} {_quoted(closer)}"
    yield f"arguments_{index}: %json {_schema(arguments)}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _schema(schema: Any) -> str:
    """In one line, as a Lark grammar takes it."""
    source = json.loads(schema) if isinstance(schema, str) else schema
    return json.dumps({**closed(source), "x-guidance": _WRITTEN} if isinstance(source, dict) else source)


def _fits_tags(name: str, arguments: Any) -> bool:
    """Whether tags can hold all that the schema says."""
    properties = arguments.get("properties")
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}
    return (
        isinstance(properties, dict)
        and arguments.get("additionalProperties") is False
        and set(arguments) <= known | {"$schema", "strict"}
        and set(arguments.get("required", ())) <= set(properties)
        and not any(sign in key for key in (name, *properties) for sign in ">\n")
    )


def _joins(schema: Any) -> bool:
    """Whether a schema puts objects together of several, each of which alone would forbid the others' properties."""
    if isinstance(schema, dict):
        several = schema.get("allOf")
        mixed = "properties" in schema and any(key in schema for key in ("allOf", "anyOf", "oneOf", "$ref"))
        return mixed or (isinstance(several, list) and len(several) > 1) or any(map(_joins, schema.values()))
    return isinstance(schema, list) and any(map(_joins, schema))


def _closed(schema: Any, *, alone: bool) -> Any:
    if isinstance(schema, list):
        return [_closed(item, alone=alone) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            made[key] = {name: _closed(inner, alone=alone) for name, inner in value.items()}
        elif key in ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"):
            made[key] = _closed(value, alone=alone)
        else:
            made[key] = value
    opened = any(key in schema for key in ("additionalProperties", "unevaluatedProperties", "patternProperties"))
    if alone and "properties" in schema and not opened:
        made["additionalProperties"] = False
    return made


def _instructed(turns: tuple[Turn, ...], tools: Sequence[Object], *, system: bool) -> tuple[Turn, ...]:
    """With the tools in the first turn: behind what a system turn says, or before what a user's says."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines)
    first, rest = turns[0], turns[1:]
    if first.role is Role.SYSTEM:
        return (replace(first, content=(*first.content, "\n\n" + text)), *rest)
    if system or first.role is not Role.USER:
        return (Turn(role=Role.SYSTEM, content=(text,)), *turns)
    return (replace(first, content=(text + "\n\n", *first.content)), *rest)


def _results_as_user(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Results in turns of the user's, since the template may know no others; those of one answer in one turn.

    They come in the order of the calls, whatever order they were sent in: nothing else says which is whose.
    """
    made: list[Turn] = []
    waiting: list[Turn] = []
    places: dict[str, int] = {}

    def pass_on() -> None:
        ordered = sorted(waiting, key=lambda turn: places.get(turn.answers, len(places)))
        content = [part for turn in ordered for part in ("\n<tool_response>\n", *turn.content, "\n</tool_response>")]
        if content:
            made.append(Turn(role=Role.USER, content=("<tool_response>\n", *content[1:])))
        waiting.clear()

    for turn in turns:
        if turn.role is Role.TOOL:
            waiting.append(turn)
            continue
        pass_on()
        made.append(turn)
        if turn.calls:
            places = {call.id: place for place, call in enumerate(turn.calls)}
    pass_on()
    return tuple(made)
