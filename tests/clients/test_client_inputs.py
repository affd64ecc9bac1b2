"""What a caller says becomes exactly the request it should; what cannot be said is refused before it is sent."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from google.protobuf import duration_pb2
from kvfork.v1 import inference_service_pb2 as inf
from kvfork.v1 import types_pb2 as types
from kvfork_client import (
    Constraint,
    Durability,
    Image,
    Mark,
    Message,
    Sampling,
    SaveOptions,
    Stopping,
    chat,
    choice,
    json_schema,
    raw,
    regex,
    tokens,
)
from kvfork_client.encode import duration, input_message
from kvfork_client.generating import generate_request
from kvfork_client.health import check_request, check_status
from kvfork_client.values import HealthStatus, Residency


def text(value: str) -> types.Part:
    return types.Part(text=value)


def ids(*values: int) -> types.Part:
    return types.Part(tokens=types.TokenRun(ids=values))


def turn(role: str, *parts: types.Part) -> types.Message:
    return types.Message(role=f"ROLE_{role}", parts=parts)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", types.Input(raw=types.RawInput(parts=[text("hi")], add_special_tokens=True))),
        ("", types.Input(raw=types.RawInput(parts=[text("")], add_special_tokens=True))),
        (tokens([1, 2]), types.Input(raw=types.RawInput(parts=[ids(1, 2)]))),
        ([tokens([1]), "a"], types.Input(raw=types.RawInput(parts=[ids(1), text("a")]))),
        (raw("a", tokens([3])), types.Input(raw=types.RawInput(parts=[text("a"), ids(3)], add_special_tokens=True))),
        (raw("a", add_special_tokens=False), types.Input(raw=types.RawInput(parts=[text("a")]))),
        (Message.user("hi"), types.Input(chat=types.ChatInput(messages=[turn("USER", text("hi"))]))),
        (
            [Message.system("s"), Message.user("u"), Message.assistant("a"), Message.tool("t", tokens([7]))],
            types.Input(
                chat=types.ChatInput(
                    messages=[
                        turn("SYSTEM", text("s")),
                        turn("USER", text("u")),
                        turn("ASSISTANT", text("a")),
                        turn("TOOL", text("t"), ids(7)),
                    ]
                )
            ),
        ),
        (
            Message.user(Image(data=b"png", mime_type="image/png"), Image(sha256=b"s" * 32)),
            types.Input(
                chat=types.ChatInput(
                    messages=[
                        turn(
                            "USER",
                            types.Part(image=types.Image(data=b"png", mime_type="image/png")),
                            types.Part(image=types.Image(sha256=b"s" * 32)),
                        )
                    ]
                )
            ),
        ),
        ([], types.Input(chat=types.ChatInput())),  # the server says what is wrong with it
    ],
)
def test_shorthands_have_one_meaning(given: Any, expected: types.Input) -> None:
    assert input_message(given, continues=False) == expected


def test_nothing_special_is_put_into_the_middle_of_a_context() -> None:
    assert input_message("hi", continues=True) == types.Input(raw=types.RawInput(parts=[text("hi")]))
    assert generate_request("hi", "snapshots/x").input.raw.add_special_tokens is False
    assert generate_request("hi").input.raw.add_special_tokens is True


def test_chat_carries_template_variables_and_the_open_turn() -> None:
    given = chat(Message.user("u"), add_generation_prompt=False, template_vars={"enable_thinking": False})
    made = input_message(given, continues=False).chat
    assert made.HasField("add_generation_prompt")
    assert made.add_generation_prompt is False
    assert json.loads(made.template_vars_json) == {"enable_thinking": False}
    assert not input_message(chat([Message.user("u")]), continues=False).chat.HasField("add_generation_prompt")


def test_unset_stays_unset() -> None:
    assert generate_request("x", "snapshots/x") == inf.GenerateRequest(
        parent="snapshots/x",
        input=types.Input(raw=types.RawInput(parts=[text("x")])),
        output=inf.OutputOptions(),
    )
    assert generate_request(None, "snapshots/x") == inf.GenerateRequest(
        parent="snapshots/x", output=inf.OutputOptions()
    )


def test_every_option_finds_its_field() -> None:
    made = generate_request(
        "x",
        "snapshots/x",
        model="models/m",
        sampling=Sampling(
            temperature=0.0,
            top_p=0.5,
            top_k=0,
            min_p=0.25,
            repetition_penalty=1.5,
            frequency_penalty=-0.5,
            presence_penalty=0.75,
            logit_bias={5: -1.0},
            seed=0,
        ),
        stopping=Stopping(
            max_tokens=0,
            min_tokens=2,
            stop="end",
            stop_token_ids=[4],
            ignore_eos=True,
            include_stop=True,
            time_limit=1.5,
        ),
        save=SaveOptions(
            ttl=dt.timedelta(hours=1),
            pinned=True,
            labels={"k": "v"},
            durability=Durability.DISK,
            snapshot_id="the-state",
        ),
        save_on_cancel=True,
        max_recompute_tokens=0,
        marks=[Mark.at(9), Mark.after_message(1), Mark.reasoning_end(SaveOptions(ttl=2))],
        constraint=regex("a+", after_reasoning=True),
        priority=-3,
        request_id="r",
        token_ids=True,
        top_logprobs=0,
        min_tokens_per_delta=8,
        progress=True,
    )
    assert made == inf.GenerateRequest(
        model="models/m",
        parent="snapshots/x",
        input=types.Input(raw=types.RawInput(parts=[text("x")])),
        sampling=types.Sampling(
            temperature=0.0,
            top_p=0.5,
            top_k=0,
            min_p=0.25,
            repetition_penalty=1.5,
            frequency_penalty=-0.5,
            presence_penalty=0.75,
            logit_bias={5: -1.0},
            seed=0,
        ),
        stopping=types.Stopping(
            max_tokens=0,
            min_tokens=2,
            stop=["end"],
            stop_token_ids=[4],
            ignore_eos=True,
            include_stop=True,
            time_limit=duration_pb2.Duration(seconds=1, nanos=500_000_000),
        ),
        output=inf.OutputOptions(token_ids=True, top_logprobs=0, min_tokens_per_delta=8, progress=True),
        save=types.SnapshotOptions(
            snapshot_id="the-state",
            ttl=duration_pb2.Duration(seconds=3600),
            pinned=True,
            labels={"k": "v"},
            durability=types.DURABILITY_DISK,
        ),
        save_on_cancel=True,
        max_recompute_tokens=0,
        marks=[
            types.Mark(token_count=9, options=types.SnapshotOptions()),
            types.Mark(message_count=1, options=types.SnapshotOptions()),
            types.Mark(
                landmark=types.LANDMARK_REASONING_END,
                options=types.SnapshotOptions(ttl=duration_pb2.Duration(seconds=2)),
            ),
        ],
        constraint=inf.Constraint(regex="a+", after_reasoning=True),
        priority=-3,
        request_id="r",
    )


def test_zeros_that_mean_something_are_sent() -> None:
    made = generate_request("x", sampling=Sampling(temperature=0.0, seed=0), stopping=Stopping(max_tokens=0))
    assert made.sampling.HasField("temperature")
    assert made.sampling.HasField("seed")
    assert made.stopping.HasField("max_tokens")


class Person:
    """Knows its schema, as pydantic's models do."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object"}


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}', Person])
def test_a_schema_may_be_a_mapping_a_document_or_a_class(schema: Any) -> None:
    for constraint in (Constraint(json_schema=schema), json_schema(schema)):
        made = generate_request("x", constraint=constraint)
        assert json.loads(made.constraint.json_schema) == {"type": "object"}


