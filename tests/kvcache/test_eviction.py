"""Eviction order against a naive reading of its rules, over random chains, pins, uses, losses and tiers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

import pytest

from kvcache.eviction import HALF_LIFE_SECONDS, EvictionOrder, Place
from kvcache.records import RecordId, RecordKind, Tier

FULL, WINDOW, STATE, LOGITS = RecordKind.FULL, RecordKind.WINDOW, RecordKind.STATE, RecordKind.LOGITS
BLOCK = 256


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


@dataclass(eq=False)
class Held:
    record: RecordId
    size: int
    tier: Tier = Tier.DISK


@dataclass(frozen=True, eq=False)
class Spot:
    """A node of the world: its name says where it is."""

    name: str
    parent: Spot | None
    end: int

    @property
    def key(self) -> bytes:
        return key_of(self.name)

    def chain(self) -> list[Spot]:
        """From here to the start."""
        return [self, *(self.parent.chain() if self.parent else [])]


class World:
    """An order, and a twin that judges everything anew each time it is asked."""

    def __init__(self, kinds: tuple[RecordKind, ...], window: int = 0) -> None:
        self.kinds, self.window = kinds, window
        self.pins: set[RecordId] = set()
        self.now = 0.0
        self.ticks = 0
        self.order = EvictionOrder(lambda record: record in self.pins, lambda: self.now)
        self.held: dict[RecordId, Held] = {}
        self.spots: dict[str, Spot] = {}

    def spot(self, name: str, parent: str | None = None, tokens: int = BLOCK) -> Spot:
        before = self.spots[parent] if parent else None
        made = self.spots[name] = Spot(name, before, (before.end if before else 0) + tokens)
        return made

    def reach(self, spot: Spot) -> list[Spot]:
        return [s for s in spot.chain()[1:] if s.end > spot.end - self.window] if WINDOW in self.kinds else []

    def put(
        self,
        spot: Spot,
        *,
        size: int = 100,
        tier: Tier = Tier.DISK,
        logits: bool = False,
        kinds: tuple[RecordKind, ...] | None = None,
    ) -> None:
        self.ticks += 1
        for kind in (*(kinds if kinds is not None else self.kinds), *((LOGITS,) if logits else ())):
            record = RecordId(spot.key, kind)
            if record not in self.held:
                member = self.held[record] = Held(record, size, tier)
                self.order.enter(member, self.ticks)
        self.order.arrange(self.place(spot))

    def place(self, spot: Spot) -> Place:
        return Place(
            key=spot.key,
            parent=spot.parent.key if spot.parent else None,
            end=spot.end,
            kinds=self.kinds,
            reach=tuple(s.key for s in self.reach(spot)),
        )

    def chain(self, name: str, count: int, behind: str | None = None, **how: object) -> list[Spot]:
        made: list[Spot] = []
        for i in range(count):
            made.append(self.spot(f"{name}{i}", f"{name}{i - 1}" if i else behind))
            self.put(made[-1], **how)  # type: ignore[arg-type]
        return made

    def use(self, spot: Spot) -> None:
        self.ticks += 1
        for kind in (*self.kinds, LOGITS):
            self.order.used(RecordId(spot.key, kind), self.ticks)

    def lose(self, spot: Spot, kind: RecordKind) -> set[str]:
        """A record is gone without the order's doing; what goes with it."""
        record = RecordId(spot.key, kind)
        del self.held[record]
        return self.forget(self.order.leave(record))

    def pop(self, tier: Tier = Tier.DISK) -> set[str]:
        """What goes next, as `kind name`."""
        return self.forget(self.order.pop(tier))

    def forget(self, members: Iterable[object]) -> set[str]:
        gone = set()
        for member in members:
            assert isinstance(member, Held)
            del self.held[member.record]
            gone.add(self.text(member.record))
        return gone

    def text(self, record: RecordId) -> str:
        spot = next(s for s in self.spots.values() if s.key == record.key)
        return f"{record.kind.name.lower()} {spot.name}"

    def stands(self, spot: Spot) -> bool:
        """Whether all that standing at a spot takes is held."""
        have = all(RecordId(spot.key, kind) in self.held for kind in self.kinds)
        have = have and all(RecordId(s.key, WINDOW) in self.held for s in self.reach(spot))
        return have and (FULL not in self.kinds or all(RecordId(s.key, FULL) in self.held for s in spot.chain()))

    def on_the_way(self) -> set[RecordId]:
        """Records of places that are not whole, and were not dropped: a run may come to make them whole.

        Also what a record that only a pin keeps stands on.
        """
        found: set[RecordId] = set()
        for spot in self.spots.values():
            unit = self.order._units.get(spot.key)
            pinned = any(RecordId(spot.key, kind) in self.pins & self.held.keys() for kind in RecordKind)
            if pinned or (unit is not None and unit.standing and not self.stands(spot)):
                found |= {RecordId(s.key, FULL) for s in spot.chain()} | {
                    RecordId(spot.key, kind) for kind in RecordKind
                }
                found |= {RecordId(s.key, WINDOW) for s in self.reach(spot)}
        return found

    def useless(self) -> set[RecordId]:
        """Held records that no place one can stand at needs."""
        needed: set[RecordId] = set()
        for spot in self.spots.values():
            if self.stands(spot):
                needed |= {RecordId(spot.key, kind) for kind in (*self.kinds, LOGITS)}
                needed |= {RecordId(s.key, WINDOW) for s in self.reach(spot)}
                needed |= {RecordId(s.key, FULL) for s in spot.chain()}
        return self.held.keys() - needed


