"""How the talking commands print: tables, receipts, sizes, JSON lines. Pure but for `say` and the `print_` functions.

Labels, names, texts and errors are somebody else's: on a terminal they could hide lines, or type. All of them go
through `say`, or through `shown` into a line of our own.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from kvfork_client import Changed, Delta, Gone, KVForkError, Snapshot, SnapshotInfo, Synced, Usage

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

SNAPSHOT_COLUMNS = ("NAME", "TOKENS", "STORED", "STATE", "EXPIRES", "KEPT", "LABELS", "PARENT")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


# Ends of a line and of a table's cell apart, what a terminal obeys, and what turns the direction of writing round.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile(r"[\t\n]")


def shown(text: str, *, lines: bool = False) -> str:
    """`text` as a terminal may have it, what it would obey written out; with `lines`, tabs and line ends stay."""
    safe = _OBEYED.sub(_written_out, text)
    return safe if lines else _LINES.sub(_written_out, safe)


def _written_out(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def say(text: str = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Prints lines in which there is something of somebody else's."""
    print(shown(text, lines=True), end=end, file=file, flush=flush)


def size(count: int) -> str:
    """1,288,490 → "1.2 MiB"."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def span(seconds: float) -> str:
    """A length of time in its largest fitting unit: "9 min"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def receipt(usage: Usage, ttft: float | None = None) -> str:
    """What a call cost, in one line."""
    parts = [
        f"restored {usage.cached_tokens:,} (disk {usage.disk_tokens:,}, memory {usage.memory_tokens:,})",
        f"recomputed {usage.recomputed_tokens:,}",
        f"new {usage.new_tokens:,}",
    ]
    if usage.recomputed_tokens and usage.miss_reason.value:
        grid = f", {usage.grid_tokens:,} by the grid" if 0 < usage.grid_tokens < usage.recomputed_tokens else ""
        parts[1] += f" ({usage.miss_reason.name.lower().replace('_', ' ')}{grid})"
    if ttft is not None:
        parts.append(f"TTFT {ttft:.2f} s")
    parts.append(f"{size(usage.disk_bytes_read)} read")
    if usage.completion_tokens:
        parts.append(f"generated {usage.completion_tokens:,}")
    return " · ".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns two spaces apart; those that hold numbers only are set to the right."""
    lines = [tuple(header), *(tuple(map(shown, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    numeric = [len(lines) > 1 and all(_is_number(line[column]) for line in lines[1:]) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Two aligned columns without a header."""
    pairs = [(name, shown(value)) for name, value in pairs]
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in pairs)


def snapshot_row(info: SnapshotInfo, now: dt.datetime) -> tuple[str, ...]:
    """The cells of SNAPSHOT_COLUMNS. STORED: tokens in the checkpoint store."""
    left = None if info.pinned or info.expire_time is None else (info.expire_time - now).total_seconds()
    kept = [word for word, on in (("pinned", info.pinned), ("durable", info.durable)) if on]
    return (
        info.name,
        f"{info.token_count:,}",
        f"{info.checkpointed_tokens:,}",
        info.residency.name.lower(),
        "never" if left is None else span(left) if left > 0 else "now",
        " ".join(kept) or "-",
        " ".join(f"{key}={value}" for key, value in sorted(info.labels.items())) or "-",
        info.parent or "-",
    )


def snapshot_table(infos: Iterable[SnapshotInfo]) -> str:
    now = dt.datetime.now(dt.UTC)
    return table(SNAPSHOT_COLUMNS, (snapshot_row(info, now) for info in infos))


def watch_line(event: Changed[Snapshot] | Gone | Synced) -> str:
    """One event of a watch."""
    from kvfork_client import Changed, Gone

    match event:
        case Changed(snapshot):
            info = snapshot.info
            kept = [word for word, on in (("pinned", info.pinned), ("durable", info.durable)) if on]
            labels = [f"{key}={value}" for key, value in sorted(info.labels.items())]
            state = [f"{info.token_count:,} tokens", info.residency.name.lower(), *kept, *labels]
            return shown(f"+ {info.name}  {' '.join(state)}")
        case Gone(name, reason):
            return f"- {shown(name)}  {reason.name.lower().replace('_', ' ')}"
    return "= all of the above was there; what follows is news"


def to_json(value: object) -> Json:
    """Any client value as JSON: enums by their lower-case name, bytes as hex, moments as ISO 8601."""
    match value:
        case None | str() | bool() | int() | float():
            return value
        case enum.Enum():
            return value.name.lower()
        case bytes():
            return value.hex()
        case dt.datetime():
            return value.isoformat()
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    info = getattr(value, "info", None)  # a snapshot handle
    if info is not None:
        return to_json(info)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_json(**fields: object) -> None:
    """One JSON object on a line of its own."""
    print(_json_line({name: to_json(value) for name, value in fields.items()}), flush=True)


def _json_line(value: Json) -> str:
    """Readable in any language, with escapes for what JSON would leave as it is and a terminal would not."""
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def print_delta(delta: Delta) -> None:
    """New text as it comes: reasoning on stderr, so that what is piped on is the answer; anything else on stdout.

    A pipe or file gets the text as it is.
    """
    from kvfork_client import Channel

    reasoning = delta.channel is Channel.REASONING
    file = sys.stderr if reasoning else sys.stdout
    text = delta.text
    if file.isatty():
        text = shown(text, lines=True)
        if reasoning:
            text = f"\033[2m{text}\033[0m"
    print(text, end="", file=file, flush=True)


def print_error(error: KVForkError, *, as_json: bool) -> None:
    """What went wrong and what to do about it, on stderr."""
    if as_json:
        fields = {
            "error": error.label,
            "text": error.text,
            "metadata": error.metadata,
            "fields": error.fields,
            "retry_after": error.retry_after,
            "incident": error.incident,
            "advice": error.advice,
        }
        print(_json_line(to_json(fields)), file=sys.stderr)
        return
    say(f"error: {error}", file=sys.stderr)
    for wrong in error.fields:
        if f"{wrong.field}: {wrong.description}" not in error.text:
            say(f"  {wrong.field}: {wrong.description}", file=sys.stderr)
    if error.incident:
        say(f"  incident {error.incident}", file=sys.stderr)
    # A server's own advice stands in brackets at the end of its text, and knows more than ours.
    if error.advice and not error.text.endswith(")"):
        say(f"  {error.advice}", file=sys.stderr)
    if error.retry_after is not None:
        say(f"  worth another try in {error.retry_after:g} s", file=sys.stderr)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit()
