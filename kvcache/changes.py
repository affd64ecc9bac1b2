"""What happened to names: a bounded log for each owner. Owns order and how far back it can be read; tells nobody.

Whoever follows keeps a place in the log and nothing else, so a reader that stops costs no memory: once the log has
moved on beyond its place, that is all it will hear. Places are numbers of an owner's own log and say nothing of others.
Not thread-safe: `kvcache.names` holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvcache.snapshots import GoneReason

OWNERS_LIMIT = 1000  # logs kept; who was quiet for longest goes first, and its readers have to start over


class PlacePassed(Exception):
    """The log no longer reaches back to that place, or never had it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a name. Labels are those before and after it; None: it was not there then.

    By id and not by snapshot: a log must not keep the nodes of what is gone.
    """

    id: str
    before: Mapping[str, str] | None
    after: Mapping[str, str] | None
    reason: GoneReason | None = None


@dataclass(slots=True)
class _Log:
    entries: deque[Change]
    head: int = 0  # place behind the newest entry


class ChangeLog:
    """The logs of all owners. A place is how many changes came before it."""

    def __init__(self, limit: int) -> None:
        """`limit`: changes kept for each owner."""
        self._limit = limit
        self._logs: OrderedDict[str, _Log] = OrderedDict()
        self._forgotten = 0  # highest place of a log that was dropped: a new log begins there

    def add(self, owner: str, change: Change) -> None:
        log = self._log(owner)
        log.entries.append(change)
        log.head += 1

    def head(self, owner: str) -> int:
        """The place behind all that has happened so far."""
        return self._log(owner).head

    def since(self, owner: str, place: int, most: int) -> list[Change]:
        """Up to `most` changes from `place` on, oldest first. Raises PlacePassed."""
        log = self._log(owner)
        first = log.head - len(log.entries)
        if not first <= place <= log.head:
            raise PlacePassed
        return [log.entries[i] for i in range(place - first, min(len(log.entries), place - first + most))]

    def _log(self, owner: str) -> _Log:
        log = self._logs.get(owner)
        if log is None:
            # Not from 0 again: a place of a log that was dropped must not fit this one.
            log = self._logs[owner] = _Log(deque(maxlen=self._limit), self._forgotten)
            while len(self._logs) > OWNERS_LIMIT:
                _, dropped = self._logs.popitem(last=False)
                self._forgotten = max(self._forgotten, dropped.head + 1)
        self._logs.move_to_end(owner)
        return log
