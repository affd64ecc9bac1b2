"""`kvfork token new`: makes a bearer token for an owner. Nothing else ever sees it in the clear."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_EPILOG = """\
examples:
  kvfork token new alice --to tokens > alice.token     the file that `kvfork serve --tokens tokens` reads
  kvfork token new ops --admin                         prints the token, and on stderr the line for the file

A second token for an owner replaces the first without a gap: add it, give it out, then take the old line away. The
server reads the file again by itself.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command and its verb."""
    parser = subparsers.add_parser(
        "token",
        help="make a token for an owner",
        description="Make bearer tokens for `kvfork serve --tokens`.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, verb=None, parser=parser)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    new = verbs.add_parser("new", help="print a new token, once")
    new.add_argument("owner", metavar="OWNER", help="whose snapshots it opens")
    new.add_argument("--admin", action="store_true", help="it may also see and trim the whole store")
    new.add_argument("--to", type=Path, metavar="FILE", help="add the line to this tokens file")
    new.set_defaults(verb=_new)


def run(args: argparse.Namespace) -> int:
    """Carries out one verb. Returns 0 well, 1 failed, 2 wrong usage."""
    if args.verb is None:
        args.parser.print_help()
        return 2
    return int(args.verb(args))


def _new(args: argparse.Namespace) -> int:
    from service.auth.tokens import new_token

    try:
        token, line = new_token(args.owner, admin=args.admin)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.to is not None:
        try:
            _append(args.to.expanduser(), f"{line}\n")
        except OSError as error:
            print(f"error: {args.to}: {error.strerror or error}", file=sys.stderr)
            return 1
    else:
        print(f"add this line to the tokens file:\n{line}", file=sys.stderr)
    print(token)
    return 0


def _append(path: Path, line: str) -> None:
    """In one write, so that a server that looks meanwhile sees all of the line or none of it."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        ended = not size or os.pread(descriptor, 1, size - 1) == b"\n"
        os.write(descriptor, (line if ended else f"\n{line}").encode())
    finally:
        os.close(descriptor)
