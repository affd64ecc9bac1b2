"""Runs families in processes of their own. Owns time limits and what a crash is called."""

from __future__ import annotations

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


def run_all(names: Iterable[str], *, limit: float, jobs: int, tell: Tell) -> list[Verdict]:
    """One verdict for each name, in the order of names; `tell` hears of each as it comes."""
    order = list(names)
    found: dict[str, Verdict] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_one, name, limit) for name in order]):
            verdict = future.result()
            found[verdict.name] = verdict
            tell(verdict, len(found), len(order))
    return [found[name] for name in order]


def run_one(name: str, limit: float) -> Verdict:
    """The verdict of a child process, or what became of it. `limit` is in seconds."""
    began = time.monotonic()

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
