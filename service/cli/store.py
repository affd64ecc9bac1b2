"""`kvfork store`: a durable store's keys and what it holds, while no server uses it. Owns the output, no work."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.open_store import KeySource, OpenStore

_EPILOG = """\
examples:
  kvfork store check --store-dir ~/.kvfork                          what is there, what is missing; exit code 1 if any
  kvfork store owners --store-dir ~/.kvfork
  kvfork store rotate-key --store-dir ~/.kvfork                     a new key inside the store
  kvfork store rotate-key --store-dir ~/.kvfork --key-file OLD --new-key-file NEW
  kvfork store shred --store-dir ~/.kvfork --owner local            nothing of this owner can be read again
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command and its verbs."""
    parser = subparsers.add_parser(
        "store",
        help="check a durable store, change its master key, or shred an owner's data",
        description="Look after a durable store. Stop its server first.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, verb=None, parser=parser)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--store-dir", type=Path, required=True, metavar="FOLDER", help="the durable store")
    common.add_argument("--key-file", type=Path, metavar="FILE", help="its master key, as `kvfork serve` takes it")
    common.add_argument("--key-command", default="", metavar="COMMAND", help="prints its master key")
    verbs.add_parser(
        "check",
        parents=[common],
        help="list the models and durable snapshots that are there, and what is missing; changes no snapshot",
    ).set_defaults(verb=_check)
    verbs.add_parser(
        "forget-lost",
        parents=[common],
        help="give up what is missing for good: files, keys and snapshots are no longer expected",
    ).set_defaults(verb=_forget_lost)
    verbs.add_parser("owners", parents=[common], help="list whose data the store holds").set_defaults(verb=_owners)
    rotate = verbs.add_parser(
        "rotate-key", parents=[common], help="wrap every owner's key under a new master key; no record changes"
    )
    rotate.add_argument("--new-key-file", type=Path, metavar="FILE", help="the new master key")
    rotate.add_argument("--new-key-command", default="", metavar="COMMAND", help="prints the new master key")
    rotate.set_defaults(verb=_rotate)
    shred = verbs.add_parser("shred", parents=[common], help="destroy an owner's key, and with it all of its data")
    shred.add_argument("--owner", required=True, metavar="NAME", help="as `kvfork store owners` shows it")
    shred.set_defaults(verb=_shred)


def run(args: argparse.Namespace) -> int:
    """Carries out one verb. Returns 0 well, 1 failed, 2 wrong usage."""
    if args.verb is None:
        args.parser.print_help()
        return 2
    from kvcache.errors import StoreUnusable
    from service.open_store import KeySource, open_store

    if args.key_file is not None and args.key_command:
        print("error: give either --key-file or --key-command", file=sys.stderr)
        return 2
    source = KeySource(file=args.key_file, command=args.key_command)
    try:
        store = open_store(args.store_dir.expanduser(), source, create=False, forget=args.verb is _forget_lost)
        try:
            return int(args.verb(args, store, source))
        finally:
            store.close()
    except (StoreUnusable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _check(args: argparse.Namespace, store: OpenStore, source: KeySource) -> int:
    held = store.survey()
    for model in held.models:
        parts = ", ".join(f"{part} {what}" for part, what in sorted(model.parts.items()))
        print(
            f"fingerprint {model.fingerprint or 'unknown'}: {len(model.whole)} durable snapshots, {model.pinned} pinned"
        )
        print(f"  made of: {parts or 'not noted by the version that wrote them'}")
        for one in sorted(model.whole, key=lambda one: (one.note.owner, one.note.created)):
            pinned = " pinned" if one.note.pinned else ""
            print(f"  {one.note.owner} {one.note.id} {one.node.end} tokens{pinned}")
    for line in held.wrong:
        print(line)
    if held.wrong:
        print("put the files back from a backup, or give up what is missing: kvfork store forget-lost")
        return 1
    print("nothing is missing")
    return 0


def _forget_lost(args: argparse.Namespace, store: OpenStore, source: KeySource) -> int:
    held = store.survey()
    store.inventory.drop_segments(held.missing)
    store.inventory.drop_names(held.lost)
    for line in held.wrong:
        print(f"given up: {line}")
    print("nothing is missing any more")
    return 0


def _owners(args: argparse.Namespace, store: OpenStore, source: KeySource) -> int:
    for owner in store.ring.owners():
        print(owner)
    return 0


def _rotate(args: argparse.Namespace, store: OpenStore, source: KeySource) -> int:
    from kvcache.keys import drop_own_master_key, replace_own_master_key
    from service.open_store import KEYS, KeySource, master_key

    keys = args.store_dir.expanduser() / KEYS
    new = KeySource(file=args.new_key_file, command=args.new_key_command)
    if new.file is not None and new.command:
        print("error: give either --new-key-file or --new-key-command", file=sys.stderr)
        return 2
    if new == KeySource():
        if source != KeySource():
            print("error: say where the new key is: --new-key-file or --new-key-command", file=sys.stderr)
            return 2
        replace_own_master_key(keys, store.ring)
        print("the store has a new master key of its own")
        return 0
    key, _ = master_key(keys, store.directory.store_id, new)
    store.ring.rewrap(key)
    if source == KeySource():
        drop_own_master_key(keys)
    print("the new master key opens the store, the old one does not any more")
    return 0


def _shred(args: argparse.Namespace, store: OpenStore, source: KeySource) -> int:
    if not store.ring.shred(args.owner):
        print(f"error: the store holds no key of owner {args.owner!r}", file=sys.stderr)
        return 1
    print(f"the key of {args.owner} is destroyed; its records cannot be read, and are removed as room is needed")
    return 0
