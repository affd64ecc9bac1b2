"""Random operations on the prefix cache over a real store, against a twin that knows who holds what.

After every operation: holds add up exactly, nothing pinned or in use was given up, no record stays that became useless
by it, no node stays that nothing needs, budgets hold, and every name is restorable as far as the records say. Whatever
is read is the state of its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from durable_worlds import CrashStorage, DurableWorld, ring_at
from test_restore import reference
from tiny_worlds import LAYOUTS, World, payload_of

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import CacheLimits, Keep, Lookup
from kvcache.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy, Checkpoints
from kvcache.errors import StoreError
from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind, Tier
from kvcache.restore import needed
from kvcache.snapshots import GoneReason, GoneSnapshot, Snapshot, SnapshotBusy, SnapshotLimit, TakenSnapshotId
from kvcache.snapshots import UnknownSnapshot as Unknown
from kvcache.tree import Node

MEMORY, DISK, QUEUE = 1_500, 6_000, 1_500
LIMITS = CacheLimits(max_snapshots=12, max_pinned=2, default_ttl=500.0, max_ttl=900.0)
OWNERS = ("a", "b")
TRUNK = [random.Random(0).randrange(50_000) for _ in range(900)]
NEVER_SAID = 60_000
PLACES = (1, 100, 255, 256, 257, 300, 511, 512, 600)

OPERATIONS = {
    "run": 14, "run behind": 10, "decode": 8, "name": 12, "let go": 10, "look up": 5, "release": 6, "cut": 12,
    "base": 4, "use": 4, "unuse": 5, "delete": 6, "pin": 3, "unpin": 3, "extend": 2, "wait": 2, "evict": 2, "write": 12,
    "rehome": 3, "find": 3, "sweep": 2, "follow": 3, "unfollow": 4,
}  # fmt: skip


@dataclass
class Name:
    snapshot: Snapshot
    tokens: list[int]
    uses: int = 0


def world_of(layout: str, *, share_decoded: bool, checkpoints: Checkpoints = DEFAULT_CHECKPOINTS) -> World:
    return World(
        LAYOUTS[layout],
        memory=MEMORY,
        disk=DISK,
        queue=QUEUE,
        limits=LIMITS,
        share_decoded=share_decoded,
        checkpoints=checkpoints,
    )


class Play:
    """One world, its twin, and what happens next."""

    operations: ClassVar[dict[str, int]] = OPERATIONS
    disk = DISK

    def __init__(self, seed: int, layout: str, world: World) -> None:
        self.rng = random.Random(f"{seed} {layout}")
        self.world = world
        self.cache, self.store = self.world.cache, self.world.store
        self.mine: Counter[Node] = Counter()
        self.followed: list[Node] = []
        self.names: dict[tuple[str, str], Name] = {}
        self.lookups: list[tuple[Lookup, list[int]]] = []
        self.done: Counter[str] = Counter()
        self.ordered: set[RecordId] = set()  # of no use to anybody, and held until an order has been carried out

    # -- operations

    def step(self) -> None:
        name = self.rng.choices(list(self.operations), list(self.operations.values()))[0]
        if sum(self.mine.values()) > 30:
            name = "let go"
        protected = self.protected()
        held_before = {record for record in protected if self.store.locate(record)}
        sound = self.behind_no_gap()
        served = self.useful() | {record for record in protected if record.key in sound}
        getattr(self, "do_" + name.replace(" ", "_"))()
        if name == "restart":  # memory is gone, and with it what stood on it
            self.ordered = set()
            self.check_names()
            self.check()
            return
        kept = held_before & self.protected()
        gone = [record for record in kept if not self.store.locate(record)]
        assert not gone, f"{name}: protected records are gone: {gone}"
        # What an order not carried out yet is to write is pinned for that long, and goes when it has been.
        left = (served & self.store._index._entries.keys()) | self.ordered
        orphans = left - self.useful() - self.on_the_way() - self.protected()
        self.ordered = orphans & self.store._index._pins.keys()
        orphans = (orphans & self.store._index._entries.keys()) - self.ordered
        assert not orphans, f"{name}: left behind, and no use to anybody: {orphans}"
        assert not self.ordered or self.store._io._background
        self.check()

    def prompt(self, *, longer_than: list[int] | None = None) -> list[int]:
        rng = self.rng
        if longer_than is not None:
            return [*longer_than, *([rng.randrange(3)] * rng.choice([0, 1, 20, 300]))]
        tokens = TRUNK[: rng.choice([*PLACES, 700])]
        return [*tokens, *([rng.randrange(3)] * rng.choice([0, 1, 40]))]

    def any_node(self) -> Node | None:
        nodes = [node for node in self.mine if node.parent is not None]  # a root is nobody's parent call
        nodes += [name.snapshot.node for name in self.names.values()]
        return self.rng.choice(nodes) if nodes else None

    def any_name(self) -> Name | None:
        return self.rng.choice(list(self.names.values())) if self.names else None

    def keep_all(self, nodes: dict[int, Node]) -> None:
        for node in nodes.values():
            self.mine[node] += 1

    def do_run(self) -> None:
        tokens = self.prompt()
        keep = [place for place in self.rng.sample(PLACES, self.rng.randrange(3)) if place <= len(tokens)]
        ran = self.world.run(tokens, keep=keep, owner=self.rng.choice(OWNERS))
        assert set(ran.nodes) == {*keep, len(tokens)}
        assert [list(node.all_tokens()) for node in ran.nodes.values()] == [tokens[:end] for end in ran.nodes]
        self.done["restored"] += ran.lookup.position > 0
        self.keep_all(ran.nodes)

    def owner_of(self, node: Node) -> str:
        root = node.path()[0].parent
        return next(owner for owner in OWNERS if self.cache.root(owner) is root)

    def do_run_behind(self, decode: int = 0) -> None:
        base = self.any_node()
        if base is None or base.end > 1500:
            return
        tokens = self.prompt(longer_than=list(base.all_tokens())) + [5] * decode
        ran = self.world.run(tokens, base=base, owner=self.owner_of(base), decode=decode)
        cached, recomputed, _ = ran.receipt
        assert cached + recomputed == max(cached, base.end)  # beyond its end stands what went this way before
        assert (ran.lookup.miss_reason is MissReason.NONE) == (recomputed == 0)
        self.done["restored behind"] += cached > 0
        self.done["recomputed behind"] += recomputed > 0
        self.keep_all(ran.nodes)

    def do_decode(self) -> None:
        self.do_run_behind(self.rng.choice([1, 5, 280]))

    def do_name(self) -> None:
        node = self.any_node()
        if node is None or node.parent is None:
            return
        owner, name = self.owner_of(node), f"n{self.rng.randrange(16)}"
        parent = next((n.snapshot for n in self.names.values() if n.snapshot.owner == owner), None)
        pinned = self.rng.random() < 0.2
        keep = Keep(snapshot_id=name, ttl=self.rng.choice([None, 100.0]), pinned=pinned)
        self.forget_expired()
        owned = [n.snapshot for key, n in self.names.items() if key[0] == owner]
        try:
            snapshot = self.cache.add_snapshot(owner, node, keep, parent=parent)
        except TakenSnapshotId:
            assert (owner, name) in self.names
        except SnapshotLimit:
            assert len(owned) >= 12 or (pinned and sum(s.pinned for s in owned) >= 2)
        else:
            self.names[owner, name] = Name(snapshot, list(node.all_tokens()))
            self.done["named"] += 1

    def do_let_go(self) -> None:
        for node in self.rng.sample(
            sorted(self.mine, key=lambda n: n.key), min(len(self.mine), self.rng.randrange(1, 5))
        ):
            self.mine[node] -= 1
            self.mine += Counter()
            self.cache.let_go(node)

    def do_look_up(self) -> None:
        base = self.any_node() if self.rng.random() < 0.5 else None
        tokens = self.prompt(longer_than=list(base.all_tokens()) if base else None)
        owner = self.owner_of(base) if base is not None and base.parent else self.rng.choice(OWNERS)
        self.lookups.append((self.cache.lookup(owner, tokens, base=base, keep=()), tokens))

    def do_release(self) -> None:
        if self.lookups:
            lookup, tokens = self.lookups.pop(self.rng.randrange(len(self.lookups)))
            if lookup.plan is not None:
                self.world.check_read(lookup, tokens, self.store.fetch_now(lookup.plan.records))
                self.done["read late"] += 1
            self.cache.release(lookup)

    def do_follow(self) -> None:
        node = self.any_node()
        if node is not None and len(self.followed) < 2:
            self.followed.append(self.cache.follow(node))
            self.done["followed"] += 1

    def do_unfollow(self) -> None:
        if self.followed:
            self.cache.unfollow(self.followed.pop(self.rng.randrange(len(self.followed))))

    def do_cut(self) -> None:
        node = self.any_node()
        if node is None or node.parent is None:
            return
        somewhere, kept = self.rng.randrange(1, node.end + 1), [n.end for n in node.path()]
        position = self.rng.choice([somewhere, self.rng.choice(PLACES), self.rng.choice(kept)])
        if position > node.end:
            return
        found = self.cache.cut(node, position)
        if found is not None:
            assert list(found.all_tokens()) == list(node.all_tokens())[:position]
            assert all(self.store.locate(record) for record, _ in needed(found.path(), self.cache.layout, logits=False))
            self.mine[found] += 1
            self.done["cut"] += 1

    def do_base(self) -> None:
        node = self.any_node()
        if node is None or node.parent is None:
            return
        position = self.rng.randrange(1, node.end + 1)
        found = self.cache.hold_base(node, position)
        assert list(found.all_tokens()) == list(node.all_tokens())[: found.end]
        assert found.end <= position
        assert all(self.store.locate(record) for record, _ in needed(found.path(), self.cache.layout, logits=False))
        self.mine[found] += 1

    def do_use(self) -> None:
        name = self.any_name()
        if name is not None:
            self.forget_expired()
            try:
                assert self.cache.use(name.snapshot.owner, name.snapshot.id) is name.snapshot
                name.uses += 1
            except GoneSnapshot:
                assert (name.snapshot.owner, name.snapshot.id) not in self.names

    def do_unuse(self) -> None:
        used = [name for name in self.names.values() if name.uses]
        if used:
            name = self.rng.choice(used)
            name.uses -= 1
            self.cache.unuse(name.snapshot)

    def do_delete(self) -> None:
        name = self.any_name()
        if name is None:
            return
        try:
            self.cache.delete(name.snapshot, GoneReason.DELETED)
            assert not name.uses
        except SnapshotBusy:
            assert name.uses
            return
        self.names.pop((name.snapshot.owner, name.snapshot.id))
        self.done["deleted"] += 1

    def do_pin(self) -> None:
        name = self.any_name()
        if name is not None:
            try:
                self.cache.update(name.snapshot, pinned=True)
            except SnapshotLimit:
                owned = [n.snapshot for key, n in self.names.items() if key[0] == name.snapshot.owner]
                assert sum(s.pinned for s in owned) >= 2 and not name.snapshot.pinned

    def do_unpin(self) -> None:
        name = self.any_name()
        if name is not None:
            self.cache.update(name.snapshot, pinned=False)

    def do_extend(self) -> None:
        name = self.any_name()
        if name is not None:
            before = name.snapshot.expires
            self.cache.extend(name.snapshot, self.rng.choice([None, 50.0, 5000.0]))
            assert before <= name.snapshot.expires <= max(before, self.world.now + 900)

    def do_wait(self) -> None:
        self.world.now += self.rng.choice([1.0, 60.0, 400.0])

    def do_evict(self) -> None:
        self.store.trim(memory_bytes=self.rng.randrange(MEMORY), disk_bytes=self.rng.randrange(self.disk))
        self.done["evicted"] += 1

    def do_write(self) -> None:
        self.store.run_pending(self.rng.randrange(1, 12))

    def do_rehome(self) -> None:
        """A name's state is computed again, as a call behind it would."""
        name = self.any_name()
        if name is None:
            return
        ran = self.world.run(name.tokens, owner=name.snapshot.owner)
        node = ran.nodes.pop(len(name.tokens))
        self.cache.rehome(name.snapshot, node)
        assert name.snapshot.node is node
        self.cache.let_go(node)
        self.done["rehomed"] += 1

    def do_find(self) -> None:
        owner, name = self.rng.choice(OWNERS), f"n{self.rng.randrange(16)}"
        self.forget_expired()
        known = self.names.get((owner, name))
        try:
            assert known is not None and self.cache.snapshot(owner, name) is known.snapshot
        except AssertionError:
            with pytest.raises((GoneSnapshot, Unknown)):
                self.cache.snapshot(owner, name)

    def do_sweep(self) -> None:
        self.cache.sweep()

    # -- the twin

    def forget_expired(self) -> None:
        """The twin's own reading of time; the cache ends names when it looks."""
        now = self.world.now
        over = [
            key for key, n in self.names.items() if not n.snapshot.pinned and not n.uses and n.snapshot.expires <= now
        ]
        for key in over:
            del self.names[key]
            self.done["expired"] += 1
        assert {(s.owner, s.id) for s in self.cache.all_snapshots()} == self.names.keys()

    def protected(self) -> set[RecordId]:
        """Records that a pin or an outstanding plan names, or that a run goes on from."""
        records = self.pinned()
        for node in self.followed:
            records |= {RecordId(node.key, kind) for kind in RecordKind}
            before = {record for record, _ in needed(node.path(), self.cache.layout, logits=True)}
            for here in reversed(node.path()):
                if here is not node and not self.store.locate(RecordId(here.source, RecordKind.FULL)):
                    break  # nothing before this gap is of use to it
                records |= {record for record in before if record.key in (here.key, here.source)}
        return records

    def pinned(self) -> set[RecordId]:
        records = {r for lookup, _ in self.lookups if lookup.plan is not None for r in lookup.plan.records}
        for lookup, _ in self.lookups:
            records |= {r for node in lookup.kept for r, _ in needed(node.path(), self.cache.layout, logits=True)}
        for name in self.names.values():
            if name.snapshot.pinned:
                records |= {r for r, _ in needed(name.snapshot.node.path(), self.cache.layout, logits=True)}
        return records

    def useful(self) -> set[RecordId]:
        """Held records that some place, at which all is there to go on, takes."""
        found: set[RecordId] = set()
        held = self.store._index._entries.keys()
        for node in self.cache._tree:
            takes = {record for record, _ in needed(node.path(), self.cache.layout, logits=True)}
            logits = RecordId(node.key, RecordKind.LOGITS)
            if takes - {logits} <= held:
                found |= takes & held
        return found

    def behind_no_gap(self) -> set[bytes]:
        """Keys of nodes before which every record of tokens is held, their own included."""
        stored = {record.key for record in self.store._index._entries if record.kind is RecordKind.FULL}
        return {node.key for node in self.cache._tree if all(here.source in stored for here in node.path())}

    def on_the_way(self) -> set[RecordId]:
        """What belongs to places of which a record was lost or refused, and what pinned ones stand on."""
        order = self.store._index._order
        protected = {record.key for record in self.protected()}
        found: set[RecordId] = set()
        for node in self.cache._tree:
            unit = order._units.get(node.key)
            if node.key in protected or (unit is not None and unit.standing and not order._is_whole(unit)):
                found |= {record for record, _ in needed(node.path(), self.cache.layout, logits=True)}
        return found

    def check(self) -> None:
        self.forget_expired()
        tree = set(self.cache._tree)
        held = Counter(self.mine) + Counter(self.followed)
        for name in self.names.values():
            held[name.snapshot.node] += 1
            assert name.snapshot.uses == name.uses
        for lookup, _ in self.lookups:
            if lookup.plan is not None:
                held.update(lookup.plan.nodes)
            held.update(lookup.kept)
        held.update(node.borrows for node in tree if node.borrows is not None)
        stored = {record.key for record in self.store._index._entries}
        unheard = {record.key for record in self.store._index._lost}  # the next sweep prunes these
        for node in tree:
            assert node.holds == held[node], node
            assert node.parent in tree or (node.parent is not None and node.parent.parent is None)
            has_use = node.holds or node.children or (node.key in stored and not node.is_tail) or node.key in unheard
            assert has_use, f"{node} is for nobody"
        assert stored <= {node.key for node in tree}, "a record without a node"
        assert {node for node in held if held[node]} <= tree | {self.cache.root(owner) for owner in OWNERS}
        stats = self.store.stats()
        assert stats.memory_bytes <= MEMORY
        assert stats.pending_bytes <= 2 * QUEUE
        assert stats.file_bytes <= self.disk
        assert self.pinned() <= self.store._index._pins.keys()
        counted = {owner: set(records) for owner, records in self.cache._pinned._records.items()}
        named: dict[str, set[RecordId]] = {}
        for (owner, _), name in self.names.items():
            if name.snapshot.pinned and self.cache._snapshots.has(name.snapshot):
                named.setdefault(owner, set()).update(self.cache._stock.records_of(name.snapshot.node))
        assert counted == named, "bytes are counted of what is pinned, and of nothing else"
        # An order that a durable store has not carried out yet pins what it is to write.
        assert stats.pinned == len(self.pinned()) or (self.store.durable and self.store._io._background)
        assert stats.failed_jobs == 0
        claims: Counter[RecordId] = Counter()
        for name in self.names.values():
            claims.update(record for record, _ in needed(name.snapshot.node.path(), self.cache.layout, logits=True))
        index = self.store._index
        assert claims == index._claims, "names claim what they stand on, and give it back"
        assert all(entry.explicit for record, entry in index._entries.items() if record in claims)

    def check_names(self) -> None:
        """Each is restorable as far as the records go, whole and right; the view says the same."""
        have = {
            RecordId(node.key, kind)
            for node in self.cache._tree
            for kind in RecordKind
            if self.store.locate(RecordId(node.key, kind))
        }
        for name in self.names.values():
            snapshot = name.snapshot
            assert list(snapshot.node.all_tokens()) == name.tokens
            path, end = snapshot.node.path(), snapshot.token_count
            wanted = reference(path, self.cache.layout, have, end, more_follows=True)
            place = wanted[0] if wanted else 0
            assert self.cache.state_of(snapshot).restorable == place
            lookup = self.cache.lookup(snapshot.owner, [*name.tokens, NEVER_SAID], base=snapshot.node, keep=())
            assert (lookup.position, lookup.known) == (place, end)
            if lookup.plan is not None:
                tiers = [self.store.locate(record) for record in lookup.plan.records]
                self.done["on disk"] += Tier.DISK in tiers
                self.world.check_read(lookup, name.tokens, self.store.fetch_now(lookup.plan.records))
            self.cache.release(lookup)
            self.done["names checked"] += 1

    def end(self) -> None:
        """With all given up, nothing is left."""
        for lookup, _ in self.lookups:
            self.cache.release(lookup)
        for name in self.names.values():
            for _ in range(name.uses):
                self.cache.unuse(name.snapshot)
        for node in list(self.mine.elements()):
            self.cache.let_go(node)
        for node in self.followed:
            self.cache.unfollow(node)
        self.lookups, self.mine, self.followed = [], Counter(), []
        for name in self.names.values():
            name.uses = 0
        self.check()
        assert all(node.holds == 0 or node in {n.snapshot.node for n in self.names.values()} or any(
            other.borrows is node for other in self.cache._tree) for node in self.cache._tree)  # fmt: skip
        self.world.forget_everything()
        assert self.world.tree == {}
        assert self.cache._tree._content.keys() <= {self.cache.root(owner).content for owner in OWNERS}
        stats = self.store.stats()
        assert (stats.pinned, stats.memory_bytes, stats.pending_bytes, stats.disk_bytes) == (0, 0, 0, 0)
        assert all(self.cache.root(owner).holds == 0 for owner in OWNERS)


