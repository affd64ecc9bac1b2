"""Requests and replies of exports and imports. Total and pure; owns their static validation."""

from __future__ import annotations

from kvfork.v1 import snapshot_service_pb2 as pb

from service.errors import InvalidField
from service.events import ExportPiece, ImportCheck, Imported, LimitsView
from service.request import ExportCall, SaveOptions
from service.rpc.fields import Fields
from service.rpc.mapping_out import write_snapshot
from service.rpc.mapping_save import read_save

HELD_BYTES = 33  # a key and a kind
MAX_HELD = 2**18  # beyond any context: a record of each of three kinds for every 256 tokens


def read_export(request: pb.ExportSnapshotRequest) -> ExportCall:
    """What to write out."""
    fields = Fields()
    fields.name("name", request.name, "snapshots", required=True)
    if len(request.held) > MAX_HELD:
        fields.wrong("held", f"at most {MAX_HELD}, are {len(request.held)}")
    for index, record in enumerate(request.held[:MAX_HELD]):
        if len(record) != HELD_BYTES:
            fields.wrong(f"held[{index}]", f"has {HELD_BYTES} bytes, as CheckImportResponse.held gives it")
            break
    fields.check()
    return ExportCall(name=request.name, manifest_only=request.manifest_only, held=frozenset(request.held))


def read_options(request: pb.ImportSnapshotRequest, limits: LimitsView) -> SaveOptions:
    """How to keep what comes, from the first message."""
    fields = Fields()
    options = read_save(request.options, "options", fields, limits)
    fields.check()
    return options


def read_data(request: pb.ImportSnapshotRequest) -> bytes:
    """The bytes of any later message."""
    if request.HasField("options"):
        raise InvalidField.at("options", "come with the first message only")
    return request.data


def write_piece(piece: ExportPiece) -> pb.ExportSnapshotResponse:
    """The next bytes of an export."""
    if piece.about is None:
        return pb.ExportSnapshotResponse(data=piece.data)
    about = piece.about
    return pb.ExportSnapshotResponse(
        data=piece.data,
        summary=pb.ExportSummary(
            snapshot=write_snapshot(about.snapshot),
            records=about.records,
            held_records=about.held_records,
            bytes=about.bytes,
            state_tokens=about.state_tokens,
        ),
    )


def write_check(check: ImportCheck) -> pb.CheckImportResponse:
    """What is here."""
    return pb.CheckImportResponse(
        held=check.held, missing_records=check.missing_records, missing_bytes=check.missing_bytes
    )


def write_imported(imported: Imported) -> pb.ImportSnapshotResponse:
    """What was taken in."""
    return pb.ImportSnapshotResponse(
        snapshot=write_snapshot(imported.snapshot),
        received_records=imported.received_records,
        received_bytes=imported.received_bytes,
        held_records=imported.held_records,
    )
