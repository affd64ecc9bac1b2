"""Messages into calls and values into messages: tables of good and bad, every wrong field by its path."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf import json_format
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from kvcache.receipt import MissReason, Usage
from service.errors import CallError, ImmutableField, InvalidField, PageTokenInvalid
from service.events import (
    Admission,
    Counted,
    Created,
    Delta,
    Finished,
    FinishReason,
    Forecast,
    Forked,
    Marked,
    ModelState,
    ModelView,
    PlanView,
    Progress,
    Residency,
    RolledBack,
    RowView,
    StatsView,
    Timing,
    TokenLogprob,
    TopLogprob,
)
from service.request import (
    Branch,
    ChatInput,
    Constraint,
    CountTokensCall,
    CreateSnapshotCall,
    Durability,
    ForkCall,
    Form,
    GenerateCall,
    ImagePart,
    Landmark,
    Mark,
    Message,
    Output,
    PlanOptions,
    RawInput,
    Release,
    Role,
    RollbackCall,
    Rounding,
    Sampling,
    SaveOptions,
    SnapshotChange,
    Stopping,
    TextPart,
    TokenPart,
)
from service.rpc import fields as field_checks
from service.rpc import mapping_in, mapping_out, mapping_snapshots, paging

from .conftest import FINISHED, LIMITS, STARTED, USAGE, snapshot

NOW = 1_700_000_000.0
UUID = "123e4567-e89b-12d3-a456-426614174000"
TEXT = {"raw": {"parts": [{"text": "Hi"}]}}
CHAT = {"chat": {"messages": [{"role": "ROLE_USER", "parts": [{"text": "Hi"}]}]}}


def generate(request: dict[str, Any]) -> GenerateCall:
    message = json_format.ParseDict(request, inference_pb.GenerateRequest())
    return mapping_in.read_generate(message, LIMITS, deadline=None)


def create(request: dict[str, Any]) -> CreateSnapshotCall:
    message = json_format.ParseDict(request, inference_pb.CreateSnapshotRequest())
    return mapping_in.read_create_snapshot(message, LIMITS)


def fork(request: dict[str, Any]) -> ForkCall:
    return mapping_in.read_fork(json_format.ParseDict(request, inference_pb.ForkRequest()), LIMITS)


def rollback(request: dict[str, Any]) -> RollbackCall:
    return mapping_in.read_rollback(json_format.ParseDict(request, inference_pb.RollbackRequest()), LIMITS)


def count(request: dict[str, Any]) -> CountTokensCall:
    return mapping_in.read_count_tokens(json_format.ParseDict(request, inference_pb.CountTokensRequest()), LIMITS)


def stop(request: dict[str, Any]) -> str:
    return mapping_in.read_stop_generation(json_format.ParseDict(request, inference_pb.StopGenerationRequest()))


def update(request: dict[str, Any]) -> SnapshotChange:
    message = json_format.ParseDict(request, snapshot_pb.UpdateSnapshotRequest())
    return mapping_snapshots.read_update(message, LIMITS, now=NOW)


def extend(request: dict[str, Any]) -> tuple[tuple[str, ...], float | None]:
    message = json_format.ParseDict(request, snapshot_pb.ExtendSnapshotsRequest())
    return mapping_snapshots.read_extend(message, LIMITS)


def listed(request: dict[str, Any], owner: str = "local") -> mapping_snapshots.Page:
    message = json_format.ParseDict(request, snapshot_pb.ListSnapshotsRequest())
    return mapping_snapshots.read_list_snapshots(message, owner)


# Good requests, whole.


def test_a_full_generate_request_becomes_a_full_call():
    request = {
        "model": "models/smollm2",
        "parent": "snapshots/abcdefgh",
        "input": {
            "chat": {
                "messages": [
                    {"role": "ROLE_SYSTEM", "parts": [{"text": "Be brief."}]},
                    {"role": "ROLE_USER", "parts": [{"text": "Hi"}, {"tokens": {"ids": [1, 2]}}]},
                    {"role": "ROLE_ASSISTANT", "parts": [{"text": ""}]},
                    {"role": "ROLE_TOOL", "parts": [{"text": "42"}]},
                ],
                "addGenerationPrompt": False,
                "templateVarsJson": '{"enable_thinking": false, "tools": [{"name": "f"}]}',
            }
        },
        "sampling": {
            "temperature": 0.5,
            "topP": 1.0,
            "topK": 0,
            "minP": 0.0,
            "repetitionPenalty": 1.0,
            "frequencyPenalty": -0.5,
            "presencePenalty": 0.5,
            "logitBias": {"7": -1.5, "3": 2.0},
            "seed": 0,
        },
        "stopping": {
            "maxTokens": 8,
            "minTokens": 8,
            "stop": ["\n\n", "é"],
            "stopTokenIds": [5, 5, 6],
            "ignoreEos": True,
            "includeStop": True,
            "timeLimit": "1.5s",
        },
        "output": {"tokenIds": True, "topLogprobs": 0, "minTokensPerDelta": 4, "progress": True},
        "save": {
            "snapshotId": "plan-0001",
            "ttl": "600s",
            "pinned": True,
            "labels": {"run": "7", "agent/name": ""},
            "durability": "DURABILITY_DISK",
        },
        "saveOnCancel": True,
        "maxRecomputeTokens": 0,
        "marks": [
            {"tokenCount": 3, "options": {"snapshotId": "mark-0001"}},
            {"messageCount": 4},
            {"landmark": "LANDMARK_PROMPT_END"},
        ],
        "priority": -3,
        "requestId": UUID.upper(),
    }
    message = json_format.ParseDict(request, inference_pb.GenerateRequest())
    assert mapping_in.read_generate(message, LIMITS, deadline=2.5) == GenerateCall(
        model="models/smollm2",
        parent="snapshots/abcdefgh",
        input=ChatInput(
            messages=(
                Message(Role.SYSTEM, (TextPart("Be brief."),)),
                Message(Role.USER, (TextPart("Hi"), TokenPart((1, 2)))),
                Message(Role.ASSISTANT, (TextPart(""),)),
                Message(Role.TOOL, (TextPart("42"),)),
            ),
            add_generation_prompt=False,
            template_vars={"enable_thinking": False, "tools": [{"name": "f"}]},
        ),
        sampling=Sampling(
            temperature=0.5,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            frequency_penalty=-0.5,
            presence_penalty=0.5,
            logit_bias=((3, 2.0), (7, -1.5)),
            seed=0,
        ),
        stopping=Stopping(
            max_tokens=8,
            min_tokens=8,
            stop=("\n\n", "é"),
            stop_token_ids=frozenset({5, 6}),
            ignore_eos=True,
            include_stop=True,
            time_limit=1.5,
        ),
        output=Output(token_ids=True, top_logprobs=0, min_tokens_per_delta=4, progress=True),
        save=SaveOptions(
            snapshot_id="plan-0001",
            ttl=600.0,
            pinned=True,
            labels=(("agent/name", ""), ("run", "7")),
            durability=Durability.DISK,
        ),
        save_on_cancel=True,
        max_recompute_tokens=0,
        marks=(
            Mark(token_count=3, options=SaveOptions(snapshot_id="mark-0001")),
            Mark(message_count=4),
            Mark(landmark=Landmark.PROMPT_END),
        ),
        priority=-3,
        request_id=UUID,
        deadline=2.5,
    )


def test_what_is_unset_stays_unset():
    assert generate({"input": CHAT}) == GenerateCall(
        input=ChatInput(messages=(Message(Role.USER, (TextPart("Hi"),)),), add_generation_prompt=True)
    )


@pytest.mark.parametrize(
    ("read", "request_", "call"),
    [
        (generate, {"parent": "snapshots/x"}, GenerateCall(parent="snapshots/x")),
        # A name is looked up, not judged: an odd one is not found.
        (generate, {"parent": "snapshots/é..-"}, GenerateCall(parent="snapshots/é..-")),
        (
            generate,
            {"input": {"raw": {"parts": [{"tokens": {}}], "addSpecialTokens": True}}},
            GenerateCall(input=RawInput(parts=(TokenPart(()),), add_special_tokens=True)),
        ),
        (
            create,
            {"input": TEXT, "options": {"pinned": True}, "marks": [{"landmark": "LANDMARK_PROMPT_END"}]},
            CreateSnapshotCall(
                input=RawInput(parts=(TextPart("Hi"),)),
                options=SaveOptions(pinned=True),
                marks=(Mark(landmark=Landmark.PROMPT_END),),
            ),
        ),
        (
            fork,
            {"parent": "snapshots/x", "branches": [{}, {"append": TEXT, "options": {"ttl": "3600s"}}]},
            ForkCall(
                parent="snapshots/x",
                branches=(
                    Branch(),
                    Branch(append=RawInput(parts=(TextPart("Hi"),)), options=SaveOptions(ttl=3600.0)),
                ),
            ),
        ),
        (
            rollback,
            {"source": "snapshots/x", "tokenCount": 1, "rounding": "ROUNDING_DOWN", "release": "RELEASE_ABANDONED"},
            RollbackCall(source="snapshots/x", token_count=1, rounding=Rounding.DOWN, release=Release.ABANDONED),
        ),
        (
            rollback,
            {"source": "snapshots/x", "dropTokens": 0, "release": "RELEASE_SOURCE", "maxRecomputeTokens": 0},
            RollbackCall(source="snapshots/x", drop_tokens=0, release=Release.SOURCE, max_recompute_tokens=0),
        ),
        (
            rollback,
            {"source": "snapshots/x", "ancestor": "snapshots/y"},
            RollbackCall(source="snapshots/x", ancestor="snapshots/y"),
        ),
        (
            count,
            {"input": TEXT, "includeRendered": True},
            CountTokensCall(input=RawInput(parts=(TextPart("Hi"),)), include_rendered=True),
        ),
        (count, {"parent": "snapshots/x"}, CountTokensCall(parent="snapshots/x")),
        (count, {"parent": "snapshots/x", "plan": {}}, CountTokensCall(parent="snapshots/x", plan=PlanOptions())),
        (
            count,
            {"parent": "snapshots/x", "plan": {"branches": 3, "max_tokens": 9}},
            CountTokensCall(parent="snapshots/x", plan=PlanOptions(branches=3, max_tokens=9)),
        ),
        (stop, {"generation": "generations/g1"}, "generations/g1"),
        (extend, {"names": ["snapshots/a", "snapshots/b"], "ttl": "0.5s"}, (("snapshots/a", "snapshots/b"), 0.5)),
        (extend, {"names": ["snapshots/a"]}, (("snapshots/a",), None)),
    ],
)
def test_good_requests(read, request_, call):
    assert read(request_) == call


# Bad requests: the paths of all that is wrong.

LONG = "x" * 300
BIG_ID = 2**31

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


# Updates and pages.


@pytest.mark.parametrize(
    ("request_", "change"),
    [
        ({"snapshot": {"pinned": True}}, {"pinned": True}),
        ({"snapshot": {}, "updateMask": "pinned"}, {"pinned": False}),
        ({"snapshot": {}, "updateMask": "labels"}, {"labels": ()}),
        ({"snapshot": {"labels": {"b": "2", "a": "1"}}}, {"labels": (("a", "1"), ("b", "2"))}),
        ({"snapshot": {"ttl": "60s"}}, {"ttl": 60.0}),
        ({"snapshot": {"expireTime": "2023-11-14T23:13:20Z"}}, {"expire_time": NOW + 3600}),
        # Sent back as it was read, with one change; the mask keeps the rest out.
        ({"snapshot": {"tokenCount": 5, "pinned": True, "ttl": "60s"}, "updateMask": "pinned"}, {"pinned": True}),
        # Read-only fields do not count as set.
        ({"snapshot": {"tokenCount": 5, "parent": "snapshots/p", "pinned": True}}, {"pinned": True}),
    ],
)
def test_an_update_changes_what_the_mask_names_or_what_is_set(request_, change):
    request_["snapshot"]["name"] = "snapshots/a"
    assert update(request_) == SnapshotChange(name="snapshots/a", **change)


@pytest.mark.parametrize("mask", ["name", "tokenCount", "pinned,parent", "nonsense", "snapshot.pinned"])
def test_a_mask_that_names_what_cannot_change_is_refused(mask):
    with pytest.raises(ImmutableField) as caught:
        update({"snapshot": {"name": "snapshots/a"}, "updateMask": mask})
    assert [violation.field for violation in caught.value.fields] == ["update_mask.paths"]


def test_page_sizes_follow_the_contract():
    assert [listed({"pageSize": size}).size for size in (0, 1, 1000, 1001, 2**31 - 1)] == [100, 1, 1000, 1000, 1000]


def test_a_page_token_goes_on_where_it_was_made():
    first = listed({"labels": {"run": "7"}})
    assert first.after is None
    token = paging.encode_place((1_700_000_000.123456789, "snapshots/é"), first.listing)
    again = listed({"labels": {"run": "7"}, "pageToken": token, "pageSize": 5})
    assert again.after == (1_700_000_000.123456789, "snapshots/é")


@pytest.mark.parametrize(
    ("request_", "owner"),
    [
        ({"labels": {"run": "8"}}, "local"),
        ({}, "local"),
        ({"labels": {"run": "7"}, "parent": "snapshots/x"}, "local"),
        ({"labels": {"run": "7"}}, "somebody-else"),
    ],
)
def test_a_page_token_of_another_listing_is_refused(request_, owner):
    token = paging.encode_place((1.0, "snapshots/a"), listed({"labels": {"run": "7"}}).listing)
    with pytest.raises(PageTokenInvalid) as caught:
        listed({**request_, "pageToken": token}, owner)
    assert [violation.field for violation in caught.value.fields] == ["page_token"]


@pytest.mark.parametrize("token", ["x", "AAAA", "é", "not base64!", "A" * 100, "=" * 4])
def test_a_page_token_that_is_none_is_refused(token):
    with pytest.raises(PageTokenInvalid):
        listed({"pageToken": token})
    with pytest.raises(PageTokenInvalid):
        mapping_snapshots.read_list_models(server_pb.ListModelsRequest(page_token=token))


# Values into messages.


def as_dict(message: Any) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def test_events_into_messages():
    logprob = TokenLogprob(9, -0.5, b"\xff", top=(TopLogprob(9, -0.5, b"\xff"), TopLogprob(8, -2.0, b"b")))
    delta = Delta(text="hé", first_position=5, token_count=2, token_ids=(9, 8), logprobs=(logprob,))
    top = [
        {"token_id": 9, "logprob": -0.5, "token_bytes": "/w=="},
        {"token_id": 8, "logprob": -2.0, "token_bytes": "Yg=="},
    ]
    table = [
        (
            STARTED,
            {
                "started": {
                    "generation": "generations/g1",
                    "instance": "i1",
                    "prompt_tokens": 5,
                    "seed": 7,
                    "queue_time": "0.250s",
                }
            },
        ),
        (Progress(256, 600), {"progress": {"done_tokens": 256, "total_tokens": 600}}),
        (
            delta,
            {
                "delta": {
                    "text": "hé",
                    "first_position": 5,
                    "token_count": 2,
                    "token_ids": [9, 8],
                    "logprobs": [{"token_id": 9, "logprob": -0.5, "token_bytes": "/w==", "top": top}],
                }
            },
        ),
        (Marked(mark=3, snapshot=None, save_error_reason="STORE_FULL"), None),
    ]
    for event, expected in table[:-1]:
        assert as_dict(mapping_out.write_event(event)) == expected
    lost = mapping_out.write_event(table[-1][0])
    assert not lost.marked.HasField("snapshot")
    assert (lost.marked.mark, lost.marked.save_error_reason) == (3, "STORE_FULL")
    kept = mapping_out.write_event(Marked(mark=0, snapshot=snapshot()))
    assert kept.marked.snapshot.name == "snapshots/one"


def test_the_end_of_a_stream_tells_what_matched():
    by_text = replace(FINISHED, reason=FinishReason.STOP, stop="")
    by_id = replace(FINISHED, reason=FinishReason.STOP, stop_token_id=0, snapshot=snapshot())
    timing = Timing(queue=0.1, load=0.2, prefill=1.5, decode=2.000001)
    messages = [mapping_out.write_event(event).finished for event in (FINISHED, by_text, by_id)]
    assert [message.WhichOneof("matched") for message in messages] == [None, "stop", "stop_token_id"]
    assert [message.HasField("snapshot") for message in messages] == [False, False, True]
    finished = Finished(reason=FinishReason.TIME_LIMIT, usage=USAGE, timing=timing, save_error_reason="STORE_FULL")
    assert as_dict(mapping_out.write_event(finished)) == {
        "finished": {
            "reason": "FINISH_REASON_TIME_LIMIT",
            "usage": {
                "prompt_tokens": 5,
                "cached_tokens": 2,
                "recomputed_tokens": 1,
                "new_tokens": 2,
                "completion_tokens": 2,
            },
            "timing": {"queue": "0.100s", "load": "0.200s", "prefill": "1.500s", "decode": "2.000001s"},
            "save_error_reason": "STORE_FULL",
        }
    }


def test_divergence_at_position_0_differs_from_no_divergence():
    plain = Usage(prompt_tokens=1, new_tokens=1)
    assert not mapping_out.write_usage(plain).HasField("diverged_at")
    at_0 = mapping_out.write_usage(replace(plain, diverged_at=0))
    assert at_0.HasField("diverged_at")
    assert at_0.diverged_at == 0


def test_enums_keep_their_names_on_the_wire():
    for reason in MissReason:
        usage = mapping_out.write_usage(Usage(prompt_tokens=0, miss_reason=reason))
        wire = pb.MissReason.Name(usage.miss_reason)
        assert wire == f"MISS_REASON_{'UNSPECIFIED' if reason is MissReason.NONE else reason.name}"
    for reason in FinishReason:
        message = mapping_out.write_event(replace(FINISHED, reason=reason)).finished
        assert inference_pb.FinishReason.Name(message.reason) == f"FINISH_REASON_{reason.name}"
    for residency in Residency:
        message = mapping_out.write_snapshot(snapshot(residency=residency))
        assert pb.Residency.Name(message.residency) == f"RESIDENCY_{residency.name}"
    for state in ModelState:
        model = mapping_out.write_model(ModelView(name="models/m", state=state))
        assert server_pb.Model.State.Name(model.state) == f"STATE_{state.name}"


def test_a_snapshot_into_a_message():
    view = snapshot(labels=(("a", "1"),), parent="snapshots/p", active_uses=2, durable=True, checkpointed_tokens=256)
    assert as_dict(mapping_out.write_snapshot(view)) == {
        "name": "snapshots/one",
        "parent": "snapshots/p",
        "model": "models/tiny",
        "model_fingerprint": "f1",
        "token_count": 5,
        "checkpointed_tokens": 256,
        "prefix_hash": "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=",
        "residency": "RESIDENCY_MEMORY",
        "durable": True,
        "expire_time": "2027-01-15T08:00:00.500Z",
        "labels": {"a": "1"},
        "create_time": "2023-11-14T22:13:20.250Z",
        "last_use_time": "2023-11-14T22:13:21Z",
        "exclusive_bytes": "10",
        "instance": "i1",
        "active_uses": 2,
    }
    pinned = mapping_out.write_snapshot(snapshot(pinned=True, expire_time=None))
    assert pinned.WhichOneof("expiration") is None
    assert pinned.pinned


def test_an_expiry_is_never_told_later_than_it_is():
    for seconds in (1.9999999, 1_700_000_000.123456789, 1_700_000_000.9999999):
        told = mapping_out.timestamp(seconds)
        assert told.seconds + told.nanos / 1e9 <= seconds
        assert math.isclose(told.seconds + told.nanos / 1e9, seconds, abs_tol=2e-6)


def test_replies_into_messages():
    created = mapping_out.write_created(Created(snapshot=snapshot(), usage=USAGE, marked=(snapshot("snapshots/m"),)))
    assert ([s.name for s in created.marked], created.usage.prompt_tokens) == (["snapshots/m"], 5)
    forked = mapping_out.write_forked(Forked(snapshots=(snapshot("snapshots/a"), snapshot("snapshots/b")), usage=USAGE))
    assert [s.name for s in forked.snapshots] == ["snapshots/a", "snapshots/b"]
    rolled = mapping_out.write_rolled_back(
        RolledBack(snapshot=snapshot(), released=("snapshots/x", "snapshots/y"), usage=USAGE)
    )
    assert list(rolled.released) == ["snapshots/x", "snapshots/y"]
    counted = Counted(total_tokens=9, cached_tokens=4, remaining_tokens=3, token_ids=(1, 2), text="ab")
    assert as_dict(mapping_out.write_counted(counted)) == {
        "total_tokens": 9,
        "cached_tokens": 4,
        "remaining_tokens": 3,
        "token_ids": [1, 2],
        "text": "ab",
    }


def test_a_plan_is_told_with_what_is_not_known_left_out():
    plan = PlanView(
        memory_tokens=1,
        disk_tokens=2,
        recomputed_tokens=3,
        new_tokens=4,
        miss_reason=MissReason.EVICTED,
        memory_bytes=5,
        disk_bytes=6,
        load_seconds=0.5,
        prefill_seconds=None,
        forecast=Forecast(admission=Admission.QUEUED, reason="ROWS_BUSY", need_bytes=7, free_bytes=8),
    )
    counted = Counted(total_tokens=10, cached_tokens=3, remaining_tokens=3, plan=plan)
    assert as_dict(mapping_out.write_counted(counted))["plan"] == {
        "memory_tokens": 1,
        "disk_tokens": 2,
        "recomputed_tokens": 3,
        "new_tokens": 4,
        "miss_reason": "MISS_REASON_EVICTED",
        "disk_bytes": "6",
        "memory_bytes": "5",
        "predicted_load": "0.500s",
        "admission": "ADMISSION_QUEUED",
        "reason": "ROWS_BUSY",
        "need_bytes": "7",
        "free_bytes": "8",
    }
    measured = mapping_out.write_counted(replace(counted, plan=replace(plan, prefill_seconds=0.25)))
    assert measured.plan.predicted_ttft.ToMilliseconds() == 750


def test_a_row_is_told_as_it_is():
    row = RowView(
        row=1,
        phase="prefill",
        prompt_tokens=300,
        done_tokens=256,
        completion_tokens=0,
        age=1.5,
        priority=-2,
        generation="generations/g",
        parent="snapshots/p",
    )
    assert as_dict(mapping_out.write_row(row)) == {
        "generation": "generations/g",
        "phase": "PHASE_PREFILL",
        "parent": "snapshots/p",
        "prompt_tokens": 300,
        "done_tokens": 256,
        "age": "1.500s",
        "priority": -2,
    }


def test_every_number_of_the_stats_arrives_under_its_own_name():
    view = replace(
        StatsView(**{field.name: number for number, field in enumerate(fields(StatsView), start=1)}),
        checkpoint_policy="marks",
        checkpoints_skipped={"queue_full": 5},
        evictions_by_tier={"disk": 6},
        writes_paused=True,
        last_write_error="OSError: no space",
    )
    message = mapping_out.write_stats(view)
    named = [field.name for field in message.DESCRIPTOR.fields if hasattr(view, field.name)]
    assert {name: getattr(message, name) for name in named} == {
        field.name: getattr(view, field.name) for field in fields(StatsView)
    }


def test_a_model_tells_its_defaults_once_it_is_ready():
    ready = ModelView(
        name="models/m",
        state=ModelState.READY,
        fingerprint="f",
        context_tokens=512,
        vocab_size=100,
        eos_token_ids=(2, 3),
        trimmable=True,
        tells_tool_calls=True,
        bytes_per_token=64,
        default_temperature=0.0,
        default_top_p=1.0,
        default_top_k=0,
    )
    message = mapping_out.write_model(ready)
    assert json.loads(json_format.MessageToJson(message.default_sampling)) == {
        "temperature": 0.0,
        "topP": 1.0,
        "topK": 0,
    }
    assert (message.tells_reasoning, message.tells_tool_calls) == (False, True)
    loading = mapping_out.write_model(ModelView(name="models/m", state=ModelState.LOADING))
    assert not loading.HasField("default_sampling")
