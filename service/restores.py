"""Reads of stored state that rows wait for. Owns which rows share a read; the store owns the reading.

A record that several rows want is read once: rows admitted together, and rows that come while it is being read, wait
for the same read. Engine thread only; answers of the store's thread come in through `post`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache.cache import Lookup
from kvcache.records import Buffer, FetchResult, RecordId, Tier
from service.plan import RowId

Fetch = Callable[[Sequence[RecordId], Callable[[FetchResult], None]], None]


@dataclass(slots=True, eq=False)
class Read:
    """One order to the store, by the first row that wanted its records."""

    records: tuple[RecordId, ...]
    waiting: list[_Waiting] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Restore:
    """What a row waited for: all of its records, or why not."""

    row: RowId
    lookup: Lookup
    result: FetchResult


@dataclass(slots=True, eq=False)
class _Waiting:
    row: RowId
    lookup: Lookup
    records: tuple[RecordId, ...]
    own: Read | None = None
    open: int = 0  # reads that have not answered yet
    found: dict[RecordId, tuple[Buffer, Tier, int]] = field(default_factory=dict)
    failed: FetchResult | None = None

    def whole(self) -> FetchResult:
        """All records, in their order. What another row had read comes from memory here, without a byte read."""
        own = frozenset(self.own.records if self.own is not None else ())
        parts = [(*self.found[record], record in own) for record in self.records]
        return FetchResult(
            payloads=[payload for payload, _, _, _ in parts],
            tiers=[tier if mine else Tier.MEMORY for _, tier, _, mine in parts],
            sizes=[size if mine else 0 for _, _, size, mine in parts],
        )


class Restores:
    """`want` while rows are admitted, `start` once that is done, `arrived` for each answer."""

    def __init__(self, fetch: Fetch, post: Callable[[Read, FetchResult], None]) -> None:
        """`post` may be called from any thread, also before `start` returns."""
        self._fetch = fetch
        self._post = post
        self._reading: dict[RecordId, Read] = {}
        self._to_start: list[Read] = []

    def want(self, row: RowId, lookup: Lookup) -> None:
        """The row waits for the records of its plan."""
        assert lookup.plan is not None
        waiting = _Waiting(row, lookup, lookup.plan.records)
        missing = tuple(dict.fromkeys(r for r in waiting.records if r not in self._reading))
        reads = list(dict.fromkeys(self._reading[r] for r in waiting.records if r in self._reading))
        if missing:
            waiting.own = Read(missing)
            self._reading |= dict.fromkeys(missing, waiting.own)
            self._to_start.append(waiting.own)
            reads.append(waiting.own)
        waiting.open = len(reads)
        for read in reads:
            read.waiting.append(waiting)

    def start(self) -> None:
        """Gives the orders."""
        orders, self._to_start = self._to_start, []
        for read in orders:
            self._fetch(read.records, lambda result, read=read: self._post(read, result))  # type: ignore[misc]

    def arrived(self, read: Read, result: FetchResult) -> list[Restore]:
        """Rows that have all they waited for; what failed for a record of somebody else's is wanted again."""
        for record in read.records:
            self._reading.pop(record, None)
        done: list[Restore] = []
        for waiting in read.waiting:
            waiting.open -= 1
            if result.ok:
                parts = zip(read.records, result.payloads, result.tiers, result.sizes, strict=True)
                waiting.found |= {record: (payload, tier, size) for record, payload, tier, size in parts}
            else:
                waiting.failed = waiting.failed or result
            if waiting.open:
                continue
            if waiting.failed is None:
                done.append(Restore(waiting.row, waiting.lookup, waiting.whole()))
            elif waiting.failed.failed is None or waiting.failed.failed in waiting.records:
                done.append(Restore(waiting.row, waiting.lookup, waiting.failed))
            else:
                self.want(waiting.row, waiting.lookup)
        self.start()
        return done
