"""`python -m tests.conformance [LANGUAGE…] [--scenario ID] [--markdown PATH]`: every client plays every scenario.

Problems go to stdout, progress to stderr; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.conformance.drivers import DRIVERS, ToolchainMissing, prepared
from tests.conformance.play import Outcome, play
from tests.conformance.scenarios import read
from tests.conformance.table import markdown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("languages", nargs="*", metavar="LANGUAGE", help=f"of {', '.join(DRIVERS)}; none: all")
    parser.add_argument("--scenario", action="append", metavar="ID", help="only this one; repeatable")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the page there")
    options = parser.parse_args(arguments)
    unknown = set(options.languages) - set(DRIVERS)
    if unknown:
        parser.error(f"no driver for {', '.join(sorted(unknown))}")
    scenarios = [one for one in read() if options.scenario is None or one.id in options.scenario]
    outcomes: list[Outcome] = []
    for language in options.languages or DRIVERS:
        _tell(f"{language:10} building")
        try:
            driver = prepared(language)
        except ToolchainMissing as absent:
            print(absent)
            return 1
        outcomes += play(driver, scenarios, _tell)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.language} {outcome.scenario}: {problem}")
    if options.markdown is not None:
        options.markdown.write_text(markdown(scenarios, outcomes), encoding="utf-8")
    return int(any(outcome.problems for outcome in outcomes))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
