"""`python -m tests.families [NAME…] [--all] [--markdown PATH]`: the conformance suite over model families.

Each family runs in a process of its own, so that a crash or a hang is one row. Rows go to stdout, progress to stderr;
the exit code is 1 if a family differs or failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.families import families
from tests.families.runner import run_all
from tests.families.table import markdown
from tests.families.verdict import Outcome, Verdict, judge


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types; none: all of them")
    parser.add_argument("--all", action="store_true", help="every family that the installed mlx-lm ships")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the table there")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="time for one family")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)  # the child's side: one row as JSON
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(judge(options.one).to_json(), flush=True)
        # The answer is out. An orderly end may abort: MLX's workers let arrays go while the interpreter shuts down.
        os._exit(0)
    if not options.names and not options.all:
        parser.error("name families, or give --all")
    names = families.names() if options.all else options.names
    verdicts = run_all(names, limit=options.limit, jobs=options.jobs, tell=_tell)
    if options.markdown is not None:
        options.markdown.write_text(markdown(verdicts), encoding="utf-8")
    return int(any(v.outcome in (Outcome.DIFFERS, Outcome.FAILED) for v in verdicts))


def _tell(verdict: Verdict, done: int, total: int) -> None:
    print(f"{verdict.name}: {verdict.outcome.value}{': ' * bool(verdict.note)}{verdict.note}", flush=True)
    print(f"[{done}/{total}] {verdict.name} {verdict.seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
