"""The Generate request and its events on the wire. Pure; unary calls are in `calls.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from kvfork.v1 import inference_service_pb2 as inference_pb

from . import decode, encode
from .messages import Constraint, InputLike, Mark, Sampling, SaveOptions, SnapshotRef, Stopping

GENERATE = "/kvfork.v1.InferenceService/Generate"


class GenerateOptions(TypedDict, total=False):
    """The keyword options of `generate`, the same on clients and snapshots.

    model: "models/{id}"; only needed without a parent on a server with several models.
    save: True or SaveOptions keeps the final state as a snapshot; save_on_cancel needs a chosen snapshot_id.
    marks: places to keep on the way; their snapshots appear in `Generation.marks` by index.
    constraint: a form that the text must have: `json_schema(…)`, `regex(…)`, `choice(…)` or a Constraint.
    max_recompute_tokens: fail with RecomputeLimit rather than compute more of the parent again.
    token_ids, top_logprobs, min_tokens_per_delta, progress: what the stream carries.
    priority: higher goes first; 0 is normal.
    """

    model: str
    sampling: Sampling | None
    stopping: Stopping | None
    save: SaveOptions | bool
    save_on_cancel: bool
    max_recompute_tokens: int | None
    marks: Sequence[Mark]
    constraint: Constraint | None
    priority: int
    request_id: str
    token_ids: bool
    top_logprobs: int | None
    min_tokens_per_delta: int
    progress: bool


def generate_request(
    input: InputLike | None = None,
    parent: SnapshotRef | None = None,
    *,
    model: str = "",
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    save: SaveOptions | bool = False,
    save_on_cancel: bool = False,
    max_recompute_tokens: int | None = None,
    marks: Sequence[Mark] = (),
    constraint: Constraint | None = None,
    priority: int = 0,
    request_id: str = "",
    token_ids: bool = False,
    top_logprobs: int | None = None,
    min_tokens_per_delta: int = 0,
    progress: bool = False,
) -> inference_pb.GenerateRequest:
    """The request of `GenerateOptions`. No request id by default: a retry before Started computes nothing twice."""
    keep = SaveOptions() if save is True else save or None
    return inference_pb.GenerateRequest(
        model=model,
        parent=encode.snapshot_name(parent),
        input=None if input is None else encode.input_message(input, continues=bool(encode.snapshot_name(parent))),
        sampling=None if sampling is None else encode.sampling_message(sampling),
        stopping=None if stopping is None else encode.stopping_message(stopping),
        output=inference_pb.OutputOptions(
            token_ids=token_ids,
            top_logprobs=top_logprobs,
            min_tokens_per_delta=min_tokens_per_delta,
            progress=progress,
        ),
        save=None if keep is None else encode.snapshot_options(keep),
        save_on_cancel=save_on_cancel,
        max_recompute_tokens=max_recompute_tokens,
        marks=encode.mark_messages(marks),
        constraint=None if constraint is None else encode.constraint_message(constraint),
        priority=priority,
        request_id=request_id,
    )


def read_event(data: bytes) -> decode.WireEvent | None:
    """One message of the Generate stream; None for a kind this client does not know, which is to be skipped."""
    return decode.event(inference_pb.GenerateResponse.FromString(data))
