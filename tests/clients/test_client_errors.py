"""Every row of the error table comes out as its class, with its facts, from unary calls and from streams alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from contract_peer import Peer, refuse
from flavours import Flavour
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2 as rpc
from kvfork_client import errors as e
from kvfork_client.status import DETAILS_KEY, error_class, from_status

# (status code, reason, class, facts in ErrorInfo). Reasons without a class of their own get their code's.
ROWS: list[tuple[str, str, type[e.KVForkError], dict[str, str]]] = [
    ("UNAUTHENTICATED", "UNAUTHENTICATED", e.Unauthenticated, {}),
    ("UNAVAILABLE", "TLS_FAILED", e.TlsFailed, {}),
    ("UNAUTHENTICATED", "TOKEN_MISSING", e.TokenMissing, {}),
    ("UNAUTHENTICATED", "TOKEN_UNKNOWN", e.TokenUnknown, {}),
    ("UNAUTHENTICATED", "CERTIFICATE_UNUSABLE", e.CertificateUnusable, {}),
    ("RESOURCE_EXHAUSTED", "CALL_QUOTA", e.CallQuota, {"limit": "256"}),
    ("RESOURCE_EXHAUSTED", "SLOW_SENDER", e.SlowSender, {}),
    ("PERMISSION_DENIED", "ADMIN_REQUIRED", e.AdminRequired, {}),
    ("PERMISSION_DENIED", "", e.PermissionDenied, {}),
    ("INVALID_ARGUMENT", "INVALID_FIELD", e.InvalidArgument, {}),
    ("RESOURCE_EXHAUSTED", "", e.ResourceExhausted, {}),
    ("DEADLINE_EXCEEDED", "", e.DeadlineExceeded, {}),
    ("CANCELLED", "", e.Cancelled, {}),
    ("INTERNAL", "INTERNAL", e.Internal, {}),
    ("INTERNAL", "ENGINE_DOWN", e.Internal, {}),
    ("INTERNAL", "ROW_FAILED", e.Internal, {}),
    ("UNAVAILABLE", "", e.Unavailable, {}),
    ("UNAVAILABLE", "SERVER_DRAINING", e.ServerDraining, {}),
    ("UNAVAILABLE", "MODEL_LOADING", e.ModelLoading, {"model": "models/m"}),
    ("UNAVAILABLE", "ENGINE_DOWN", e.EngineDown, {}),
    ("RESOURCE_EXHAUSTED", "QUEUE_FULL", e.QueueFull, {"queued": "64", "limit": "64"}),
    ("NOT_FOUND", "", e.NotFound, {}),
    ("NOT_FOUND", "MODEL_NOT_FOUND", e.ModelNotFound, {}),
    ("INVALID_ARGUMENT", "MODEL_MISMATCH", e.ModelMismatch, {"snapshotModel": "models/a", "model": "models/b"}),
    ("INVALID_ARGUMENT", "CONTEXT_OVERFLOW", e.ContextOverflow, {"promptTokens": "9000", "contextTokens": "8192"}),
    ("INVALID_ARGUMENT", "CONSTRAINT_FAILED", e.ConstraintFailed, {}),
    ("INVALID_ARGUMENT", "IMAGE_UNSUPPORTED", e.ImageUnsupported, {}),
    ("INVALID_ARGUMENT", "IMAGE_INVALID", e.ImageInvalid, {}),
    ("INVALID_ARGUMENT", "IMAGE_TOO_LARGE", e.ImageTooLarge, {}),
    ("FAILED_PRECONDITION", "IMAGE_NOT_HELD", e.ImageNotHeld, {"sha256": "ab"}),
    ("FAILED_PRECONDITION", "TURN_OPEN", e.TurnOpen, {}),
    ("FAILED_PRECONDITION", "TEMPLATE_NOT_APPENDABLE", e.TemplateNotAppendable, {}),
    ("FAILED_PRECONDITION", "TEMPLATE_MISSING", e.TemplateMissing, {}),
    ("NOT_FOUND", "SNAPSHOT_NOT_FOUND", e.SnapshotNotFound, {}),
    ("NOT_FOUND", "SNAPSHOT_EXPIRED", e.SnapshotExpired, {"expireTime": "2026-01-01T00:00:00Z"}),
    ("NOT_FOUND", "SNAPSHOT_DELETED", e.SnapshotDeleted, {}),
    ("NOT_FOUND", "SNAPSHOT_ROLLED_BACK", e.SnapshotRolledBack, {}),
    ("NOT_FOUND", "SNAPSHOT_EVICTED", e.SnapshotEvicted, {}),
    ("NOT_FOUND", "SNAPSHOT_LOST", e.SnapshotLost, {}),
    ("NOT_FOUND", "SNAPSHOT_NOT_DURABLE", e.SnapshotNotDurable, {"bootId": "b0"}),
    ("FAILED_PRECONDITION", "WRONG_INSTANCE", e.WrongInstance, {"instance": "other"}),
    ("FAILED_PRECONDITION", "MODEL_CHANGED", e.ModelChanged, {"have": "a", "want": "b"}),
    (
        "FAILED_PRECONDITION",
        "RECOMPUTE_LIMIT",
        e.RecomputeLimit,
        {"needed": "700", "allowed": "0", "nearestCheckpoint": "512"},
    ),
    ("DATA_LOSS", "CHECKPOINT_CORRUPT", e.CheckpointCorrupt, {}),
    ("DATA_LOSS", "", e.DataLoss, {}),
    ("ALREADY_EXISTS", "SNAPSHOT_ID_TAKEN", e.SnapshotIdTaken, {}),
    ("ALREADY_EXISTS", "", e.AlreadyExists, {}),
    ("RESOURCE_EXHAUSTED", "SNAPSHOT_QUOTA", e.SnapshotQuota, {}),
    ("RESOURCE_EXHAUSTED", "PIN_QUOTA", e.PinQuota, {}),
    ("RESOURCE_EXHAUSTED", "STORE_FULL", e.StoreFull, {}),
    ("ABORTED", "REQUEST_IN_PROGRESS", e.RequestInProgress, {"generation": "generations/1"}),
    ("ABORTED", "", e.Aborted, {}),
    ("INVALID_ARGUMENT", "REQUEST_ID_REUSED", e.RequestIdReused, {}),
    ("RESOURCE_EXHAUSTED", "ACTIVE_MEMORY", e.ActiveMemory, {"needBytes": "9", "limitBytes": "1"}),
    ("RESOURCE_EXHAUSTED", "WATCH_QUOTA", e.WatchQuota, {"limit": "16"}),
    ("RESOURCE_EXHAUSTED", "IMAGE_MEMORY", e.ImageMemory, {"needBytes": "9", "limitBytes": "1"}),
    ("RESOURCE_EXHAUSTED", "FORK_MEMORY", e.ForkMemory, {"needBytes": "9", "freeBytes": "1"}),
    ("OUT_OF_RANGE", "ROLLBACK_BEYOND_END", e.RollbackBeyondEnd, {"tokenCount": "12"}),
    ("OUT_OF_RANGE", "", e.OutOfRange, {}),
    ("FAILED_PRECONDITION", "NOT_AN_ANCESTOR", e.NotAnAncestor, {}),
    ("INVALID_ARGUMENT", "CUT_INSIDE_IMAGE", e.CutInsideImage, {"start": "10", "end": "266"}),
    ("FAILED_PRECONDITION", "SNAPSHOT_IN_USE", e.SnapshotInUse, {"activeUses": "2"}),
    ("INVALID_ARGUMENT", "IMMUTABLE_FIELD", e.ImmutableField, {}),
    ("INVALID_ARGUMENT", "PAGE_TOKEN_INVALID", e.PageTokenInvalid, {}),
    ("OUT_OF_RANGE", "RESUME_TOKEN_EXPIRED", e.ResumeTokenExpired, {}),
    ("RESOURCE_EXHAUSTED", "WATCH_OVERFLOW", e.WatchOverflow, {}),
    ("RESOURCE_EXHAUSTED", "SLOW_READER", e.SlowReader, {}),
    ("DEADLINE_EXCEEDED", "DEADLINE_UNMET", e.DeadlineUnmet, {}),
    ("UNIMPLEMENTED", "UNSUPPORTED", e.Unimplemented, {}),
    ("UNIMPLEMENTED", "EXCHANGE_UNSUPPORTED", e.ExchangeUnsupported, {}),
    ("RESOURCE_EXHAUSTED", "EXCHANGE_QUOTA", e.ExchangeQuota, {"limit": "4"}),
    ("FAILED_PRECONDITION", "EXCHANGE_KEY_DIFFERS", e.ExchangeKeyDiffers, {"have": "a", "want": "b"}),
    ("FAILED_PRECONDITION", "FINGERPRINT_DIFFERS", e.FingerprintDiffers, {"have": "a", "want": "b"}),
    ("INVALID_ARGUMENT", "EXPORT_UNREADABLE", e.ExportUnreadable, {}),
    ("DATA_LOSS", "EXPORT_DAMAGED", e.ExportDamaged, {"record": "full 0011223344556677"}),
    ("ABORTED", "EXPORT_INCOMPLETE", e.ExportIncomplete, {"record": "full 0011223344556677"}),
    ("UNKNOWN", "", e.Unknown, {}),
    ("FAILED_PRECONDITION", "A_REASON_OF_TOMORROW", e.FailedPrecondition, {"fact": "1"}),
]


@pytest.mark.parametrize(("code", "reason", "expected", "facts"), ROWS)
def test_every_row_of_the_table_has_its_class(
    peer: Peer,
    flavour: Flavour,
    code: str,
    reason: str,
    expected: type[e.KVForkError],
    facts: dict[str, str],
) -> None:
    def script(request: Any, context: Any) -> Any:
        refuse(context, code, reason, "what happened", **facts)

    def stream(request: Any, context: Any) -> Iterator[Any]:
        refuse(context, code, reason, "what happened", **facts)
        yield

    peer.scripts |= {"GetSnapshot": script, "Generate": stream}
    client = flavour.client(peer.address, retry=False)
    found = []
    for attempt in (
        lambda: flavour.do(client.get_snapshot, "snapshots/x"),
        lambda: flavour.do(flavour.do(client.generate, "x").result),
    ):
        with pytest.raises(e.KVForkError) as caught:
            attempt()
        error = caught.value
        found.append((type(error), error.reason, error.text, error.metadata, error.CODE.name))
    assert found == [(expected, reason, "what happened", facts, code)] * 2


def test_every_class_has_a_row() -> None:
    classes = {getattr(e, name) for name in e.__all__ if name not in ("KVForkError", "FieldViolation")}
    assert classes == {expected for _, _, expected, _ in ROWS}


def test_all_details_become_attributes(peer: Peer, flavour: Flavour) -> None:
    def script(request: Any, context: Any) -> Any:
        refuse(
            context,
            "RESOURCE_EXHAUSTED",
            "QUEUE_FULL",
            "64 calls wait already",
            rpc.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)),
            rpc.BadRequest(
                field_violations=[rpc.BadRequest.FieldViolation(field="sampling.top_p", description="above 1")]
            ),
            rpc.ResourceInfo(resource_type="kvfork.v1.Snapshot", resource_name="snapshots/x"),
            rpc.RequestInfo(request_id="incident-7"),
            queued="64",
        )

    peer.scripts["GetServerInfo"] = script
    client = flavour.client(peer.address)
    with pytest.raises(e.QueueFull) as caught:
        flavour.do(client.server_info)
    error = caught.value
    assert str(error) == "QUEUE_FULL: 64 calls wait already"
    assert error.retry_after == 1.5
    assert error.fields == (e.FieldViolation("sampling.top_p", "above 1"),)
    assert (error.resource, error.incident, error.metadata) == ("snapshots/x", "incident-7", {"queued": "64"})
    assert error.advice


def test_a_status_without_details_still_has_its_class(peer: Peer, flavour: Flavour) -> None:
    peer.scripts["GetServerInfo"] = lambda request, context: context.abort(grpc.StatusCode.DATA_LOSS, "gone")
    client = flavour.client(peer.address)
    with pytest.raises(e.DataLoss, match="DATA_LOSS: gone"):
        flavour.do(client.server_info)


def test_broken_details_are_as_good_as_none() -> None:
    error = from_status(grpc.StatusCode.NOT_FOUND, "no", [(DETAILS_KEY, b"\xff\xff"), ("other", "x")])
    assert (type(error), error.reason, str(error)) == (e.NotFound, "", "NOT_FOUND: no")


def test_no_server_is_unavailable(flavour: Flavour) -> None:
    with Peer() as gone:
        address = gone.address
    client = flavour.client(address, retry=False)
    with pytest.raises(e.Unavailable):
        flavour.do(client.server_info)


def test_the_servers_table_and_this_one_agree() -> None:
    """The two are kept apart on purpose: a client knows no server code. This keeps them one."""
    from service.rpc.status import CODES

    general = {
        "INTERNAL",
        "INVALID_FIELD",
        "UNSUPPORTED",
        "ROW_FAILED",
        "UNAUTHENTICATED",
    }  # the class of the code says it all
    for error, code in CODES.items():
        found = error_class(code, error.reason)
        assert found.CODE is code, error
        assert error.reason == found.REASON or error.reason in general or code is grpc.StatusCode.INTERNAL, error
