"""What can go wrong with a call, as exceptions: the mirror of the server's error table. `status.py` picks the class.

    KVForkError                      .reason .text .metadata .fields .retry_after .resource .advice
    ├── InvalidArgument              ModelMismatch, ContextOverflow, ImageUnsupported, ImageInvalid, ImageTooLarge,
    │                                CutInsideImage, ConstraintFailed, RequestIdReused, ImmutableField,
    │                                PageTokenInvalid, ExportUnreadable
    ├── NotFound
    │   ├── ModelNotFound
    │   └── SnapshotNotFound         SnapshotExpired, SnapshotDeleted, SnapshotRolledBack, SnapshotEvicted,
    │                                SnapshotNotDurable, WrongInstance (FailedPrecondition as well)
    ├── FailedPrecondition           RecomputeLimit, TurnOpen, TemplateNotAppendable, TemplateMissing, ModelChanged,
    │                                NotAnAncestor, SnapshotInUse, ImageNotHeld, FingerprintDiffers,
    │                                ExchangeKeyDiffers
    ├── ResourceExhausted            QueueFull, CallQuota, ActiveMemory, SnapshotQuota, PinQuota, StoreFull,
    │                                ForkMemory, ImageMemory, SlowReader, SlowSender, WatchOverflow, WatchQuota,
    │                                ExchangeQuota
    ├── Unavailable                  ServerDraining, ModelLoading, EngineDown, TlsFailed
    ├── OutOfRange                   RollbackBeyondEnd, ResumeTokenExpired
    ├── AlreadyExists                SnapshotIdTaken
    ├── Aborted                      RequestInProgress, ExportIncomplete
    ├── PermissionDenied             AdminRequired
    ├── DataLoss                     CheckpointCorrupt, ExportDamaged
    ├── Internal                     .incident
    ├── DeadlineExceeded             DeadlineUnmet
    ├── Unauthenticated              TokenMissing, TokenUnknown, CertificateUnusable
    └── Unimplemented (ExchangeUnsupported), Cancelled, Unknown

The class is looked up by status code and reason; a reason this client does not know gets the class of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import grpc

__all__ = [
    "Aborted",
    "ActiveMemory",
    "AdminRequired",
    "AlreadyExists",
    "CallQuota",
    "Cancelled",
    "CertificateUnusable",
    "CheckpointCorrupt",
    "ConstraintFailed",
    "ContextOverflow",
    "CutInsideImage",
    "DataLoss",
    "DeadlineExceeded",
    "DeadlineUnmet",
    "EngineDown",
    "ExchangeKeyDiffers",
    "ExchangeQuota",
    "ExchangeUnsupported",
    "ExportDamaged",
    "ExportIncomplete",
    "ExportUnreadable",
    "FailedPrecondition",
    "FieldViolation",
    "FingerprintDiffers",
    "ForkMemory",
    "ImageInvalid",
    "ImageMemory",
    "ImageNotHeld",
    "ImageTooLarge",
    "ImageUnsupported",
    "ImmutableField",
    "Internal",
    "InvalidArgument",
    "KVForkError",
    "ModelChanged",
    "ModelLoading",
    "ModelMismatch",
    "ModelNotFound",
    "NotAnAncestor",
    "NotFound",
    "OutOfRange",
    "PageTokenInvalid",
    "PermissionDenied",
    "PinQuota",
    "QueueFull",
    "RecomputeLimit",
    "RequestIdReused",
    "RequestInProgress",
    "ResourceExhausted",
    "ResumeTokenExpired",
    "RollbackBeyondEnd",
    "ServerDraining",
    "SlowReader",
    "SlowSender",
    "SnapshotDeleted",
    "SnapshotEvicted",
    "SnapshotExpired",
    "SnapshotIdTaken",
    "SnapshotInUse",
    "SnapshotLost",
    "SnapshotNotDurable",
    "SnapshotNotFound",
    "SnapshotQuota",
    "SnapshotRolledBack",
    "StoreFull",
    "TemplateMissing",
    "TemplateNotAppendable",
    "TlsFailed",
    "TokenMissing",
    "TokenUnknown",
    "TurnOpen",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "WatchOverflow",
    "WatchQuota",
    "WrongInstance",
]


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path and what is wrong."""

    field: str
    description: str


