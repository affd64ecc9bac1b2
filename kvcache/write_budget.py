"""How much may be written to disk in a day. Owns the count and nothing else: no I/O, no lock, no clock of its own.

Days are those of UTC, counted from the caller's wall time in seconds. The count covers every record that is appended,
copies that cleaning makes among them, since flash wears by bytes written and not by what they were for. It lives in
memory: a restart begins a new count.
"""

from __future__ import annotations

DAY_SECONDS = 86_400.0


class WriteBudget:
    """Bytes written today against a limit; None: no limit, counted all the same."""

    def __init__(self, daily_bytes: int | None) -> None:
        self.daily_bytes = daily_bytes
        self._day = -1
        self._spent = 0

    def spent(self, now: float) -> int:
        """Bytes written since the day began."""
        self._turn(now)
        return self._spent

    def allows(self, size: int, now: float) -> bool:
        """Whether `size` more bytes, with what else is on its way counted in, stay within the limit."""
        return self.daily_bytes is None or self.spent(now) + size <= self.daily_bytes

    def count(self, size: int, now: float) -> None:
        """Bytes went to disk."""
        self._turn(now)
        self._spent += size

    def _turn(self, now: float) -> None:
        day = int(now // DAY_SECONDS)
        if day != self._day:  # also when the clock was set back: a day that is not today's counts no more
            self._day, self._spent = day, 0
