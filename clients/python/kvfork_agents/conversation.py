"""A conversation's items and the snapshots that they name. Owns the mark on an item and what it is good for; pure.

The last item of an answer says which snapshot the model's state behind it is, and a digest of all that the model has
read by then. The mark travels with the item, through whatever session stores it, branches from it or pops it. Behind a
marked item the state is the right one exactly if the same conversation still leads there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]

MARK = "kvfork"  # in an item's provider_data, which the SDK keeps and no model reads
_NOT_READ = ("id", "status", "provider_data")  # of an item: what sessions may change, and the model does not see


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A snapshot's name, and the server that holds it; "" where nobody said."""

    snapshot: str
    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`length`: of the items, how many the state there has read."""

    kept: Kept
    length: int


def snapshots_of(items: Iterable[Any]) -> list[str]:
    """The snapshots that a session's items name, oldest first: handles of the contract like any other."""
    return [mark["snapshot"] for mark in map(_mark, items) if mark is not None]


class Read:
    """What the model has read of a conversation: all of its `items`, each digested once.

    setting: what else the template is given, such as instructions and tools; anything that JSON takes.
    """

    def __init__(self, items: Sequence[Item], setting: Any) -> None:
        self._running = hashlib.sha256(_text(setting))
        self.latest: Place | None = None
        """The last item behind which the state of this very conversation is kept."""
        for length, item in enumerate(items, start=1):
            _add(self._running, item)
            mark = _mark(item)
            if mark is not None and mark.get("digest") == self._running.hexdigest():
                self.latest = Place(kept=_kept(mark), length=length)

    def mark(self, said: Iterable[Item], kept: Kept) -> dict[str, str]:
        """The mark for the last item that was `said` behind these, where `kept` is the state."""
        running = self._running.copy()
        for item in said:
            _add(running, item)
        return {"snapshot": kept.snapshot, "instance": kept.instance, "digest": running.hexdigest()}


def _mark(item: Any) -> dict[str, str] | None:
    data = item.get("provider_data") if isinstance(item, Mapping) else None
    mark = data.get(MARK) if isinstance(data, Mapping) else None
    return mark if isinstance(mark, dict) and isinstance(mark.get("snapshot"), str) else None


def _kept(mark: Mapping[str, Any]) -> Kept:
    instance = mark.get("instance")
    return Kept(snapshot=mark["snapshot"], instance=instance if isinstance(instance, str) else "")


def _add(running: hashlib._Hash, item: Item) -> None:
    running.update(_text({name: value for name, value in item.items() if name not in _NOT_READ}))


def _text(value: Any) -> bytes:
    """One line, the same for the same value."""
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"
