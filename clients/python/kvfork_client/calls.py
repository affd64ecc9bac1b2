"""Every unary call, built from the caller's values. Pure, and shared by both flavours.

A `Call` is what to send, where, and how to read the reply; `connection.py` carries it out. Calls that make snapshots
get a request id unless the caller gives one, so that the same request sent again returns the same snapshot.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf import field_mask_pb2, timestamp_pb2
from google.protobuf.message import Message as ProtoMessage
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as types_pb

from . import decode, encode, exchange_wire
from .health import check_request, check_status
from .messages import (
    InputLike,
    Mark,
    Release,
    Rounding,
    SaveOptions,
    Seconds,
    SnapshotRef,
)
from .values import (
    CacheStats,
    Created,
    Extended,
    Forked,
    HealthStatus,
    ImportCheck,
    ModelInfo,
    Plan,
    RolledBack,
    ServerInfo,
    SnapshotInfo,
    TokenCount,
)

R = TypeVar("R")

INFERENCE = "/kvfork.v1.InferenceService/"
SNAPSHOTS = "/kvfork.v1.SnapshotService/"
SERVER = "/kvfork.v1.ServerService/"


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One unary call: method path, serialized request, and what makes a value of the reply's bytes.

    `instance`: the server that holds the snapshot it is about; empty where it is about none, or nobody knows.
    `lost`: the answer where another server is in that one's place, as the same server would give it for a snapshot that
    is gone; None: that is an error.
    """

    path: str
    request: bytes
    parse: Callable[[bytes], R]
    instance: str = ""
    lost: R | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """One page of a listing; an empty token is the end."""

    items: tuple[R, ...]
    next_page_token: str


def create_snapshot(
    input: InputLike,
    parent: SnapshotRef | None,
    *,
    model: str,
    options: SaveOptions | None,
    marks: Sequence[Mark],
    request_id: str,
) -> Call[Created]:
    request = inference_pb.CreateSnapshotRequest(
        model=model,
        parent=encode.snapshot_name(parent),
        input=_input(input, parent),
        options=_options(options),
        marks=encode.mark_messages(marks),
        request_id=request_id or _new_request_id(),
    )
    return _call(
        INFERENCE + "CreateSnapshot",
        request,
        lambda data: decode.created(_read(inference_pb.CreateSnapshotResponse, data)),
        parent,
    )


def fork(
    parent: SnapshotRef,
    branches: int | Sequence[InputLike | None],
    *,
    options: SaveOptions | Sequence[SaveOptions | None] | None,
    request_id: str,
) -> Call[Forked]:
    """`branches`: how many plain copies, or what each child appends (None: nothing)."""
    appends: Sequence[InputLike | None] = [None] * branches if isinstance(branches, int) else branches
    if isinstance(appends, str):
        raise TypeError("branches is a count or a list of inputs, one per child; a single string is neither")
    keeps = [options] * len(appends) if options is None or isinstance(options, SaveOptions) else list(options)
    if len(keeps) != len(appends):
        raise ValueError(f"{len(keeps)} options for {len(appends)} branches")
    request = inference_pb.ForkRequest(
        parent=encode.snapshot_name(parent),
        branches=[
            inference_pb.ForkBranch(append=_input(append, parent), options=_options(keep))
            for append, keep in zip(appends, keeps, strict=True)
        ],
        request_id=request_id or _new_request_id(),
    )
    return _call(
        INFERENCE + "Fork", request, lambda data: decode.forked(_read(inference_pb.ForkResponse, data)), parent
    )


def rollback(
    source: SnapshotRef,
    *,
    token_count: int | None,
    drop_tokens: int | None,
    ancestor: SnapshotRef | None,
    rounding: Rounding,
    release: Release,
    options: SaveOptions | None,
    max_recompute_tokens: int | None,
    request_id: str,
) -> Call[RolledBack]:
    if sum(target is not None for target in (token_count, drop_tokens, ancestor)) != 1:
        raise ValueError("a rollback needs exactly one of token_count, drop_tokens and ancestor")
    request = inference_pb.RollbackRequest(
        source=encode.snapshot_name(source),
        token_count=token_count,
        drop_tokens=drop_tokens,
        ancestor=None if ancestor is None else encode.snapshot_name(ancestor),
        rounding=f"ROUNDING_{rounding.name}",
        release=f"RELEASE_{release.name}",
        options=_options(options),
        max_recompute_tokens=max_recompute_tokens,
        request_id=request_id or _new_request_id(),
    )
    return _call(
        INFERENCE + "Rollback",
        request,
        lambda data: decode.rolled_back(_read(inference_pb.RollbackResponse, data)),
        source,
    )