class DurablePlay(Play):
    """The same over a durable store, which is opened anew now and then."""

    operations: ClassVar[dict[str, int]] = {**OPERATIONS, "persist": 8, "restart": 1}
    disk = 40_000  # the notes of nodes take a kilobyte each

    def __init__(self, seed: int, layout: str, folder: Path) -> None:
        self.storage = CrashStorage()
        self.ring = ring_at(folder)
        self.layout = layout
        self.opening = 0
        super().__init__(seed, layout, self.opened(1000.0))

    def opened(self, now: float) -> DurableWorld:
        self.opening += 1
        return DurableWorld(
            LAYOUTS[self.layout],
            self.storage,
            self.ring,
            opening=self.opening,
            disk=self.disk,
            memory=MEMORY,
            queue=QUEUE,
            limits=LIMITS,
            now=now,
        )

    def do_persist(self) -> None:
        name = self.any_name()
        if name is None:
            return
        answers: list[StoreError | None] = []
        stood = self.cache.stands(name.snapshot.node)
        self.cache.make_durable(name.snapshot, answers.append)
        self.store.run_pending()
        if answers == [None]:
            assert name.snapshot.durable
            self.done["made durable"] += stood
        else:
            assert len(answers) == 1 and not (stood and self.store.stats().write_errors == 0)
            self.names.pop((name.snapshot.owner, name.snapshot.id))
            self.cache.delete(name.snapshot, in_use_ok=True)  # as whoever asked for it does

    def do_restart(self) -> None:
        """The process ends, in good order or not, with all that was asked for on disk; another takes its place."""
        self.cache.sweep()
        self.store.run_pending()
        now = self.world.now + self.rng.choice([0.0, 30.0])
        orderly = self.rng.random() < 0.5
        if orderly:
            self.cache.close()
        self.done["restarted" if orderly else "killed"] += 1
        before, self.names = self.names, {}
        self.lookups, self.mine, self.followed = [], Counter(), []
        self.world = self.opened(now)
        self.cache, self.store = self.world.cache, self.world.store
        found = {(s.owner, s.id): s for s in self.cache.all_snapshots()}
        for key, was in before.items():
            there = found.pop(key, None)
            if not was.snapshot.durable:
                assert there is None, "what was not durable ends with the process"
                self.done["ended with it"] += 1
                continue
            told_late = 0.0 if orderly else 60.0  # a use that only pushes the expiry out is written once a minute
            if there is None:
                assert not was.snapshot.pinned and was.snapshot.expires - told_late <= now
                self.done["expired"] += 1
                continue
            assert (list(there.node.all_tokens()), there.labels) == (was.tokens, was.snapshot.labels)
            assert was.snapshot.expires - told_late <= there.expires <= was.snapshot.expires
            assert (there.pinned, there.lineage) == (was.snapshot.pinned, was.snapshot.lineage)
            self.names[key] = Name(there, was.tokens)
            self.done["came back"] += 1
            self.done["came back pinned"] += there.pinned
            self.done["came back whole"] += self.cache.stands(there.node)
        assert not found, "names that nobody made"


