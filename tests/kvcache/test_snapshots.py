"""Names: whose they are, how many, how they end, and what a caller is told about one that is gone."""

from __future__ import annotations

import random

import pytest

from kvcache.blocks import BLOCK_TOKENS, root_key
from kvcache.snapshots import (
    ORIGIN_LIMIT,
    TOMBSTONE_LIMIT,
    TOMBSTONE_SECONDS,
    GoneReason,
    GoneSnapshot,
    Snapshot,
    SnapshotLimit,
    SnapshotRegistry,
    TakenSnapshotId,
    UnknownSnapshot,
    origins_behind,
)
from kvcache.tree import BlockTree, Node

TREE = BlockTree()


def node_at(end: int, token: int = 1) -> Node:
    node = TREE.root(root_key("model", "owner"))
    while node.end < end:
        node = TREE.add(node, [token] * min(BLOCK_TOKENS, end - node.end), b"P")
    return node


class Names:
    """A registry and what it let go of."""

    def __init__(self, *, most: int = 100, pinned: int = 2) -> None:
        self.forgotten: list[str] = []
        self.registry = SnapshotRegistry(
            max_per_owner=most, max_pinned=pinned, forget=lambda snapshot, reason: self.forgotten.append(snapshot.id)
        )

    def add(self, id: str, *, owner: str = "a", end: int = 10, lineage: str = "", now: float = 0.0, ttl: float = 10.0,
            pinned: bool = False, token: int = 1, parent: Snapshot | None = None,
            call: str = "") -> Snapshot:  # fmt: skip
        """`call` brought what lies beyond the parent: one of its own where it is empty."""
        snapshot = Snapshot(
            id=id, owner=owner, node=node_at(end, token), created=now, last_use=now, ttl=ttl, expires=now + ttl,
            lineage=(*parent.lineage, parent.id) if parent else tuple(lineage.split()), pinned=pinned,
            origins=origins_behind(parent, end, call or f"{id} {now}"),
        )  # fmt: skip
        self.registry.add(snapshot)
        return snapshot

    def ids(self, owner: str = "a") -> list[str]:
        return [s.id for s in self.registry.of(owner)]


@pytest.fixture
def names() -> Names:
    return Names()


def test_a_name_is_seen_by_its_owner_only(names: Names) -> None:
    mine, theirs = names.add("x", owner="a"), names.add("x", owner="b")
    assert (names.registry.find("a", "x", 0), names.registry.find("b", "x", 0)) == (mine, theirs)
    for owner, name in (("c", "x"), ("a", "y"), ("", "x")):
        with pytest.raises(UnknownSnapshot):
            names.registry.find(owner, name, 0)
    names.registry.drop(theirs, GoneReason.DELETED, 1)
    assert names.registry.find("a", "x", 1) is mine
    with pytest.raises(UnknownSnapshot):  # not even a tombstone shows through to others
        names.registry.find("c", "x", 1)


def test_a_taken_name_changes_nothing_and_is_free_again_once_it_ended(names: Names) -> None:
    first = names.add("x")
    with pytest.raises(TakenSnapshotId):
        names.add("x", end=20)
    assert (list(names.registry), names.forgotten) == ([first], [])
    names.registry.drop(first, GoneReason.DELETED, 1)
    second = names.add("x", end=20)
    assert names.registry.find("a", "x", 2) is second  # no tombstone in its way


def test_limits_are_per_owner_and_refuse_before_anything_changed() -> None:
    names = Names(most=3, pinned=1)
    names.add("p", pinned=True)
    with pytest.raises(SnapshotLimit) as error:
        names.add("q", pinned=True)
    assert (error.value.limit, error.value.pinned) == (1, True)
    names.add("q")
    names.add("r")
    with pytest.raises(SnapshotLimit) as error:
        names.add("s")
    assert (error.value.limit, error.value.pinned) == (3, False)
    assert sorted(names.ids()) == ["p", "q", "r"]
    names.add("s", owner="b", pinned=True)
    names.registry.check_room("b", count=2, pinned=0)
    for count, pinned in ((3, 0), (1, 1)):
        with pytest.raises(SnapshotLimit):
            names.registry.check_room("b", count=count, pinned=pinned)


