"""How a figure is printed, and how quiet the machine was meanwhile. Owns the JSON line; measures nothing itself.

One object a line on stdout, as docs/benchmarks.md explains; everything a person watches goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One metric. `ours` and `against` are medians in `unit`s of their own; `value` is what the metric says."""

    metric: str
    value: float
    unit: str
    model: str
    n: int
    ours: float | None = None
    against: float | None = None
    peer: str = ""  # what `against` is
    extra: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for."""

    quick: bool = False  # sizes for a smoke test: the figures mean nothing
    full: bool = False  # longer outputs
    model: str | None = None  # instead of the bench's own
    runs: int | None = None
    plots: Path | None = None  # folder for plots; None: draw none


def note(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def emit(figure: Figure, *, others: float | None = None) -> None:
    """Prints one figure. `others`: cores that other processes used while it was measured, where that is known."""
    line: dict[str, object] = {"metric": figure.metric, "value": rounded(figure.value), "unit": figure.unit}
    if figure.ours is not None:
        line["ours"] = rounded(figure.ours)
    if figure.against is not None:
        line["against"] = rounded(figure.against)
    if figure.peer:
        line["peer"] = figure.peer
    line |= {"model": figure.model, "n": figure.n}
    line |= {name: rounded(value) if isinstance(value, float) else value for name, value in figure.extra.items()}
    line["load"] = rounded(os.getloadavg()[0])
    if others is not None:
        line["others"] = rounded(others)
    print(json.dumps(line, ensure_ascii=False), flush=True)


def rounded(value: float) -> float:
    """Four significant digits: more would claim what no run here can show. Exact results stay exact."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, 3 - math.floor(math.log10(abs(value)))))


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def spread(values: Sequence[float]) -> list[float]:
    """Lowest and highest."""
    return [rounded(min(values)), rounded(max(values))]


class Bystanders:
    """Cores that processes other than `ours` used since the start. Linux only; elsewhere it knows nothing."""

    def __init__(self, ours: Sequence[int]) -> None:
        self._ours = (os.getpid(), *ours)
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic(), _busy_seconds(), sum(_cpu_seconds(pid) for pid in self._ours)

    def cores(self) -> float | None:
        """Mean number of cores in other hands since `restart`."""
        then, busy, own = self._began
        now = _busy_seconds()
        elapsed = time.monotonic() - then
        if now is None or busy is None or elapsed <= 0:
            return None
        mine = sum(_cpu_seconds(pid) for pid in self._ours) - own
        return max(0.0, (now - busy - mine) / elapsed)


class Quiet:
    """Waits for a moment in which others use little of the machine, as long as its patience lasts."""

    def __init__(self, ours: Sequence[int], *, patience: float) -> None:
        self._ours = ours
        self._left = patience  # seconds over all waits

    def wait(self) -> None:
        """Returns when a window of `WINDOW` seconds was quiet, or when patience is over. Always waits one window,
        which also lets MKL's threads fall asleep: they spin for 0.2 s after a product."""
        while True:
            seen = Bystanders(self._ours)
            time.sleep(WINDOW)
            busy = seen.cores()
            self._left -= WINDOW
            if busy is None or busy < QUIET_CORES or self._left <= 0:
                return


WINDOW = 0.4
QUIET_CORES = 0.25

_STAT = Path("/proc/stat")
_TICK = os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float | None:
    """Seconds that the machine's cores have worked for anybody."""
    if not _STAT.exists():
        return None
    fields = [int(x) for x in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICK


def _cpu_seconds(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    after_name = text.rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICK


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, without the pages of files and shared memory where the system tells them apart."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines.get("RssAnon", lines["VmRSS"]).split()[0]) * 1024
    import subprocess

    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True).stdout) * 1024
