"""The commands that talk to a server: their parsers, and what an error becomes. Each one's work is in its module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from service.cli import chat, exchange, flags, generate, health, output, plan, snapshots, top

Run = Callable[[argparse.Namespace], int]


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds every command that talks to a server; each sets `run` to this module's."""
    connection, generation = flags.connection_flags(), flags.generation_flags()
    both = [connection, generation]
    chat.add_flags(
        _add(subparsers, "chat", "talk to a model; fork and roll back as you go", chat.run, chat.EPILOG, both)
    )
    generate.add_flags(
        _add(subparsers, "generate", "generate text from a prompt or a snapshot", generate.run, generate.EPILOG, both)
    )
    group = _add(
        subparsers,
        "snapshots",
        "list, get, watch, delete, extend, export, import and copy snapshots",
        None,
        snapshots.SNAPSHOTS_EPILOG,
        [],
    )
    verbs = group.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for name, help_text, add_flags, run_verb in (
        ("list", "all snapshots, oldest first", snapshots.add_list_flags, snapshots.run_list),
        ("get", "one snapshot", snapshots.add_get_flags, snapshots.run_get),
        ("watch", "follow what is made, changed and gone", snapshots.add_watch_flags, snapshots.run_watch),
        ("delete", "drop names; state shared with others stays", snapshots.add_delete_flags, snapshots.run_delete),
        ("extend", "keep snapshots alive", snapshots.add_extend_flags, snapshots.run_extend),
        ("export", "write one to a file, for another server", exchange.add_export_flags, exchange.run_export),
        ("import", "take one in from a file", exchange.add_import_flags, exchange.run_import),
        ("copy", "bring one to another server", exchange.add_copy_flags, exchange.run_copy),
    ):
        add_flags(_add(verbs, name, help_text, run_verb, "", [connection]))
    for name, help_text, epilog, add_more, run_it in (
        (
            "fork",
            "derive several snapshots from one",
            snapshots.FORK_EPILOG,
            snapshots.add_fork_flags,
            snapshots.run_fork,
        ),
        (
            "rollback",
            "derive a snapshot of a shorter prefix",
            snapshots.ROLLBACK_EPILOG,
            snapshots.add_rollback_flags,
            snapshots.run_rollback,
        ),
        ("plan", "what a call would cost, without making it", plan.EPILOG, plan.add_flags, plan.run),
        ("top", "rows, queue, tiers and the snapshot tree, live", top.EPILOG, top.add_flags, top.run),
        ("health", "whether a server takes work: exit code 0 or 1", health.EPILOG, health.add_flags, health.run),
        ("stats", "what the server holds and has done", snapshots.STATS_EPILOG, None, snapshots.run_stats),
    ):
        parser = _add(subparsers, name, help_text, run_it, epilog, [connection])
        if add_more is not None:
            add_more(parser)


def run(args: argparse.Namespace) -> int:
    """Carries out a command. Returns 0 well, 1 for a failed call, 2 for wrong usage, 130 for Ctrl-C."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its log lines would mix with ours; statuses tell the same
    from kvfork_client import KVForkError

    try:
        return int(args.talk(args))
    except KVForkError as error:
        output.print_error(error, as_json=args.json)
        return 1
    except (flags.UsageError, UnicodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output is gone. Point stdout elsewhere, or its flush at exit fails once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_text: str,
    work: Run | None,
    epilog: str,
    parents: list[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        name,
        parents=parents,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    if work is not None:
        parser.set_defaults(talk=work)
    return parser
