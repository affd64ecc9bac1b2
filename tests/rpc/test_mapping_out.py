"""What the service tells, as messages."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

from google.protobuf import json_format
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import types_pb2 as pb

from kvcache.receipt import MissReason, Usage
from service.events import (
    Admission,
    CallForm,
    CallSyntax,
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
from service.rpc import mapping_out

from .conftest import FINISHED, STARTED, USAGE, snapshot


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
        call_form=CallForm(opening="<tool_call>", closing="</tool_call>", syntax=CallSyntax.TAGS),
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
    form = message.tool_call_form
    assert (form.opening, form.closing, form.syntax) == ("<tool_call>", "</tool_call>", form.SYNTAX_TAGS)
    loading = mapping_out.write_model(ModelView(name="models/m", state=ModelState.LOADING))
    assert not loading.HasField("tool_call_form")
    assert not loading.HasField("default_sampling")
