"""`kvfork snapshots | fork | rollback | stats`: looking at what a server keeps, and deriving from it."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

from service.cli import flags, output
from service.cli.opening import appended, first_taken

if TYPE_CHECKING:
    from kvfork_client import CacheStats, Snapshot

SNAPSHOTS_EPILOG = """\
examples:
  kvfork snapshots list --label task=42
  kvfork snapshots get plan-0001
  kvfork snapshots watch --label task=42               until Ctrl-C
  kvfork snapshots extend plan-0001 plan-0002 --ttl 3600
  kvfork snapshots delete plan-0001 --descendants
  kvfork snapshots copy plan-0001 --to 127.0.0.1:50052
"""
FORK_EPILOG = """\
examples:
  kvfork fork plan-0001 --count 3                      three names for the same state
  kvfork fork plan-0001 --append "Be bold." --append "Be careful."
  kvfork fork plan-0001 --raw --append " red" --append " blue"
"""
ROLLBACK_EPILOG = """\
examples:
  kvfork rollback plan-0001 --to 512                   keep the first 512 tokens
  kvfork rollback plan-0001 --drop 100                 drop the last 100
  kvfork rollback plan-0002 --ancestor plan-0001       back to a snapshot it came from
  kvfork rollback plan-0001 --to 700 --down            cut at the nearest stored point, compute nothing
"""
STATS_EPILOG = """\
examples:
  kvfork stats
  kvfork stats --json | jq .cache.memory_bytes
