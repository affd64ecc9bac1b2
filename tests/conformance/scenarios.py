"""The scenarios as `clients/conformance/scenarios.json` has them, and whether what was seen is what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "clients" / "conformance" / "scenarios.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario. `observed` is what the driver must report, `server` what the server's side must have seen."""

    id: str
    title: str
    given: Mapping[str, Any]
    observed: Mapping[str, Any]
    server: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)  # at the peer, for a scenario that needs a failing server
    peer: str = ""  # which peer of tests/conformance it is played against, besides the server
    drains: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row that ended, as `witness` writes it."""

    row: int
    tokens: int
    cancelled: int | None
    last: int


def read() -> list[Scenario]:
    return [Scenario(**one) for one in json.loads(FILE.read_text(encoding="utf-8"))["scenarios"]]


def differences(wanted: Any, seen: Any, reference: Mapping[int, str], path: str = "") -> list[str]:
    """Where `seen` is not what is wanted. `reference`: the greedy text of the prompt by its number of tokens."""
    if isinstance(wanted, Mapping) and set(wanted) == {"reference"}:
        wanted = reference[wanted["reference"]]
    if isinstance(wanted, Mapping) and isinstance(seen, Mapping):
        found = []
        for key in sorted(set(wanted) | set(seen)):
            where = f"{path}.{key}" if path else key
            if key not in seen or key not in wanted:
                found.append(f"{where}: {'is missing' if key not in seen else 'was not asked for'}")
            else:
                found += differences(wanted[key], seen[key], reference, where)
        return found
    if wanted != seen or type(wanted) is not type(seen):
        return [f"{path}: {seen!r} instead of {wanted!r}"]
    return []


def server_differences(wanted: Mapping[str, int], rows: list[Row]) -> list[str]:
    """What the server's side did that it must not: rows not cancelled, or not let go of in time."""
    if not wanted:
        return []
    given_up = [row for row in rows if row.cancelled is not None]
    found = []
    if len(given_up) != wanted["cancelled_rows"]:
        found.append(f"server: {len(given_up)} rows cancelled instead of {wanted['cancelled_rows']}: {rows}")
    for row in given_up:
        assert row.cancelled is not None
        if row.last - row.cancelled > wanted["most_steps_after"]:
            found.append(f"server: worked on for {row.last - row.cancelled} steps after the cancel: {row}")
        if row.tokens > wanted["most_tokens"]:
            found.append(f"server: made {row.tokens} tokens for nobody: {row}")
    return found