def count_tokens(
    input: InputLike,
    parent: SnapshotRef | None,
    *,
    model: str,
    rendered: bool,
) -> Call[TokenCount]:
    request = inference_pb.CountTokensRequest(
        model=model, parent=encode.snapshot_name(parent), input=_input(input, parent), include_rendered=rendered
    )
    return _call(
        INFERENCE + "CountTokens",
        request,
        lambda data: decode.token_count(_read(inference_pb.CountTokensResponse, data)),
        parent,
    )


def plan(
    input: InputLike | None, parent: SnapshotRef | None, *, model: str, branches: int, max_tokens: int | None
) -> Call[Plan]:
    request = inference_pb.CountTokensRequest(
        model=model,
        parent=encode.snapshot_name(parent),
        input=_input(input, parent),
        plan=inference_pb.PlanOptions(branches=branches, max_tokens=max_tokens),
    )
    return _call(
        INFERENCE + "CountTokens",
        request,
        lambda data: decode.plan(_read(inference_pb.CountTokensResponse, data)),
        parent,
    )


def stop(generation: str, instance: str = "") -> Call[bool]:
    request = inference_pb.StopGenerationRequest(generation=generation)
    return Call(
        INFERENCE + "StopGeneration",
        request.SerializeToString(),
        lambda data: _read(inference_pb.StopGenerationResponse, data).was_running,
        instance,
    )


def get_snapshot(ref: SnapshotRef) -> Call[SnapshotInfo]:
    request = snapshot_pb.GetSnapshotRequest(name=encode.snapshot_name(ref))
    return _call(
        SNAPSHOTS + "GetSnapshot",
        request,
        lambda data: decode.snapshot(_read(snapshot_pb.GetSnapshotResponse, data).snapshot),
        ref,
    )


def snapshot_tokens(ref: SnapshotRef) -> Call[tuple[int, ...]]:
    request = snapshot_pb.GetSnapshotRequest(name=encode.snapshot_name(ref), include_tokens=True)
    return _call(
        SNAPSHOTS + "GetSnapshot",
        request,
        lambda data: tuple(_read(snapshot_pb.GetSnapshotResponse, data).token_ids),
        ref,
    )


def list_snapshots(
    page_token: str, *, labels: Mapping[str, str] | None, parent: SnapshotRef | None, page_size: int
) -> Call[Page[SnapshotInfo]]:
    request = snapshot_pb.ListSnapshotsRequest(
        page_size=page_size, page_token=page_token, labels=labels or {}, parent=encode.snapshot_name(parent)
    )

    def parse(data: bytes) -> Page[SnapshotInfo]:
        reply = _read(snapshot_pb.ListSnapshotsResponse, data)
        return Page(tuple(decode.snapshot(one) for one in reply.snapshots), reply.next_page_token)

    return _call(SNAPSHOTS + "ListSnapshots", request, parse, parent, lost=Page((), ""))


def update_snapshot(
    ref: SnapshotRef,
    *,
    labels: Mapping[str, str] | None,
    ttl: Seconds | None,
    expire_time: dt.datetime | None,
    pinned: bool | None,
) -> Call[SnapshotInfo]:
    """Only what is given changes; an empty mapping takes all labels away."""
    if ttl is not None and expire_time is not None:
        raise ValueError("an expiry is either a ttl or an expire_time")
    wanted = types_pb.Snapshot(name=encode.snapshot_name(ref))
    mask = field_mask_pb2.FieldMask()
    if labels is not None:
        wanted.labels.update(labels)
        mask.paths.append("labels")
    if ttl is not None:
        wanted.ttl.CopyFrom(encode.duration(ttl))
        mask.paths.append("ttl")
    if expire_time is not None:
        moment = timestamp_pb2.Timestamp()
        moment.FromDatetime(expire_time)
        wanted.expire_time.CopyFrom(moment)
        mask.paths.append("expire_time")
    if pinned is not None:
        wanted.pinned = pinned
        mask.paths.append("pinned")
    if not mask.paths:
        raise ValueError("nothing to change: give labels, ttl, expire_time or pinned")
    request = snapshot_pb.UpdateSnapshotRequest(snapshot=wanted, update_mask=mask)
    return _call(
        SNAPSHOTS + "UpdateSnapshot",
        request,
        lambda data: decode.snapshot(_read(snapshot_pb.UpdateSnapshotResponse, data).snapshot),
        ref,
    )