def test_of_like_places_the_one_used_longest_ago_goes_first() -> None:
    world = World((FULL,))
    for name in "abc":
        world.put(world.spot(name))
    world.now = 5.0
    world.use(world.spots["a"])
    assert [world.pop() for _ in range(4)] == [{"full b"}, {"full c"}, {"full a"}, set()]


def test_what_is_dear_to_compute_for_its_bytes_stays_longer() -> None:
    world = World((FULL,))
    world.put(world.spot("large"), size=400)
    world.put(world.spot("small"), size=100)
    world.put(world.spot("short", tokens=20), size=100)
    assert [world.pop() for _ in range(3)] == [{"full short"}, {"full large"}, {"full small"}]


def test_age_outweighs_worth_at_the_stated_rate() -> None:
    for age, first in ((0.9, "dear"), (1.1, "cheap")):
        world = World((FULL,))
        world.put(world.spot("dear"), size=100)
        world.now = age * HALF_LIFE_SECONDS
        world.put(world.spot("cheap"), size=200)
        assert world.pop() == {"full cheap" if first == "dear" else "full dear"}


def test_descendants_go_before_ancestors() -> None:
    world = World((FULL,))
    world.chain("a", 4)
    for spot in reversed(list(world.spots.values())):
        world.now += 1000.0
        world.use(spot)  # however recently the end was used: what stands on something goes before it
    assert [world.pop() for _ in range(4)] == [{"full a3"}, {"full a2"}, {"full a1"}, {"full a0"}]


def test_states_are_thinned_where_the_next_place_before_is_near() -> None:
    world = World((STATE,))
    world.chain("a", 9)
    gone = [world.pop() for _ in range(4)]
    left = [i for i in range(9) if RecordId(world.spots[f"a{i}"].key, STATE) in world.held]
    assert all(len(one) == 1 for one in gone)
    assert all(after - before <= 2 for before, after in zip([-1, *left], left, strict=False))


def test_window_records_stay_as_long_as_a_place_behind_reaches_back_to_them() -> None:
    world = World((FULL, WINDOW), window=512)
    world.chain("a", 3)
    world.now = 5000.0
    world.use(world.spots["a2"])
    assert world.pop() == {"window a0"}  # a0 and a1 are both old; a0's window is what a1 needs beside its own
    assert world.stands(world.spots["a2"])
    assert not world.useless()


