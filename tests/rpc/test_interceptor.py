"""How a status leaves where the call has ended under it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from service.errors import Internal
from service.rpc.ended import be_quiet_about_ended_calls
from service.rpc.interceptor import leave
from service.rpc.status import status_of


def test_a_status_for_a_call_that_has_ended_under_it_is_no_error_of_ours():
    class Over:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def abort_with_status(self, status: object) -> None:
            raise self.error

    over = type("ExecuteBatchError", (Exception,), {})("the call is gone")
    for error, left in ((over, asyncio.CancelledError), (ValueError("a bug"), ValueError)):
        with pytest.raises(left):
            asyncio.run(leave(Over(error), status_of(Internal("x"))))  # type: ignore[arg-type]


def test_grpcs_own_word_for_it_is_none_in_the_log_either_and_its_other_errors_are(caplog: pytest.LogCaptureFixture):
    be_quiet_about_ended_calls()
    be_quiet_about_ended_calls()
    log = logging.getLogger("grpc._cython.cygrpc")
    for error in (type("ExecuteBatchError", (Exception,), {})("the call is gone"), ValueError("a bug")):
        try:
            raise error
        except Exception:
            log.exception("raised in core")
    log.error("something else")
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [ValueError, None]
