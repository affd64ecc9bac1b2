"""`kvfork top`: rows, queue, tiers and the snapshot tree of a server, live. Plain text once with `--once` or in a pipe.

Built from GetServerInfo, GetCacheStats and ListSnapshots. `picture` is pure: two looks and a width in, lines out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.cli import flags, output

if TYPE_CHECKING:
    from kvfork_client import CacheStats, Client, ModelInfo, Row, ServerInfo, SnapshotInfo

EPILOG = """\
q or Ctrl-C ends it.

examples:
  kvfork top
  kvfork top --once | head -20
  kvfork top --every 0.5 --snapshots 50
"""
MOST_LISTED = 1000  # snapshots that are asked for at a look
CLEAR, HIDE, SHOW = "\033[H\033[J", "\033[?25l\033[?1049h", "\033[?1049l\033[?25h"
BAR = 20  # characters
ENDS = "q ends"  # the last line of the screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a server said at one moment."""

    at: float  # seconds on a clock of one's own
    server: ServerInfo
    models: Sequence[ModelInfo]
    cache: CacheStats
    snapshots: Sequence[SnapshotInfo]
    more: bool  # there are more snapshots than were asked for


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", type=flags.positive_seconds, default=1.0, metavar="S", help="seconds between looks")
    parser.add_argument("--once", action="store_true", help="print one look and end; so does output to a pipe")
    parser.add_argument("--snapshots", type=flags.count, default=20, metavar="N", help="most lines of the tree")


def run(args: argparse.Namespace) -> int:
    """Draws until q or Ctrl-C."""
    with flags.connect(args) as client:
        if args.json:
            seen = look(client)
            output.print_json(server=seen.server, cache=seen.cache, snapshots=seen.snapshots)
            return 0
        if args.once or not sys.stdout.isatty():
            print("\n".join(picture(look(client), None, lines=args.snapshots)))
            return 0
        print(HIDE, end="")
        try:
            with _keys() as keys:
                before = None
                while True:
                    now = look(client)
                    width, height = shutil.get_terminal_size()
                    lines = [*picture(now, before, lines=args.snapshots)[: height - 3], "", ENDS]
                    print(CLEAR + "\n".join(line[:width] for line in lines), end="", flush=True)
                    before = now
                    if _pressed_q(keys, args.every):
                        return 0
        except KeyboardInterrupt:
            return 0
        finally:
            print(SHOW, end="", flush=True)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The terminal's keys as they are pressed, unseen; None where stdin is none. Afterwards it is as it was."""
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _pressed_q(keys: int | None, seconds: float) -> bool:
    """Waits; True as soon as q is pressed, or the terminal is gone. Other keys mean nothing."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left)
        elif select.select([keys], [], [], left)[0]:
            try:
                typed = os.read(keys, 256)
            except OSError:
                return True
            if not typed or b"q" in typed.lower():
                return True
    return False


def look(client: Client) -> Look:
    """Asks the server. Raises KVForkError."""
    infos: list[SnapshotInfo] = []
    more = False
    for snapshot in client.list_snapshots(page_size=MOST_LISTED):
        if len(infos) == MOST_LISTED:
            more = True
            break
        infos.append(snapshot.info)
    return Look(
        at=time.monotonic(),
        server=client.server_info(),
        models=client.models(),
        cache=client.cache_stats(),
        snapshots=infos,
        more=more,
    )


def picture(now: Look, before: Look | None, *, lines: int) -> list[str]:
    """The screen's lines; rates need two looks. `lines`: most of the snapshot tree."""
    server, cache = now.server, now.cache
    model = ", ".join(f"{m.name.removeprefix('models/')} {m.state.name.lower()}" for m in now.models)
    running = f"{cache.active_sequences} of {server.limits.max_batch} rows"
    phases = [
        f"{count} {name}"
        for name, count in (
            ("restoring", cache.restoring_rows),
            ("prefill", cache.prefilling_rows),
            ("decode", cache.decoding_rows),
            ("saving", cache.saving_rows),
        )
        if count
    ]
    total = cache.prompt_tokens or 1
    head = [
        f"kvfork {server.version}  {model}  {server.instance}  up {output.span(server.uptime)}"
        + ("  DRAINING" if server.draining else ""),
        "",
        f"running  {running}{': ' + ', '.join(phases) if phases else ''};  {cache.queued_calls} of "
        f"{server.limits.max_queue} waiting{_rates(now, before)}",
        _tier("active", cache.active_bytes, cache.active_limit_bytes),
        _tier("memory", cache.memory_bytes, cache.memory_limit_bytes),
        _tier("disk", cache.disk_bytes, cache.disk_limit_bytes)
        + (f"  {output.size(cache.pending_bytes)} on its way" if cache.pending_bytes else ""),
        f"prompts  {cache.prompt_tokens:,} tokens: {cache.cached_tokens / total:.0%} restored, "
        f"{cache.recomputed_tokens:,} recomputed;  {cache.completion_tokens:,} generated",
    ]
    trouble = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(cache.checkpoints_skipped.items())]
    if trouble:
        head.append(f"skipped  {', '.join(trouble)}")
    if cache.write_errors:
        head.append(f"errors   {cache.write_errors:,} writes failed: {cache.last_write_error}")
    whole = [*head, "", *_rows(cache.rows), "", *_tree(now, lines)]
    # Labels are anybody's text: what would move the cursor is not for this terminal.
    return ["".join(c if c.isprintable() else "?" for c in line) for line in whole]