def test_what_only_a_dropped_place_needed_goes_with_it() -> None:
    world = World((FULL, STATE))
    world.chain("a", 3)
    for i in (0, 1):
        assert world.lose(world.spots[f"a{i}"], STATE) == set()
    assert world.pop() == {"full a2", "state a2", "full a1", "full a0"}
    assert len(world.order) == 0


def test_a_place_that_was_passed_takes_the_rest_of_its_own_with_it() -> None:
    world = World((FULL, WINDOW, STATE), window=256)
    world.chain("a", 3, logits=True)
    assert world.lose(world.spots["a1"], STATE) == {"window a1", "logits a1"}
    assert not world.useless()


def test_a_chain_on_its_way_to_a_mark_stays_when_a_tail_beside_it_goes() -> None:
    world = World((FULL, STATE))
    world.chain("a", 1)
    world.put(world.spot("a1", "a0"), kinds=(FULL,))
    world.put(world.spot("tail", "a1", tokens=30))
    for spot, kind in (("tail", FULL), ("tail", STATE)):
        assert world.lose(world.spots[spot], kind) == set()
    assert RecordId(world.spots["a1"].key, FULL) in world.held


def test_logits_inside_a_chain_go_alone() -> None:
    world = World((FULL,))
    world.put(world.spot("a"), logits=True, size=10)
    world.now = 5000.0
    world.put(world.spot("b", "a"))
    assert world.pop() == {"logits a"}
    assert [world.pop() for _ in range(2)] == [{"full b"}, {"full a"}]


def test_what_a_pin_keeps_goes_when_the_pin_does() -> None:
    world = World((FULL, STATE))
    world.chain("a", 2)
    pinned = RecordId(world.spots["a0"].key, FULL)
    world.pins.add(pinned)
    assert world.pop() == {"state a1", "full a1"}
    assert world.pop() == set()
    world.pins.discard(pinned)
    assert world.forget(world.order.unpinned(pinned)) == set()  # the place as such still stands
    assert world.pop() == {"full a0", "state a0"}


def test_what_somebody_is_at_work_on_stays_with_all_that_it_stands_on() -> None:
    world = World((FULL, STATE))
    tip = world.chain("a", 2)[1]
    world.put(world.spot("next", "a1"), kinds=(FULL,))
    world.order.guard(world.place(world.spots["next"]))
    assert world.pop() == {"state a0"} and world.pop() == {"state a1"}  # places before it may be thinned
    assert world.pop() == set()
    assert world.order.unguard(tip.key) == []
    assert world.forget(world.order.unguard(world.spots["next"].key)) == set()
    assert world.pop() == {"full next", "full a1", "full a0"}


def test_what_somebody_is_at_work_on_keeps_what_comes_before_it_though_nothing_of_it_is_held_yet() -> None:
    world = World((FULL, WINDOW, STATE), window=300)
    world.chain("a", 3)
    ahead = world.spot("next", "a2")
    world.order.guard(world.place(ahead))
    gone = world.pop() | world.pop() | world.pop()
    # Going on takes every FULL record, and the windows that reach back to it; states of places behind do not matter.
    assert gone == {"state a0", "state a1", "state a2", "window a0", "window a1"} and world.pop() == set()
    world.put(ahead)
    assert world.pop() == set()
    assert {world.text(record) for record in world.held} >= {"full next", "window next", "state next", "window a2"}
    assert world.forget(world.order.unguard(ahead.key)) == set()
    assert world.pop() == {"full next", "window next", "state next", "full a2", "window a2", "full a1", "full a0"}
    assert len(world.order) == 0


