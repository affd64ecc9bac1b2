"""`kvfork serve` whose prefill takes as long as a test says. Run as a module instead of `service`.

A step that prefills takes at least as many seconds as the file that TESTS_PACE names says, which may be written anew
meanwhile. One line for each call that reaches the engine goes to the file that TESTS_WITNESS names, if it names one: a
call that was sent again has two.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    from service.engine import cpu

    cpu.mlx()
    from service.cli import main as command
    from service.engine.mlx_engine import MlxEngine
    from service.loop import EngineLoop

    pace, witnessed = Path(os.environ["TESTS_PACE"]), os.environ.get("TESTS_WITNESS")
    step, submit = MlxEngine.step, EngineLoop.submit

    def paced_step(engine: Any, plan: Any) -> Any:
        began = time.monotonic()
        while plan.prefill and time.monotonic() - began < float(pace.read_text() or "inf"):
            time.sleep(0.02)
        waited = time.monotonic() - began
        result = step(engine, plan)
        if plan.prefill:
            result.prefill_seconds += waited
        return result

    def watched_submit(loop: Any, work: Any, *arguments: Any) -> Any:
        if witnessed is not None:
            with Path(witnessed).open("a") as file:
                file.write(f"{len(work.tokens)}\n")
        return submit(loop, work, *arguments)

    MlxEngine.step = paced_step  # type: ignore[method-assign]
    EngineLoop.submit = watched_submit  # type: ignore[method-assign]
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
