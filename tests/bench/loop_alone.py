"""The engine without a server: a child process that generates on request, through the engine loop or without it.

    python -m tests.bench.loop_alone MODEL

Reads lines `{"how": "loop" | "engine", "tokens": [...], "answer": N}` and answers each with `{"ttft": s, "each": s}`:
seconds to the first token, and from one token to the next. "engine" makes the same model calls with step plans written
by hand; "loop" adds scheduler, cache, text and events, and is what the server drives.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence

from kvcache.cache import PrefixCache
from kvcache.schedule import plan_calls
from kvcache.store import StoreConfig, TieredStore
from service.engine import cpu
from service.loop import EngineLoop
from service.models import resolve
from service.plan import Decode, OpenRow, Prefill, RowId, StepPlan
from service.request import Sampling, Stopping
from service.scheduler import Scheduler, SchedulerConfig
from service.text.stream import TextStream
from service.text.tokens import TextCodec
from service.work import Ended, Failed, Generation, Tokens, Work, WorkEvent

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=0)
MIB = 1 << 20


class Alone:
    """One model with its loop; both ways of driving it share the engine, one at a time."""

    def __init__(self, name: str) -> None:
        self._folder = resolve(name)
        self._codec = TextCodec.load(self._folder)
        self._asked: tuple[list[int], int] | None = None
        self._answer: tuple[float, float] = (0.0, 0.0)
        self._rows = 1 << 20  # beyond the loop's own
        self.loop = EngineLoop(self._load, Scheduler(SchedulerConfig()), self._flush, snapshot_wait=10.0)
        self._loaded = threading.Event()
        self._done = threading.Event()
        self.loop.start()
        self._loaded.wait()

    def _load(self):  # type: ignore[no-untyped-def]
        cpu.mlx()
        from service.engine.loading import load
        from service.engine.mlx_engine import MlxEngine

        model, facts = load(self._folder)
        store = TieredStore(StoreConfig(memory_bytes=512 * MIB, disk_bytes=1024 * MIB, queue_bytes=64 * MIB))
        store.start()
        self._store = store
        self._engine = MlxEngine(model, facts.layout)
        self._loaded.set()
        return self._engine, PrefixCache(store, facts.layout, facts.fingerprint)

    def _flush(self) -> None:
        """Called by the loop on the engine's thread, which alone may touch MLX."""
        if self._asked is not None:
            (tokens, answer), self._asked = self._asked, None
            self._answer = self._drive(tokens, answer)
            self._done.set()

    def close(self) -> None:
        self.loop.close()
        self._store.close()
        time.sleep(0.2)  # MLX's part of the engine thread ends after Python's; a process that is gone by then aborts

    def by_loop(self, tokens: Sequence[int], answer: int) -> tuple[float, float]:
        times: list[float] = []
        self._done.clear()

        def hear(event: WorkEvent) -> None:
            match event:
                case Tokens():
                    times.append(time.perf_counter())
                case Ended():
                    self._done.set()
                case Failed():
                    raise event.error

        stopping = Stopping(ignore_eos=True)
        text = TextStream(
            self._codec, stopping, max_new_tokens=answer, context_room=100_000, context_tail=list(tokens[-8:])
        )
        generation = Generation(
            sampling=GREEDY, stopping=stopping, top_logprobs=None, text=text, save=False, save_on_cancel=False
        )
        began = time.perf_counter()
        self.loop.submit(Work(owner="bench", tokens=tokens, base=None, keep=frozenset(), generation=generation), hear)
        self._done.wait()
        return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)

    def by_engine(self, tokens: Sequence[int], answer: int) -> tuple[float, float]:
        self._done.clear()
        self._asked = (list(tokens), answer)
        self.loop.cancel(RowId(0))  # unknown, so nothing comes of it but a turn of the loop
        self._done.wait()
        return self._answer

    def _drive(self, tokens: list[int], answer: int) -> tuple[float, float]:
        self._rows += 1
        row = RowId(self._rows)
        calls = plan_calls(0, len(tokens), ())
        began = time.perf_counter()
        for call in calls:
            first, last = call.start == 0, call.end == len(tokens)
            opened = OpenRow(row=row, restored=None, sampling=GREEDY, top_logprobs=None, context=tokens)
            self._engine.step(
                StepPlan(
                    open=(opened,) if first else (),
                    prefill=(Prefill(row=row, tokens=tokens[call.start : call.end], logits=last, capture=None),),
                    sample=(row,) if last else (),
                )
            )
        times = [time.perf_counter()]
        for _ in range(answer - 1):
            self._engine.step(StepPlan(decode=Decode(rows=(row,))))
            times.append(time.perf_counter())
        self._engine.step(StepPlan(close=(row,)))
        return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)


def main(name: str) -> None:
    alone = Alone(name)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        drive = alone.by_loop if request["how"] == "loop" else alone.by_engine
        ttft, each = drive(request["tokens"], request["answer"])
        print(json.dumps({"ttft": ttft, "each": each}), flush=True)
    alone.close()


if __name__ == "__main__":
    main(sys.argv[1])