@pytest.mark.parametrize("reason", GoneReason)
def test_a_gone_name_tells_why_and_when_for_an_hour(names: Names, reason: GoneReason) -> None:
    snapshot = names.add("x")
    names.registry.drop(snapshot, reason, 5)
    names.registry.drop(snapshot, GoneReason.DELETED, 7)  # the second time is harmless
    for now in (5, 5 + TOMBSTONE_SECONDS - 1):
        with pytest.raises(GoneSnapshot) as error:
            names.registry.find("a", "x", now)
        assert (error.value.reason, error.value.when, error.value.snapshot_id) == (reason, 5, "x")
    with pytest.raises(UnknownSnapshot):
        names.registry.find("a", "x", 5 + TOMBSTONE_SECONDS)
    assert names.forgotten == ["x"]


def test_names_expire_when_their_time_is_over_unless_pinned_or_in_use(names: Names) -> None:
    names.add("late", ttl=20)
    names.add("pinned", pinned=True)
    used = names.add("used")
    names.add("idle")
    used.uses = 1
    assert names.registry.expire(9.9) == []
    assert [s.id for s in names.registry.expire(10)] == ["idle"]
    assert sorted(names.ids()) == ["late", "pinned", "used"]
    used.uses = 0
    with pytest.raises(GoneSnapshot) as error:  # found too late is gone as well, without a sweep
        names.registry.find("a", "used", 10)
    assert error.value.reason is GoneReason.EXPIRED
    assert names.forgotten == ["idle", "used"]


def test_use_pushes_the_end_out_and_never_in(names: Names) -> None:
    snapshot = names.add("x", ttl=10)
    snapshot.touch(4)
    assert (snapshot.last_use, snapshot.expires) == (4, 14)
    snapshot.touch(2)  # a clock that went back
    assert (snapshot.last_use, snapshot.expires) == (4, 14)
    snapshot.ttl = 1
    snapshot.touch(6)
    assert (snapshot.last_use, snapshot.expires) == (6, 14)


def test_tombstones_are_bounded_oldest_first_and_flush_nobody_elses(names: Names) -> None:
    names.registry.drop(names.add("before", owner="other"), GoneReason.DELETED, 0)
    for number in range(TOMBSTONE_LIMIT + 5):
        names.registry.drop(names.add(str(number), owner="o"), GoneReason.DELETED, 0)
    for number in (0, 4):
        with pytest.raises(UnknownSnapshot):
            names.registry.find("o", str(number), 1)
    for owner, name in (("o", "5"), ("o", str(TOMBSTONE_LIMIT + 4)), ("other", "before")):
        with pytest.raises(GoneSnapshot):
            names.registry.find(owner, name, 1)


def test_whoever_drops_twice_does_not_end_the_next_of_that_name(names: Names) -> None:
    first = names.add("x")
    names.registry.drop(first, GoneReason.DELETED, 1)
    second = names.add("x")
    names.registry.drop(first, GoneReason.DELETED, 2)
    assert names.registry.find("a", "x", 3) is second and names.forgotten == ["x"]


def test_descendants_are_found_through_names_that_are_gone(names: Names) -> None:
    names.add("root")
    middle = names.add("middle", lineage="root")
    names.add("leaf", lineage="root middle")
    names.add("other", lineage="elsewhere")
    names.add("root", owner="b")
    names.add("foreign", owner="b", lineage="root")
    names.registry.drop(middle, GoneReason.DELETED, 1)
    assert [s.id for s in names.registry.descendants(names.registry.find("a", "root", 1))] == ["leaf"]


def test_a_rollback_gives_up_its_own_branch_beyond_the_cut_and_nothing_else(names: Names) -> None:
    prompt = names.add("prompt", end=100)
    answer = names.add("answer", end=150, parent=prompt, now=1)
    source = names.add("more", end=200, parent=answer, now=2)
    names.add("after", end=220, parent=source, now=3)
    names.add("kept", end=230, parent=source, now=4, pinned=True)
    cut_off = names.add("cut off", end=100, parent=source, now=5)  # an earlier rollback of the same line
    names.add("again", end=240, parent=cut_off, now=6)  # which came to the same tokens by another call
    names.add("sibling", end=180, parent=prompt, now=7)
    names.add("cousin", end=190, parent=answer, now=8)

    def given_up(cut: int) -> list[str]:
        return [s.id for s in names.registry.abandoned_by(source, cut)]

    assert given_up(200) == [], "nothing is dropped"
    assert given_up(160) == ["more", "after"]
    assert given_up(100) == ["answer", "more", "after", "cousin"]
    assert given_up(99) == ["prompt", "answer", "more", "after", "cut off", "again", "sibling", "cousin"]
    names.registry.drop(answer, GoneReason.DELETED, 9)
    assert given_up(100) == ["more", "after", "cousin"], "the cousin has what a call brought whose name is gone"


