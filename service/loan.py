"""Memory that kept state has given up to running rows. Owns the sum on loan: the scheduler decides, the store pays."""

from __future__ import annotations

from kvcache.store import TieredStore


class Loan:
    """Of one store, in bytes. Engine thread only."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._bytes = 0

    def raise_to(self, size: int) -> int:
        """Borrows so much in all, at least; how much is missing."""
        return 0 if size <= self._bytes else self.set(size)

    def set(self, size: int) -> int:
        """Sets the loan; how much is missing, and then it is what it was."""
        if size == self._bytes:
            return 0
        missing = self._store.lend(size)
        if missing and size > self._bytes:
            self._store.lend(self._bytes)
            return missing
        self._bytes = size
        return 0