def test_each_kind_of_form_is_written_as_its_own() -> None:
    forms = [
        (choice("yes", "no"), inf.Constraint(choice=inf.Choice(options=["yes", "no"]))),
        (Constraint(lark="start: A", after_reasoning=True), inf.Constraint(lark="start: A", after_reasoning=True)),
        (json_schema("{}", after_reasoning=True), inf.Constraint(json_schema="{}", after_reasoning=True)),
        (choice("a", after_reasoning=True), inf.Constraint(choice=inf.Choice(options=["a"]), after_reasoning=True)),
    ]
    for constraint, message in forms:
        assert generate_request("x", constraint=constraint).constraint == message


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: input_message([Message.user("u"), "text"], continues=False), TypeError, "not both"),
        (lambda: input_message([3], continues=False), TypeError, "not int"),
        (lambda: input_message(Message.user(3), continues=False), TypeError, "not int"),  # type: ignore[arg-type]
        (lambda: generate_request("x", sampling=Sampling(top_k=-1)), ValueError, "sampling: "),
        (lambda: generate_request("x", stopping=Stopping(max_tokens=2**32)), ValueError, "stopping: "),
        (lambda: generate_request(tokens([-1])), ValueError, "tokens: "),
        (lambda: generate_request("x", marks=[Mark.at(-1)]), ValueError, "mark: "),
        (lambda: duration(float("nan")), ValueError, "finite"),
        (lambda: Mark(), ValueError, "exactly one"),
        (lambda: Mark(tokens=1, messages=1), ValueError, "exactly one"),
        (lambda: Constraint(), ValueError, "exactly one"),
        (lambda: Constraint(regex="a", choice=["a"]), ValueError, "exactly one"),
        (lambda: Constraint(choice="yes"), TypeError, "letters"),
        (lambda: Image(), ValueError, "data or its sha256"),
        (lambda: generate_request("x", nonsense=1), TypeError, "nonsense"),  # type: ignore[call-arg]
    ],
)
def test_what_cannot_be_said_is_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("given", "whole", "nanos"),
    [(0, 0, 0), (1.25, 1, 250_000_000), (-1.5, -1, -500_000_000), (dt.timedelta(days=1), 86_400, 0)],
)
def test_times_become_durations(given: Any, whole: int, nanos: int) -> None:
    assert duration(given) == duration_pb2.Duration(seconds=whole, nanos=nanos)


def test_times_just_below_a_second_do_not_overflow_the_nanos() -> None:
    assert duration(0.9999999999) == duration_pb2.Duration(seconds=1)


def test_an_image_is_read_when_it_is_made(tmp_path: Any) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"png")
    assert Image.file(path) == Image(data=b"png")


def test_numbers_of_tomorrow_read_as_unspecified() -> None:
    assert Residency(77) is Residency.UNSPECIFIED
    with pytest.raises(ValueError, match="nonsense"):
        Residency("nonsense")


def test_health_messages_are_those_of_the_generated_stubs() -> None:
    from grpc_health.v1 import health_pb2

    for name in ("", "kvfork.v1.InferenceService"):
        assert check_request(name) == health_pb2.HealthCheckRequest(service=name).SerializeToString()
    for status in HealthStatus:
        assert check_status(health_pb2.HealthCheckResponse(status=status.value).SerializeToString()) is status
    with pytest.raises(ValueError, match="128"):
        check_request("x" * 128)
