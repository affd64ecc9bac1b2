"""Calls from their first moment to their last: counted, traced, and told in one line. Owns that line.

The line has ids, names and numbers, never what was said. Calls of InferenceService are told at info, the others at
debug. The gRPC layer says when a call begins and with which code it ended; the rest it learns on the way (`facts`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from service import facts
from service.metering import Meter
from service.tracing import Tracer

log = logging.getLogger("kvfork.calls")


class Calls:
    """Implements `core_api.Observer`."""

    def __init__(self, meter: Meter, tracer: Tracer) -> None:
        self._meter = meter
        self._tracer = tracer

    @contextmanager
    def call(self, method: str, metadata: Iterable[tuple[str, Any]]) -> Iterator[Callable[[str], None]]:
        """Around one call of a method of the contract ("kvfork.v1.InferenceService/Generate").

        The value is to be told the code; a call of which nothing was told has ended as UNKNOWN.
        """
        service, _, name = method.rpartition("/")
        known = facts.begin(method=name)
        code = "UNKNOWN"
        began = time.monotonic()
        self._meter.call_began(name)

        def tell(ended: str) -> None:
            nonlocal code
            code = ended

        try:
            with self._tracer.call(method, metadata) as span:
                try:
                    yield tell
                finally:
                    span.end(code, known)
        finally:
            seconds = time.monotonic() - began
            self._meter.call_ended(name, code, seconds)
            level = logging.INFO if service.endswith(".InferenceService") else logging.DEBUG
            fields = {**known, "code": code, "seconds": round(seconds, 6)}
            log.log(level, "%s %s", name, code, extra={"fields": fields})

    def waited(self, seconds: float) -> None:
        """A stream's write has taken so long."""
        self._meter.stream_waits += seconds

    def gave_up(self) -> None:
        """A generation was ended since nobody read it."""
        self._meter.slow_readers += 1

    def refused(self, reason: str) -> None:
        """A call ends with an error that has this reason, at the door or behind it."""
        self._meter.refused[reason] += 1
