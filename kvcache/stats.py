"""What the record store reports about itself. Owns the counters and their frozen picture; decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvcache.records import PutResult, RecordKind, Tier


@dataclass(frozen=True, slots=True)
class Usage:
    """A number of records and their payload bytes."""

    records: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What is held now, and what happened since the start. Bytes are payload bytes unless they say otherwise."""

    usage: dict[tuple[Tier, RecordKind], Usage]
    memory_bytes: int
    pending_bytes: int
    disk_bytes: int
    file_bytes: int  # sizes of the segment files
    live_ratio: float  # share of the files that still counts; 1.0 without files
    segments: int
    pinned: int  # records with at least one use, held or not
    written: Usage
    read: dict[Tier, Usage]
    copied_on: Usage  # by cleaning
    evicted: dict[Tier, Usage]
    skipped: dict[PutResult, int]  # records not taken, or given up rather than written, by reason
    missing: int  # fetches refused for a record that was not there
    corrupt: int  # records dropped since their bytes did not verify or could not be read
    write_errors: int
    failed_jobs: int  # jobs of the I/O thread that raised what nobody expected
    paused: bool  # writes are stopped for a while after failures
    written_today: int  # bytes that went to disk since the day (UTC) or the process began, overhead and copies included
    last_error: str


class Tally:
    """Running totals since the start. Not locked; the store counts under its lock."""

    def __init__(self) -> None:
        self._records: Counter[object] = Counter()
        self._bytes: Counter[object] = Counter()
        self.skipped: Counter[PutResult] = Counter()
        self.missing = 0
        self.corrupt = 0
        self.write_errors = 0
        self.last_error = ""

    def add(self, what: object, size: int) -> None:
        """One record of `size` payload bytes; `what` is any name, by tier where one event has several."""
        self._records[what] += 1
        self._bytes[what] += size

    def write_error(self, error: Exception) -> None:
        self.write_errors += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def total(self, what: object) -> Usage:
        return Usage(self._records[what], self._bytes[what])

    def by_tier(self, what: str) -> dict[Tier, Usage]:
        return {tier: self.total((what, tier)) for tier in Tier}