"""


def add_list_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--label", action="append", default=[], type=flags.label, metavar="K=V", help="only with it")
    parser.add_argument("--parent", metavar="NAME", help="only children of this snapshot")


def run_list(args: argparse.Namespace) -> int:
    parent = None if args.parent is None else flags.full_name(args.parent)
    with flags.connect(args) as client:
        found = client.list_snapshots(labels=dict(args.label), parent=parent)
        if args.json:
            for snapshot in found:
                output.print_json(snapshot=snapshot)
            return 0
        infos = [snapshot.info for snapshot in found]
    output.say(output.snapshot_table(infos) if infos else "no snapshots")
    return 0


def add_watch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--label", action="append", default=[], type=flags.label, metavar="K=V", help="only with it")
    parser.add_argument("--resume", default="", metavar="TOKEN", help="go on behind this resume token; see --json")


def run_watch(args: argparse.Namespace) -> int:
    """Prints until Ctrl-C."""
    from kvfork_client import Changed, Gone

    with flags.connect(args) as client:
        watch = client.watch(labels=dict(args.label), resume_token=args.resume, timeout=args.timeout)
        with watch:
            for event in watch:
                if args.json:
                    match event:
                        case Changed(snapshot):
                            output.print_json(changed=snapshot, resume_token=watch.resume_token)
                        case Gone(name, reason):
                            output.print_json(gone=name, reason=reason, resume_token=watch.resume_token)
                        case _:
                            output.print_json(synced=True, resume_token=watch.resume_token)
                else:
                    output.say(output.watch_line(event), flush=True)
    return 0


def add_get_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="snapshots/ID or ID")
    parser.add_argument("--tokens", action="store_true", help="print its token ids too")


def run_get(args: argparse.Namespace) -> int:
    with flags.connect(args) as client:
        snapshot = client.get_snapshot(flags.full_name(args.name))
        tokens = snapshot.tokens() if args.tokens else None
    if args.json:
        output.print_json(snapshot=snapshot, **({} if tokens is None else {"token_ids": tokens}))
        return 0
    info = snapshot.info
    pairs = [
        ("name", info.name),
        ("parent", info.parent or "-"),
        ("model", info.model),
        ("tokens", f"{info.token_count:,} ({info.checkpointed_tokens:,} in the checkpoint store)"),
        ("state", info.residency.name.lower()),
        ("durable", "yes" if info.durable else "no"),
        ("pinned", "yes" if info.pinned else "no"),
        ("expires", "-" if info.expire_time is None else info.expire_time.isoformat(timespec="seconds")),
        ("labels", " ".join(f"{key}={value}" for key, value in sorted(info.labels.items())) or "-"),
        ("own bytes", output.size(info.exclusive_bytes)),
        ("in use by", f"{info.active_uses} calls"),
        ("prefix hash", info.prefix_hash.hex() or "-"),
    ]
    if tokens is not None:
        pairs.append(("token ids", " ".join(map(str, tokens))))
    output.say(output.facts(pairs))
    return 0


def add_delete_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--descendants", action="store_true", help="and all unpinned snapshots that came from it")
    parser.add_argument("--stop-active", action="store_true", help="stop generations that run from it")
    parser.add_argument("--missing-ok", action="store_true", help="a missing name is no error")


def run_delete(args: argparse.Namespace) -> int:
    with flags.connect(args) as client:
        for name in args.names:
            deleted = client.delete_snapshot(
                flags.full_name(name),
                descendants=args.descendants,
                stop_active=args.stop_active,
                allow_missing=args.missing_ok,
            )
            for gone in deleted:
                if args.json:
                    output.print_json(deleted=gone)
                else:
                    output.say(f"deleted {gone}")
    return 0


def add_extend_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument(
        "--ttl", type=flags.positive_seconds, metavar="S", help="idle seconds to live from now on (default: its own)"
    )


def run_extend(args: argparse.Namespace) -> int:
    """1 if a name is missing."""
    with flags.connect(args) as client:
        extended = client.extend_snapshots([flags.full_name(name) for name in args.names], args.ttl)
    if args.json:
        for info in extended.snapshots:
            output.print_json(snapshot=info)
        for name in extended.missing:
            output.print_json(missing=name)
    else:
        if extended.snapshots:
            output.say(output.snapshot_table(extended.snapshots))
        for name in extended.missing:
            output.say(f"missing: {name}")
    return 1 if extended.missing else 0


def add_fork_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the snapshot to fork")
    branches = parser.add_mutually_exclusive_group(required=True)
    branches.add_argument("--count", "-n", type=flags.positive_count, metavar="N", help="make N plain copies")
    branches.add_argument(
        "--append", action="append", metavar="TEXT", help="one child that goes on with this text; repeatable"
    )
    flags.form_flags(parser)
    flags.keep_flags(parser)


def run_fork(args: argparse.Namespace) -> int:
    with flags.connect(args) as client:
        parent, options = client.snapshot(flags.full_name(args.name)), flags.save_options(args)
        if args.append:
            forms = zip(*(appended(flags.as_turn(text, raw=args.raw)) for text in args.append), strict=True)
            attempts = [functools.partial(parent.fork, list(form), options=options) for form in forms]
            _, children = first_taken(attempts)
        else:
            children = parent.fork(args.count, options=options)
    if args.json:
        for child in children:
            output.print_json(snapshot=child)
        output.print_json(usage=children.usage)
        return 0
    output.say(output.snapshot_table(child.info for child in children))
    print(output.receipt(children.usage))
    return 0


def add_rollback_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the snapshot to cut")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", type=flags.positive_count, metavar="N", help="keep this many tokens")
    target.add_argument("--drop", type=flags.positive_count, metavar="N", help="drop this many tokens from the end")
    target.add_argument("--ancestor", metavar="NAME", help="go back to this ancestor")
    parser.add_argument("--down", action="store_true", help="cut at the nearest stored point at or before it")
    parser.add_argument(
        "--release",
        choices=("none", "source", "abandoned"),
        default="none",
        help="what to let go of: nothing (default), the source's name, or all that came after the cut",
    )
    parser.add_argument(
        "--max-recompute", type=flags.count, metavar="N", help="fail rather than compute more tokens again"
    )
    parser.add_argument("--save", default="", metavar="ID", help="a name for the result")
    flags.keep_flags(parser)


def run_rollback(args: argparse.Namespace) -> int:
    from kvfork_client import Release, Rounding

    with flags.connect(args) as client:
        result: Snapshot = client.snapshot(flags.full_name(args.name)).rollback(
            token_count=args.to,
            drop_tokens=args.drop,
            ancestor=None if args.ancestor is None else flags.full_name(args.ancestor),
            rounding=Rounding.DOWN if args.down else Rounding.EXACT,
            release=Release[args.release.upper()],
            options=flags.save_options(args, args.save),
            max_recompute_tokens=args.max_recompute,
        )
    if args.json:
        output.print_json(snapshot=result, released=result.released, usage=result.usage)
        return 0
    output.say(output.snapshot_table([result.info]))
    for name in result.released:
        output.say(f"released {name}")
    if result.usage is not None:
        print(output.receipt(result.usage))
    return 0


def run_stats(args: argparse.Namespace) -> int:
    with flags.connect(args) as client:
        server, models, cache = client.server_info(), client.models(), client.cache_stats()
    if args.json:
        output.print_json(server=server, models=models, cache=cache)
        return 0
    output.say(
        output.facts(
            [
                ("server", f"{server.instance}, version {server.version}, up {output.span(server.uptime)}"),
                *(
                    (
                        "model",
                        f"{model.name.removeprefix('models/')}: {model.state.name.lower()}, "
                        f"{model.context_tokens:,} tokens of context",
                    )
                    for model in models
                ),
                ("running", f"{cache.active_sequences} sequences, {cache.queued_calls} calls waiting"),
                (
                    "snapshots",
                    f"{cache.memory_snapshots} in memory, {cache.disk_snapshots} on disk, "
                    f"{cache.token_snapshots} as tokens only",
                ),
            ]
            + ([("counted", f"what is {cache.owner}'s")] if cache.owner else _shared(cache))
            + ([("state", "draining: takes no new work")] if server.draining else [])
        )
    )
    return 0


def _shared(cache: CacheStats) -> list[tuple[str, str]]:
    """What belongs to all owners: told to admins alone."""
    bytes_left, disk_left = output.size(cache.memory_limit_bytes), output.size(cache.disk_limit_bytes)
    looked_at = max(1, cache.prompt_tokens)
    return [
        ("memory", f"{output.size(cache.memory_bytes)} of {bytes_left}"),
        ("disk", f"{output.size(cache.disk_bytes)} of {disk_left}"),
        (
            "prompt tokens",
            f"{cache.prompt_tokens:,}: {cache.cached_tokens:,} restored "
            f"({cache.cached_tokens / looked_at:.0%}), {cache.recomputed_tokens:,} recomputed",
        ),
        (
            "checkpoints",
            f"{cache.checkpoints_written:,} written, {cache.checkpoints_read:,} read, "
            f"{cache.checkpoints_corrupt:,} corrupt, every {cache.checkpoint_interval} tokens",
        ),
        ("evictions", f"{cache.evictions:,}"),
        ("writing", _writing(cache)),
    ]


def _writing(cache: CacheStats) -> str:
    """The policy, what was left out and why, and how the disk is."""
    limit = cache.daily_write_limit_bytes
    today = f"{output.size(cache.written_today_bytes)} today" + (
        f" of {output.size(limit)}" if limit is not None else ""
    )
    parts = [cache.checkpoint_policy or "unknown", today]
    skipped = sorted(cache.checkpoints_skipped.items())
    if skipped:
        parts.append("skipped " + ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in skipped))
    if cache.write_errors:
        paused = f", now paused: {cache.last_write_error}" if cache.writes_paused else ""
        parts.append(f"{cache.write_errors:,} errors{paused}")
    return "; ".join(parts)
