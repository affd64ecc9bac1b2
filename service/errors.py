"""Everything that can be wrong with a call, by name. Owns reasons and their facts; `service.rpc.status` owns codes.

    CallError
    ├── InvalidField          one or more fields are wrong            (also IMAGE_UNSUPPORTED, CONTEXT_OVERFLOW …)
    ├── Unsupported           part of the contract that comes later
    ├── ModelNotFound / ModelLoading / ModelMismatch / ModelChanged
    ├── EngineDown (EngineFailed) / Draining / QueueFull / ActiveMemory / DeadlineUnmet
    ├── SnapshotNotFound      unknown, foreign, or gone (with the tombstone's reason)
    ├── SnapshotIdTaken / SnapshotInUse / SnapshotQuota / StoreFull
    ├── RecomputeLimit / RollbackBeyondEnd / NotAnAncestor / WrongInstance
    ├── TurnOpen / TemplateNotAppendable / TemplateMissing
    ├── ImageNotHeld / ImageMemory
    ├── ConstraintFailed      no token fits the constraint any more
    ├── WatchOverflow / WatchQuota / ResumeTokenExpired
    ├── ExchangeQuota / ExchangeKeyDiffers / ExportUnreadable / ExportDamaged / ExportIncomplete / FingerprintDiffers
    ├── RequestInProgress / RequestIdReused / PageTokenInvalid / ImmutableField
    ├── Unauthenticated / AdminRequired / CallQuota / SlowReader / SlowSender
    └── Internal              ours: fixed text, incident id

Every error carries facts as strings (`metadata`, camelCase keys) that repeat what the text says, so that no client
needs to parse text. `hint` says what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field: its path in the request and what is wrong with it."""

    field: str
    text: str


