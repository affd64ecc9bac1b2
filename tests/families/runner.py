"""Runs families in processes of their own. Owns time limits and what a crash is called."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.families.verdict import Outcome, Verdict

ROOT = Path(__file__).parents[2]

Tell = Callable[[Verdict, int, int], None]


def run_all(names: Iterable[str], *, limit: float, jobs: int, tell: Tell, within: float = math.inf) -> list[Verdict]:
    """One verdict for each name, in the order of names; `tell` hears of each as it comes.

    `limit` is the time of one family and `within` that of all, in seconds.
    """
    order = list(names)
    end = time.monotonic() + within
    found: dict[str, Verdict] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_one, name, limit, end) for name in order]):
            verdict = future.result()
            found[verdict.name] = verdict
            tell(verdict, len(found), len(order))
    return [found[name] for name in order]


def run_one(name: str, limit: float, end: float = math.inf) -> Verdict:
    """The verdict of a child process, or what became of it, at `end` of the monotonic clock at the latest."""
    began = time.monotonic()
    limit = max(0.0, min(limit, end - began))

    def failed(note: str) -> Verdict:
        return Verdict(name=name, outcome=Outcome.FAILED, note=note, seconds=round(time.monotonic() - began, 1))

    command = [sys.executable, "-m", "tests.families", "--one", name]
    try:
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return failed(f"not finished in {limit:.0f} s")
    if child.returncode < 0:
        return failed(f"the process died of {signal.Signals(-child.returncode).name}")
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return failed(f"exit code {child.returncode}: {last[:200]}")
    return Verdict.from_json(lines[-1])
