"""What a call wants kept: `SnapshotOptions` and `Mark` messages into values. Total and pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvfork.v1 import types_pb2 as pb

from service.events import LimitsView
from service.request import ChatInput, Durability, Input, Landmark, Mark, SaveOptions
from service.rpc.fields import MAX_WRITTEN, Fields

MAX_MARKS = 64

_DURABILITIES = {
    pb.DURABILITY_UNSPECIFIED: Durability.MEMORY,
    pb.DURABILITY_MEMORY: Durability.MEMORY,
    pb.DURABILITY_DISK: Durability.DISK,
}
_LANDMARKS = {
    pb.LANDMARK_PROMPT_END: Landmark.PROMPT_END,
    pb.LANDMARK_REASONING_START: Landmark.REASONING_START,
    pb.LANDMARK_REASONING_END: Landmark.REASONING_END,
}


def read_save(message: pb.SnapshotOptions, path: str, fields: Fields, limits: LimitsView) -> SaveOptions:
    """How to keep one snapshot; an unset message is all defaults."""
    if message.durability not in _DURABILITIES:
        fields.wrong(f"{path}.durability", f"must be DURABILITY_MEMORY or _DISK, is {int(message.durability)}")
    ttl = None
    if message.HasField("ttl"):
        ttl = fields.duration(f"{path}.ttl", message.ttl, longest=limits.max_ttl, what="limits.max_ttl")
    return SaveOptions(
        snapshot_id=fields.snapshot_id(f"{path}.snapshot_id", message.snapshot_id),
        ttl=ttl,
        pinned=message.pinned,
        labels=fields.labels(f"{path}.labels", message.labels),
        durability=_DURABILITIES.get(message.durability, Durability.MEMORY),
    )


def read_marks(
    messages: Sequence[pb.Mark], given: Input | None, fields: Fields, limits: LimitsView
) -> tuple[Mark, ...]:
    """The marks of a call whose input is `given`, in their order."""
    if len(messages) > MAX_MARKS:
        fields.wrong("marks", f"at most {MAX_MARKS}, are {len(messages)}")
    turns = len(given.messages) if isinstance(given, ChatInput) else 0
    ends = {message.message_count for message in messages[:MAX_MARKS] if message.WhichOneof("at") == "message_count"}
    if len(ends) * turns > MAX_WRITTEN:
        text = f"{len(ends)} marks at ends of messages, times {turns} messages, are more than {MAX_WRITTEN}"
        fields.wrong("marks", f"{text}: use fewer of them, or token_count")
    return tuple(
        _read_mark(message, f"marks[{index}]", turns, fields, limits)
        for index, message in enumerate(messages[:MAX_MARKS])
    )


def _read_mark(message: pb.Mark, path: str, turns: int, fields: Fields, limits: LimitsView) -> Mark:
    token_count = message_count = landmark = None
    match message.WhichOneof("at"):
        case "token_count":
            token_count = message.token_count
            if token_count == 0:
                fields.wrong(f"{path}.token_count", "must be at least 1: an empty context is no snapshot")
        case "message_count":
            message_count = message.message_count
            if not 1 <= message_count <= turns:
                ends = f"must be 1 to {turns}, the messages of input.chat" if turns else "needs input.chat"
                fields.wrong(f"{path}.message_count", f"{ends}, is {message_count}")
        case "landmark":
            landmark = _LANDMARKS.get(message.landmark)
            if landmark is None:
                fields.wrong(f"{path}.landmark", f"names no landmark: {int(message.landmark)}")
        case _:
            fields.wrong(path, "one of token_count, message_count and landmark must be set")
    return Mark(
        token_count=token_count,
        message_count=message_count,
        landmark=landmark,
        options=read_save(message.options, f"{path}.options", fields, limits),
    )


def distinct_ids(named: Iterable[tuple[str, SaveOptions | None]], fields: Fields) -> None:
    """Two snapshots of one call cannot have one id: the second would be "already there" with another content."""
    first: dict[str, str] = {}
    for path, options in named:
        if options is None or not options.snapshot_id:
            continue
        other = first.setdefault(options.snapshot_id, path)
        if other != path:
            fields.wrong(f"{path}.snapshot_id", f"is the same as {other}.snapshot_id")
