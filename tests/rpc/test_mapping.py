"""Messages into calls and values into messages: tables of good and bad, every wrong field by its path."""

from __future__ import annotations

import pytest
from google.protobuf import json_format
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb

from service.errors import ImmutableField, PageTokenInvalid
from service.request import (
    Branch,
    ChatInput,
    CountTokensCall,
    CreateSnapshotCall,
    Durability,
    ForkCall,
    GenerateCall,
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
from service.rpc import mapping_in, mapping_snapshots, paging

from .conftest import LIMITS
from .mapping_calls import CHAT, NOW, TEXT, UUID, count, create, extend, fork, generate, listed, rollback, stop, update

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
