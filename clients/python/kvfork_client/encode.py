"""The caller's values as protobuf requests. Pure; unset stays unset, so that the server's defaults apply.

Raises TypeError or ValueError for what cannot be written down at all (a negative count, a time that is not a number);
what can be written but is wrong is left to the server, which knows the limits.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from google.protobuf import duration_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import types_pb2 as types_pb

from .messages import (
    ChatInput,
    Constraint,
    Image,
    InputLike,
    Mark,
    Message,
    Part,
    Sampling,
    SaveOptions,
    Seconds,
    SnapshotRef,
    Stopping,
    Tokens,
    as_input,
)

P = ParamSpec("P")
R = TypeVar("R")


def _named(what: str, make: Callable[P, R], /, *args: P.args, **fields: P.kwargs) -> R:
    """Makes a message; says whose value protobuf refused, since its own text names none."""
    try:
        return make(*args, **fields)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {error}") from None


def duration(value: Seconds) -> duration_pb2.Duration:
    """Seconds or a timedelta as a Duration. Raises ValueError for NaN and infinities."""
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"a time must be a finite number of seconds, not {seconds}")
    sign = -1 if seconds < 0 else 1  # a Duration's two fields have the same sign
    whole, nanos = divmod(round(abs(seconds) * 1e9), 10**9)
    return duration_pb2.Duration(seconds=sign * whole, nanos=sign * nanos)


def snapshot_name(ref: SnapshotRef | None) -> str:
    """The name behind a handle, an info or a string; empty for None."""
    if ref is None:
        return ""
    return ref if isinstance(ref, str) else ref.name


def instance_of(ref: SnapshotRef | None) -> str:
    """The server that a handle or an info says holds it; empty for None, and for a name alone."""
    return "" if ref is None or isinstance(ref, str) else getattr(ref, "instance", "")


def _part(part: Part) -> types_pb.Part:
    if isinstance(part, str):
        return types_pb.Part(text=part)
    if isinstance(part, Tokens):
        return types_pb.Part(tokens=_named("tokens", types_pb.TokenRun, ids=part.ids))
    if isinstance(part, Image):
        image = types_pb.Image(mime_type=part.mime_type)
        if part.sha256:
            image.sha256 = part.sha256
        else:
            image.data = part.data
        return types_pb.Part(image=image)
    raise TypeError(f"a part is text, tokens or an image, not {type(part).__name__}")


def _message(message: Message) -> types_pb.Message:
    return types_pb.Message(role=f"ROLE_{message.role.name}", parts=[_part(part) for part in message.parts])


def input_message(value: InputLike, *, continues: bool) -> types_pb.Input:
    """An input in full. `continues`: it is appended to a parent, where a BOS is never right."""
    source = as_input(value)
    if isinstance(source, ChatInput):
        chat = types_pb.ChatInput(messages=[_message(message) for message in source.messages])
        if source.add_generation_prompt is not None:
            chat.add_generation_prompt = source.add_generation_prompt
        if source.template_vars:
            chat.template_vars_json = json.dumps(dict(source.template_vars), allow_nan=False)
        return types_pb.Input(chat=chat)
    special = source.add_special_tokens
    if special is None:
        # Text that opens a context needs the tokenizer's BOS; token ids are taken at their word.
        special = not continues and bool(source.parts) and isinstance(source.parts[0], str)
    return types_pb.Input(
        raw=types_pb.RawInput(parts=[_part(part) for part in source.parts], add_special_tokens=special)
    )


def sampling_message(value: Sampling) -> types_pb.Sampling:
    return _named(
        "sampling",
        types_pb.Sampling,
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        min_p=value.min_p,
        repetition_penalty=value.repetition_penalty,
        frequency_penalty=value.frequency_penalty,
        presence_penalty=value.presence_penalty,
        logit_bias=value.logit_bias,
        seed=value.seed,
    )


def stopping_message(value: Stopping) -> types_pb.Stopping:
    return _named(
        "stopping",
        types_pb.Stopping,
        max_tokens=value.max_tokens,
        min_tokens=value.min_tokens,
        stop=[value.stop] if isinstance(value.stop, str) else value.stop,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
        include_stop=value.include_stop,
        time_limit=None if value.time_limit is None else duration(value.time_limit),
    )


def snapshot_options(value: SaveOptions) -> types_pb.SnapshotOptions:
    return types_pb.SnapshotOptions(
        snapshot_id=value.snapshot_id,
        ttl=None if value.ttl is None else duration(value.ttl),
        pinned=value.pinned,
        labels=value.labels,
        durability=None if value.durability is None else f"DURABILITY_{value.durability.name}",
    )


def mark_message(value: Mark) -> types_pb.Mark:
    return _named(
        "mark",
        types_pb.Mark,
        token_count=value.tokens,
        message_count=value.messages,
        landmark=None if value.landmark is None else f"LANDMARK_{value.landmark.name}",
        options=snapshot_options(value.options),
    )


def mark_messages(values: Sequence[Mark]) -> list[types_pb.Mark]:
    return [mark_message(value) for value in values]


def constraint_message(value: Constraint) -> inference_pb.Constraint:
    schema = value.json_schema
    if schema is not None and not isinstance(schema, str):
        known = schema if isinstance(schema, Mapping) else schema.model_json_schema()
        schema = json.dumps(dict(known), allow_nan=False)
    return inference_pb.Constraint(
        json_schema=schema,
        regex=value.regex,
        lark=value.lark,
        choice=None if value.choice is None else inference_pb.Choice(options=value.choice),
        after_reasoning=value.after_reasoning,
    )
