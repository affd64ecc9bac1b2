"""`kvfork serve` with a stop watch around the model thread; at its end prints one JSON line with every step.

For each step: rows decoded, whether a prefill was part of it, `active` bytes of working caches after it, `wall` seconds
from the end of the step before, and `eval` seconds of them spent waiting in `mx.eval`. The rest is the host's: Python
that builds the graph, scheduling, text, handing out events, and waiting for the interpreter lock. On a CPU backend both
compete for the same cores, so the share is an upper bound of what better host code could win.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from service.cli import main
from service.engine import cpu


class StopWatch:
    """Adds up the time in `mx.eval` and closes a step's account at its end."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._inside = 0.0
        self._last = time.perf_counter()

    def timed(self, evaluate: Any) -> Any:
        def timed_eval(*arrays: Any) -> None:
            began = time.perf_counter()
            evaluate(*arrays)
            self._inside += time.perf_counter() - began

        return timed_eval

    def stepping(self, step: Any) -> Any:
        def timed_step(engine: Any, plan: Any) -> Any:
            result = step(engine, plan)
            now = time.perf_counter()
            rows = len(plan.decode.rows) if plan.decode is not None else 0
            self.steps.append(
                {
                    "rows": rows,
                    "prefill": bool(plan.prefill),
                    "active": engine.active_bytes(),
                    "wall": now - self._last,
                    "eval": self._inside,
                }
            )
            self._last, self._inside = now, 0.0
            return result

        return timed_step


if __name__ == "__main__":
    mx = cpu.mlx()
    from service.engine.mlx_engine import MlxEngine

    watch = StopWatch()
    mx.eval = watch.timed(mx.eval)
    MlxEngine.step = watch.stepping(MlxEngine.step)  # type: ignore[method-assign]
    code = main(["serve", *sys.argv[1:]])
    print(json.dumps({"steps": watch.steps}), flush=True)
    sys.exit(code)
