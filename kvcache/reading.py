"""Reading several records at once. Owns the second thread that large reads get; knows nothing of tiers or of the index.

Reading from the page cache and opening a seal take about as long as each other, both outside the interpreter lock. Two
threads that each do both for every other record read about as fast as plain files are read; the next pair of hands
would only find the memory bus busy. Small reads are not worth the hand-over.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvcache.errors import RecordError
from kvcache.records import Buffer, Name
from kvcache.seal import Scratch
from kvcache.segments import Extent, SegmentLog

WORTH_SHARING_BYTES = 1 << 20

Answer = Buffer | RecordError


class Reader:
    """Reads from one segment log, for the thread that owns it."""

    def __init__(self, segments: SegmentLog) -> None:
        self._segments = segments
        self._scratch = Scratch()  # the second thread's
        self._second: ThreadPoolExecutor | None = None

    def read(self, wanted: Sequence[tuple[Name, Extent]]) -> list[Answer]:
        """Every payload, or why it cannot be given, in the order asked for."""
        if len(wanted) < 2 or sum(extent.length for _, extent in wanted) < WORTH_SHARING_BYTES:
            return self._each(wanted, None)
        if self._second is None:
            self._second = ThreadPoolExecutor(1, "kvcache-read")
        odd = self._second.submit(self._each, wanted[1::2], self._scratch)
        answers: list[Answer] = [b""] * len(wanted)
        try:
            answers[0::2] = self._each(wanted[0::2], None)
        finally:  # whatever happened, nobody may read while segments change
            answers[1::2] = odd.result()
        return answers

    def close(self) -> None:
        """Ends the second thread. Safe to repeat."""
        if self._second is not None:
            self._second.shutdown()
            self._second = None

    def _each(self, wanted: Sequence[tuple[Name, Extent]], scratch: Scratch | None) -> list[Answer]:
        answers: list[Answer] = []
        for record, extent in wanted:
            try:
                answers.append(self._segments.read(record, extent, scratch))
            except RecordError as error:
                answers.append(error)
        return answers
