"""What callers are told when the model thread or one row of it fails. Owns these texts and facts; decides nothing."""

from __future__ import annotations

import logging
import secrets

from kvcache.receipt import MissReason
from service.errors import CallError, EngineDown, RowFailed

log = logging.getLogger("kvfork.failures")


def not_begun(error: CallError) -> EngineDown:
    """`error`, which ends every call, for one that nothing was done for: it cannot be the cause, and may try again."""
    return EngineDown(error.text, hint="try again", retry_after=2.0)


def why_lost(missing: MissReason, refused: str) -> str:
    """Why a place that was asked for does not stand: `missing` says what became of state that it stands on.

    `refused`: what the store said when it did not take some of it, if it did not. The result is a cause of STORE_FULL.
    """
    if missing in (MissReason.EVICTED, MissReason.CORRUPT):
        return missing.name
    return refused or "NOT_STORED"


def row_failure(failure: Exception, *, row: int, call: str, position: int) -> CallError:
    """`failure` of one row, in a call of the kind `call`, at a token position.

    Our own errors pass. The words of others may hold a prompt and stay in the log, under an incident.
    """
    if isinstance(failure, CallError):
        return failure
    incident = secrets.token_hex(16)
    log.error("row %d failed in %s, incident %s", row, call, incident, exc_info=failure)
    return RowFailed(
        f"the sequence failed in {call} at token {position}: {type(failure).__name__}",
        hint="the others go on; the server's log has the incident",
        metadata={"row": str(row), "call": call, "position": str(position), "incident": incident},
    )
