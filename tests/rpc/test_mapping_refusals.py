"""Wrong requests: every field that is wrong is named, in the order of the request."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from google.protobuf import json_format
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import types_pb2 as pb

from service.errors import CallError, InvalidField
from service.request import (
    Constraint,
    Form,
    ImagePart,
)
from service.rpc import fields as field_checks
from service.rpc import mapping_in

from .conftest import LIMITS
from .mapping_calls import CHAT, TEXT, count, create, extend, fork, generate, listed, rollback, stop, update

BIG_ID = 2**31

LONG = "x" * 300

BAD: list[tuple[Any, dict[str, Any], list[str]]] = [
    # What the context is.
    (generate, {}, ["input"]),
    (generate, {"input": {}}, ["input"]),
    (generate, {"parent": "snapshots/x", "input": {}}, ["input"]),
    (generate, {"input": {"raw": {}}}, ["input.raw.parts"]),
    (generate, {"input": {"chat": {}}}, ["input.chat.messages"]),
    (generate, {"input": {"raw": {"parts": [{"text": "a"}, {}]}}}, ["input.raw.parts[1]"]),
    (
        generate,
        {"input": {"chat": {"messages": [{"role": "ROLE_USER", "parts": []}]}}},
        ["input.chat.messages[0].parts"],
    ),
    (
        generate,
        {"input": {"chat": {"messages": [{"parts": [{"text": "a"}]}, {"role": 9, "parts": [{"text": "a"}]}]}}},
        ["input.chat.messages[0].role", "input.chat.messages[1].role"],
    ),
    (
        generate,
        {
            "input": {
                "chat": {
                    "messages": [
                        {"role": "ROLE_USER", "parts": [{"text": "a"}]},
                        {"role": "ROLE_USER", "parts": [{"text": "a"}, {"tokens": {"ids": [1, BIG_ID, 2, BIG_ID]}}]},
                    ]
                }
            }
        },
        [f"input.chat.messages[1].parts[1].tokens.ids[{i}]" for i in (1, 3)],
    ),
    (
        generate,
        {"parent": "snapshots/x", "input": {"raw": {"parts": [{"text": "a"}], "addSpecialTokens": True}}},
        ["input.raw.add_special_tokens"],
    ),
    *[
        (
            generate,
            {"input": {"chat": {**CHAT["chat"], "templateVarsJson": text}}},
            ["input.chat.template_vars_json"],
        )
        for text in (
            "[]",
            "{",
            '"a"',
            '{"a": NaN}',
            "[" * 100_000,
            '{"a": ' + "9" * 5000 + "}",
            '{"chat_template": "{{ x }}"}',
            '{"messages": []}',
            '{"add_generation_prompt": true}',
        )
    ],
    # Names.
    *[
        (generate, {"parent": name}, ["parent"])
        for name in (
            "x",
            "snapshots/",
            "snapshots/a/b",
            "models/x",
            "snapshots/a b",
            "/",
            "snapshots/" + "x" * 129,
        )
    ],
    (generate, {"model": "smollm2", "input": TEXT}, ["model"]),
    (generate, {"requestId": "abc", "input": TEXT}, ["request_id"]),
    (stop, {}, ["generation"]),
    (stop, {"generation": "snapshots/x"}, ["generation"]),
    (count, {"model": "m"}, ["input", "model"]),
    (count, {"input": TEXT, "plan": {"branches": 65, "max_tokens": 0}}, ["plan.branches", "plan.max_tokens"]),
    # Sampling.
    *[
        (generate, {"input": TEXT, "sampling": {name: value}}, [f"sampling.{path}"])
        for name, path, values in (
            ("temperature", "temperature", ("NaN", "Infinity", -0.1, 101)),
            ("topP", "top_p", ("NaN", 0, -1, 1.01)),
            ("minP", "min_p", ("NaN", 1, -0.1)),
            ("repetitionPenalty", "repetition_penalty", ("NaN", 0, -1, "Infinity", 1000)),
            ("frequencyPenalty", "frequency_penalty", ("NaN", "-Infinity", 101)),
            ("presencePenalty", "presence_penalty", ("NaN", "Infinity", -101)),
        )
        for value in values
    ],
    (
        generate,
        {"input": TEXT, "sampling": {"logitBias": {"5": "NaN", "6": 101, "7": 1, str(BIG_ID): 1}}},
        ["sampling.logit_bias[5]", "sampling.logit_bias[6]", f"sampling.logit_bias[{BIG_ID}]"],
    ),
    (
        generate,
        {"input": TEXT, "sampling": {"logitBias": {str(i): 1 for i in range(1025)}}},
        ["sampling.logit_bias"],
    ),
    # Stopping and output.
    (generate, {"input": TEXT, "stopping": {"maxTokens": 0}}, ["stopping.max_tokens"]),
    (generate, {"input": TEXT, "stopping": {"maxTokens": 3, "minTokens": 4}}, ["stopping.min_tokens"]),
    (generate, {"input": TEXT, "stopping": {"stop": ["a", "", "é" * 513]}}, ["stopping.stop[1]", "stopping.stop[2]"]),
    (generate, {"input": TEXT, "stopping": {"stop": ["a"] * 33}}, ["stopping.stop"]),
    (generate, {"input": TEXT, "stopping": {"stopTokenIds": [1, BIG_ID]}}, ["stopping.stop_token_ids[1]"]),
    (generate, {"input": TEXT, "stopping": {"stopTokenIds": list(range(257))}}, ["stopping.stop_token_ids"]),
    *[(generate, {"input": TEXT, "stopping": {"timeLimit": t}}, ["stopping.time_limit"]) for t in ("0s", "-1s")],
    (generate, {"input": TEXT, "output": {"topLogprobs": 21}}, ["output.top_logprobs"]),
    # What is kept.
    *[
        (generate, {"input": TEXT, "save": {"snapshotId": id_}}, ["save.snapshot_id"])
        for id_ in ("short", "-starts-with", "Capital-letters", "under_score", "a" * 64, "ünicode-id")
    ],
    *[(generate, {"input": TEXT, "save": {"ttl": ttl}}, ["save.ttl"]) for ttl in ("0s", "-5s", "3600.001s")],
    (generate, {"input": TEXT, "save": {"durability": 9}}, ["save.durability"]),
    (
        generate,
        {"input": TEXT, "save": {"labels": {"": "a", "b": LONG, "sp ace": "c", "d" * 64: "e"}}},
        ["save.labels['']", "save.labels['b']", f"save.labels['{'d' * 64}']", "save.labels['sp ace']"],
    ),
    (generate, {"input": TEXT, "save": {"labels": {f"k{i}": "" for i in range(65)}}}, ["save.labels"]),
    (generate, {"input": TEXT, "saveOnCancel": True}, ["save_on_cancel"]),
    (generate, {"input": TEXT, "save": {}, "saveOnCancel": True}, ["save_on_cancel"]),
    (generate, {"input": TEXT, "marks": [{}]}, ["marks[0]"]),
    (generate, {"input": TEXT, "marks": [{"tokenCount": 0}]}, ["marks[0].token_count"]),
    (generate, {"input": TEXT, "marks": [{"messageCount": 1}]}, ["marks[0].message_count"]),
    (
        generate,
        {"input": CHAT, "marks": [{"messageCount": 1}, {"messageCount": 2}, {"messageCount": 0}]},
        ["marks[1].message_count", "marks[2].message_count"],
    ),
    (
        generate,
        {"input": TEXT, "marks": [{"landmark": 0}, {"landmark": 9}]},
        ["marks[0].landmark", "marks[1].landmark"],
    ),
    (generate, {"input": TEXT, "marks": [{"tokenCount": 1}] * 65}, ["marks"]),
    # The form of the text.
    (generate, {"input": TEXT, "constraint": {}}, ["constraint"]),
    (generate, {"input": TEXT, "constraint": {"afterReasoning": True}}, ["constraint"]),
    *[
        (generate, {"input": TEXT, "constraint": {name: text}}, [f"constraint.{wire}"])
        for name, wire in (("jsonSchema", "json_schema"), ("regex", "regex"), ("lark", "lark"))
        for text in ("", "a" * ((64 << 10) + 1), "é" * ((32 << 10) + 1))
    ],
    (generate, {"input": TEXT, "constraint": {"choice": {}}}, ["constraint.choice.options"]),
    (generate, {"input": TEXT, "constraint": {"choice": {"options": ["a"] * 257}}}, ["constraint.choice.options"]),
    (
        generate,
        {"input": TEXT, "constraint": {"choice": {"options": ["a", "", "b" * 1025]}}},
        ["constraint.choice.options[1]", "constraint.choice.options[2]"],
    ),
    (
        generate,
        {"input": TEXT, "marks": [{"tokenCount": 1, "options": {"ttl": "-1s"}}]},
        ["marks[0].options.ttl"],
    ),
    (
        generate,
        {
            "input": TEXT,
            "save": {"snapshotId": "same-0001"},
            "marks": [{"tokenCount": 1, "options": {"snapshotId": "same-0001"}}],
        },
        ["marks[0].options.snapshot_id"],
    ),
    *[
        (create, {"input": TEXT, "marks": [{"landmark": landmark}]}, ["marks[0].landmark"])
        for landmark in ("LANDMARK_REASONING_START", "LANDMARK_REASONING_END")
    ],
    (create, {}, ["input"]),
    # Fork.
    (fork, {"branches": [{}]}, ["parent"]),
    (fork, {"parent": "snapshots/x"}, ["branches"]),
    (fork, {"parent": "snapshots/x", "branches": [{}] * 5}, ["branches"]),
    (
        fork,
        {
            "parent": "snapshots/x",
            "branches": [
                {"options": {"snapshotId": "same-0001"}},
                {"append": {}, "options": {"ttl": "0s", "snapshotId": "same-0001"}},
            ],
        },
        ["branches[1].append", "branches[1].options.ttl", "branches[1].options.snapshot_id"],
    ),
    (
        fork,
        {
            "parent": "snapshots/x",
            "branches": [{"append": {"raw": {"parts": [{"text": "a"}], "addSpecialTokens": True}}}],
        },
        ["branches[0].append.raw.add_special_tokens"],
    ),
    # Rollback.
    (rollback, {}, ["target", "source"]),
    (rollback, {"source": "snapshots/x", "tokenCount": 0}, ["token_count"]),
    (rollback, {"source": "snapshots/x", "ancestor": ""}, ["ancestor"]),
    (rollback, {"source": "snapshots/x", "dropTokens": 1, "rounding": 9, "release": 9}, ["rounding", "release"]),
    # Snapshots.
    (extend, {}, ["names"]),
    (extend, {"names": ["snapshots/a", "", "b"]}, ["names[1]", "names[2]"]),
    (extend, {"names": ["snapshots/a"] * 1001}, ["names"]),
    (extend, {"names": ["snapshots/a"], "ttl": "0s"}, ["ttl"]),
    (listed, {"pageSize": -1}, ["page_size"]),
    (listed, {"parent": "x", "labels": {"": ""}}, ["labels['']", "parent"]),
    (update, {"snapshot": {"pinned": True}}, ["snapshot.name"]),
    (update, {"snapshot": {"name": "snapshots/a"}}, ["update_mask"]),
    (update, {"snapshot": {"name": "snapshots/a"}, "updateMask": "ttl"}, ["snapshot.ttl"]),
    (update, {"snapshot": {"name": "snapshots/a"}, "updateMask": "expireTime"}, ["snapshot.expire_time"]),
    (update, {"snapshot": {"name": "snapshots/a", "ttl": "5s"}, "updateMask": "ttl,expireTime"}, ["update_mask"]),
    (update, {"snapshot": {"name": "snapshots/a", "ttl": "3601s"}}, ["snapshot.ttl"]),
    (update, {"snapshot": {"name": "snapshots/a", "labels": {"": ""}}}, ["snapshot.labels['']"]),
    *[
        (update, {"snapshot": {"name": "snapshots/a", "expireTime": time}}, ["snapshot.expire_time"])
        for time in ("2023-11-14T22:13:20Z", "1970-01-01T00:00:00Z", "2023-11-14T23:13:21Z")  # now, long ago, too late
    ],
]


@pytest.mark.parametrize(("read", "request_", "paths"), BAD)
def test_bad_requests_name_every_wrong_field(read, request_, paths):
    with pytest.raises(InvalidField) as caught:
        read(request_)
    assert [violation.field for violation in caught.value.fields] == paths
    assert caught.value.reason == "INVALID_FIELD"
    assert caught.value.metadata["fieldCount"] == str(len(paths))
    assert all(violation.text for violation in caught.value.fields)


def test_one_refusal_tells_of_everything_that_is_wrong():
    request = {
        "model": "m",
        "parent": "p",
        "input": {"chat": {"messages": [{"role": "ROLE_USER", "parts": [{}]}]}},
        "sampling": {"temperature": "NaN", "topP": 2},
        "stopping": {"maxTokens": 1, "minTokens": 2},
        "output": {"topLogprobs": 99},
        "save": {"ttl": "-1s"},
        "saveOnCancel": True,
        "marks": [{}],
        "requestId": "r",
    }
    with pytest.raises(InvalidField) as caught:
        generate(request)
    assert {violation.field for violation in caught.value.fields} == {
        "model",
        "parent",
        "input.chat.messages[0].parts[0]",
        "sampling.temperature",
        "sampling.top_p",
        "stopping.min_tokens",
        "output.top_logprobs",
        "save.ttl",
        "save_on_cancel",
        "marks[0]",
        "request_id",
    }


def test_images_are_read_with_their_source_and_kind():
    parts = [
        {"image": {"data": "aGk=", "mimeType": "IMAGE/JPG"}},
        {"image": {"sha256": base64.b64encode(bytes(32)).decode(), "mimeType": "image/webp"}},
        {"image": {"data": ""}},  # an empty file is the decoder's to refuse
    ]
    read = generate({"input": {"raw": {"parts": parts}}}).input
    assert read.parts == (
        ImagePart(data=b"hi", mime_type="image/jpeg"),
        ImagePart(sha256=bytes(32), mime_type="image/webp"),
        ImagePart(data=b""),
    )


def test_wrong_images_are_told_by_their_path():
    parts = [
        {"image": {}},
        {"image": {"sha256": "aGk="}},
        {"image": {"data": "aGk=", "mimeType": "image/gif"}},
    ]
    with pytest.raises(InvalidField) as caught:
        generate({"input": {"chat": {"messages": [{"role": "ROLE_USER", "parts": parts}]}}})
    at = "input.chat.messages[0].parts"
    assert [v.field for v in caught.value.fields] == [
        f"{at}[0].image",
        f"{at}[1].image.sha256",
        f"{at}[2].image.mime_type",
    ]


def test_the_images_of_a_request_are_counted_over_all_of_its_inputs():
    two = {"raw": {"parts": [{"image": {"data": "aGk="}}] * 2}}
    fork({"parent": "snapshots/x", "branches": [{"append": two}]})
    with pytest.raises(InvalidField) as caught:
        fork({"parent": "snapshots/x", "branches": [{"append": two}, {"append": two}]})
    assert [v.field for v in caught.value.fields] == ["branches[1].append.raw.parts[1].image"]
    assert caught.value.text.endswith(f"at most {LIMITS.max_images} images")


@pytest.mark.parametrize(
    ("message", "constraint"),
    [
        ({"regex": "a+"}, Constraint(form=Form.REGEX, text="a+")),
        (
            {"jsonSchema": "{}", "afterReasoning": True},
            Constraint(form=Form.JSON_SCHEMA, text="{}", after_reasoning=True),
        ),
        ({"lark": 'start: "a"'}, Constraint(form=Form.LARK, text='start: "a"')),
        ({"choice": {"options": ["no", "yes"]}}, Constraint(form=Form.CHOICE, options=("no", "yes"))),
        ({"choice": {"options": ["é" * 512] * 256}}, Constraint(form=Form.CHOICE, options=("é" * 512,) * 256)),
        ({"regex": "a" * (64 << 10)}, Constraint(form=Form.REGEX, text="a" * (64 << 10))),
    ],
)
def test_a_constraint_is_read_by_its_kind(message, constraint):
    assert generate({"input": TEXT, "constraint": message}).constraint == constraint


def test_a_hostile_number_of_wrong_fields_is_counted_but_not_kept():
    request = inference_pb.GenerateRequest()
    request.input.raw.parts.add().tokens.ids.extend([BIG_ID] * 10_000)
    with pytest.raises(InvalidField) as caught:
        mapping_in.read_generate(request, LIMITS, deadline=None)
    assert len(caught.value.fields) == field_checks.MOST_KEPT
    assert caught.value.metadata["fieldCount"] == "10000"


def test_more_pieces_than_any_context_holds_are_not_even_looked_at():
    request = inference_pb.ForkRequest(parent="snapshots/x")
    for _ in range(2):  # counted over the whole request
        parts = [pb.Part() for _ in range(field_checks.MAX_PARTS // 2 + 1)]
        request.branches.add().append.raw.parts.extend(parts)
    with pytest.raises(InvalidField) as caught:
        mapping_in.read_fork(request, LIMITS)
    assert int(caught.value.metadata["fieldCount"]) == field_checks.MAX_PARTS // 2 + 2  # the first half's, and one

    tokens = inference_pb.GenerateRequest()
    tokens.input.raw.parts.add().tokens.ids.extend([BIG_ID] * (field_checks.MAX_TOKENS + 1))
    with pytest.raises(InvalidField) as caught:
        mapping_in.read_generate(tokens, LIMITS, deadline=None)
    assert [v.field for v in caught.value.fields] == ["input.raw.parts[0].tokens.ids"]


def test_a_duration_that_is_none_is_refused():
    request = inference_pb.GenerateRequest(parent="snapshots/x")
    request.save.ttl.seconds, request.save.ttl.nanos = 1, -5
    request.stopping.time_limit.nanos = 1_000_000_000
    with pytest.raises(InvalidField) as caught:
        mapping_in.read_generate(request, LIMITS, deadline=None)
    assert [v.field for v in caught.value.fields] == ["save.ttl", "stopping.time_limit"]


def test_what_a_caller_sent_is_quoted_without_its_control_characters():
    with pytest.raises(InvalidField) as caught:
        generate({"parent": "\x1b[31mred\n" + LONG})
    assert "\x1b" not in caught.value.text
    assert len(caught.value.text) < 300


def test_an_unreadable_request_of_any_bytes_ends_in_a_call_or_a_call_error():
    """Total: whatever parses as a message is read to a call or refused, never a stray exception."""
    import random

    rng = random.Random(7)
    good = inference_pb.GenerateRequest()
    json_format.ParseDict(
        {"input": CHAT, "sampling": {"temperature": 1}, "save": {"ttl": "5s"}, "marks": [{"tokenCount": 1}]}, good
    )
    wire = good.SerializeToString()
    read = refused = 0
    for _ in range(3000):
        mutated = bytearray(wire)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        message = inference_pb.GenerateRequest()
        try:
            message.ParseFromString(bytes(mutated))
        except Exception:  # not a message: the interceptor's business
            continue
        try:
            mapping_in.read_generate(message, LIMITS, deadline=None)
            read += 1
        except CallError:
            refused += 1
    assert read > 50
    assert refused > 50
