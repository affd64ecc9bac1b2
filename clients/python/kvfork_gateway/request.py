"""A chat completion's request, read and judged. Owns which parameters there are and what is refused; pure.

What is merely out of range is left to the server, which knows the limits; `errors.param_of` names it then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvfork_client import Constraint, Durability, Sampling, SaveOptions, Stopping

from .fields import Fields, Object, object_of, refuse, text_of, unsupported
from .messages import Turn, turns_of

MOST_CHOICES = 128

# Taken and without effect: who asks is the token's to say, and these change nothing about the text.
_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The `kvfork` object. `save` None: the caller wants no name of its own. `instance`: who holds `parent`."""

    parent: str = ""
    instance: str = ""
    save: SaveOptions | None = None
    max_recompute_tokens: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What is to be done with the tools. `names`: those that may be called; none: all of them.

    `parallel`: several calls in one answer; None where the caller said nothing of it.
    """

    required: bool = False
    parallel: bool | None = None
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What is asked for. `tools` are the protocol's own objects, none where none may be called."""

    model: str
    turns: tuple[Turn, ...]
    n: int
    stream: bool
    include_usage: bool
    sampling: Sampling
    stopping: Stopping
    top_logprobs: int | None
    constraint: Constraint | None
    tools: tuple[Object, ...]
    choice: ToolChoice
    template_vars: Mapping[str, object]
    extension: Extension = field(default_factory=Extension)


def read(source: Object) -> ChatRequest:
    """Raises Refused naming the first parameter that is wrong or unsupported."""
    fields = Fields(source)
    model = fields.text("model")
    if model is None:
        refuse("model", "is missing", code="missing_required_parameter")
    turns = turns_of(fields.items("messages"))
    stream = fields.flag("stream")
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    include_usage = options.flag("include_usage")
    options.ignore("include_obfuscation", "continuous_usage_stats")
    options.rest_is_unknown()
    n = fields.whole("n", least=1, most=MOST_CHOICES)
    sampling = _sampling(fields)
    stopping = _stopping(fields)
    top_logprobs = _logprobs(fields)
    constraint = _form(fields)
    tools, choice = _tools(fields)
    variables = _variables(fields)
    extension = _extension(fields)
    _indifferent(fields)
    fields.rest_is_unknown()
    return ChatRequest(
        model=model,
        turns=turns,
        n=n or 1,
        stream=stream,
        include_usage=include_usage,
        sampling=sampling,
        stopping=stopping,
        top_logprobs=top_logprobs,
        constraint=constraint,
        tools=tools,
        choice=choice,
        template_vars=variables,
        extension=extension,
    )


def _sampling(fields: Fields) -> Sampling:
    bias: dict[int, float] = {}
    for name, value in (fields.object("logit_bias") or {}).items():
        at = f"logit_bias.{name[:20]}"
        # Python makes no number of thousands of digits; a token id has ten at most.
        if not name.isdecimal() or not name.isascii() or len(name) > 10 or int(name) >= 2**32:
            refuse(at, "is no token id")
        bias[int(name)] = Fields({"bias": value}, at).number("bias") or 0.0
    seed = fields.whole("seed")
    return Sampling(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.whole("top_k", least=0, most=2**32 - 1),
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        logit_bias=bias,
        seed=None if seed is None else seed % 2**32,  # the contract's seeds have 32 bits
    )


