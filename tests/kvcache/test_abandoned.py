"""What a rollback gives up, over random trees of calls, against a twin in which every token is a thing of its own.

Few different tokens and few lengths: most calls come to what another call came to as well, and only whose tokens they
are tells them apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tiny_worlds import LAYOUTS, World

from kvcache.cache import Keep
from kvcache.snapshots import GoneReason, Snapshot, new_call_id

OWNERS = ("a", "b")
LENGTHS = (1, 60, 100, 156, 256, 300)
MOST_TOKENS = 900


@dataclass(frozen=True, eq=False)
class Token:
    """One that a call brought; equal to nothing but itself."""

    id: int


@dataclass
class Name:
    snapshot: Snapshot
    tokens: list[Token]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Trees:
    """The names of two owners, and how they came about."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(LAYOUTS["full"], memory=10_000_000)
        self.names: list[Name] = []
        self.made = 0

    def name(self, owner: str, tokens: list[Token], parent: Name | None, call: str) -> None:
        self.made += 1
        self.world.now += self.rng.choice((0.0, 1.0))
        node = self.world.run([token.id for token in tokens], owner=owner).nodes[len(tokens)]
        snapshot = self.world.cache.add_snapshot(
            owner,
            node,
            Keep(snapshot_id=f"n{self.made}", pinned=self.rng.random() < 0.1),
            parent=parent.snapshot if parent else None,
            call=call,
        )
        self.world.cache.let_go(node)
        self.names.append(Name(snapshot, list(tokens)))

    def any_name(self) -> Name | None:
        return self.rng.choice(self.names) if self.names else None

    def added(self) -> list[Token]:
        """What a call brings: one token over and over."""
        id = self.rng.choice((1, 2))
        return [Token(id) for _ in range(self.rng.choice(LENGTHS))]

    def call(self) -> None:
        """A call that keeps marks, also inside its parent, and perhaps its end."""
        parent = self.any_name() if self.rng.random() < 0.8 else None
        tokens = [*(parent.tokens if parent else []), *self.added()]
        owner = parent.snapshot.owner if parent else self.rng.choice(OWNERS)
        if len(tokens) <= MOST_TOKENS:
            call = new_call_id()
            for place in {self.rng.randint(1, len(tokens)) for _ in range(self.rng.randint(0, 2))} | {len(tokens)}:
                self.name(owner, tokens[:place], parent, call)

    def fork(self) -> None:
        """Branches of one call, plain ones and ones that go on."""
        parent = self.any_name()
        if parent is not None:
            for tokens in ([], self.added(), self.added()):
                if len(parent.tokens) + len(tokens) <= MOST_TOKENS:
                    self.name(parent.snapshot.owner, [*parent.tokens, *tokens], parent, "")

    def delete(self) -> None:
        name = self.any_name()
        if name is not None:
            self.world.cache.delete(name.snapshot)
            self.names.remove(name)

    def rollback(self) -> None:
        """Gives up what the cut drops, and checks that against the twin."""
        source = self.any_name()
        if source is None:
            return
        owner, cut = source.snapshot.owner, self.rng.randint(1, len(source.tokens))
        going = self.world.cache.abandoned_by(source.snapshot, cut)
        dropped = source.tokens[cut:]
        mine = [name for name in self.names if name.snapshot.owner == owner]
        for name in mine:
            if name.snapshot in going:
                assert dropped and name.ids[: cut + 1] == source.ids[: cut + 1], "it does not have what was dropped"
                assert not name.snapshot.pinned
        kin = [name for name in mine if dropped and dropped[0] in name.tokens]
        assert {name.snapshot.id for name in kin if not name.snapshot.pinned} == {gone.id for gone in going}
        self.name(owner, source.tokens[:cut], source, "")
        for gone in going:
            self.world.cache.delete(gone, GoneReason.ROLLED_BACK)
        self.names = [name for name in self.names if name.snapshot not in going]


@pytest.mark.parametrize("seed", range(40))
def test_what_a_rollback_gives_up_has_what_was_dropped_and_nothing_that_has_it_stays(seed: int) -> None:
    trees = Trees(seed)
    acts = [trees.call] * 6 + [trees.fork, trees.delete, trees.rollback, trees.rollback]
    for _ in range(80):
        trees.rng.choice(acts)()
