"""The conformance suite: what holds for a model family whose state is kept, whatever its caches are.

Runs the engine's own loop, cache and store (the rig of the engine tests) on one model, and compares whole states: what
stands in a row's caches as soon as it is restored, and the bytes of every record on a path, logits among them. "Cold"
is the same engine under an owner that shares nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvcache.mlx_arrays import from_payload
from kvcache.records import Buffer, RecordKind
from tests.engine.rig import Outcome, Rig, Ticket, prompt_of
from tests.families.mutations import Mutating, Mutation, of_kinds
from tests.families.watched import WatchedEngine

BLOCK = 256
EARLIER = BLOCK + 44
MARK = 2 * BLOCK + 44  # behind two blocks of equal size, in a tail as long as the earlier mark's
SUFFIX = 12
DECODED = 8

_OWNERS = itertools.count()

_Payloads = Mapping[RecordKind, Buffer]


@dataclass(frozen=True, slots=True)
class Difference:
    """One broken promise: where, and how far off."""

    check: str
    place: int
    figure: str

    def __str__(self) -> str:
        return f"{self.check} at {self.place}: {self.figure}"


Colds = dict[tuple[object, ...], Ticket]
"""Rows that were computed from nothing, by what they were given. They are the same for every run of the suite."""


def check(rig: Rig, colds: Colds) -> Iterator[Difference]:
    """Every difference found; nothing if the family conforms. Raises what the engine raises."""
    suite = _Suite(rig, colds)
    yield from suite.restored()
    yield from suite.forked()
    yield from suite.decoded_and_rolled_back()
    yield from suite.decoded_over_a_boundary()
    yield from suite.together()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the suite said of one mutation; `applied` is False where the family has nothing that could be so wrong."""

    mutation: Mutation
    applied: bool
    seen: bool


def mutated(rig: Rig, colds: Colds) -> Iterator[Answer]:
    """Whether the suite would have found each kind of wrong restore, tried on the family itself."""
    engine = rig.engine
    assert isinstance(engine, WatchedEngine)
    for mutation in of_kinds(rig.facts.layout.kinds):
        engine.change = mutating = Mutating(mutation)
        suite = _Suite(rig, colds)
        parts = [suite.restored, suite.forked, suite.decoded_and_rolled_back]
        if mutation.kind is RecordKind.LOGITS:
            parts = parts[1:]  # none are read where tokens follow
        try:
            seen = any(difference for part in parts for difference in part())
        except ValueError:  # a restore that is refused ends its row, and the suite with it
            seen = True
        finally:
            engine.change = None
        yield Answer(mutation, applied=mutating.applied > 0, seen=seen)