class KVForkError(Exception):
    """A call that failed.

    `reason` is the stable name (empty if gRPC itself ended the call), `metadata` repeats the facts of the text,
    `fields` are the wrong fields, `retry_after` the seconds after which a retry makes sense (None: not told),
    `resource` the name of what was looked for, `advice` what to do about it.
    """

    CODE: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    REASON: ClassVar[str] = ""
    advice: ClassVar[str] = ""

    def __init__(
        self,
        text: str = "",
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        fields: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
        resource: str = "",
        incident: str = "",
    ) -> None:
        self.text = text
        self.reason = reason or self.REASON
        self.metadata = dict(metadata or {})
        self.fields = fields
        self.retry_after = retry_after
        self.resource = resource
        self.incident = incident  # the id under which the server logged it
        super().__init__(f"{self.label}: {text}" if text else self.label)

    @property
    def label(self) -> str:
        """The reason, or the status code's name where there is none."""
        return self.reason or self.CODE.name


class InvalidArgument(KVForkError):
    """A field of the request is wrong; see `fields`."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT


class ModelMismatch(InvalidArgument):
    """The model named is not the parent's. metadata: snapshotModel, model."""

    REASON = "MODEL_MISMATCH"
    advice = "leave the model out: a snapshot knows its own"


class ContextOverflow(InvalidArgument):
    """The prompt leaves no room. metadata: promptTokens, contextTokens."""

    REASON = "CONTEXT_OVERFLOW"
    advice = "shorten the input, or roll back to an earlier point first"


class ConstraintFailed(InvalidArgument):
    """In the middle of a generation: no token fits the form any more, or following it costs too much."""

    REASON = "CONSTRAINT_FAILED"
    advice = "make the form simpler, or one that can always be completed"


class ImageUnsupported(InvalidArgument):
    REASON = "IMAGE_UNSUPPORTED"
    advice = "use a model with vision, or leave the image out"


class ImageInvalid(InvalidArgument):
    REASON = "IMAGE_INVALID"
    advice = "send an encoded PNG, JPEG or WebP file"


class ImageTooLarge(InvalidArgument):
    REASON = "IMAGE_TOO_LARGE"
    advice = "scale the image down; the limits are in the server's info"


class CutInsideImage(InvalidArgument):
    """metadata: start, end."""

    REASON = "CUT_INSIDE_IMAGE"
    advice = "cut before the image's start, or ask for rounding down"


class RequestIdReused(InvalidArgument):
    REASON = "REQUEST_ID_REUSED"
    advice = "make a new request id for each different request"


class ImmutableField(InvalidArgument):
    REASON = "IMMUTABLE_FIELD"
    advice = "only labels, expiry and pinned can change"


class PageTokenInvalid(InvalidArgument):
    REASON = "PAGE_TOKEN_INVALID"
    advice = "start the listing over"


class ExportUnreadable(InvalidArgument):
    REASON = "EXPORT_UNREADABLE"
    advice = "send an export as it is, from its first byte on"


class NotFound(KVForkError):
    """Something named does not exist; `resource` is its name."""

    CODE = grpc.StatusCode.NOT_FOUND


class ModelNotFound(NotFound):
    REASON = "MODEL_NOT_FOUND"
    advice = "see which models there are: client.models()"


class SnapshotNotFound(NotFound):
    """The snapshot was never there, is somebody else's, or is gone: the handle is of no more use."""

    REASON = "SNAPSHOT_NOT_FOUND"
    advice = "check the name; list what there is with `kvfork snapshots list`"


class SnapshotExpired(SnapshotNotFound):
    """metadata: expireTime."""

    REASON = "SNAPSHOT_EXPIRED"
    advice = "make it again; use a longer ttl, extend it, or pin it"


class SnapshotDeleted(SnapshotNotFound):
    REASON = "SNAPSHOT_DELETED"
    advice = "make it again"


class SnapshotRolledBack(SnapshotNotFound):
    REASON = "SNAPSHOT_ROLLED_BACK"
    advice = "go on from the rollback's result"


class SnapshotEvicted(SnapshotNotFound):
    REASON = "SNAPSHOT_EVICTED"
    advice = "make it again; pin what must stay"


class SnapshotNotDurable(SnapshotNotFound):
    """Lost at a restart. metadata: bootId."""

    REASON = "SNAPSHOT_NOT_DURABLE"
    advice = "make it again; run the server with a store directory to keep snapshots over restarts"


class SnapshotLost(SnapshotNotFound):
    """Was durable, and files of the server's store are missing or damaged."""

    REASON = "SNAPSHOT_LOST"
    advice = "make it again, or have the store's files put back: `kvfork store check` names them"


class FailedPrecondition(KVForkError):
    """What is named exists but cannot be used as asked."""

    CODE = grpc.StatusCode.FAILED_PRECONDITION


