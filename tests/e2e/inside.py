"""`kvfork serve` with a window into it and a way to hurt its engine. For tests: run as a module instead of `service`.

A prompt that holds one of the tokens below, among others, hurts the engine when it is prefilled; one that was generated
is fed alone and does no harm. With TESTS_UNHURT set they are tokens as others are. SIGUSR1 makes the process write what
it holds to the file that TESTS_REPORT names: a client cannot see tasks, rows and holds, and none of them may be left.
SIGUSR2 makes it write to stderr where its threads stand.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

DIES = 506  # the engine raises out of its step
ENDS = 507  # the thread is ended, without an exception that anybody catches
SLEEPS = 508  # the step takes until the file that TESTS_RELEASE names is there
HANGS = 509  # the step never ends
DIES_AND_STAYS = 510  # the engine raises, and the model cannot be loaded again until UNTIL loads have failed
SPOILS = 511  # the model raises out of the call that prefills it
NANS = 505  # that call's logits are no numbers
STUCK = "a text that no tokenizer gets to the end of"
FAILED_LOADS = 1
RELOAD = 1.0  # seconds that every load after the first takes at least, as real models do


def hurting(step: Any, failing: dict[str, int]) -> Any:
    def hurt(engine: Any, plan: Any) -> Any:
        tokens = {token for call in plan.prefill for token in call.tokens if len(call.tokens) > 2}
        if DIES in tokens:
            raise RuntimeError("as planned")
        if ENDS in tokens:
            raise SystemExit("as planned")
        if SLEEPS in tokens:
            release = Path(os.environ["TESTS_RELEASE"])
            while not release.exists():
                time.sleep(0.01)
        if HANGS in tokens:
            threading.Event().wait()
        if DIES_AND_STAYS in tokens:
            failing["loads"] = FAILED_LOADS
            raise RuntimeError("as planned")
        return step(engine, plan)

    return hurt


USED_BY: dict[str, set[int]] = {"model": set(), "engine": set(), "evaluation": set()}  # threads, by what they used


def noting(what: str, call: Any) -> Any:
    """`call`, which notes the threads that it is made on."""

    def noted(*arguments: Any, **more: Any) -> Any:
        USED_BY[what].add(threading.get_ident())
        return call(*arguments, **more)

    return noted


def spoiling(call: Any) -> Any:
    """A model's call that goes wrong for one row."""

    def spoilt(model: Any, tokens: Any, *arguments: Any, **more: Any) -> Any:
        import mlx.core as mx

        given = tokens.reshape(-1).tolist() if tokens.shape[1] > 2 else []
        if SPOILS in given:
            raise ValueError("as planned")
        logits = call(model, tokens, *arguments, **more)
        return mx.full(logits.shape, float("nan")) if NANS in given else logits

    return spoilt


def loading(load: Any, failing: dict[str, int]) -> Any:
    loads: list[Any] = []
    spoilt: set[type] = set()

    def load_or_fail(folder: Any) -> Any:
        if loads:
            time.sleep(RELOAD)
        loads.append(folder)
        if failing["loads"]:
            failing["loads"] -= 1
            raise MemoryError("as planned")
        model, facts = load(folder)
        kind = type(model)
        if kind not in spoilt and "TESTS_UNHURT" not in os.environ:
            spoilt.add(kind)
            kind.__call__ = noting("model", spoiling(kind.__call__))
        return model, facts

    return load_or_fail


def sticking(encode: Any) -> Any:
    """A tokenizer's call that never comes back from one text, as if inside of a library."""

    def stuck(codec: Any, text: str, **more: Any) -> Any:
        if STUCK in text:
            threading.Event().wait()
        return encode(codec, text, **more)

    return stuck


def open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own, which is closed by now
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def report(core: Any) -> dict[str, Any]:
    """Everything that a call takes, counted."""
    import mlx.core as mx

    from service.scheduler import State

    gc.collect()
    runtime = core._rt
    loop, cache = runtime.loop, runtime.loaded.cache
    engine = loop._engine
    named = {id(snapshot.node) for snapshot in cache.all_snapshots()}
    return {
        "loops": sum(isinstance(o, asyncio.AbstractEventLoop) and o.is_running() for o in gc.get_objects()),
        **{f"{what}_threads": len(threads) for what, threads in USED_BY.items()},
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": sum("(deleted)" not in name for name in open_files()),  # the store's are unlinked, and bounded
        "sequences": len(loop._steps.rows),
        "scheduled": loop._scheduler.count(*State),
        "states": repr(loop._scheduler),
        "rows": len(engine._rows),
        "row_bytes": engine.active_bytes(),
        "running": len(runtime.running),
        "saving": len(runtime.saving),
        "pinned": cache.store.stats().pinned,
        "held": sum(1 for node in cache._tree if node.holds and id(node) not in named),
        "uses": sum(snapshot.uses for snapshot in cache.all_snapshots()),
        "objects": len(gc.get_objects()),
        "mlx_bytes": mx.get_active_memory(),
    }


def watch(core: Any) -> None:
    """Runs on the server's event loop."""

    def write() -> None:
        target = Path(os.environ["TESTS_REPORT"])
        part = target.with_suffix(".part")
        part.write_text(json.dumps(report(core)))
        part.rename(target)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)


def main() -> int:
    from service.engine import cpu

    cpu.mlx()
    faulthandler.register(signal.SIGUSR2)
    from service import core
    from service.cli import main as command
    from service.engine import loading as engine_loading
    from service.engine.mlx_engine import MlxEngine
    from service.text.tokens import TextCodec

    failing = {"loads": 0}
    TextCodec.encode_spans = sticking(TextCodec.encode_spans)  # type: ignore[method-assign]
    if "TESTS_UNHURT" not in os.environ:
        MlxEngine.step = hurting(MlxEngine.step, failing)  # type: ignore[method-assign]
        for name in ("step", "relax"):
            setattr(MlxEngine, name, noting("engine", getattr(MlxEngine, name)))
        import mlx.core as mx

        for name in ("eval", "async_eval"):
            setattr(mx, name, noting("evaluation", getattr(mx, name)))
    engine_loading.load = loading(engine_loading.load, failing)
    start = core.Core.start

    async def watched(self: core.Core) -> None:
        await start(self)
        watch(self)

    core.Core.start = watched  # type: ignore[method-assign]
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