def _rates(now: Look, before: Look | None) -> str:
    if before is None or now.at <= before.at or now.server.boot_id != before.server.boot_id:
        return ""
    seconds = now.at - before.at
    new = (now.cache.completion_tokens - before.cache.completion_tokens) / seconds
    return f";  {new:.1f} new tokens/s"


def _tier(name: str, used: int, limit: int) -> str:
    share = min(1.0, used / limit) if limit else 0.0
    full = round(share * BAR)
    return f"{name:<8} [{'#' * full}{'.' * (BAR - full)}] {output.size(used)} of {output.size(limit)}"


def _rows(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["no rows of yours"]
    header = ("ROW", "PHASE", "PROMPT", "NEW", "AGE", "FROM")
    cells = [
        (
            row.generation.removeprefix("generations/")[:12] or "snapshot",
            row.phase.name.lower(),
            f"{row.done_tokens:,}/{row.prompt_tokens:,}",
            f"{row.completion_tokens:,}",
            f"{row.age:.1f} s",
            row.parent.removeprefix("snapshots/") or "-",
        )
        for row in rows
    ]
    return output.table(header, cells).splitlines()


def _tree(now: Look, most: int) -> list[str]:
    cache, infos = now.cache, now.snapshots
    where = (
        f"{cache.memory_snapshots} in memory, {cache.disk_snapshots} on disk, {cache.token_snapshots} as tokens only"
    )
    found = list(_branches(infos))
    shown = [f"{prefix}{_described(info)}" for prefix, info in found[:most]]
    left = len(found) - len(shown)
    if left or now.more:
        shown.append(f"and {left:,} more" if not now.more else "and more")
    return [f"snapshots  {where}", *shown]


def _described(info: SnapshotInfo) -> str:
    kept = [word for word, on in (("pinned", info.pinned), ("durable", info.durable)) if on]
    used = [f"used by {info.active_uses}"] if info.active_uses else []
    labels = [f"{key}={value}" for key, value in sorted(info.labels.items())]
    about = [f"{info.token_count:,}", info.residency.name.lower(), *kept, *used, *labels]
    return f"{info.name.removeprefix('snapshots/')}  {' '.join(about)}"


def _branches(infos: Sequence[SnapshotInfo]) -> Iterable[tuple[str, SnapshotInfo]]:
    """Depth first, oldest first, with the drawing before each; what has lost its parent is a root."""
    names = {info.name for info in infos}
    children: dict[str, list[SnapshotInfo]] = {}
    for info in infos:
        children.setdefault(info.parent if info.parent in names else "", []).append(info)
    yield from _below(children, "", "")


def _below(children: Mapping[str, list[SnapshotInfo]], name: str, margin: str) -> Iterable[tuple[str, SnapshotInfo]]:
    # A stack and not a recursion: a conversation that forks at every turn is as deep as it is long.
    stack = [(info, margin, index == 0, not name) for index, info in enumerate(reversed(children.get(name, [])))]
    while stack:
        info, before, last, root = stack.pop()
        yield (before if root else f"{before}{'└─ ' if last else '├─ '}"), info
        inner = before if root else f"{before}{'   ' if last else '│  '}"
        below = children.get(info.name, [])
        stack += [(child, inner, index == 0, False) for index, child in enumerate(reversed(below))]
