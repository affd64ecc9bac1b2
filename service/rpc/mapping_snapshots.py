"""Requests of SnapshotService and ServerService into values. Pure; owns their static validation."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import timestamp_pb2
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from service.errors import FieldViolation, ImmutableField
from service.events import LimitsView
from service.request import SnapshotChange
from service.rpc.fields import Fields, quoted
from service.rpc.paging import Place, decode_place, page_size

MAX_EXTENDED = 1000  # the contract's
MAX_RESUME_TOKEN = 200  # ours have 32 characters

CHANGEABLE = ("labels", "expire_time", "ttl", "pinned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which part of which listing."""

    size: int
    after: Place | None
    listing: object  # tells listings apart, for the next token
    labels: dict[str, str]
    parent: str


def read_snapshot_name(name: str) -> str:
    """A required snapshot name in the field `name`."""
    fields = Fields()
    fields.name("name", name, "snapshots", required=True)
    fields.check()
    return name


def read_model_name(request: server_pb.GetModelRequest) -> str:
    """ "models/{id}", or empty for the only one."""
    fields = Fields()
    name = fields.name("name", request.name, "models")
    fields.check()
    return name


def read_list_snapshots(request: snapshot_pb.ListSnapshotsRequest, owner: str) -> Page:
    """The page of `owner`'s snapshots that is asked for."""
    fields = Fields()
    size = page_size(request.page_size, fields)
    labels = dict(fields.labels("labels", request.labels))
    parent = fields.name("parent", request.parent, "snapshots")
    fields.check()
    listing = ["snapshots", owner, labels, parent]
    after = decode_place(request.page_token, listing)
    return Page(size=size, after=after, listing=listing, labels=labels, parent=parent)


def read_watch(request: snapshot_pb.WatchSnapshotsRequest) -> dict[str, str]:
    """The labels to watch for."""
    fields = Fields()
    labels = dict(fields.labels("labels", request.labels))
    if len(request.resume_token) > MAX_RESUME_TOKEN:
        fields.wrong("resume_token", "is no resume token of this server")
    fields.check()
    return labels


def read_list_models(request: server_pb.ListModelsRequest) -> Page:
    """The page of models that is asked for."""
    fields = Fields()
    size = page_size(request.page_size, fields)
    fields.check()
    listing = ["models"]
    return Page(size=size, after=decode_place(request.page_token, listing), listing=listing, labels={}, parent="")


def read_extend(
    request: snapshot_pb.ExtendSnapshotsRequest, limits: LimitsView
) -> tuple[tuple[str, ...], float | None]:
    """(names, time to live in seconds; None for each one's own)."""
    fields = Fields()
    if not 1 <= len(request.names) <= MAX_EXTENDED:
        fields.wrong("names", f"must be 1 to {MAX_EXTENDED}, are {len(request.names)}")
    for index, name in enumerate(request.names[:MAX_EXTENDED]):
        fields.name(f"names[{index}]", name, "snapshots", required=True)
    ttl = None
    if request.HasField("ttl"):
        ttl = fields.duration("ttl", request.ttl, longest=limits.max_ttl, what="limits.max_ttl")
    fields.check()
    return tuple(request.names), ttl


def read_update(request: snapshot_pb.UpdateSnapshotRequest, limits: LimitsView, *, now: float) -> SnapshotChange:
    """The change asked for at Unix time `now`. A mask names what changes; without one, what is set does."""
    fields = Fields()
    snapshot = request.snapshot
    fields.name("snapshot.name", snapshot.name, "snapshots", required=True)
    paths = set(request.update_mask.paths) if request.update_mask.paths else _set_paths(snapshot)
    fixed = sorted(paths - set(CHANGEABLE))
    if fixed:
        listed = ", ".join(quoted(path) for path in fixed[:8])
        raise ImmutableField(
            f"only {', '.join(CHANGEABLE)} can change, not {listed}",
            fields=tuple(
                FieldViolation("update_mask.paths", f"{quoted(path)} cannot change or is no field")
                for path in fixed[:8]
            ),
            metadata={"paths": ",".join(fixed[:8])},
        )
    if not paths:
        fields.wrong("update_mask", f"nothing to change: name some of {', '.join(CHANGEABLE)}")
    labels = expire_time = ttl = pinned = None
    if "labels" in paths:
        labels = fields.labels("snapshot.labels", snapshot.labels)
    if "pinned" in paths:
        pinned = snapshot.pinned
    if {"expire_time", "ttl"} <= paths:
        fields.wrong("update_mask", "only one of expire_time and ttl can be given")
    elif "ttl" in paths:
        if snapshot.HasField("ttl"):
            ttl = fields.duration("snapshot.ttl", snapshot.ttl, longest=limits.max_ttl, what="limits.max_ttl")
        else:
            fields.wrong("snapshot.ttl", "is in the mask, so it must be set")
    elif "expire_time" in paths:
        if snapshot.HasField("expire_time"):
            expire_time = _expire_time(snapshot.expire_time, fields, limits, now)
        else:
            fields.wrong("snapshot.expire_time", "is in the mask, so it must be set")
    fields.check()
    return SnapshotChange(name=snapshot.name, labels=labels, expire_time=expire_time, ttl=ttl, pinned=pinned)


def _set_paths(snapshot: pb.Snapshot) -> set[str]:
    """What counts as set without a mask. Read-only fields are left alone: callers send back what they have read."""
    paths = set()
    if snapshot.labels:
        paths.add("labels")
    if snapshot.pinned:
        paths.add("pinned")
    expiration = snapshot.WhichOneof("expiration")
    if expiration is not None:
        paths.add(expiration)
    return paths


def _expire_time(value: timestamp_pb2.Timestamp, fields: Fields, limits: LimitsView, now: float) -> float:
    seconds = value.seconds + value.nanos / 1e9
    if not 0 <= value.nanos < 1_000_000_000 or not now < seconds <= now + limits.max_ttl:
        fields.wrong(
            "snapshot.expire_time", f"must be in the future, at most {limits.max_ttl:g} s (limits.max_ttl) away"
        )
    return seconds