def test_what_is_stored_in_part_while_guarded_stays_for_what_follows() -> None:
    world = World((FULL, WINDOW), window=300)
    spot = world.spot("a")
    world.order.guard(world.place(spot))
    world.put(spot, kinds=(FULL,))  # the window was refused
    assert world.order.unguard(spot.key) == []
    assert {world.text(record) for record in world.held} == {"full a"}


def test_what_was_only_passed_goes_when_the_last_that_is_at_work_there_leaves() -> None:
    world = World((FULL, STATE))
    passed = world.spot("a")
    world.put(passed, kinds=(FULL,), logits=True)  # the state was refused
    world.put(world.spot("b", "a"))
    world.order.guard(world.place(passed))
    world.now = 2 * HALF_LIFE_SECONDS
    assert world.pop() == {"full b", "state b"}
    assert world.forget(world.order.unguard(passed.key)) == {"full a", "logits a"}
    assert len(world.order) == 0


@pytest.mark.parametrize("held", [False, True])
def test_a_guard_that_ends_leaves_nothing_behind(*, held: bool) -> None:
    world = World((FULL, STATE))
    spot = world.spot("a")
    world.order.guard(world.place(spot))
    if held:
        world.put(spot)
        assert world.lose(spot, STATE) == set() and world.lose(spot, FULL) == set()
    assert world.order.unguard(spot.key) == []
    assert len(world.order) == 0


