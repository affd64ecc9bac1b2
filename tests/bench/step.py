"""Where a decode step's time goes, beside the floor: reading every weight once.

The engine alone, in this process, without a server: a step of 1, 2, 4 and 8 rows; in it the body (all layers), the head
and what picks a token of its logits. The *floor* is the bytes of all weights over the bandwidth at which this machine
reads memory that no cache holds, taken in the same rounds by adding up as many bytes with as many threads as a product
uses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvcache.schedule import plan_calls
from service.engine import cpu
from service.models import resolve
from service.plan import Decode, OpenRow, Prefill, RowId, StepPlan
from service.request import Sampling
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import some_tokens

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=0)
PROMPT = 130
PARTS = ("step", "body", "head", "pick")


def run(options: Options) -> None:
    model = options.model or ("tiny-gemma3" if options.quick else "gemma3")
    widths = (1, 2) if options.quick else (1, 2, 4, 8)
    rounds, steps = (1, 4) if options.quick else (options.runs or 5, 16)
    cpu.prepare()
    cpu.mlx()
    bench = _Bench(model)
    quiet, others = Quiet([], patience=2 if options.quick else 60), Bystanders([])
    seconds: dict[int, list[dict[str, float]]] = {width: [] for width in widths}
    floors: list[float] = []
    for number in range(rounds):
        quiet.wait()
        floors.append(bench.weight_bytes / _bandwidth())
        for width in widths:
            seconds[width].append(bench.measure(width, steps))
        told = ", ".join(f"{width}: {1000 * seconds[width][-1]['step']:.0f}" for width in widths)
        note(f"  round {number + 1} of {rounds}: floor {1000 * floors[-1]:.0f} ms; a step by rows, ms: {told}")
    for width in widths:
        ratios = [s["step"] / floor for s, floor in zip(seconds[width], floors, strict=True)]
        emit(
            Figure(
                metric=f"step.over_floor_{width}",
                value=median(ratios),
                unit="ratio",
                ours=1000 * median(s["step"] for s in seconds[width]),
                against=1000 * median(floors),
                peer="reading every weight once",
                model=model,
                n=rounds,
                extra={
                    "spread": spread(ratios),
                    "sides_unit": "ms",
                    **{f"{part}_ms": 1000 * median(s[part] for s in seconds[width]) for part in PARTS[1:]},
                    "weights_mib": bench.weight_bytes / 2**20,
                },
            ),
            others=others.cores(),
        )


class _Bench:
    """One loaded model and its engine."""

    def __init__(self, name: str) -> None:
        import mlx.core as mx
        from mlx.utils import tree_flatten

        from service.engine.loading import load
        from service.engine.mlx_engine import MlxEngine

        self._mx = mx
        self._model, facts = load(resolve(name))
        self._engine = MlxEngine(self._model, facts.layout)
        self._vocab = facts.vocab_size
        self._next = 0
        self.weight_bytes = sum(array.nbytes for _, array in tree_flatten(self._model.parameters()))

    def measure(self, width: int, steps: int) -> dict[str, float]:
        """Seconds of a whole step of the engine, and of its parts made one by one: the median of `steps`."""
        rows = [RowId(self._next + row) for row in range(width)]
        self._next += width
        for row in rows:
            self._open(row)
        decode = StepPlan(decode=Decode(rows=tuple(rows)))
        self._engine.step(decode)  # joins
        whole = median(_seconds(lambda: self._engine.step(decode)) for _ in range(steps))
        self._engine.step(StepPlan(close=tuple(rows)))
        return {"step": whole, **self._parts(width, steps)}

    def _open(self, row: RowId) -> None:
        tokens = some_tokens(PROMPT, 70 + row, self._vocab)
        for call in plan_calls(0, PROMPT, ()):
            opened = OpenRow(row=row, restored=None, sampling=GREEDY, top_logprobs=None, context=tokens)
            last = call.end == PROMPT
            self._engine.step(
                StepPlan(
                    open=(opened,) if call.start == 0 else (),
                    prefill=(Prefill(row=row, tokens=tokens[call.start : call.end], logits=last, capture=None),),
                    sample=(row,) if last else (),
                )
            )

    def _parts(self, width: int, steps: int) -> dict[str, float]:
        mx = self._mx
        from service.engine.sampling import RowSampler, pick_all
        from service.engine.upstream import make_prompt_cache

        caches = make_prompt_cache(self._model)
        prompt = mx.array([some_tokens(PROMPT, 7 + row, self._vocab) for row in range(width)], dtype=mx.uint32)
        mx.eval(self._model.model(prompt, cache=caches))
        token = mx.array([[5 + row] for row in range(width)], dtype=mx.uint32)

        def body() -> object:
            hidden = self._model.model(token, cache=caches)
            mx.eval(hidden)
            return hidden

        body_seconds = median(_seconds(body) for _ in range(steps))
        hidden = body()
        head = self._model.model.embed_tokens.as_linear
        head_seconds = median(_seconds(lambda: mx.eval(head(hidden))) for _ in range(steps))
        logits = head(hidden)[:, -1, :]
        mx.eval(logits)
        samplers = [RowSampler(GREEDY, None, [1]) for _ in range(width)]
        pick_seconds = median(_seconds(lambda: pick_all(logits, samplers, {})) for _ in range(steps))
        return {"body": body_seconds, "head": head_seconds, "pick": pick_seconds}


def _bandwidth(size: int = 1 << 30) -> float:
    """Bytes a second: all cores together add up `size` bytes of float32."""
    threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(size // 4, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / min(_seconds(lambda: list(pool.map(np.sum, parts))) for _ in range(3))


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
