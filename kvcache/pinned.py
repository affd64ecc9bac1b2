"""How much state each owner's pins keep from eviction. Owns the count alone: pins themselves are the store's.

A record that several of an owner's pinned snapshots stand on counts once for that owner. Its size is that of the moment
when it was pinned, or told again; a record that is not stored is nothing until then. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcache.records import RecordId


class PinnedBytes:
    """By owner. `size` gives a record's bytes; None if it is not stored."""

    def __init__(self, size: Callable[[RecordId], int | None]) -> None:
        self._size = size
        self._records: dict[str, dict[RecordId, list[int]]] = {}  # by owner: how many pins, bytes
        self._bytes: dict[str, int] = {}

    def of(self, owner: str) -> int:
        """Bytes that the owner's pins keep."""
        return self._bytes.get(owner, 0)

    def more(self, owner: str, records: Iterable[RecordId]) -> int:
        """Bytes that pinning `records` too would add."""
        have = self._records.get(owner, {})
        return sum(self._size(record) or 0 for record in records if record not in have)

    def add(self, owner: str, records: Iterable[RecordId]) -> None:
        """One more pin of each."""
        have = self._records.setdefault(owner, {})
        for record in records:
            have.setdefault(record, [0, 0])[0] += 1
            self._measure(owner, record)

    def remove(self, owner: str, records: Iterable[RecordId]) -> None:
        """One pin of each fewer; KeyError if there is none."""
        have = self._records[owner]
        for record in records:
            entry = have[record]
            entry[0] -= 1
            if not entry[0]:
                self._bytes[owner] -= entry[1]
                del have[record]
        if not have:
            del self._records[owner]
            del self._bytes[owner]

    def told(self, owner: str, records: Iterable[RecordId]) -> None:
        """Records that are pinned may have been stored since."""
        for record in records:
            self._measure(owner, record)

    def _measure(self, owner: str, record: RecordId) -> None:
        entry = self._records[owner][record]
        now = self._size(record) or 0
        self._bytes[owner] = self._bytes.get(owner, 0) + now - entry[1]
        entry[1] = now
