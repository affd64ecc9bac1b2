"""What constrained rows cost others: decode speed of free chats beside constrained ones and beside free ones.

Half of the rows are *free* and measured; the other half, their neighbours, write JSON of a schema in one turn and free
text in the next, on the same server. Only the time in which every row was answering and none had ended counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvfork.v1 import inference_service_pb2 as inference

from service.models import resolve
from tests.bench.ours import Reply, Server, raw
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import prose

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": PERSON, "minItems": 1000})  # none ends by itself


def run(options: Options) -> None:
    model = options.model or ("tiny-gemma3" if options.quick else "gemma3")
    words, answer, half = (20, 8, 1) if options.quick else (50, 64, 4)
    rounds = options.runs or (1 if options.quick else 5)
    beside: dict[str, list[float]] = {"free": [], "constrained": []}
    form = inference.Constraint(json_schema=SCHEMA)
    resolve(model)
    with Server(model) as server:
        quiet, others = Quiet([server.pid], patience=2 if options.quick else 40), Bystanders([server.pid])
        server.generate(raw("Warm up."), 4)
        server.generate(raw("Warm up."), 4, constraint=form)  # the vocabulary is read at the first form
        for number in range(rounds):
            prompts = [prose(words, 9000 + 100 * number + row) for row in range(2 * half)]
            turns = [("free", None), ("constrained", form)]
            for name, constraint in turns if number % 2 == 0 else reversed(turns):
                quiet.wait()
                beside[name].append(_speed(server, prompts, half, answer, constraint))
            note(f"  round {number + 1} of {rounds}: " + ", ".join(f"{k} {v[-1]:.1f} tok/s" for k, v in beside.items()))
        busy = others.cores()
    ratios = [a / b for a, b in zip(beside["constrained"], beside["free"], strict=True)]
    emit(
        Figure(
            metric="chat.unconstrained_beside_constrained",
            value=median(ratios),
            unit="ratio",
            ours=median(beside["constrained"]),
            against=median(beside["free"]),
            peer="the same rows beside free ones",
            model=model,
            n=rounds,
            extra={"spread": spread(ratios), "rows": half, "neighbours": half, "sides_unit": "tok/s"},
        ),
        others=busy,
    )


def _speed(
    server: Server, prompts: Sequence[str], half: int, answer: int, constraint: inference.Constraint | None
) -> float:
    """Tokens per second of the first `half` rows together while all rows answer."""
    calls: list[Callable[[], Reply]] = []
    for row, prompt in enumerate(prompts):
        form = constraint if row >= half else None
        calls.append(lambda prompt=prompt, form=form: server.generate(raw(prompt), answer, constraint=form))
    with ThreadPoolExecutor(len(calls)) as pool:
        replies = list(pool.map(lambda call: call(), calls))
    assert all(len(reply.times) == answer for reply in replies)
    opened, closed = max(reply.times[0] for reply in replies), min(reply.times[-1] for reply in replies)
    inside = sum(opened < at <= closed for reply in replies[:half] for at in reply.times)
    return inside / (closed - opened) if closed > opened else 0.0
