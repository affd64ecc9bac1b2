"""The WatchSnapshots request and its messages on the wire. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvfork.v1 import snapshot_service_pb2 as snapshot_pb

from . import decode
from .values import Changed, Gone, GoneReason, SnapshotInfo, Synced

WATCH = "/kvfork.v1.SnapshotService/WatchSnapshots"


@dataclass(frozen=True, slots=True)
class Told:
    """One message. No event: a bookmark, or a kind that this client does not know; its token counts all the same."""

    event: Changed[SnapshotInfo] | Gone | Synced | None
    resume_token: str


def watch_request(labels: Mapping[str, str] | None, resume_token: str) -> bytes:
    request = snapshot_pb.WatchSnapshotsRequest(labels=labels or {}, resume_token=resume_token)
    return request.SerializeToString()


def read_told(data: bytes) -> Told:
    message = snapshot_pb.WatchSnapshotsResponse.FromString(data)
    event: Changed[SnapshotInfo] | Gone | Synced | None = None
    match message.WhichOneof("event"):
        case "changed":
            event = Changed(decode.snapshot(message.changed))
        case "gone":
            event = Gone(message.gone.name, GoneReason(int(message.gone.reason)))
        case "synced":
            event = Synced()
    return Told(event, message.resume_token)
