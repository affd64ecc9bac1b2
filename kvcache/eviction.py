"""What goes first when room is short. Owns what places are worth and what stands on what; no bytes and no I/O.

A *unit* is one node's records, and worth what it would take to compute its place again:

    value = tokens back to the nearest stored place × 2^(-age / HALF_LIFE_SECONDS) ÷ bytes that its going frees

Ages grow alike, so time alone never changes which of two values is greater: log2(tokens ÷ bytes) + last use ÷ half-life
stays the same between changes, and a heap keeps it. Tokens stand for seconds, as one store serves one model.

A unit that *stands* is a place to go on from. Dropping it frees the records that no other standing unit needs: its
own state and logits, window records that no place behind them reaches back to, and FULL records that nothing follows.
So descendants go before ancestors, in whichever tier they are, and what only a dropped place needed goes with it. Of a
window record that several places need, each counts its share: so it goes in the end, and they go near each other.

Not thread-safe; the store's index calls it under the store's lock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2
from typing import Protocol

from kvcache.records import RecordId, RecordKind, Tier

HALF_LIFE_SECONDS = 600.0  # of no use, after which a place counts half: agents pause for minutes, not for hours
EVICTABLE = (Tier.MEMORY, Tier.DISK)
MANY = 32  # of a record that more places need, a share more or less is not worth a look at all of them

Value = tuple[float, int]  # log2 of the value, then the tick of the last use


class Member(Protocol):
    """A held record."""

    @property
    def record(self) -> RecordId: ...
    @property
    def size(self) -> int: ...
    @property
    def tier(self) -> Tier: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the records of one key stand on their chain."""

    key: bytes
    parent: bytes | None  # whose FULL record, and place, comes before; None at the start
    end: int  # tokens up to here
    kinds: tuple[RecordKind, ...]  # of its own that standing here takes
    reach: tuple[bytes, ...] = ()  # keys before it whose window records standing here takes as well


class _Unit:
    __slots__ = ("children", "key", "last_use", "members", "noted", "parent", "place", "standing", "tick")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.place: Place | None = None  # None: nothing is known of it, and it is worth its recency
        self.parent: _Unit | None = None
        self.children: set[_Unit] = set()  # that come right behind it
        self.standing = False
        self.members: dict[RecordKind, Member] = {}
        self.last_use = 0.0
        self.tick = 0
        self.noted: dict[Tier, Value] = {}  # as what it lies in the heaps


