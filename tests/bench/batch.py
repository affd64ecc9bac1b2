"""What decoding four rows together changes, seen from outside: token agreement and log-probabilities, beside one alone.

Four prompts of unequal length are kept as snapshots; each is continued greedily alone, then all four at once. Rows are
compared up to the first token in which they differ, for behind it they answer different contexts. The difference is
taken over every alternative that both report.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvfork.v1 import inference_service_pb2 as inference

from tests.bench.ours import Reply, Server, raw
from tests.bench.report import Figure, Options, emit, note
from tests.bench.texts import prose, some_tokens

TINY = ("tiny-llama", "tiny-gemma3", "tiny-gemma3-w64", "tiny-gpt-oss", "tiny-qwen3_5", "tiny-lfm2")
ROWS = 4
TOP = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one row, decoded in company, from itself alone."""

    tokens: int  # equal ones before the first that differs
    logprob: float
    compared: int  # log-probabilities


def run(options: Options) -> None:
    models = [options.model] if options.model else ["tiny-gemma3"] if options.quick else ["gemma3", *TINY]
    answer = 8 if options.quick else 32
    for model in models:
        with Server(model) as server:
            vocab = server.get_model().vocab_size
            names: list[str] = []
            for number, length in enumerate((40, 130, 300, 600)):
                if model.startswith("tiny-"):
                    what = raw(tokens=some_tokens(length, 40 + number, vocab))
                else:
                    what = raw(tokens=server.tokens(prose(length, 40 + number))[:length])
                names.append(server.create_snapshot(what).snapshot.name)
            alone = [_go_on(server, name, answer) for name in names]
            together, widest = _together(server, names, answer)
            differences = [_difference(a, b) for a, b in zip(alone, together, strict=True)]
        note(f"  {model}: {[d.tokens for d in differences]} of {answer} tokens agree")
        logprob = max(d.logprob for d in differences)
        extra = {"rows_answering_at_once": widest, "compared": sum(d.compared for d in differences)}
        emit(
            Figure(
                metric="batch.max_logprob_difference_4_vs_1",
                value=logprob,
                unit="nat",
                peer="the same row alone",
                model=model,
                n=ROWS,
                extra=extra,
            )
        )
        emit(
            Figure(
                metric="batch.token_agreement_4_vs_1",
                value=sum(d.tokens for d in differences) / (ROWS * answer),
                unit="share",
                peer="the same row alone",
                model=model,
                n=ROWS,
                extra={"tokens": ROWS * answer},
            )
        )


def _go_on(server: Server, name: str, answer: int) -> Reply:
    return server.generate(None, answer, parent=name, ids=True, top_logprobs=TOP)


def _together(server: Server, names: Sequence[str], answer: int) -> tuple[list[Reply], bool]:
    """All at once, and whether there was a moment in which all were answering."""
    everyone = threading.Barrier(len(names))

    def go_on(name: str) -> Reply:
        everyone.wait()
        return _go_on(server, name, answer)

    with ThreadPoolExecutor(len(names)) as pool:
        replies = list(pool.map(go_on, names))
    return replies, max(r.times[0] for r in replies) < min(r.times[-1] for r in replies)


def _difference(alone: Reply, together: Reply) -> Difference:
    worst, compared, tokens = 0.0, 0, 0
    for a, b in zip(alone.logprobs, together.logprobs, strict=True):
        left, right = _by_token(a), _by_token(b)
        for token in left.keys() & right.keys():
            worst = max(worst, abs(left[token] - right[token]))
            compared += 1
        if a.token_id != b.token_id:
            break
        tokens += 1
    return Difference(tokens, worst, compared)


def _by_token(entry: inference.TokenLogprob) -> dict[int, float]:
    return {entry.token_id: entry.logprob} | {top.token_id: top.logprob for top in entry.top}