class RecomputeLimit(FailedPrecondition):
    """metadata: needed, allowed, nearestCheckpoint."""

    REASON = "RECOMPUTE_LIMIT"
    advice = "allow more recompute, or round down to the nearest checkpoint"


class TurnOpen(FailedPrecondition):
    REASON = "TURN_OPEN"
    advice = "the last turn has no end: finish it with raw input, or roll back to before it"


class TemplateNotAppendable(FailedPrecondition):
    REASON = "TEMPLATE_NOT_APPENDABLE"
    advice = "this model's template cannot append turns: use raw input, or send the whole chat without a parent"


class TemplateMissing(FailedPrecondition):
    REASON = "TEMPLATE_MISSING"
    advice = "this model has no chat template: use raw input"


class WrongInstance(SnapshotNotFound, FailedPrecondition):
    """The server that answers is not the one that was meant. metadata: instance, the one that answers.

    Of a handle's call: a server that began anew without a store took the place of the one that held it, and it is gone;
    or calls do not reach the instance that they name.
    """

    CODE = grpc.StatusCode.FAILED_PRECONDITION
    REASON = "WRONG_INSTANCE"
    advice = "make it again if its server began anew without a store; else send the call to the instance that holds it"


class ModelChanged(FailedPrecondition):
    """metadata: have, want."""

    REASON = "MODEL_CHANGED"
    advice = "the state is of no more use; its tokens can still be read and generated from anew"


class NotAnAncestor(FailedPrecondition):
    REASON = "NOT_AN_ANCESTOR"
    advice = "roll back to a token count, or to a snapshot that the source descends from"


class SnapshotInUse(FailedPrecondition):
    """metadata: activeUses."""

    REASON = "SNAPSHOT_IN_USE"
    advice = "wait for the calls that use it, or delete with stop_active"


class ImageNotHeld(FailedPrecondition):
    """metadata: sha256."""

    REASON = "IMAGE_NOT_HELD"
    advice = "send the image's bytes"


class FingerprintDiffers(FailedPrecondition):
    """A snapshot of another model or other software. metadata: have, want, model."""

    REASON = "FINGERPRINT_DIFFERS"
    advice = "serve the same model with the same software there, or make the snapshot again from its tokens"


class ExchangeKeyDiffers(FailedPrecondition):
    """metadata: have, want (what tells the keys apart)."""

    REASON = "EXCHANGE_KEY_DIFFERS"
    advice = "start both servers with the same exchange key"


class ResourceExhausted(KVForkError):
    """A quota or a limit; `retry_after` is set where waiting helps."""

    CODE = grpc.StatusCode.RESOURCE_EXHAUSTED


class QueueFull(ResourceExhausted):
    """metadata: queued, limit."""

    REASON = "QUEUE_FULL"
    advice = "try again later"


class CallQuota(ResourceExhausted):
    """metadata: limit."""

    REASON = "CALL_QUOTA"
    advice = "wait for some of your calls to end"


class ActiveMemory(ResourceExhausted):
    """metadata: needBytes, limitBytes."""

    REASON = "ACTIVE_MEMORY"
    advice = "ask for fewer new tokens, or give the server more --active-bytes"


class SnapshotQuota(ResourceExhausted):
    REASON = "SNAPSHOT_QUOTA"
    advice = "release snapshots that are no longer needed"


class PinQuota(ResourceExhausted):
    REASON = "PIN_QUOTA"
    advice = "unpin or release pinned snapshots"


class StoreFull(ResourceExhausted):
    REASON = "STORE_FULL"
    advice = "release snapshots, or give the store more room"


class ImageMemory(ResourceExhausted):
    """metadata: needBytes, limitBytes."""

    REASON = "IMAGE_MEMORY"
    advice = "delete snapshots with images, or give the server more --image-bytes"


class ForkMemory(ResourceExhausted):
    """Nothing was created. metadata: needBytes, freeBytes."""

    REASON = "FORK_MEMORY"
    advice = "fork into fewer branches, or release snapshots first"


class SlowReader(ResourceExhausted):
    REASON = "SLOW_READER"
    advice = "read the stream faster, or gather more tokens into a message"


class SlowSender(ResourceExhausted):
    REASON = "SLOW_SENDER"
    advice = "the request took too long to arrive: send less at a time"


class WatchOverflow(ResourceExhausted):
    REASON = "WATCH_OVERFLOW"
    advice = "start the watch over"


class WatchQuota(ResourceExhausted):
    """metadata: limit."""

    REASON = "WATCH_QUOTA"
    advice = "end a watch, or share one"


class ExchangeQuota(ResourceExhausted):
    """metadata: limit."""

    REASON = "EXCHANGE_QUOTA"
    advice = "wait for some of the exports, imports and checks to end"


