"""`kvfork models`: list, get, path, verify. Owns the output; the work is in service.models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.models.status import ModelStatus

_NAME_HELP = "a name that `kvfork models list` shows, a model folder, or a hub id"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command and its four verbs."""
    parser = subparsers.add_parser(
        "models", help="list, get and check models", description="List, get and check models."
    )
    parser.set_defaults(run=run, verb=None, parser=parser)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of text")

    verbs.add_parser("list", parents=[common], help="the known models and which are here").set_defaults(verb=_list)
    get = verbs.add_parser("get", parents=[common], help="fetch, convert and check a model, then print its folder")
    get.add_argument("name", help=_NAME_HELP)
    get.add_argument("--accept-gemma-terms", action="store_true", help="accept the Gemma Terms of Use (for gemma3)")
    get.add_argument("--again", action="store_true", help="make it anew even if it is here")
    get.set_defaults(verb=_get)
    path = verbs.add_parser("path", parents=[common], help="print the folder of a model that is here")
    path.add_argument("name", help=_NAME_HELP)
    path.set_defaults(verb=_path)
    verify = verbs.add_parser("verify", parents=[common], help="compare every file with its recorded checksum")
    verify.add_argument("name", help=_NAME_HELP)
    verify.set_defaults(verb=_verify)


def run(args: argparse.Namespace) -> int:
    """Carries out one verb. Returns 0 well, 1 failed, 2 no verb given."""
    if args.verb is None:
        args.parser.print_help()
        return 2
    from service.models import ModelError

    try:
        args.verb(args)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _list(args: argparse.Namespace) -> None:
    from service.models.registry import DEFAULT
    from service.models.status import statuses

    found = statuses()
    if args.json:
        print(json.dumps([_as_json(status) for status in found], indent=2))
        return
    rows = [("NAME", "STATE", "SIZE", "LICENSE", "WHAT IT IS")]
    for status in found:
        name = f"{status.name} *" if status.name == DEFAULT else status.name
        size = f"{status.size / 1e6:,.1f} MB" if status.size else "-"
        rows.append((name, status.state, size, status.license, status.summary))
    _table(rows)
    print("\n* default. `kvfork models get NAME` fetches one; `kvfork serve --model` gets what it needs by itself.")


def _get(args: argparse.Namespace) -> None:
    from service.models import KNOWN, ModelError, ensure, resolve

    if args.again and args.name not in KNOWN:
        raise ModelError(f"--again makes a known model anew, and {args.name} is not one of {', '.join(KNOWN)}")
    accept = True if args.accept_gemma_terms else None
    if args.name in KNOWN:
        path = ensure(args.name, accept_terms=accept, again=args.again)
    else:
        path = resolve(args.name)
    print(json.dumps({"name": args.name, "path": str(path)}) if args.json else path)


def _path(args: argparse.Namespace) -> None:
    from service.models.status import find

    path = find(args.name)
    print(json.dumps({"name": args.name, "path": str(path)}) if args.json else path)


def _verify(args: argparse.Namespace) -> None:
    from service.models import read_manifest, verify
    from service.models.status import find

    path = find(args.name)
    digest = verify(path)
    recorded = read_manifest(path) is not None
    if args.json:
        print(json.dumps({"name": args.name, "path": str(path), "sha256": digest, "compared": recorded}))
    elif recorded:
        print(f"ok: every file of {path} is the one recorded\ncontents sha256 {digest}")
    else:
        print(f"ok: {path} looks whole; it has no recorded checksums to compare with\ncontents sha256 {digest}")


def _as_json(status: ModelStatus) -> dict[str, Any]:
    return {
        "name": status.name,
        "state": status.state,
        "path": str(status.path) if status.path else None,
        "bytes": status.size,
        "license": status.license,
        "summary": status.summary,
    }


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
