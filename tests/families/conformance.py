"""The conformance suite: what holds for a model family whose state is kept, whatever its caches are.

Runs the engine's own loop, cache and store (the rig of the engine tests) on one model, and compares whole states: the
bytes of every record on a path, logits among them. "Cold" is the same engine under an owner that shares nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvcache.mlx_arrays import from_payload
from kvcache.records import RecordKind
from kvcache.tree import Node
from tests.engine.rig import Outcome, Rig, prompt_of

MARK = 300
SUFFIX = 12
DECODED = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """One broken promise: where, and how far off."""

    check: str
    place: int
    figure: str

    def __str__(self) -> str:
        return f"{self.check} at {self.place}: {self.figure}"


def check(rig: Rig) -> Iterator[Difference]:
    """Every difference found; nothing if the family conforms. Raises what the engine raises."""
    suite = _Suite(rig)
    yield from suite.restored()
    yield from suite.forked()
    yield from suite.decoded_and_rolled_back()
    yield from suite.decoded_over_a_boundary()
    yield from suite.together()


class _Suite:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._owners = (f"cold-{n}" for n in itertools.count())
        window = {spec.window for spec in rig.facts.layout.layers if 1 < spec.window < MARK}
        self.places = sorted({255, 256, 257, MARK} | {w + off for w in window for off in (-1, 0, 1)})
        self.prompt = prompt_of(rig, MARK)

    def cold(self, tokens: list[int], **how: Any) -> Outcome:
        outcome = self.rig.run(tokens, owner=next(self._owners), **how)
        assert outcome.usage is not None and outcome.usage.cached_tokens == 0
        return outcome

    def restored(self) -> Iterator[Difference]:
        """A snapshot goes on as a cold run does, at every kind of place."""
        once = self.rig.run(self.prompt, keep=self.places)
        for place in self.places:
            tokens = self.prompt[:place] + prompt_of(self.rig, SUFFIX, seed=place)
            warm = self.rig.run(tokens, base=once.nodes[place], keep=[len(tokens)])
            assert warm.usage is not None
            if warm.usage.cached_tokens != place:
                yield Difference("restored", place, f"{warm.usage.cached_tokens} tokens were restored")
            marks = [p for p in self.places if p <= place]
            other = self.cold(tokens, keep=[*marks, len(tokens)])
            yield from self._compare("restored", place, warm.nodes[len(tokens)], other.nodes[len(tokens)])

    def forked(self) -> Iterator[Difference]:
        """Children beside a parent that decodes on: each as if alone, the parent untouched."""
        parent = self.rig.run(self.prompt, keep=[MARK]).nodes[MARK]
        before = self.rig.chain(parent)
        running = self.rig.submit(self.prompt, base=parent, generate=DECODED)
        suffixes = [prompt_of(self.rig, n, seed=n) for n in (7, 40)]
        children = [self.rig.submit(self.prompt + s, base=parent, keep=[MARK + len(s)]) for s in suffixes]
        for suffix, child in zip(suffixes, children, strict=True):
            end = MARK + len(suffix)
            other = self.cold(self.prompt + suffix, keep=[MARK, end])
            yield from self._compare("forked", MARK, child.wait().nodes[end], other.nodes[end])
        running.wait()
        if self.rig.chain(parent) != before:
            yield Difference("forked", MARK, "the parent's records changed")

    def decoded_and_rolled_back(self) -> Iterator[Difference]:
        """Decoded state is kept and goes on; the places before it are as they were."""
        answer = self.rig.run(self.prompt, keep=[MARK], generate=DECODED, save=True)
        end = MARK + DECODED
        twin = self.cold(self.prompt, keep=[MARK], generate=DECODED, save=True)
        yield from self._compare("decoded", end, answer.nodes[end], twin.nodes[end])
        whole = self.cold(self.prompt, keep=[MARK], generate=2 * DECODED)
        more = self.rig.run(self.prompt + answer.tokens, base=answer.nodes[end], generate=DECODED)
        if answer.tokens + more.tokens != whole.tokens:
            yield Difference("decoded", end, "other tokens behind the snapshot than in one go")
        for place, make in ((MARK, self._marked), (256, self._plain)):
            back = self.rig.cache.cut(answer.nodes[end], place)
            if back is None:
                yield Difference("rolled back", place, "the place was not kept")
                continue
            tokens = self.prompt[:place] + prompt_of(self.rig, SUFFIX, seed=900 + place)
            warm = self.rig.run(tokens, base=back, keep=[len(tokens)])
            yield from self._compare("rolled back", place, warm.nodes[len(tokens)], make(tokens))

    def decoded_over_a_boundary(self) -> Iterator[Difference]:
        """A boundary that decode passed beside another row is a place to go on from."""
        neighbour = self.rig.submit(prompt_of(self.rig, 70, seed=70), generate=4 * DECODED)
        prompt = self.prompt[: 256 - DECODED]
        answer = self.rig.run(prompt, generate=2 * DECODED, save=True)
        neighbour.wait()
        back = self.rig.cache.cut(answer.nodes[256 + DECODED], 256)
        if back is None:
            yield Difference("decoded over", 256, "the boundary was not kept")
            return
        # One token more than the boundary: decode keeps no next-token logits where nobody asked for them.
        more = self.rig.run(prompt + answer.tokens[: DECODED + 1], base=back, generate=DECODED - 1)
        assert more.usage is not None
        if more.usage.cached_tokens != 256:
            yield Difference("decoded over", 256, f"{more.usage.cached_tokens} tokens were restored")
        if more.tokens != answer.tokens[DECODED + 1 :]:
            yield Difference("decoded over", 256, "other tokens than in one go")

    def together(self) -> Iterator[Difference]:
        """Rows that decode beside each other pick the tokens that they pick alone."""
        prompts = [prompt_of(self.rig, n, seed=n) for n in (5, 70, 260)]
        alone = [self.rig.run(p, generate=DECODED).tokens for p in prompts]
        tickets = [self.rig.submit(p, generate=DECODED) for p in prompts]
        for prompt, own, ticket in zip(prompts, alone, tickets, strict=True):
            tokens = ticket.wait().tokens
            if tokens != own:
                first = next(i for i, (a, b) in enumerate(zip(tokens, own, strict=True)) if a != b)
                yield Difference("B=3 against B=1", len(prompt), f"token {first + 1} of {DECODED} is another")

    def _marked(self, tokens: list[int]) -> Node:
        return self.cold(tokens, keep=[MARK, len(tokens)]).nodes[len(tokens)]

    def _plain(self, tokens: list[int]) -> Node:
        return self.cold(tokens, keep=[len(tokens)]).nodes[len(tokens)]

    def _compare(self, check: str, place: int, warm: Node, other: Node) -> Iterator[Difference]:
        if warm.all_tokens() != other.all_tokens():
            yield Difference(check, place, "other tokens were picked")
            return
        for ours, theirs in zip(self.rig.chain(warm), self.rig.chain(other), strict=True):
            if ours.keys() - {RecordKind.LOGITS} != theirs.keys() - {RecordKind.LOGITS}:
                yield Difference(check, place, "other kinds of records are stored")
            for kind in ours.keys() & theirs.keys():
                if ours[kind] != theirs[kind]:
                    yield Difference(check, place, f"{kind.name.lower()} {_distance(ours[kind], theirs[kind])}")
        if not all(RecordKind.LOGITS in self.rig.records(node) for node in (warm, other)):
            yield Difference(check, place, "no logits are stored")


def _distance(ours: bytes, theirs: bytes) -> str:
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