class Unavailable(KVForkError):
    """The server cannot serve now, or cannot be reached."""

    CODE = grpc.StatusCode.UNAVAILABLE
    advice = "check the address and that a server runs there (`kvfork serve`)"


class ServerDraining(Unavailable):
    REASON = "SERVER_DRAINING"
    advice = "the server is shutting down: try another one, or again after its restart"


class ModelLoading(Unavailable):
    """metadata: model."""

    REASON = "MODEL_LOADING"
    advice = "the model is still loading: try again in a moment"


class EngineDown(Unavailable):
    REASON = "ENGINE_DOWN"
    advice = "the model's thread is dead or stuck: restart the server"


class TlsFailed(Unavailable):
    """No connection was made, because the two sides do not trust or do not understand each other. Never the server's
    own word: this client reads it off the failure."""

    REASON = "TLS_FAILED"
    advice = "check that the server speaks TLS, that its certificate is from the given ca and names the address"


class OutOfRange(KVForkError):
    CODE = grpc.StatusCode.OUT_OF_RANGE


class RollbackBeyondEnd(OutOfRange):
    """metadata: tokenCount."""

    REASON = "ROLLBACK_BEYOND_END"
    advice = "a rollback only shortens: stay below the snapshot's token count"


class ResumeTokenExpired(OutOfRange):
    REASON = "RESUME_TOKEN_EXPIRED"
    advice = "start the watch over"


class AlreadyExists(KVForkError):
    CODE = grpc.StatusCode.ALREADY_EXISTS


class SnapshotIdTaken(AlreadyExists):
    REASON = "SNAPSHOT_ID_TAKEN"
    advice = "choose another snapshot id, or delete the snapshot that has it"


class Aborted(KVForkError):
    CODE = grpc.StatusCode.ABORTED


class RequestInProgress(Aborted):
    """metadata: generation."""

    REASON = "REQUEST_IN_PROGRESS"
    advice = "the same request is still running: wait for it"


class ExportIncomplete(Aborted):
    """metadata: record."""

    REASON = "EXPORT_INCOMPLETE"
    advice = "check what is missing and export it again; what came is not sent twice"


class PermissionDenied(KVForkError):
    CODE = grpc.StatusCode.PERMISSION_DENIED


class AdminRequired(PermissionDenied):
    REASON = "ADMIN_REQUIRED"
    advice = "use an admin's credentials"


class Unauthenticated(KVForkError):
    CODE = grpc.StatusCode.UNAUTHENTICATED
    advice = "give a valid token or client certificate"


class TokenMissing(Unauthenticated):
    REASON = "TOKEN_MISSING"
    advice = "give the client a token"


class TokenUnknown(Unauthenticated):
    REASON = "TOKEN_UNKNOWN"
    advice = "check the token: it may be mistyped, or have been replaced"


class CertificateUnusable(Unauthenticated):
    REASON = "CERTIFICATE_UNUSABLE"
    advice = "use a client certificate with one name"


class DataLoss(KVForkError):
    CODE = grpc.StatusCode.DATA_LOSS


class CheckpointCorrupt(DataLoss):
    REASON = "CHECKPOINT_CORRUPT"
    advice = "make the snapshot again"


class ExportDamaged(DataLoss):
    """metadata: record."""

    REASON = "EXPORT_DAMAGED"
    advice = "export the snapshot again; nothing of the damaged export was kept"


class Internal(KVForkError):
    """The server's fault; `incident` leads to its log."""

    CODE = grpc.StatusCode.INTERNAL
    advice = "look for the incident id in the server's log"


class Unimplemented(KVForkError):
    CODE = grpc.StatusCode.UNIMPLEMENTED
    advice = "this server does not have that yet; its info lists the features it has"


class ExchangeUnsupported(Unimplemented):
    REASON = "EXCHANGE_UNSUPPORTED"
    advice = "start the servers with an exchange key"


class DeadlineExceeded(KVForkError):
    CODE = grpc.StatusCode.DEADLINE_EXCEEDED
    advice = "allow more time; to end a generation cleanly use a time limit instead"


class DeadlineUnmet(DeadlineExceeded):
    """The server did not begin what it could not end in time. metadata: neededSeconds, leftSeconds."""

    REASON = "DEADLINE_UNMET"
    advice = "allow the call more time, or go on from a snapshot"


class Cancelled(KVForkError):
    CODE = grpc.StatusCode.CANCELLED


class Unknown(KVForkError):
    CODE = grpc.StatusCode.UNKNOWN