class EvictionOrder:
    """Units by value, for each tier by the bytes that they would free there."""

    def __init__(self, pinned: Callable[[RecordId], bool], clock: Callable[[], float]) -> None:
        """`clock` is in seconds and never goes back."""
        self._pinned = pinned
        self._clock = clock
        self._units: dict[bytes, _Unit] = {}
        self._reached: dict[bytes, set[_Unit]] = {}  # keys whose window records standing units behind them take
        self._heaps: dict[Tier, list[tuple[Value, int, _Unit]]] = {tier: [] for tier in EVICTABLE}
        self._tie = itertools.count()
        self._full = dict.fromkeys(Tier, 0)  # FULL records by tier
        self._parked: dict[RecordId | bytes, set[_Unit]] = {}  # units that would go but for this pin, or guarded key
        self._guarded: set[bytes] = set()
        self._raised: set[bytes] = set()  # those of them that stand for no other reason

    def __len__(self) -> int:
        return len(self._units)

    # What happened

    def enter(self, member: Member, tick: int) -> None:
        """A record is held now, and was just used."""
        unit = self._unit(member.record.key)
        unit.members[member.record.kind] = member
        self._full[member.tier] += member.record.kind is RecordKind.FULL
        self._stand(unit)
        self._raised.discard(unit.key)
        unit.last_use, unit.tick = self._clock(), tick
        self._note(unit)

    def arrange(self, place: Place) -> None:
        """Say where the records of a key stand; of no effect if none is held."""
        unit = self._units.get(place.key)
        if unit is not None:
            self._put_in_place(unit, place)

    def _put_in_place(self, unit: _Unit, place: Place) -> None:
        if unit.place == place:
            return
        self._let_go_of_reach(unit)
        self._unlink(unit)
        unit.place = place
        if place.parent is not None:
            unit.parent = self._unit(place.parent)
            unit.parent.children.add(unit)
        if unit.standing:
            self._hold_reach(unit)
        self._note(unit)

    def moved(self, member: Member, before: Tier) -> None:
        """A record has changed its tier."""
        unit = self._units[member.record.key]
        if member.record.kind is RecordKind.FULL:
            self._full[before] -= 1
            self._full[member.tier] += 1
        self._note(unit)
        if member.record.kind is RecordKind.WINDOW:
            self._note_those_that_share([unit.key])
        elif unit.children:
            self._note(_leaf_below(unit))  # it has to go first now

    def used(self, record: RecordId, tick: int) -> None:
        unit = self._units.get(record.key)
        if unit is not None and (record.kind is not RecordKind.FULL or _only_full(unit)):
            # Going on from a place behind reads this FULL record too, and says nothing about this place.
            unit.last_use, unit.tick = self._clock(), tick
            if not unit.standing and self._is_whole(unit):
                self._stand(unit)  # it was given up, and was still there thanks to others
                self._note(unit)

    def unpinned(self, record: RecordId) -> list[Member]:
        """The last pin of a record is gone; returns what nothing has needed for as long as that."""
        for unit in self._parked.pop(record, ()):
            self._note(unit)
        owner = self._units.get(record.key)
        return self._sweep([owner]) if owner is not None and not owner.standing else []

    def guard(self, place: Place) -> None:
        """Somebody is at work there: until `unguard` none of its records goes, and none that it stands on.

        It stands for that long, whether any record of it is held yet or not. What comes before a gap does not count.
        """
        self._guarded.add(place.key)
        unit = self._unit(place.key)
        self._put_in_place(unit, place)
        if not unit.standing:
            self._raised.add(place.key)
            self._stand(unit)

    def keeps_something(self, key: bytes) -> bool:
        """Whether anything would have gone but for this guard."""
        unit = self._units.get(key)
        return key in self._parked or key in self._raised or (unit is not None and not unit.members)

    def unguard(self, key: bytes) -> list[Member]:
        """Returns what nothing has needed for as long as that."""
        self._guarded.discard(key)
        for unit in self._parked.pop(key, ()):
            self._note(unit)
        owner, raised = self._units.get(key), key in self._raised
        self._raised.discard(key)
        if owner is None:
            return []
        if not owner.members or (raised and not self._is_whole(owner)) or self._was_only_passed(owner):
            return self._sweep(self._drop(owner))
        self._note(owner)
        return []

    def leave(self, record: RecordId) -> list[Member]:
        """A record is gone, as its owner wished or by accident; returns what only it had made useful."""
        unit = self._units[record.key]
        self._part(unit, unit.members[record.kind])
        # Where something follows, no run comes back to make it whole again: one that does will put it again.
        passed = bool(unit.children) and unit.place is not None and record.kind in unit.place.kinds
        gone = unit.standing and (passed or not unit.members) and unit.key not in self._guarded
        affected = self._drop(unit) if gone else [unit]
        self._note(unit)
        return self._sweep(affected)

    # What goes

    def has_victim(self, tier: Tier) -> bool:
        return self._cheapest(tier) is not None

    def pop(self, tier: Tier) -> list[Member]:
        """Drop units, from the least value on, until bytes of this tier are free; returns all that goes with them."""
        freed: list[Member] = []
        while not any(member.tier is tier for member in freed):
            unit = self._cheapest(tier)
            if unit is None:
                break
            going = self._spare(unit)
            if going and len(going) < len(unit.members) and all(m.record.kind is RecordKind.LOGITS for m in going):
                # The state stays, for others need it: the place stays as well.
                self._part(unit, going[0])
                self._note(unit)
                freed += going
            else:
                freed += self._sweep(self._drop(unit))
        return freed

    # Inside

    def _unit(self, key: bytes) -> _Unit:
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = _Unit(key)
        return unit

    def _stand(self, unit: _Unit) -> None:
        if not unit.standing:
            unit.standing = True
            self._hold_reach(unit)

    def _drop(self, unit: _Unit) -> list[_Unit]:
        """Returns the units of which records may have become useless."""
        unit.standing = False
        self._let_go_of_reach(unit)
        self._note_those_that_share([*_reach(unit), unit.key])
        return [unit, *(self._units[key] for key in _reach(unit) if key in self._units)]

    def _hold_reach(self, unit: _Unit) -> None:
        for key in _reach(unit):
            self._reached.setdefault(key, set()).add(unit)

    def _let_go_of_reach(self, unit: _Unit) -> None:
        for key in _reach(unit):
            users = self._reached.get(key)
            if users is not None:
                users.discard(unit)
                if not users:
                    del self._reached[key]

    def _note_those_that_share(self, keys: Iterable[bytes]) -> None:
        """Shares in the window records of these keys have changed."""
        affected: set[_Unit] = set()
        for key in keys:
            users = self._reached.get(key, ())
            if len(users) <= MANY:
                affected.update(users)
            if key in self._units:
                affected.add(self._units[key])
        for unit in affected:
            self._note(unit)

    def _part(self, unit: _Unit, member: Member) -> None:
        del unit.members[member.record.kind]
        self._full[member.tier] -= member.record.kind is RecordKind.FULL

    def _unlink(self, unit: _Unit) -> None:
        if unit.parent is not None:
            unit.parent.children.discard(unit)
            unit.parent = None

    def _sweep(self, units: Iterable[_Unit]) -> list[Member]:
        """Frees what nothing needs of units that do not stand, and on up the chain."""
        freed: list[Member] = []
        todo = list(units)
        while todo:
            unit = todo.pop()
            if not unit.standing and unit.key not in self._guarded:
                loose = [
                    m for m in unit.members.values() if not self._is_needed(unit, m) and not self._pinned(m.record)
                ]
                for member in loose:
                    self._part(unit, member)
                freed += loose
            if unit.members or unit.children or unit.key in self._guarded or self._units.get(unit.key) is not unit:
                continue
            del self._units[unit.key]
            parent = unit.parent
            self._unlink(unit)
            if parent is not None and parent.children:
                self._note(_leaf_below(parent))
            elif parent is not None:
                if self._was_only_passed(parent):
                    todo += self._drop(parent)
                self._note(parent)
                todo.append(parent)
        return freed

    def _was_only_passed(self, unit: _Unit) -> bool:
        """Whether nobody can stand there, what it was passed on the way to has gone, and no run is on its way."""
        idle = self._clock() - unit.last_use > HALF_LIFE_SECONDS
        at_work = unit.key in self._guarded
        return unit.standing and not unit.children and not at_work and idle and not self._is_whole(unit)

    def _is_needed(self, unit: _Unit, member: Member) -> bool:
        """Whether any other standing unit takes this record of `unit`."""
        match member.record.kind:
            case RecordKind.FULL:
                return bool(unit.children)
            case RecordKind.WINDOW:
                return unit.key in self._reached
            case _:
                return False

    def _spare(self, unit: _Unit) -> list[Member]:
        """What would go with a standing unit. FULL records further up that nothing else needs are not looked for."""
        spare = [member for member in unit.members.values() if not self._is_needed(unit, member)]
        for key in _reach(unit):
            owner = self._units.get(key)
            if owner is not None and not owner.standing and len(self._reached.get(key, ())) == 1:
                member = owner.members.get(RecordKind.WINDOW)
                spare += [member] if member is not None else []
        return spare

    def _is_whole(self, unit: _Unit) -> bool:
        """Whether one can stand there, as far as its own records and those in reach go."""
        place = unit.place
        if place is None:
            return True
        return all(kind in unit.members for kind in place.kinds) and all(
            key in self._units and RecordKind.WINDOW in self._units[key].members for key in place.reach
        )

    def _cost(self, unit: _Unit, place: Place) -> int:
        """Tokens from the nearest place before that one can stand at."""
        if unit.children and _only_full(unit):
            return 1  # only its logits can go
        before = unit.parent
        while before is not None and not (before.standing and before.place is not None and self._is_whole(before)):
            before = before.parent
        return place.end - _end(before)

    def _share(self, unit: _Unit, tier: Tier) -> float:
        """Bytes of this tier that are there for a standing unit; of what others need as well, its part."""
        share = 0.0
        for member in unit.members.values():
            if member.tier is tier:
                if member.record.kind is RecordKind.WINDOW:
                    share += member.size / (1 + len(self._reached.get(unit.key, ())))
                elif not self._is_needed(unit, member):
                    share += member.size
        for key in _reach(unit):
            owner = self._units.get(key)
            member_before = owner.members.get(RecordKind.WINDOW) if owner is not None else None
            if owner is not None and member_before is not None and member_before.tier is tier:
                share += member_before.size / (len(self._reached[key]) + owner.standing)
        return share

    def _exposed(self, unit: _Unit, tier: Tier) -> tuple[float, int]:
        """Of a leaf with nothing in a tier: bytes there that have to wait for it, and what both cost in tokens."""
        part = 1.0
        before = unit.parent if self._full[tier] else None
        while before is not None:
            part /= len(before.children)
            member = before.members.get(RecordKind.FULL)
            if member is not None and member.tier is tier:
                if not self._pinned(member.record):
                    return member.size * part, _end(unit) - _end(before.parent)
                self._parked.setdefault(member.record, set()).add(unit)
                break
            before = before.parent
        return 0.0, 0

    def _value(self, unit: _Unit, tier: Tier) -> Value | None:
        """None if its going would help to free nothing in this tier."""
        if not unit.standing:
            return None
        freed, cost = self._share(unit, tier), 0
        if not freed and not unit.children:
            freed, cost = self._exposed(unit, tier)
        if not freed:
            return None
        worth = log2((cost or self._cost(unit, unit.place)) / freed) if unit.place is not None else 0.0
        return worth + unit.last_use / HALF_LIFE_SECONDS, unit.tick

    def _note(self, unit: _Unit) -> None:
        """Brings a unit whose value may have fallen to where it belongs. What has risen is found when it comes up."""
        for tier, heap in self._heaps.items():
            value = self._value(unit, tier)
            if value is None:
                unit.noted.pop(tier, None)
            elif tier not in unit.noted or value < unit.noted[tier]:
                unit.noted[tier] = value
                heapq.heappush(heap, (value, next(self._tie), unit))
                if len(heap) > 4 * len(self._units) + 64:  # mostly outdated ones
                    heap[:] = [(u.noted[tier], next(self._tie), u) for u in self._units.values() if tier in u.noted]
                    heapq.heapify(heap)

    def _cheapest(self, tier: Tier) -> _Unit | None:
        """The unit of least value whose going no pin forbids; it stays on top of its heap."""
        heap = self._heaps[tier]
        while heap:
            noted, _, unit = heap[0]
            if unit.noted.get(tier) != noted:
                heapq.heappop(heap)
                continue
            value = self._value(unit, tier)
            if value is None:
                del unit.noted[tier]
                heapq.heappop(heap)
            elif value > noted:
                unit.noted[tier] = value
                heapq.heapreplace(heap, (value, next(self._tie), unit))
            else:
                involved = [
                    *self._spare(unit),
                    *(m for m in unit.members.values() if m.record.kind is RecordKind.WINDOW),
                ]
                keys = (unit.key, *(m.record.key for m in involved))
                keeper = next((m.record for m in involved if self._pinned(m.record)), None) or next(
                    (key for key in keys if key in self._guarded), None
                )
                if keeper is None:
                    return unit
                del unit.noted[tier]
                heapq.heappop(heap)
                self._parked.setdefault(keeper, set()).add(unit)
        return None


def _only_full(unit: _Unit) -> bool:
    return unit.place is None or unit.place.kinds == (RecordKind.FULL,)


def _reach(unit: _Unit) -> tuple[bytes, ...]:
    return unit.place.reach if unit.place is not None else ()


def _end(unit: _Unit | None) -> int:
    return unit.place.end if unit is not None and unit.place is not None else 0


def _leaf_below(unit: _Unit) -> _Unit:
    while unit.children:
        unit = next(iter(unit.children))
    return unit
