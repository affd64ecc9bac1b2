"""How a status leaves where the call has ended under it."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import Internal
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