class _Suite:
    def __init__(self, rig: Rig, colds: Colds) -> None:
        self.rig = rig
        self._colds = colds
        assert isinstance(rig.engine, WatchedEngine)
        self.engine = rig.engine
        self.owner = f"suite-{next(_OWNERS)}"  # what another run of the suite left behind is none of this one's
        window = {spec.window for spec in rig.facts.layout.layers if 1 < spec.window < MARK}
        around = {at + off for at in {BLOCK, 2 * BLOCK, *window} for off in (-1, 0, 1)}
        self.places = sorted({EARLIER, MARK} | {place for place in around if place <= MARK})
        self.prompt = prompt_of(rig, MARK)

    def submit(self, tokens: list[int], **how: Any) -> Ticket:
        return self.rig.submit(tokens, owner=self.owner, **how)

    def run(self, tokens: list[int], **how: Any) -> Outcome:
        return self.submit(tokens, **how).wait()

    def cold(self, tokens: list[int], **how: Any) -> Outcome:
        return self.cold_row(tokens, **how).wait()

    def cold_row(self, tokens: list[int], **how: Any) -> Ticket:
        """Ended, and computed from nothing; once for the same tokens and orders."""
        key = (*tokens, repr(how))
        if key not in self._colds:
            ticket = self.rig.submit(tokens, owner=f"cold-{next(_OWNERS)}", **how)
            usage = ticket.wait().usage
            assert usage is not None and usage.cached_tokens == 0
            self._colds[key] = ticket
        return self._colds[key]

    def restored(self) -> Iterator[Difference]:
        """A snapshot goes on as a cold run does, at every kind of place."""
        once = self.run(self.prompt, keep=self.places)
        for place in self.places:
            tokens = self.prompt[:place] + prompt_of(self.rig, SUFFIX, seed=place)
            warm = self.submit(tokens, base=once.nodes[place], keep=[len(tokens)])
            usage = warm.wait().usage
            assert usage is not None
            if usage.cached_tokens != place:
                yield Difference("restored", place, f"{usage.cached_tokens} tokens were restored")
            marks = [p for p in self.places if p <= place]
            other = self.cold_row(tokens, keep=[*marks, len(tokens)])
            yield from self._stands("restored", place, warm, other)
            yield from self._compare("restored", place, warm, other, end=len(tokens))

    def forked(self) -> Iterator[Difference]:
        """Children beside a parent that decodes on: each as if alone, the parent untouched."""
        parent = self.run(self.prompt, keep=[MARK]).nodes[MARK]
        before = self.rig.chain(parent)
        running = self.submit(self.prompt, base=parent, generate=DECODED)
        suffixes = [prompt_of(self.rig, n, seed=n) for n in (7, 40)]
        children = [self.submit(self.prompt + s, base=parent, keep=[MARK + len(s)]) for s in suffixes]
        for suffix, child in zip(suffixes, children, strict=True):
            end = MARK + len(suffix)
            other = self.cold_row(self.prompt + suffix, keep=[MARK, end])
            child.wait()
            yield from self._stands("forked", MARK, child, other)
            yield from self._compare("forked", MARK, child, other, end=end)
        running.wait()
        yield from self._stands("forked", MARK, running, other)
        if self.rig.chain(parent) != before:
            yield Difference("forked", MARK, "the parent's records changed")

    def decoded_and_rolled_back(self) -> Iterator[Difference]:
        """Decoded state is kept and goes on; the places before it are as they were."""
        answer = self.submit(self.prompt, keep=[MARK], generate=DECODED, save=True)
        kept, picked, end = answer.wait().nodes, answer.outcome.tokens, MARK + DECODED
        twin = self.cold_row(self.prompt, keep=[MARK], generate=DECODED, save=True)
        yield from self._compare("decoded", end, answer, twin, end=end)
        whole = self.cold(self.prompt, keep=[MARK], generate=2 * DECODED)
        more = self.submit(self.prompt + picked, base=kept[end], generate=DECODED)
        tokens = picked + more.wait().tokens
        yield from self._stands("decoded", end, more, twin)
        if tokens != whole.tokens:
            yield Difference("decoded", end, "other tokens behind the snapshot than in one go")
        for place, marks in ((MARK, [MARK]), (2 * BLOCK, []), (BLOCK, [])):
            back = self.rig.cache.cut(kept[end], place)
            if back is None:
                yield Difference("rolled back", place, "the place was not kept")
                continue
            tokens = self.prompt[:place] + prompt_of(self.rig, SUFFIX, seed=900 + place)
            warm = self.submit(tokens, base=back, keep=[len(tokens)])
            warm.wait()
            other = self.cold_row(tokens, keep=[*marks, len(tokens)])
            yield from self._stands("rolled back", place, warm, other)
            yield from self._compare("rolled back", place, warm, other, end=len(tokens))

    def decoded_over_a_boundary(self) -> Iterator[Difference]:
        """A boundary that decode passed beside another row is a place to go on from."""
        edge = 2 * BLOCK
        neighbour = self.submit(prompt_of(self.rig, 70, seed=70), generate=4 * DECODED)
        prompt = self.prompt[: edge - DECODED]
        answer = self.submit(prompt, generate=2 * DECODED, save=True)
        picked = answer.wait().tokens
        neighbour.wait()
        back = self.rig.cache.cut(answer.outcome.nodes[edge + DECODED], edge)
        if back is None:
            yield Difference("decoded over", edge, "the boundary was not kept")
            return
        # One token more than the boundary: decode keeps no next-token logits where nobody asked for them.
        more = self.submit(prompt + picked[: DECODED + 1], base=back, generate=DECODED - 1)
        usage = more.wait().usage
        assert usage is not None
        if usage.cached_tokens != edge:
            yield Difference("decoded over", edge, f"{usage.cached_tokens} tokens were restored")
        yield from self._stands("decoded over", edge, more, answer)
        if more.outcome.tokens != picked[DECODED + 1 :]:
            yield Difference("decoded over", edge, "other tokens than in one go")

    def together(self) -> Iterator[Difference]:
        """Rows that decode beside each other pick the tokens that they pick alone."""
        prompts = [prompt_of(self.rig, n, seed=n) for n in (5, 70, 260)]
        alone = [self.run(p, generate=DECODED).tokens for p in prompts]
        tickets = [self.submit(p, generate=DECODED) for p in prompts]
        for prompt, own, ticket in zip(prompts, alone, tickets, strict=True):
            tokens = ticket.wait().tokens
            if tokens != own:
                first = next(i for i, (a, b) in enumerate(zip(tokens, own, strict=True)) if a != b)
                yield Difference("B=3 against B=1", len(prompt), f"token {first + 1} of {DECODED} is another")

    def _stands(self, check: str, place: int, warm: Ticket, other: Ticket) -> Iterator[Difference]:
        """What stood in the row's caches once it was restored, against what a cold row held there."""
        ours, theirs = self.engine.states.get((warm.row, place)), self.engine.states.get((other.row, place))
        if ours is None or theirs is None:
            yield Difference(check, place, "no row stood there")
            return
        yield from _payloads(check, place, "in the caches, ", ours, theirs)

    def _compare(self, check: str, place: int, warm: Ticket, other: Ticket, *, end: int) -> Iterator[Difference]:
        """The records of both rows' nodes that end at `end`, and of all before them."""
        left, right = warm.outcome.nodes[end], other.outcome.nodes[end]
        if left.all_tokens() != right.all_tokens():
            yield Difference(check, place, "other tokens were picked")
            return
        for ours, theirs in zip(self.rig.chain(left), self.rig.chain(right), strict=True):
            yield from _payloads(check, place, "", ours, theirs)
        if not all(RecordKind.LOGITS in self.rig.records(node) for node in (left, right)):
            yield Difference(check, place, "no logits are stored")


def _payloads(check: str, place: int, where: str, ours: _Payloads, theirs: _Payloads) -> Iterator[Difference]:
    if ours.keys() - {RecordKind.LOGITS} != theirs.keys() - {RecordKind.LOGITS}:
        yield Difference(check, place, f"{where}other kinds of records")
    for kind in ours.keys() & theirs.keys():
        if ours[kind] != theirs[kind]:
            yield Difference(check, place, f"{where}{kind.name.lower()} {_distance(ours[kind], theirs[kind])}")


def _distance(ours: Buffer, theirs: Buffer) -> str:
    """How far two payloads are apart."""
    left, right = from_payload(ours), from_payload(theirs)
    if left.keys() != right.keys():
        return f"holds {len(left)} arrays against {len(right)}"
    most = 0.0
    for name in left:
        if left[name].shape != right[name].shape:
            return f"{name} has the shape {left[name].shape} against {right[name].shape}"
        a, b = (np.array(x[name].astype(mx.float32)) for x in (left, right))
        if a.size:
            most = max(most, float(np.abs(a - b).max()))
    return f"off by {most:.2g}"
