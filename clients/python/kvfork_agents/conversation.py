"""A conversation's items and the snapshots that they name. Owns the mark on an item and what it is good for; pure.

The last item of an answer says which snapshot the model's state behind it is, and a digest of all that the model has
read by then. The mark travels with the item, through whatever session stores it, branches from it or pops it. Behind a
marked item the state is the right one exactly if the same conversation still leads there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]

MARK = "kvfork"  # in an item's provider_data, which the SDK keeps and no model reads
_NOT_READ = ("id", "status", "provider_data")  # of an item: what sessions may change, and the model does not see


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`length`: of the items, how many the snapshot's state has read."""

    snapshot: str
    length: int


def snapshots_of(items: Iterable[Any]) -> list[str]:
    """The snapshots that a session's items name, oldest first: handles of the contract like any other."""
    return [mark["snapshot"] for mark in map(_mark, items) if mark is not None]


def latest(items: Sequence[Item], setting: Any) -> Place | None:
    """The last item behind which the state of this very conversation is kept.

    setting: what else the template is given, such as instructions and tools; anything that JSON takes.
    """
    found = None
    for length, (item, digest) in enumerate(zip(items, _digests(items, setting), strict=True), start=1):
        mark = _mark(item)
        if mark is not None and mark.get("digest") == digest:
            found = Place(snapshot=mark["snapshot"], length=length)
    return found


def marked(items: Sequence[Item], setting: Any, snapshot: str) -> dict[str, str]:
    """The mark for the last of the items, behind which `snapshot` is the state."""
    *_, digest = _digests(items, setting)
    return {"snapshot": snapshot, "digest": digest}


def _mark(item: Any) -> dict[str, str] | None:
    data = item.get("provider_data") if isinstance(item, Mapping) else None
    mark = data.get(MARK) if isinstance(data, Mapping) else None
    return mark if isinstance(mark, dict) and isinstance(mark.get("snapshot"), str) else None


def _digests(items: Iterable[Item], setting: Any) -> Iterator[str]:
    """Behind each item, the digest of all that was read by then."""
    running = hashlib.sha256(_text(setting))
    for item in items:
        running.update(_text({name: value for name, value in item.items() if name not in _NOT_READ}))
        yield running.hexdigest()


def _text(value: Any) -> bytes:
    """One line, the same for the same value."""
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"