class CallError(Exception):
    """A call that cannot be served; `reason` is the stable name."""

    reason = "INTERNAL"

    def __init__(
        self,
        text: str,
        *,
        hint: str = "",
        metadata: dict[str, str] | None = None,
        fields: tuple[FieldViolation, ...] = (),
        resource: tuple[str, str] | None = None,  # (type, name)
        retry_after: float | None = None,  # seconds
        reason: str | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint
        self.metadata = metadata or {}
        self.fields = fields
        self.resource = resource
        self.retry_after = retry_after
        if reason is not None:
            self.reason = reason


class InvalidField(CallError):
    """One or more fields of the request are wrong."""

    reason = "INVALID_FIELD"

    @classmethod
    def at(
        cls, field: str, text: str, *, reason: str | None = None, metadata: dict[str, str] | None = None
    ) -> InvalidField:
        """The common case: one field."""
        return cls(f"{field}: {text}", fields=(FieldViolation(field, text),), reason=reason, metadata=metadata)


class Unsupported(CallError):
    """A part of the contract that this version does not serve yet (UNIMPLEMENTED)."""

    reason = "UNSUPPORTED"


class ModelNotFound(CallError):
    reason = "MODEL_NOT_FOUND"


class ModelLoading(CallError):
    reason = "MODEL_LOADING"


class ModelMismatch(CallError):
    reason = "MODEL_MISMATCH"


class ModelChanged(CallError):
    reason = "MODEL_CHANGED"


class EngineDown(CallError):
    """The model thread is dead or stuck, or a form's processes cannot be begun: UNAVAILABLE for new calls."""

    reason = "ENGINE_DOWN"


class EngineFailed(EngineDown):
    """The model thread died or hung under a running call: UNAVAILABLE too, but not to be repeated blindly.

    The call itself may be what the thread died of, and a client that repeats it would bring the next one down.
    """

    reason = "ENGINE_DOWN"


class Draining(CallError):
    reason = "SERVER_DRAINING"


class QueueFull(CallError):
    reason = "QUEUE_FULL"


class ActiveMemory(CallError):
    """The call alone may grow beyond the memory that all rows share, or that kept state in use leaves of it.

    Waiting helps in the second case alone, which has a time to retry.
    """

    reason = "ACTIVE_MEMORY"


class DeadlineUnmet(CallError):
    """The call's deadline passed in the queue, or no part of its prompt could be computed and kept before it."""

    reason = "DEADLINE_UNMET"


class SnapshotNotFound(CallError):
    """Unknown or foreign (SNAPSHOT_NOT_FOUND), or gone: _EXPIRED, _DELETED, _ROLLED_BACK, _NOT_DURABLE, _LOST."""

    reason = "SNAPSHOT_NOT_FOUND"


class SnapshotIdTaken(CallError):
    reason = "SNAPSHOT_ID_TAKEN"


class SnapshotInUse(CallError):
    reason = "SNAPSHOT_IN_USE"


class SnapshotQuota(CallError):
    """Too many snapshots (SNAPSHOT_QUOTA) or pins (PIN_QUOTA) of one owner."""

    reason = "SNAPSHOT_QUOTA"


class StoreFull(CallError):
    reason = "STORE_FULL"


class ForkMemory(CallError):
    reason = "FORK_MEMORY"


class RecomputeLimit(CallError):
    reason = "RECOMPUTE_LIMIT"

    @classmethod
    def over(cls, needed: int, allowed: int, nearest: int) -> RecomputeLimit:
        """`nearest` is the deepest position whose state is stored."""
        return cls(
            f"{needed} tokens would be computed again, {allowed} are allowed",
            hint="raise max_recompute_tokens, or roll back to the nearest checkpoint",
            metadata={"needed": str(needed), "allowed": str(allowed), "nearestCheckpoint": str(nearest)},
        )


class RollbackBeyondEnd(CallError):
    reason = "ROLLBACK_BEYOND_END"


class NotAnAncestor(CallError):
    reason = "NOT_AN_ANCESTOR"


class WrongInstance(CallError):
    reason = "WRONG_INSTANCE"


class TurnOpen(CallError):
    reason = "TURN_OPEN"


class TemplateNotAppendable(CallError):
    reason = "TEMPLATE_NOT_APPENDABLE"


class TemplateMissing(CallError):
    """The model has no chat template: only raw input works."""

    reason = "TEMPLATE_MISSING"


class ImageNotHeld(CallError):
    """No file with this digest is held for the caller; another caller's is none."""

    reason = "IMAGE_NOT_HELD"


class ImageMemory(CallError):
    """The image files that calls and snapshots need take all the memory for them."""

    reason = "IMAGE_MEMORY"


class ConstraintFailed(CallError):
    """The form that was asked for leaves no token, or is too costly to follow: INVALID_ARGUMENT for that row alone."""

    reason = "CONSTRAINT_FAILED"


class RequestInProgress(CallError):
    reason = "REQUEST_IN_PROGRESS"


class RequestIdReused(CallError):
    reason = "REQUEST_ID_REUSED"


class PageTokenInvalid(CallError):
    reason = "PAGE_TOKEN_INVALID"


class ImmutableField(CallError):
    reason = "IMMUTABLE_FIELD"


class SlowReader(CallError):
    reason = "SLOW_READER"


class WatchOverflow(CallError):
    """A watch whose reader fell behind by more changes than are kept."""

    reason = "WATCH_OVERFLOW"


class ResumeTokenExpired(CallError):
    """A watch cannot go on where it was: too much has happened, or the process is another."""

    reason = "RESUME_TOKEN_EXPIRED"


class WatchQuota(CallError):
    """Too many watches of one owner."""

    reason = "WATCH_QUOTA"


class ExchangeQuota(CallError):
    """Too many exports, imports and checks of one owner, or of all, are under way."""

    reason = "EXCHANGE_QUOTA"


class ExchangeKeyDiffers(CallError):
    """An export was signed with another instance's key."""

    reason = "EXCHANGE_KEY_DIFFERS"


class ExportUnreadable(CallError):
    """What was to be an export is none, or of a version that this server does not know."""

    reason = "EXPORT_UNREADABLE"


class ExportDamaged(CallError):
    """A part of an export is not what was signed: DATA_LOSS, by the name of the record."""

    reason = "EXPORT_DAMAGED"


class ExportIncomplete(CallError):
    """An export ends too soon, or what was left out of it is gone: to be asked for anew."""

    reason = "EXPORT_INCOMPLETE"


class FingerprintDiffers(ModelChanged):
    """A snapshot of another model, or of other software: its state means nothing here."""

    reason = "FINGERPRINT_DIFFERS"


class SlowSender(CallError):
    """The request message did not arrive in time, or others were let past it."""

    reason = "SLOW_SENDER"


class Unauthenticated(CallError):
    """Nobody knows who calls: TOKEN_MISSING, TOKEN_UNKNOWN or CERTIFICATE_UNUSABLE."""

    reason = "UNAUTHENTICATED"


class AdminRequired(CallError):
    reason = "ADMIN_REQUIRED"


class CallQuota(CallError):
    """As many calls of one owner are under way as it may have."""

    reason = "CALL_QUOTA"


class Internal(CallError):
    """Our fault. The text is fixed; the incident id leads to the log."""

    reason = "INTERNAL"


class RowFailed(CallError):
    """One sequence failed by itself (NaN logits, a raising processor): INTERNAL, the others go on."""

    reason = "ROW_FAILED"

    @classmethod
    def given_up(cls) -> RowFailed:
        """The end of one whose caller left: nobody hears it, and it is counted as no failure."""
        return cls("cancelled", reason="CANCELLED")
