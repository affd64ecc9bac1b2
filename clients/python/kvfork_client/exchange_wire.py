"""ExportSnapshot, CheckImport and ImportSnapshot on the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvfork.v1 import snapshot_service_pb2 as snapshot_pb

from . import decode, encode
from .messages import SaveOptions, SnapshotRef
from .values import ExportSummary, ImportCheck, Imported, SnapshotInfo

EXPORT = "/kvfork.v1.SnapshotService/ExportSnapshot"
CHECK = "/kvfork.v1.SnapshotService/CheckImport"
IMPORT = "/kvfork.v1.SnapshotService/ImportSnapshot"
PIECE_BYTES = 1 << 20  # of what a caller gives in larger ones: far below what a server takes


def export_request(name: SnapshotRef, held: Iterable[bytes], *, manifest_only: bool) -> bytes:
    request = snapshot_pb.ExportSnapshotRequest(name=encode.snapshot_name(name), manifest_only=manifest_only, held=held)
    return request.SerializeToString()


def read_piece(data: bytes) -> tuple[bytes, ExportSummary | None]:
    """The next bytes, and with the first of them what is in the export."""
    message = snapshot_pb.ExportSnapshotResponse.FromString(data)
    if not message.HasField("summary"):
        return message.data, None
    told = message.summary
    return message.data, ExportSummary(
        snapshot=decode.snapshot(told.snapshot),
        records=told.records,
        held_records=told.held_records,
        bytes=told.bytes,
        state_tokens=told.state_tokens,
    )


def check_request(manifest: bytes) -> bytes:
    return snapshot_pb.CheckImportRequest(manifest=manifest).SerializeToString()


def read_check(data: bytes) -> ImportCheck:
    message = snapshot_pb.CheckImportResponse.FromString(data)
    return ImportCheck(
        held=tuple(message.held), missing_records=message.missing_records, missing_bytes=message.missing_bytes
    )


def first_request(options: SaveOptions | None) -> bytes:
    """How to keep it, before its first byte: so a refusal that needs no byte comes before one is sent."""
    kept = None if options is None else encode.snapshot_options(options)
    return snapshot_pb.ImportSnapshotRequest(options=kept).SerializeToString()


def data_requests(piece: bytes) -> Iterator[bytes]:
    """A piece of any size in messages that a server takes."""
    for at in range(0, len(piece), PIECE_BYTES):
        yield snapshot_pb.ImportSnapshotRequest(data=piece[at : at + PIECE_BYTES]).SerializeToString()


def read_imported(data: bytes) -> Imported[SnapshotInfo]:
    message = snapshot_pb.ImportSnapshotResponse.FromString(data)
    return Imported(
        snapshot=decode.snapshot(message.snapshot),
        received_records=message.received_records,
        received_bytes=message.received_bytes,
        held_records=message.held_records,
    )
