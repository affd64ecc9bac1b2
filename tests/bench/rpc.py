"""What the way from the engine to a client costs: per token and for the first one.

The same generations on one chat of a model so small that its own step is short: through a real server over loopback,
through the engine loop alone, and by hand-written step plans (`tests.bench.loop_alone`), in turn. The difference
between the first two is client, gRPC and server; between the last two the loop: scheduling, text, events.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType

from tests.bench.ours import Server, raw
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import some_tokens

PROMPT = 16


class Child:
    """A running `loop_alone`."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "tests.bench.loop_alone", model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Child:
        if self._line() != "ready":
            raise RuntimeError("the engine did not come up alone")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, how: str, tokens: list[int], answer: int) -> tuple[float, float]:
        """Seconds to the first token, and from one to the next."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"how": how, "tokens": tokens, "answer": answer}) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._line())
        return reply["ttft"], reply["each"]

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def run(options: Options) -> None:
    model = options.model or "tiny-llama"
    answer = 32 if options.quick else 200
    rounds = options.runs or (3 if options.quick else 15)
    served: list[tuple[float, float]] = []
    looped: list[tuple[float, float]] = []
    bare: list[tuple[float, float]] = []
    with Child(model) as child, Server(model) as server:
        pids = [child.pid, server.pid]
        vocab = server.get_model().vocab_size
        others, quiet = Bystanders(pids), Quiet(pids, patience=2 if options.quick else 60)
        for number in range(rounds + 1):
            prompts = [some_tokens(PROMPT, 10 * number + n, vocab) for n in range(3)]
            turns = [
                lambda p=prompts[0]: served.append(_served(server, p, answer)),
                lambda p=prompts[1]: looped.append(child.ask("loop", p, answer)),
                lambda p=prompts[2]: bare.append(child.ask("engine", p, answer)),
            ]
            for turn in turns[number % 3 :] + turns[: number % 3]:
                quiet.wait()
                turn()
            if number == 0:  # a first run of each is a warm-up
                served.clear(), looped.clear(), bare.clear()
                continue
            note(
                f"  {1e6 * served[-1][1]:.0f} µs a token served, {1e6 * looped[-1][1]:.0f} by the loop, "
                f"{1e6 * bare[-1][1]:.0f} by the engine; first one {1e3 * served[-1][0]:.2f}, "
                f"{1e3 * looped[-1][0]:.2f}, {1e3 * bare[-1][0]:.2f} ms"
            )
        busy = others.cores()
    for metric, index, scale, unit in (
        ("rpc.overhead_per_token_us", 1, 1e6, "us"),
        ("rpc.ttft_overhead_ms", 0, 1e3, "ms"),
    ):
        over = [scale * (a[index] - b[index]) for a, b in zip(served, looped, strict=True)]
        emit(
            Figure(
                metric=metric,
                value=median(over),
                unit=unit,
                ours=scale * median(s[index] for s in served),
                against=scale * median(entry[index] for entry in looped),
                peer="the engine loop alone, in a process of its own",
                model=model,
                n=rounds,
                extra={
                    "spread": spread(over),
                    "engine_alone": scale * median(b[index] for b in bare),
                    "loop_over_engine": scale * median(a[index] - b[index] for a, b in zip(looped, bare, strict=True)),
                },
            ),
            others=busy,
        )


def _served(server: Server, prompt: list[int], answer: int) -> tuple[float, float]:
    reply = server.generate(raw(tokens=prompt), answer)
    return reply.ttft, (reply.times[-1] - reply.times[0]) / max(1, answer - 1)
