"""`make soak MINUTES=30`: mixed traffic against real servers of tiny models, with a look into them whenever idle.

Progress goes to stderr; one JSON object on stdout says what was done, how calls ended, and what was wrong. Exit code 1
if anything was: an end that is not planned, a row or hold left over, a canary that says something else, memory with a
trend.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.e2e.live import LiveServer, generate, greedy, prompt_of, raw, until
from tests.soak.traffic import PLANNED, Caller

MODELS = ("tiny-gemma3-w64", "tiny-llama", "tiny-qwen3_5")
CALLERS = 10
LEAST_ROUNDS, LEAST_ACTS = 2, 3  # of each model, and of each caller in a round: however slow the machine is
FLAGS = ("--max-batch", "4", "--max-queue", "64", "--memory-bytes", "16MiB", "--disk-bytes", "64MiB")
NOTHING_LEFT = ("sequences", "scheduled", "rows", "row_bytes", "running", "saving", "pinned", "held", "uses")
MIB = 1 << 20
FLAT = 32 * MIB  # what the resident size may drift by between the second and the last third of a run


@dataclass
class Run:
    """One model's share of the soak."""

    model: str
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: int = 0
    rounds: int = 0
    resident: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def soak(model: str, seconds: float, round_seconds: float, seed: int) -> Run:
    """Rounds of traffic; after each the server must be as before."""
    run = Run(model)
    server = LiveServer(model, *FLAGS, inside=True, env={"TESTS_UNHURT": "1"})  # prompts are random
    try:
        canary = greedy(raw(prompt_of(300, 1)), tokens=16)
        expected = generate(server, canary).ids
        until_time = time.monotonic() + seconds
        while run.rounds < LEAST_ROUNDS or time.monotonic() < until_time:
            length = max(0.0, min(round_seconds, until_time - time.monotonic()))
            callers = [
                Caller(server, random.Random(f"{seed} {run.rounds} {i}"), f"round-{run.rounds}-{i}")
                for i in range(CALLERS)
            ]
            with ThreadPoolExecutor(CALLERS) as pool:
                for error in pool.map(lambda caller, length=length: busy(caller, length), callers):
                    if error:
                        run.wrong.append(error)
            for caller in callers:
                run.ends.update(caller.ends)
                run.tokens += caller.tokens
            run.rounds += 1
            look(server, run, canary, expected)
            print(
                f"{model}: round {run.rounds}, {run.ends.total()} calls, {run.tokens} tokens, "
                f"{run.resident[-1] / MIB:.0f} MiB resident, {len(run.wrong)} wrong",
                file=sys.stderr,
                flush=True,
            )
        log = server.complaints()
        if log:
            run.wrong.append(f"the log complains: {log[-2000:]}")
    except BaseException:
        print(f"the server's log:\n{server.log.read_text()[-20_000:]}", file=sys.stderr)
        raise
    finally:
        server.close()
    drift = trend(run.resident)
    if drift > FLAT:
        run.wrong.append(f"resident memory grows: {drift / MIB:.0f} MiB from the second to the last third")
    run.wrong += [
        f"unplanned end: {kind}: {end} ({count})" for (kind, end), count in run.ends.items() if end not in PLANNED[kind]
    ]
    return run


def busy(caller: Caller, seconds: float) -> str:
    """Acts until time is over, but a few times at least; what went wrong, if anything."""
    until_time = time.monotonic() + seconds
    try:
        for number in itertools.count():
            if number >= LEAST_ACTS and time.monotonic() >= until_time:
                break
            caller.act()
    except Exception as error:  # whatever it is, the soak goes on and says so at its end
        return f"{caller.name}: {type(error).__name__}: {error}"[:500]
    return ""


def look(server: LiveServer, run: Run, canary: object, expected: list[int]) -> None:
    """The invariants of an idle server."""
    server.idle()
    if generate(server, canary).ids != expected:  # type: ignore[arg-type]
        run.wrong.append(f"round {run.rounds}: the canary says something else")
    server.idle()
    try:
        until(lambda: not left(server), what="everything to be let go of", patience=20)
    except AssertionError:
        run.wrong.append(f"round {run.rounds}: left over: {left(server)}")
    report = server.report()
    run.objects.append(report["objects"])
    run.resident.append(server.resident_bytes)


def left(server: LiveServer) -> dict[str, int]:
    report = server.report()
    return {name: report[name] for name in NOTHING_LEFT if report[name]}


def trend(readings: list[int]) -> float:
    """From the median of the second third to that of the last; 0 if there are too few."""
    third = len(readings) // 3
    if third < 2:
        return 0.0
    return statistics.median(readings[-third:]) - statistics.median(readings[third : 2 * third])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="in all, shared by the models")
    parser.add_argument("--round", type=float, default=10.0, help="seconds of traffic between two looks")
    parser.add_argument("--model", action="append", help="a model; may be given more than once")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    models = args.model or list(MODELS)
    runs = [soak(model, args.minutes * 60 / len(models), args.round, args.seed) for model in models]
    print(
        json.dumps({"minutes": args.minutes, "ok": not any(run.wrong for run in runs), "runs": list(map(told, runs))})
    )
    return int(any(run.wrong for run in runs))


def told(run: Run) -> dict[str, object]:
    """A run as JSON."""
    ends: dict[str, dict[str, int]] = {}
    for (kind, end), count in sorted(run.ends.items()):
        ends.setdefault(kind, {})[end] = count
    return {
        "model": run.model,
        "rounds": run.rounds,
        "calls": run.ends.total(),
        "tokens": run.tokens,
        "ends": ends,
        "resident_mib": [round(size / MIB) for size in (run.resident[:1] + run.resident[-1:])],
        "drift_mib": round(trend(run.resident) / MIB, 1),
        "objects": run.objects[:1] + run.objects[-1:],
        "wrong": run.wrong,
    }


if __name__ == "__main__":
    sys.exit(main())