def test_the_marks_of_a_call_have_what_a_cut_before_them_drops(names: Names) -> None:
    for end in (400, 600, 650):
        names.add(f"mark {end}", end=end, call="one", now=end)
    source = names.add("saved", end=700, call="one", now=700)
    names.add("as long", end=700, call="another", now=701)
    given_up = names.registry.abandoned_by(source, 400)
    assert [s.id for s in given_up] == ["mark 600", "mark 650", "saved"]


def test_a_name_that_is_taken_again_has_nothing_to_do_with_what_came_of_the_first(names: Names) -> None:
    first = names.add("base", end=150)
    child = names.add("child", end=200, parent=first, now=1)
    names.registry.drop(first, GoneReason.DELETED, 2)
    other = names.add("base", end=150, token=2, now=3)
    other_child = names.add("other child", end=200, token=2, parent=other, now=4)
    assert names.registry.descendants(other) == [other_child]
    assert names.registry.abandoned_by(child, 100) == [child]
    assert names.registry.abandoned_by(other_child, 100) == [other, other_child]
    assert names.registry.abandoned_by(other, 100) == [other, other_child]
    names.registry.drop(other, GoneReason.DELETED, 5)
    again = names.add("base", end=150, now=6)  # what the child came of, made once more
    assert names.registry.descendants(again) == [child]
    assert names.registry.abandoned_by(child, 100) == [child], "it does not stand on what was made since"


def test_a_rolled_back_line_that_went_on_otherwise_still_came_of_its_source(names: Names) -> None:
    source = names.add("source", end=200)
    names.add("cut", end=100, lineage="source", now=1)
    # Its tokens begin like the source's and then differ.
    turned = names.add("turned", end=150, token=3, lineage="source cut", now=2)
    assert turned in names.registry.descendants(source)


def test_origins_are_bounded_and_the_last_ones_stay(names: Names) -> None:
    here = names.add("0", end=1)
    for turn in range(1, ORIGIN_LIMIT + 20):
        here = names.add(str(turn), end=turn + 1, parent=here, now=turn)
        names.registry.drop(here, GoneReason.DELETED, turn)
    assert len(here.origins) == ORIGIN_LIMIT and here.origins[-1].start == here.token_count - 1
    child = names.add("child", end=here.token_count + 5, parent=here, now=9_999)
    names.registry.add(here)
    assert names.registry.abandoned_by(child, 5) == [here, child]


def test_random_histories_keep_every_index_in_step() -> None:
    rng = random.Random(4)
    names = Names(most=8, pinned=2)
    registry = names.registry
    live: dict[tuple[str, str], Snapshot] = {}
    ended: dict[tuple[str, str], tuple[GoneReason, float]] = {}
    now = 0.0
    for _ in range(8_000):
        now += rng.choice([0, 0.5, 3])
        owner, name = rng.choice("ab"), rng.choice("0123456789")
        key = (owner, name)
        over = {k for k, s in live.items() if not s.pinned and not s.uses and s.expires <= now}
        match rng.choice(["add", "add", "drop", "use", "find", "expire"]):
            case "add":
                pinned = rng.random() < 0.2
                mine = [s for s in live.values() if s.owner == owner]
                fits = len(mine) < 8 and not (pinned and sum(s.pinned for s in mine) >= 2)
                try:
                    live[key] = names.add(name, owner=owner, now=now, ttl=rng.choice([2, 40]), pinned=pinned)
                    assert fits
                    ended.pop(key, None)
                except TakenSnapshotId:
                    assert key in live
                except SnapshotLimit:
                    assert not fits
            case "drop" if key in live:
                registry.drop(live.pop(key), GoneReason.ROLLED_BACK, now)
                ended[key] = (GoneReason.ROLLED_BACK, now)
            case "use" if key in live:
                live[key].uses = 1 - live[key].uses
            case "find":
                try:
                    assert registry.find(owner, name, now) is live[key]
                    assert key not in over
                except GoneSnapshot as gone:
                    if key in over:
                        ended[key] = (GoneReason.EXPIRED, now)
                        del live[key]
                    assert ended[key] == (gone.reason, gone.when)  # noqa: PT017 - only some finds raise
                except UnknownSnapshot:
                    assert key not in live
                    assert key not in ended or now - ended[key][1] >= TOMBSTONE_SECONDS
            case "expire":
                assert {(s.owner, s.id) for s in registry.expire(now)} == over
                for k in over:
                    ended[k] = (GoneReason.EXPIRED, now)
                    del live[k]
        assert {(s.owner, s.id): s for s in registry} == live
        assert len(registry) == len(live)
        for who in "ab":
            assert {s.id for s in registry.of(who)} == {k[1] for k in live if k[0] == who}