def extend_snapshots(refs: Sequence[SnapshotRef], *, ttl: Seconds | None) -> Call[Extended]:
    """Of one server's and no more than the contract allows in a call; `extending` makes such calls of any."""
    names = [encode.snapshot_name(ref) for ref in refs]
    request = snapshot_pb.ExtendSnapshotsRequest(names=names, ttl=None if ttl is None else encode.duration(ttl))
    return _call(
        SNAPSHOTS + "ExtendSnapshots",
        request,
        lambda data: decode.extended(_read(snapshot_pb.ExtendSnapshotsResponse, data)),
        refs[0],
        lost=Extended(snapshots=(), missing=tuple(names)),
    )


def delete_snapshot(
    ref: SnapshotRef, *, descendants: bool, stop_active: bool, allow_missing: bool
) -> Call[tuple[str, ...]]:
    request = snapshot_pb.DeleteSnapshotRequest(
        name=encode.snapshot_name(ref), descendants=descendants, stop_active=stop_active, allow_missing=allow_missing
    )
    return _call(
        SNAPSHOTS + "DeleteSnapshot",
        request,
        lambda data: tuple(_read(snapshot_pb.DeleteSnapshotResponse, data).deleted),
        ref,
        lost=() if allow_missing else None,
    )


def check_import(manifest: bytes) -> Call[ImportCheck]:
    return Call(exchange_wire.CHECK, exchange_wire.check_request(manifest), exchange_wire.read_check)


def server_info() -> Call[ServerInfo]:
    request = server_pb.GetServerInfoRequest()
    return _call(
        SERVER + "GetServerInfo", request, lambda data: decode.server_info(_read(server_pb.GetServerInfoResponse, data))
    )


def list_models(page_token: str) -> Call[Page[ModelInfo]]:
    def parse(data: bytes) -> Page[ModelInfo]:
        reply = _read(server_pb.ListModelsResponse, data)
        return Page(tuple(decode.model(one) for one in reply.models), reply.next_page_token)

    return _call(SERVER + "ListModels", server_pb.ListModelsRequest(page_token=page_token), parse)


def get_model(name: str) -> Call[ModelInfo]:
    return _call(
        SERVER + "GetModel",
        server_pb.GetModelRequest(name=name),
        lambda data: decode.model(_read(server_pb.GetModelResponse, data).model),
    )


def cache_stats() -> Call[CacheStats]:
    request = server_pb.GetCacheStatsRequest()
    return _call(
        SERVER + "GetCacheStats",
        request,
        lambda data: decode.cache_stats(_read(server_pb.GetCacheStatsResponse, data)),
    )


def trim_cache(*, memory_bytes: int | None, disk_bytes: int | None) -> Call[CacheStats]:
    request = server_pb.TrimCacheRequest(memory_bytes=memory_bytes, disk_bytes=disk_bytes)

    def parse(data: bytes) -> CacheStats:
        return decode.cache_stats(server_pb.GetCacheStatsResponse(stats=_read(server_pb.TrimCacheResponse, data).stats))

    return _call(SERVER + "TrimCache", request, parse)


def health(service: str) -> Call[HealthStatus]:
    """`service` may be short ("InferenceService"); empty asks for the whole process."""
    full = f"kvfork.v1.{service}" if service and "." not in service else service
    return Call("/grpc.health.v1.Health/Check", check_request(full), check_status)


M = TypeVar("M", bound=ProtoMessage)


def _read(kind: type[M], data: bytes) -> M:
    return kind.FromString(data)


def _call(
    path: str,
    request: ProtoMessage,
    parse: Callable[[bytes], R],
    about: SnapshotRef | None = None,
    *,
    lost: R | None = None,
) -> Call[R]:
    """`lost`: as in a `Call`, and of no meaning for a bare name, for which any server may be the wrong one."""
    instance = encode.instance_of(about)
    return Call(path, request.SerializeToString(), parse, instance, lost if instance else None)


def _input(value: InputLike | None, parent: SnapshotRef | None) -> Any:
    return None if value is None else encode.input_message(value, continues=bool(encode.snapshot_name(parent)))


def _options(value: SaveOptions | None) -> types_pb.SnapshotOptions | None:
    return None if value is None else encode.snapshot_options(value)


def _new_request_id() -> str:
    return str(uuid.uuid4())
