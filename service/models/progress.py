"""Progress on standard error. Owns how often it is said; the workers only say how far they are."""

import sys
import time
from typing import Protocol


class Progress(Protocol):
    """Hears what a long job is doing."""

    def step(self, text: str) -> None:
        """A new step begins, or something worth a line happened."""

    def bytes(self, text: str, done: int, total: int) -> None:
        """A step with a known size is at `done` of `total` bytes; may be called as often as one likes."""


class Quiet:
    """Says nothing."""

    def step(self, text: str) -> None: ...

    def bytes(self, text: str, done: int, total: int) -> None: ...


class StderrProgress:
    """One line that is rewritten on a terminal, a line every few seconds elsewhere (logs, CI)."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause = 0.2 if self._terminal else 5.0
        self._spoke_at = 0.0
        self._open = False

    def step(self, text: str) -> None:
        self._end_line()
        self._write(text + "\n")
        self._spoke_at = time.monotonic()

    def bytes(self, text: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._spoke_at < self._pause and not (self._open and done >= total):
            return
        self._spoke_at = now
        line = f"  {text}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB ({min(1.0, done / max(1, total)):.0%})"
        if self._terminal:
            self._write(f"\r{line}\x1b[K")
            self._open = True
        else:
            self._write(line + "\n")

    def _end_line(self) -> None:
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
