"""What a request may say, and which parameter an error names."""

from __future__ import annotations

import base64
from typing import Any

import kvfork_client as kv
import pytest
from kvfork_gateway.errors import Refused, param_of, refused_by
from kvfork_gateway.messages import images_of
from kvfork_gateway.request import read

TURN = {"role": "user", "content": "Hi"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [TURN], **fields}


def test_everything_that_is_left_out_is_the_servers_to_choose() -> None:
    made = read(asked(temperature=None, stop=None, tools=None))
    assert made.sampling == kv.Sampling() and made.stopping == kv.Stopping(stop=[])
    assert (made.n, made.stream, made.top_logprobs, made.constraint, made.tools) == (1, False, None, None, ())


def test_every_knob_has_its_place() -> None:
    made = read(
        asked(
            temperature=1,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            seed=-1,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            repetition_penalty=1.1,
            logit_bias={"7": -100},
            max_tokens=3,
            max_completion_tokens=4,
            stop="x",
            n=2,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            reasoning_effort="low",
            chat_template_kwargs={"enable_thinking": False},
            kvfork={"parent": "abc", "save": {"ttl": 5, "pinned": True}, "priority": -1, "max_recompute_tokens": 0},
            user="somebody",
            store=False,
        )
    )
    assert made.sampling == kv.Sampling(
        temperature=1.0,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=2**32 - 1,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias={7: -100.0},
    )
    assert made.stopping == kv.Stopping(max_tokens=4, stop=["x"])
    assert (made.n, made.top_logprobs, made.stream, made.include_usage) == (2, 0, True, True)
    assert made.template_vars == {"reasoning_effort": "low", "enable_thinking": False}
    extension = made.extension
    assert (extension.parent, extension.priority, extension.max_recompute_tokens) == ("snapshots/abc", -1, 0)
    assert extension.save == kv.SaveOptions(ttl=5.0, pinned=True)


def test_images_and_text_stay_in_order() -> None:
    url = "data:image/jpg;base64," + base64.b64encode(b"pixels").decode()
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    made = read(asked(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": content}]))
    picture = kv.Image(data=b"pixels", mime_type="image/jpeg")
    assert [(turn.role, turn.content) for turn in made.turns] == [
        (kv.Role.SYSTEM, ("be brief",)),
        (kv.Role.USER, ("a", picture)),
    ]
    assert images_of(made.turns) == (picture,)


TOOL = {"type": "function", "function": {"name": "f"}}
PARTS = [
    ("messages", {"messages": []}),
    ("model", {"model": None}),
    ("messages[0].role", {"messages": [{"role": "function", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    (
        "messages[0].content[0].image_url.detail",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "", "detail": "low"}}]}]},
    ),
    ("messages[0].content", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("n", {"n": 0}),
    ("n", {"n": True}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": 1e300}),
    ("logit_bias.-1", {"logit_bias": {"-1": 1}}),
    (f"logit_bias.{'0' * 20}", {"logit_bias": {"0" * 5000: 1}}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop[0]", {"stop": [3]}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("response_format.type", {"response_format": {"type": "grammar"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("tools[0].type", {"tools": [{"type": "retrieval"}]}),
    ("tools", {"tools": []}),
    ("tools[1].function.name", {"tools": [TOOL, TOOL]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
    ("tool_choice.function", {"tools": [TOOL], "tool_choice": {"type": "function"}}),
    ("tool_choice.function.name", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}),
    (
        "tool_choice.allowed_tools.mode",
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
    ),
    (
        "tool_choice.allowed_tools.tools",
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
    ),
    ("functions", {"functions": [{}]}),
    ("stream_options.shape", {"stream_options": {"shape": 1}}),
    ("modalities", {"modalities": ["audio"]}),
    ("service_tier", {"service_tier": "flex"}),
    ("store", {"store": True}),
    ("audio", {"audio": {}}),
    ("prediction", {"prediction": {}}),
    ("web_search_options", {"web_search_options": {}}),
    ("kvfork.save.ttl", {"kvfork": {"save": {"ttl": -1}}}),
    ("kvfork.rollback", {"kvfork": {"rollback": 3}}),
]


@pytest.mark.parametrize(("param", "fields"), PARTS, ids=[f"{i}-{param}" for i, (param, _) in enumerate(PARTS)])
def test_what_is_wrong_or_unsupported_is_named(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        read(asked(**fields))
    error = caught.value.body()["error"]
    assert caught.value.status == 400 and error["param"] == param and param in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.top_p", "top_p"),
        ("stopping.stop[2]", "stop"),
        ("input.chat.messages[3].parts[1].image.data", "messages[3].content[1]"),
        ("input", "messages"),
        ("constraint.json_schema", "response_format"),
        ("save.ttl", "kvfork.save.ttl"),
        ("somewhere.else", "somewhere.else"),
    ],
)
def test_a_field_of_the_contract_is_told_as_the_parameter_behind_it(field: str, param: str) -> None:
    assert param_of(field) == param


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (
            kv.QueueFull("full", retry_after=1.2),
            429,
            {"retry-after": "2", "retry-after-ms": "1200", "x-should-retry": "true"},
        ),
        (kv.SnapshotQuota("many"), 429, {"x-should-retry": "false"}),
        (
            kv.ModelLoading("soon", retry_after=0.3),
            503,
            {"retry-after": "1", "retry-after-ms": "300", "x-should-retry": "true"},
        ),
        (kv.EngineDown("stuck"), 503, {}),
        (kv.TokenUnknown("no"), 401, {"x-should-retry": "false"}),
        (kv.AdminRequired("no"), 403, {"x-should-retry": "false"}),
        (kv.SnapshotExpired("gone"), 404, {"x-should-retry": "false"}),
        (kv.TurnOpen("open"), 400, {"x-should-retry": "false"}),
        (kv.RequestInProgress("busy"), 409, {"x-should-retry": "false"}),
        (kv.DeadlineUnmet("late"), 504, {}),
        (kv.Unimplemented("no"), 501, {"x-should-retry": "false"}),
        (kv.Internal("bug", incident="i-1"), 500, {}),
    ],
)
def test_a_status_becomes_http(error: kv.KVForkError, status: int, headers: dict[str, str]) -> None:
    refused = refused_by(error)
    assert (refused.status, dict(refused.headers())) == (status, headers)
    assert refused.body()["error"].get("kvfork", {}).get("incident") == (error.incident or None)