@pytest.mark.parametrize(
    ("kinds", "window"),
    [
        ((FULL,), 0),
        ((STATE,), 0),
        ((FULL, STATE), 0),
        ((FULL, WINDOW), 300),
        ((WINDOW,), 700),
        ((FULL, WINDOW, STATE), 300),
        ((FULL, WINDOW, STATE), 700),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_random_histories_keep_the_rules(kinds: tuple[RecordKind, ...], window: int, seed: int) -> None:
    rng = random.Random(f"{kinds} {window} {seed}")
    world = World(kinds, window)
    popped = 0
    for step in range(600):
        world.now += rng.choice([0.0, 1.0, 300.0])
        spots = list(world.spots.values())
        match rng.choices(["new", "again", "use", "pin", "unpin", "move", "pop", "lose"], [8, 3, 4, 2, 2, 2, 6, 1])[0]:
            case "new":
                whole = [s for s in spots if s.end % BLOCK == 0 and world.stands(s)]
                parent = rng.choice(whole).name if whole and rng.random() < 0.9 else None
                tokens = rng.choice([BLOCK, BLOCK, BLOCK, 30])
                tier = rng.choice([Tier.DISK, Tier.MEMORY, Tier.PENDING])
                spot = world.spot(f"s{step}", parent, tokens)
                world.put(spot, size=rng.randrange(1, 500), tier=tier, logits=rng.random() < 0.3)
            case "again" if spots:
                spot = rng.choice(spots)
                if spot.parent is None or world.stands(spot.parent):
                    world.put(spot, size=50)
            case "use" if spots:
                world.use(rng.choice(spots))
            case "pin" if world.held:
                spot = rng.choice(spots)
                if world.stands(spot):
                    world.pins |= {RecordId(s.key, FULL) for s in spot.chain()} & world.held.keys()
                    world.pins |= {RecordId(spot.key, kind) for kind in kinds}
            case "unpin" if world.pins:
                for record in rng.sample(sorted(world.pins), min(4, len(world.pins))):
                    world.pins.discard(record)
                    world.forget(world.order.unpinned(record))
            case "move" if world.held:
                member = rng.choice(list(world.held.values()))
                before_move, member.tier = member.tier, rng.choice(list(Tier))
                world.order.moved(member, before_move)
            case "lose" if world.held:
                record = rng.choice(sorted(world.held))
                world.lose(next(s for s in spots if s.key == record.key), record.kind)
            case "pop":
                tier = rng.choice([Tier.DISK, Tier.MEMORY])
                before, useless = dict(world.held), world.useless()
                offered, members = world.order.has_victim(tier), world.order.pop(tier)
                assert offered or not members
                world.forget(members)
                popped += bool(members)
                gone = before.keys() - world.held.keys()
                assert not gone & world.pins
                # In vain only where pins share what is left.
                assert any(before[record].tier is tier for record in gone) or not world.order.has_victim(tier)
                # Whatever stood on something that went has gone with it or before: nothing became useless, but for
                # what belongs to a place that was not whole before.
                new = world.useless() - world.pins - useless - world.on_the_way()
                assert not new, {world.text(record) for record in new}
    assert popped > 20
    world.pins.clear()
    for record in {RecordId(s.key, kind) for s in world.spots.values() for kind in (*kinds, LOGITS)}:
        world.forget(world.order.unpinned(record))
    for member in world.held.values():
        before_move, member.tier = member.tier, Tier.DISK
        world.order.moved(member, before_move)
    while world.order.has_victim(Tier.DISK):
        world.forget(world.order.pop(Tier.DISK))
    assert (world.held, len(world.order), world.order._reached) == ({}, 0, {})
    assert not any(world.order._full.values())


def test_a_descendant_in_memory_goes_before_its_ancestor_on_disk() -> None:
    world = World((FULL,))
    world.put(world.spot("a"), tier=Tier.DISK)
    world.put(world.spot("b", "a"), tier=Tier.MEMORY)
    world.put(world.spot("c", "b"), tier=Tier.PENDING)
    world.put(world.spot("d", "b"), tier=Tier.MEMORY)
    assert world.order.has_victim(Tier.DISK)
    assert world.pop(Tier.DISK) == {"full a", "full b", "full c", "full d"}


def test_nothing_goes_in_vain_for_an_ancestor_that_is_pinned() -> None:
    world = World((FULL,))
    world.put(world.spot("a"), tier=Tier.DISK)
    world.put(world.spot("b", "a"), tier=Tier.MEMORY)
    pinned = RecordId(world.spots["a"].key, FULL)
    world.pins.add(pinned)
    assert (world.order.has_victim(Tier.DISK), world.pop(Tier.DISK)) == (False, set())
    world.pins.discard(pinned)
    world.forget(world.order.unpinned(pinned))
    assert world.pop(Tier.DISK) == {"full a", "full b"}


@pytest.mark.parametrize("seed", range(5))
def test_the_least_value_goes_first(seed: int) -> None:
    """Full attention: the twin computes every leaf's value from scratch."""
    rng = random.Random(seed)
    world = World((FULL,))
    used: dict[str, float] = {}
    for step in range(400):
        world.now += rng.choice([0.5, 40.0])
        spots = [s for s in world.spots.values() if world.stands(s)]
        action = rng.random()
        if action < 0.5 or not spots:
            parent = rng.choice(spots).name if spots and rng.random() < 0.7 else None
            spot = world.spot(f"s{step}", parent)
            world.put(spot, size=rng.randrange(1, 1000))
            used[spot.name] = world.now
        elif action < 0.7:
            spot = rng.choice(spots)
            world.use(spot)
            used[spot.name] = world.now
        else:
            leaves = [s for s in spots if not any(o.parent is s and world.stands(o) for o in world.spots.values())]
            value = {
                s.name: log2(BLOCK / world.held[RecordId(s.key, FULL)].size) + used[s.name] / HALF_LIFE_SECONDS
                for s in leaves
            }
            assert world.pop() == {f"full {min(value, key=value.__getitem__)}"}


def test_the_heaps_do_not_grow_with_the_number_of_uses() -> None:
    world = World((FULL,))
    spots = world.chain("a", 3)
    for _ in range(2_000):
        world.now += 1.0
        world.use(spots[2])
        for record in list(world.held):
            world.pins.add(record)
        world.order.has_victim(Tier.DISK)
        world.pins.clear()
        for record in list(world.held):
            world.order.unpinned(record)
    assert all(len(heap) <= 4 * 3 + 65 for heap in world.order._heaps.values())
    assert not world.order._parked