def _stopping(fields: Fields) -> Stopping:
    most = fields.whole("max_completion_tokens", least=1, most=2**32 - 1)
    older = fields.whole("max_tokens", least=1, most=2**32 - 1)
    stop = fields.take("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list):
        refuse("stop", "must be a string or an array of strings")
    return Stopping(
        max_tokens=older if most is None else most,
        stop=[text_of(text, f"stop[{i}]") for i, text in enumerate(stops)],
    )


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", least=0, most=20)
    if top is not None and not wanted:
        refuse("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def _form(fields: Fields) -> Constraint | None:
    source = fields.object("response_format")
    if source is None:
        return None
    form = Fields(source, "response_format")
    kind = form.text("type")
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        named = Fields(
            object_of(form.take("json_schema"), "response_format.json_schema"), "response_format.json_schema"
        )
        schema = named.take("schema")
        if schema is None:
            refuse("response_format.json_schema.schema", "is missing")
        schema = object_of(schema, "response_format.json_schema.schema")
        named.ignore("name", "strict", "description")  # every form is strict here
        named.rest_is_unknown()
    elif kind != "json_object":
        unsupported("response_format.type", 'must be "text", "json_object" or "json_schema"')
    form.rest_is_unknown()
    return Constraint(json_schema=json.dumps(schema), after_reasoning=True)


def _tools(fields: Fields) -> tuple[tuple[Object, ...], ToolChoice]:
    for name in ("functions", "function_call"):
        if fields.take(name) is not None:
            unsupported(name, "use tools and tool_choice")
    given = fields.items("tools")
    if given is not None and not given:
        refuse("tools", "must hold at least one tool; leave it out for none")
    tools = tuple(given or ())
    names: list[str] = []
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        one = Fields(object_of(tool, at), at)
        if one.text("type") != "function":
            unsupported(f"{at}.type", 'must be "function"')
        function = Fields(object_of(one.take("function"), f"{at}.function"), f"{at}.function")
        name = text_of(function.take("name"), f"{at}.function.name")
        if not name or name in names:
            refuse(f"{at}.function.name", "names a tool twice" if name else "is empty")
        names.append(name)
        function.object("parameters")
    choice = _choice(fields.take("tool_choice"), names)
    parallel = fields.flag("parallel_tool_calls") if fields.has("parallel_tool_calls") else None
    return (() if choice is None else tools), replace(choice or ToolChoice(), parallel=parallel)


def _choice(source: Any, names: Sequence[str]) -> ToolChoice | None:
    """None where nothing may be called."""
    if source in (None, "auto"):
        return ToolChoice()
    if source == "none":
        return None
    if not names:
        refuse("tool_choice", "is of no use without tools")
    if source == "required":
        return ToolChoice(required=True)
    if not isinstance(source, dict):
        refuse("tool_choice", 'must be "none", "auto", "required" or an object that names a function')
    fields = Fields(source, "tool_choice")
    kind = fields.text("type")
    if kind == "function":
        chosen = ToolChoice(required=True, names=frozenset([_named(fields, "tool_choice", names)]))
    elif kind == "allowed_tools":
        at = "tool_choice.allowed_tools"
        allowed = Fields(object_of(fields.take("allowed_tools"), at), at)
        mode = allowed.text("mode")
        if mode not in ("auto", "required"):
            refuse(f"{at}.mode", 'must be "auto" or "required"')
        items = [object_of(item, f"{at}.tools[{i}]") for i, item in enumerate(allowed.items("tools") or ())]
        if not items:
            refuse(f"{at}.tools", "must hold at least one tool")
        allowed.rest_is_unknown()
        found = [_named(Fields(item, f"{at}.tools[{i}]"), f"{at}.tools[{i}]", names) for i, item in enumerate(items)]
        chosen = ToolChoice(required=mode == "required", names=frozenset(found))
    else:
        unsupported("tool_choice.type", 'must be "function" or "allowed_tools"')
    fields.rest_is_unknown()
    return chosen


def _named(fields: Fields, at: str, names: Sequence[str]) -> str:
    """The function that an object names, which must be one of `names`."""
    fields.ignore("type")
    function = Fields(object_of(fields.take("function"), f"{at}.function"), f"{at}.function")
    name = text_of(function.take("name"), f"{at}.function.name")
    if name not in names:
        refuse(f"{at}.function.name", f'is none of the tools: "{name[:64]}"')
    return name


def _variables(fields: Fields) -> dict[str, object]:
    variables: dict[str, object] = dict(fields.object("chat_template_kwargs") or {})
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    if "tools" in variables:
        refuse("chat_template_kwargs.tools", "use tools")
    return variables


def _extension(fields: Fields) -> Extension:
    own = Fields(fields.object("kvfork") or {}, "kvfork")
    parent = own.text("parent") or ""
    instance = own.text("instance") or ""
    if not (instance.isascii() and instance.isprintable() and instance == instance.strip()):
        refuse("kvfork.instance", "must be the instance that an answer named")
    if instance and not parent:
        refuse("kvfork.instance", "is of no use without parent")
    asked = own.take("save")
    recompute = own.whole("max_recompute_tokens", least=0, most=2**32 - 1)
    priority = own.whole("priority", least=-(2**31), most=2**31 - 1)
    own.rest_is_unknown()
    save: SaveOptions | None = None
    if isinstance(asked, bool):
        save = SaveOptions() if asked else None
    elif asked is not None:
        save = _save(object_of(asked, "kvfork.save"))
    return Extension(
        parent=parent if not parent or parent.startswith("snapshots/") else f"snapshots/{parent}",
        instance=instance,
        save=save,
        max_recompute_tokens=recompute,
        priority=priority or 0,
    )


def _save(source: Object) -> SaveOptions:
    fields = Fields(source, "kvfork.save")
    labels = {
        text_of(key, "kvfork.save.labels"): text_of(value, f"kvfork.save.labels.{key}")
        for key, value in (fields.object("labels") or {}).items()
    }
    ttl = fields.number("ttl")
    if ttl is not None and not 0 < ttl < 1e9:
        refuse("kvfork.save.ttl", "must be a number of seconds above 0")
    made = SaveOptions(
        ttl=ttl,
        pinned=fields.flag("pinned"),
        labels=labels,
        durability=Durability.DISK if fields.flag("durable") else None,
        snapshot_id=fields.text("snapshot_id") or "",
    )
    fields.rest_is_unknown()
    return made


def _indifferent(fields: Fields) -> None:
    """Parameters that are taken where they ask for what happens anyway, and refused where they do not."""
    fields.ignore(*_WITHOUT_EFFECT)
    if fields.flag("store"):
        unsupported("store", "answers are not kept; kvfork.save keeps the model's state")
    if (fields.text("service_tier") or "auto") not in ("auto", "default"):
        unsupported("service_tier", 'must be "auto" or "default"; kvfork.priority puts a call before others')
    modalities = fields.take("modalities")
    if modalities not in (None, ["text"]):
        unsupported("modalities", 'must be ["text"]')