def play(
    seed: int, layout: str, operations: int, *, share_decoded: bool, checkpoints: Checkpoints = DEFAULT_CHECKPOINTS
) -> Counter[str]:
    return play_on(
        Play(seed, layout, world_of(layout, share_decoded=share_decoded, checkpoints=checkpoints)), operations
    )


def play_on(game: Play, operations: int) -> Counter[str]:
    for number in range(operations):
        game.step()
        if number % 50 == 0:
            game.check_names()
            game.check()
    game.end()
    return game.done


@pytest.mark.parametrize("share_decoded", [False, True], ids=["own line only", "shared"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_agrees_with_a_twin_that_knows_who_holds_what(layout: str, share_decoded: bool) -> None:
    done = play(1, layout, 2_500, share_decoded=share_decoded)
    # The history was worth its while.
    assert min(done[what] for what in ("restored", "restored behind", "recomputed behind", "named", "deleted")) > 15
    assert min(done[what] for what in ("cut", "evicted", "on disk")) > 3
    assert done["names checked"] > 100


@pytest.mark.parametrize("layout", ["window", "state", "all"])
def test_the_cache_agrees_with_its_twin_while_chains_are_thinned_to_what_handles_need(layout: str) -> None:
    done = play(3, layout, 1_500, share_decoded=True, checkpoints=Checkpoints(policy=CheckpointPolicy.MARKS))
    # Ids and nonces are drawn anew in every run, so what is rare may not come in a short one.
    assert min(done[what] for what in ("restored", "named", "deleted")) > 3
    assert done["names checked"] > 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_agrees_with_its_twin_over_restarts_of_a_durable_store(layout: str, tmp_path: Path) -> None:
    done = play_on(DurablePlay(1, layout, tmp_path), 1_500)
    assert min(done[what] for what in ("restarted", "killed", "made durable", "came back")) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_agrees_with_its_twin_over_many_restarts(layout: str, seed: int, tmp_path: Path) -> None:
    assert play_on(DurablePlay(seed, layout, tmp_path), 4_000)["came back"] > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_agrees_with_its_twin_over_a_hundred_thousand_operations(layout: str, seed: int) -> None:
    play(seed, layout, 6_500, share_decoded=seed % 2 == 0)


def test_the_reference_state_is_a_function_of_the_tokens_alone() -> None:
    assert payload_of(RecordKind.FULL, [1, 2]) == payload_of(RecordKind.FULL, [1, 2])
    states = {payload_of(kind, TRUNK[:n]) for kind in RecordKind for n in range(0, 900, BLOCK_TOKENS)}
    assert len(states) == len(RecordKind) * 4
