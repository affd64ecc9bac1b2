"""`python -m tests.bench NAME... | all`: runs benchmarks, prints one JSON object a line on stdout.

Owns the command line. What each one measures, and how to read it, is in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path

from tests.bench.report import Options, note

BENCHES = {
    "rollback": "rollback and a new turn against a cold run and the peer (gemma3)",
    "reasoning": "prompt tokens computed over 20 turns without their reasoning, beside the peer (gemma3)",
    "chat": "concurrent chats beside the peer (gemma3)",
    "constraint": "free chats beside constrained ones (gemma3)",
    "fair": "a chat beside a long prompt, and short prompts behind one (gemma3)",
    "image": "a picture's first and later TTFT, and images beside text (a Qwen3.5 with vision, built here)",
    "memory": "memory of many long snapshots and of a fork (tiny-gemma3)",
    "step": "where a decode step's time goes, beside reading every weight once (gemma3)",
    "batch": "how decoding four rows together differs from one alone (gemma3 and every tiny model)",
    "store": "the record store against plain files",
    "health": "how long a health check takes while the server is full (smollm2)",
    "guarded": "what TLS, tokens and metrics cost together (smollm2)",
    "rpc": "what a token and a first token cost beyond the engine (tiny-llama)",
}

_PLOTS = Path(__file__).parents[2] / "docs" / "plots"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Benchmarks. One JSON object a line on stdout, progress on stderr.",
        epilog="\n".join(f"  {name:10} {text}" for name, text in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=[*BENCHES, "all"], metavar="NAME", help="one or more, or all")
    parser.add_argument("--quick", action="store_true", help="small sizes on a tiny model, to see that it runs")
    parser.add_argument("--full", action="store_true", help="longer outputs where a bench has them")
    parser.add_argument("--model", help="another model than the bench's own")
    parser.add_argument("--runs", type=int, help="how often to repeat")
    parser.add_argument("--no-plots", action="store_true", help="draw nothing under docs/plots")
    args = parser.parse_args(arguments)
    if args.runs is not None and args.runs < 1:
        parser.error("--runs must be at least 1")
    options = Options(
        quick=args.quick,
        full=args.full,
        model=args.model,
        runs=args.runs,
        plots=None if args.no_plots or args.quick else _PLOTS,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an orderly exit, which ends the servers as well
    names = list(BENCHES) if "all" in args.names else args.names
    for name in names:
        began = time.monotonic()
        note(f"{name}: {BENCHES[name]}")
        importlib.import_module(f"tests.bench.{name}").run(options)
        note(f"{name}: done in {time.monotonic() - began:.0f} s, load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
