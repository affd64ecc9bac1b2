"""How the talking commands print: tables, receipts, sizes, JSON lines. Pure but for the `print_` functions."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfork_client import Changed, Delta, Gone, KVForkError, Snapshot, SnapshotInfo, Synced, Usage

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

SNAPSHOT_COLUMNS = ("NAME", "TOKENS", "STORED", "STATE", "EXPIRES", "KEPT", "LABELS", "PARENT")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
    lines = [tuple(header), *(tuple(row) for row in rows)]
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
    pairs = list(pairs)
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
            return f"+ {info.name}  {' '.join(state)}"
        case Gone(name, reason):
            return f"- {name}  {reason.name.lower().replace('_', ' ')}"
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
    print(json.dumps({name: to_json(value) for name, value in fields.items()}, ensure_ascii=False), flush=True)


def print_delta(delta: Delta) -> None:
    """New text as it comes: reasoning on stderr, so that what is piped on is the answer; anything else on stdout."""
    from kvfork_client import Channel

    if delta.channel is not Channel.REASONING:
        print(delta.text, end="", flush=True)
    elif sys.stderr.isatty():
        print(f"\033[2m{delta.text}\033[0m", end="", file=sys.stderr, flush=True)
    else:
        print(delta.text, end="", file=sys.stderr, flush=True)


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
        print(json.dumps(to_json(fields), ensure_ascii=False), file=sys.stderr)
        return
    print(f"error: {error}", file=sys.stderr)
    for wrong in error.fields:
        if f"{wrong.field}: {wrong.description}" not in error.text:
            print(f"  {wrong.field}: {wrong.description}", file=sys.stderr)
    if error.incident:
        print(f"  incident {error.incident}", file=sys.stderr)
    # A server's own advice stands in brackets at the end of its text, and knows more than ours.
    if error.advice and not error.text.endswith(")"):
        print(f"  {error.advice}", file=sys.stderr)
    if error.retry_after is not None:
        print(f"  worth another try in {error.retry_after:g} s", file=sys.stderr)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit()
