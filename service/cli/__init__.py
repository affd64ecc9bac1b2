"""`kvfork`: the command line. Owns the list of commands; each command's module owns its flags.

Commands that talk to a server need the base install only; `serve`, `models`, `doctor` and `demo` need the `server`
extra, and say so where it is missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from service.extras import install
from service.limits import no_core_dumps

_COMMANDS = ("serve", "talk", "gateway", "models", "store", "token", "config", "doctor", "demo")

_EPILOG = """\
first steps:
  kvfork demo                     one server, one story: generate, fork, roll back, with receipts
  kvfork serve                    serve the default model on 127.0.0.1:50051
  kvfork chat                     talk to it; /back rolls the last turn back
  kvfork generate "Tell me a joke" --save
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the process's exit code: 0 well, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="kvfork",
        description="Run MLX models over gRPC, where the state after a prefix can be named, forked and rolled back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in _COMMANDS:
        module = importlib.import_module(f"service.cli.{name}")
        getattr(module, "add_parsers" if name == "talk" else "add_parser")(subparsers)
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(f"kvfork {version('kvfork')}")
        return 0
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    no_core_dumps()
    try:
        return int(args.run(args))
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("service", "kvcache", "kvfork", "kvfork_client"):
            raise
        print(f"error: {error.name} is not installed: {install('server')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kvfork … | head`: whoever read has read enough
        sys.stderr.close()
        return 0
