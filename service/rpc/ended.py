"""Calls that have ended under gRPC. Owns how that is told from an error.

A deadline that passes between a handler's last word and the status leaves gRPC with nobody to send the status to. It
calls that an error and writes a traceback, though nothing failed and nobody hears: it is a cancellation like any other.
"""

from __future__ import annotations

import logging


def is_ended(error: object) -> bool:
    """Whether gRPC raised this for a call that had ended under it."""
    return type(error).__name__ == "ExecuteBatchError"  # gRPC's own, without a public name


class CallHasEnded(logging.Filter):
    """Lets all pass but that."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and is_ended(record.exc_info[1]))


_ENDED = CallHasEnded()


def be_quiet_about_ended_calls() -> None:
    """For the process; once more is of no effect."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_ENDED)
