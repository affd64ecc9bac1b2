"""`kvfork serve` that writes down when each cancelled row was let go of. For the conformance suite: run as a module.

Clients cannot see the engine's steps, and "the row is free within one step" is a promise about them. A step begins
no sooner than PACE seconds after the last one, so that a tiny model leaves time to cancel in. One JSON line for each
row that ends goes to the file that TESTS_WITNESS names:

    {"row": 3, "tokens": 5, "cancelled": 17, "last": 18}

`tokens`: those it picked. `cancelled`: steps begun when its call was given up, null if it ended by itself. `last`: the
last step that did anything for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

PACE = 0.005


class Witness:
    """What is known of rows under way. `step` runs on the engine thread, `cancelled` on any."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._steps = 0
        self._next = 0.0
        self._last: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._cancelled: dict[int, int] = {}

    def step(self, step: Any, engine: Any, plan: Any) -> Any:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + PACE
        with self._lock:
            self._steps += 1
            decoded = plan.decode.rows if plan.decode else ()
            for row in (*(call.row for call in plan.prefill), *plan.sample, *decoded):
                self._last[row] = self._steps
        result = step(engine, plan)
        with self._lock:
            for row in result.picked:
                self._tokens[row] = self._tokens.get(row, 0) + 1
            for row in plan.close:
                self._write(row)
        return result

    def cancelled(self, row: int) -> None:
        with self._lock:
            self._cancelled.setdefault(row, self._steps)

    def _write(self, row: int) -> None:
        told = {
            "row": row,
            "tokens": self._tokens.pop(row, 0),
            "cancelled": self._cancelled.pop(row, None),
            "last": self._last.pop(row, self._steps),
        }
        with self._target.open("a") as file:
            file.write(json.dumps(told) + "\n")


def main() -> int:
    from service.engine import cpu

    cpu.mlx()
    from service.cli import main as command
    from service.engine.mlx_engine import MlxEngine
    from service.loop import EngineLoop

    witness = Witness(Path(os.environ["TESTS_WITNESS"]))
    step, cancel = MlxEngine.step, EngineLoop.cancel

    def watched_step(engine: Any, plan: Any) -> Any:
        return witness.step(step, engine, plan)

    def watched_cancel(loop: Any, row: Any, *, save: bool = False) -> None:
        with loop._wake:  # so that the engine sees both or neither
            witness.cancelled(row)
            cancel(loop, row, save=save)

    MlxEngine.step = watched_step  # type: ignore[method-assign]
    EngineLoop.cancel = watched_cancel  # type: ignore[method-assign]
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
