"""One vision model's engine, driven by hand: contexts of text and pictures, runs with their records, restores."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.blocks import BLOCK_TOKENS
from kvcache.media import MediaSpan, symbols, tag_of
from kvcache.records import RecordKind
from kvcache.schedule import Call, plan_calls
from service.engine import cpu
from service.media import Picture, Prepared
from service.models import resolve
from service.plan import (
    Capture,
    Decode,
    Encode,
    OpenRow,
    Payloads,
    Prefill,
    Restored,
    RowId,
    RowImage,
    StepPlan,
    StepResult,
)
from service.request import Sampling

GREEDY = Sampling(temperature=0.0, seed=0)
Part = int | Prepared
"""So many tokens of text, or an image."""


def picture(width: int, height: int, seed: int = 0) -> Picture:
    """Stripes and noise: another seed, another picture."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    pixels[:: 2 + seed % 5] //= 3
    return Picture(pixels=pixels, digest=hashlib.sha256(f"{width} {height} ".encode() + pixels.tobytes()).digest())


@dataclass(frozen=True)
class Context:
    """Tokens with symbols where images are."""

    tokens: tuple[int, ...]
    images: tuple[RowImage, ...]
    prepared: tuple[Prepared, ...]

    def upto(self, end: int) -> Context:
        kept = sum(image.end <= end for image in self.images)
        return Context(self.tokens[:end], self.images[: kept + 1], self.prepared[: kept + 1])

    @property
    def spans(self) -> list[MediaSpan]:
        return [MediaSpan(i.start, i.end, tag_of(self.tokens[i.start : i.end])) for i in self.images]


@dataclass(frozen=True)
class Node:
    """A block or a tail with its records."""

    start: int
    end: int
    payloads: Payloads


class VisionBench:
    """One engine."""

    def __init__(self, name: str) -> None:
        cpu.mlx()
        from service.engine.loading import load
        from service.engine.mlx_engine import MlxEngine

        self.name = name
        self.model, self.facts = load(resolve(name))
        assert self.facts.preparer is not None
        self.preparer = self.facts.preparer
        self.layout = self.facts.layout
        self.engine = MlxEngine(self.model, self.layout, self.facts.footprint)
        self.whole = self.layout.whole_images
        self._numbers = itertools.count(1)

    def prepare(self, width: int, height: int, seed: int = 0) -> Prepared:
        return self.preparer.prepare(picture(width, height, seed))

    def context(self, *parts: Part, seed: int = 1) -> Context:
        rng = np.random.default_rng(seed)
        tokens: list[int] = []
        images: list[RowImage] = []
        prepared: list[Prepared] = []
        for part in parts:
            if isinstance(part, int):
                tokens += rng.integers(20, 500, part).tolist()
            else:
                images.append(RowImage(start=len(tokens), key=part.key, ids=part.ids, grid=part.grid))
                tokens += symbols(part.key, len(part.ids))
                prepared.append(part)
        return Context(tuple(tokens), tuple(images), tuple(prepared))

    def step(self, plan: StepPlan) -> StepResult:
        result = self.engine.step(plan)
        assert result.failed == {}, result.failed
        return result

    def calls(self, context: Context, start: int, stops: Iterable[int]) -> list[Call]:
        whole = context.spans if self.whole else ()
        return plan_calls(start, len(context.tokens), stops, whole=whole)

    def open(self, context: Context, nodes: Sequence[Node] = ()) -> RowId:
        """A row that stands at the last node's end, with everything encoded that it will touch."""
        row = RowId(next(self._numbers))
        position = nodes[-1].end if nodes else 0
        order = OpenRow(
            row=row,
            restored=self.restored(nodes),
            sampling=GREEDY,
            top_logprobs=None,
            context=context.tokens,
            images=context.images,
        )
        needed = [Encode(image=p) for p, i in zip(context.prepared, context.images, strict=True) if i.end > position]
        self.step(StepPlan(open=(order,), encode=tuple(needed)))
        return row

    def restored(self, nodes: Sequence[Node]) -> Restored | None:
        if not nodes:
            return None
        end = nodes[-1].end
        last = nodes[-1].start
        wanted = [
            (node.start, kind, node.payloads[kind])
            for kind in RecordKind
            for node in nodes
            if kind in node.payloads
            and (
                kind is RecordKind.FULL
                or node.start == last
                or (kind is RecordKind.WINDOW and node.end > end - self.layout.window)
            )
        ]
        starts, kinds, payloads = zip(*wanted, strict=True)
        return Restored(position=end, kinds=kinds, starts=starts, payloads=payloads)

    def prefill(self, row: RowId, context: Context, before: Sequence[Node], stops: Iterable[int]) -> list[Node]:
        """Everything behind `before`; nodes of the whole path. A tail that a block follows is taken up by the block."""
        nodes = list(before)
        position = nodes[-1].end if nodes else 0
        for call in self.calls(context, position, stops):
            passed = []
            for boundary in call.passed:
                kinds = tuple(kind for kind in self.layout.kinds if kind is not RecordKind.STATE)
                passed.append(Capture(start=boundary - BLOCK_TOKENS, end=boundary, kinds=kinds))
            start = (call.end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            take = Capture(start=start, end=call.end, kinds=(*self.layout.kinds, RecordKind.LOGITS))
            fed = Prefill(
                row=row,
                tokens=context.tokens[call.start : call.end],
                logits=True,
                capture=take,
                passed=tuple(passed),
            )
            result = self.step(StepPlan(prefill=(fed,)))
            for capture, payloads in zip(passed, result.passed.get(row, ()), strict=True):
                nodes = [node for node in nodes if node.end <= capture.start]
                nodes.append(Node(capture.start, capture.end, payloads))
            nodes = [node for node in nodes if node.end <= start]
            nodes.append(Node(start, call.end, result.captured[row]))
        return nodes

    def run(self, context: Context, stops: Iterable[int] = (), before: Sequence[Node] = ()) -> list[Node]:
        row = self.open(context, before)
        nodes = self.prefill(row, context, before, stops)
        self.step(StepPlan(close=(row,)))
        return nodes

    def path_to(self, context: Context, position: int, stops: Iterable[int] = ()) -> list[Node]:
        """What a run that stopped at `position` stored."""
        return self.run(context.upto(position), stops)

    def decode(self, rows: Sequence[RowId], steps: int, *, first: bool = True) -> dict[RowId, list[int]]:
        tokens: dict[RowId, list[int]] = {row: [] for row in rows}
        plans = [StepPlan(sample=tuple(rows))] if first else []
        for plan in [*plans, *[StepPlan(decode=Decode(rows=tuple(rows)))] * steps]:
            for row, pick in self.step(plan).picked.items():
                tokens[row].append(pick.token)
        return tokens

    def answer(self, context: Context, steps: int, stops: Iterable[int] = (), before: Sequence[Node] = ()) -> list[int]:
        """What a row alone picks."""
        row = self.open(context, before)
        self.prefill(row, context, before, stops)
        tokens = self.decode([row], steps)[row]
        self.step(StepPlan(close=(row,)))
        return tokens

    def end(self, nodes: Sequence[Node]) -> dict[tuple[int, int, RecordKind], bytes]:
        """The whole state at the end of a path: what a restore there reads, and the logits."""
        restored = self.restored(nodes)
        assert restored is not None
        parts = zip(restored.starts, restored.kinds, restored.payloads, strict=True)
        return {(start, nodes[-1].end, kind): bytes(payload) for start, kind, payload in parts}
