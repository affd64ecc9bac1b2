"""Memory of many long conversations that are all kept, of long prompts at once, and of a fork; and that all come back.

The server runs with a memory budget that holds half of the conversations' global state. *Base* is its resident memory
when one prompt of 600 tokens was answered and let go of, less what its store still holds: what MKL and the interpreter
keep after their first calls depends on neither the number nor the length of conversations. `memory.extra_over_budget`
is the growth from there to when all conversations are kept, over the budget and one active row. Each reading waits
until the server has been idle for long enough to give working memory back; the same line tells the growth with the
working memory of a prefill still in it (`busy_mib`).

`memory.extra_over_uncheckpointed`: long prompts sent at once to a model of Gemma 3's shape (five window layers to a
global one). Ours is the most that working caches, the memory tier and the writer's queue took together, each at its
worst; against it, what the same prompts take where every layer keeps every token, which is what going back to any of
their boundaries takes without checkpoints. The memory budget is one prompt's global state; all else lies on disk and
comes back from there. No working memory of model calls is in either side; `resident_mib` is the most by which the
process grew from the loaded model, with all of it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from service.loop import RELAX_AFTER
from service.models.tiny import CONFIGS, build_tiny
from service.options import default_scratch_dir
from tests.bench.ours import TIMED, Reply, Server, raw
from tests.bench.report import Figure, Options, emit, note, resident_bytes
from tests.bench.texts import some_tokens

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Talk:
    """One kept conversation."""

    prompt: list[int]
    at_prompt: str  # snapshot of the prompt's end


def run(options: Options) -> None:
    model = options.model or "tiny-gemma3"
    length = 600 if options.quick else 4000
    count = 3 if options.quick else 8
    _kept(model, length, count)
    _fork(model, length, 8)
    _at_once(*((3, 600) if options.quick else (8, 8000)))


def _kept(model: str, length: int, count: int) -> None:
    with ExitStack() as stack:
        probe = stack.enter_context(Server(model))
        facts = probe.get_model()
        budget = max(MIB, count * length * facts.bytes_per_token // 2)
    with Server(model, "--memory-bytes", str(budget), "--disk-bytes", "2GiB", program=TIMED) as server:
        server.generate(raw(tokens=some_tokens(8, 1, facts.vocab_size)), 4)
        loaded = resident_bytes(server.pid)
        server.delete(_talk(server, 600, 900, facts.vocab_size).at_prompt)
        base = _settled(server) - server.stats().memory_bytes
        talks: list[Talk] = []
        grown: list[int] = []
        busy = 0
        for number in range(count):
            talks.append(_talk(server, length, number, facts.vocab_size))
            busy = max(busy, resident_bytes(server.pid) - base)
            grown.append(_settled(server))
            note(f"  conversation {number + 1}: resident {grown[-1] / MIB:.1f} MiB, {server.stats().memory_bytes} held")
        extra = max(grown) - base
        turns = [some_tokens(16, 500 + number, facts.vocab_size) for number in range(count)]
        warm = [
            server.generate(raw(tokens=turn), 4, parent=talk.at_prompt, ids=True, top_logprobs=5)
            for talk, turn in zip(talks, turns, strict=True)
        ]
        stats = server.stats()
        active = max(step["active"] for step in server.ended_steps())
    with Server(model) as fresh:
        cold = [
            fresh.generate(raw(tokens=[*talk.prompt, *turn]), 4, mark_at=length, ids=True, top_logprobs=5)
            for talk, turn in zip(talks, turns, strict=True)
        ]
    assert not any(reply.usage.cached_tokens for reply in cold)
    emit(
        Figure(
            metric="memory.extra_over_budget",
            value=extra / (active + budget),
            unit="ratio",
            ours=extra / MIB,
            against=(active + budget) / MIB,
            peer="active row and memory budget",
            model=model,
            n=count,
            extra={
                "sides_unit": "MiB",
                "budget_mib": budget / MIB,
                "active_mib": active / MIB,
                "once_mib": (base - loaded) / MIB,
                "busy_mib": busy / MIB,
                "last_half_mib": (grown[-1] - grown[count // 2 - 1]) / MIB,
                "disk_mib": stats.disk_bytes / MIB,
                "evictions": stats.evictions,
            },
        )
    )
    emit(
        Figure(
            metric="memory.restored_exactly",
            value=sum(_same(a, b) for a, b in zip(warm, cold, strict=True)) / count,
            unit="share",
            model=model,
            n=count,
            peer="the same prompt and turn on a server that has seen nothing",
            extra={
                "disk_tokens": sum(reply.usage.disk_tokens for reply in warm),
                "memory_tokens": sum(reply.usage.memory_tokens for reply in warm),
                "recomputed_tokens": sum(reply.usage.recomputed_tokens for reply in warm),
            },
        )
    )


def _at_once(count: int, length: int) -> None:
    config = {**CONFIGS["tiny-gemma3"], "num_hidden_layers": 18, "sliding_window_pattern": 6}
    answer = 16
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfork-bench-", dir=default_scratch_dir()))
        )
        CONFIGS["bench-window-heavy"] = config
        build_tiny("bench-window-heavy", folder)
        with Server(str(folder)) as probe:
            per_token = probe.get_model().bytes_per_token  # of the global layers
        budget = length * per_token
        flags = ("--memory-bytes", str(budget), "--disk-bytes", "4GiB", "--max-batch", str(count))
        server = stack.enter_context(Server(str(folder), *flags, program=TIMED))
        vocab = server.get_model().vocab_size
        server.generate(raw(tokens=some_tokens(8, 1, vocab)), 4)
        loaded, stored, resident = resident_bytes(server.pid), 0, 0

        def go(number: int) -> Reply:
            return server.generate(
                raw(tokens=some_tokens(length, number, vocab)), answer, mark_prompt_end=True, save=True
            )

        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(go, number) for number in range(count)]
            while not all(call.done() for call in running):
                stats = server.stats()
                stored = max(stored, stats.memory_bytes + stats.pending_bytes)
                resident = max(resident, resident_bytes(server.pid) - loaded)
                time.sleep(0.1)
            replies = [call.result() for call in running]
        stats = server.stats()
        active = max(step["active"] for step in server.ended_steps())
    layers, global_layers = config["num_hidden_layers"], config["num_hidden_layers"] // config["sliding_window_pattern"]
    whole = count * (length + answer) * per_token * layers // global_layers
    emit(
        Figure(
            metric="memory.extra_over_uncheckpointed",
            value=(active + stored) / whole,
            unit="ratio",
            ours=(active + stored) / MIB,
            against=whole / MIB,
            peer="the same prompts with every layer keeping every token",
            model="tiny-gemma3 with 18 layers, 3 of them global",
            n=count,
            extra={
                "sides_unit": "MiB",
                "budget_mib": budget / MIB,
                "active_mib": active / MIB,
                "stored_mib": stored / MIB,
                "resident_mib": resident / MIB,
                "disk_mib": stats.disk_bytes / MIB,
                "skipped": sum(stats.checkpoints_skipped.values()),
                "saved": sum(bool(reply.snapshot) for reply in replies),
            },
        )
    )


def _talk(server: Server, length: int, seed: int, vocab: int) -> Talk:
    prompt = some_tokens(length, seed, vocab)
    reply = server.generate(raw(tokens=prompt), 16, mark_prompt_end=True, save=True)
    return Talk(prompt, reply.marked[0].name)


def _settled(server: Server) -> int:
    time.sleep(1.2 * RELAX_AFTER)
    return resident_bytes(server.pid)


def _same(a: Reply, b: Reply) -> bool:
    """Token ids and every reported log-probability, bit for bit."""
    return a.ids == b.ids and [p.SerializeToString() for p in a.logprobs] == [p.SerializeToString() for p in b.logprobs]


def _fork(model: str, length: int, branches: int) -> None:
    suffix = 64
    with Server(model, "--max-batch", str(branches), program=TIMED) as server:
        facts = server.get_model()
        parent = server.create_snapshot(raw(tokens=some_tokens(length, 77, facts.vocab_size))).snapshot
        alone = _stored(server)
        # What a token of state weighs in every layer, measured: a snapshot of `suffix` tokens and nothing else.
        server.create_snapshot(raw(tokens=some_tokens(suffix, 78, facts.vocab_size)))
        state = _stored(server) - alone
        before = _stored(server)
        appends = [raw(tokens=some_tokens(suffix, 100 + n, facts.vocab_size)) for n in range(branches)]
        forked = server.fork(parent.name, appends)
        grown = _stored(server) - before
        names = [snapshot.name for snapshot in forked.snapshots]
        everyone = threading.Barrier(branches)

        def go_on(name: str) -> Reply:
            everyone.wait()
            return server.generate(None, 16, parent=name)

        with ThreadPoolExecutor(branches) as pool:
            replies = list(pool.map(go_on, names))
        recomputed = sum(reply.usage.recomputed_tokens for reply in replies)
        steps = server.ended_steps()
        together = max((step["active"] for step in steps if step["rows"] == branches), default=0.0)
        one = _first_peak([step["active"] for step in steps])
    ideal = alone + branches * state
    emit(
        Figure(
            metric=f"memory.fork{branches}_over_ideal",
            value=(alone + grown) / ideal,
            unit="ratio",
            ours=(alone + grown) / MIB,
            against=ideal / MIB,
            peer=f"bytes stored for the prefix and {branches} times the suffix alone",
            model=model,
            n=1,
            extra={
                "sides_unit": "MiB",
                "grown_over_suffixes": grown / (branches * state),
                "recomputed_tokens": recomputed,
                "usage_new": forked.usage.new_tokens,
            },
        )
    )
    if together:
        emit(
            Figure(
                metric=f"memory.fork{branches}_active_over_ideal",
                value=together / (one + branches * state),
                unit="ratio",
                ours=together / MIB,
                against=(one + branches * state) / MIB,
                peer=f"working caches of one such row, and {branches} times the suffix",
                model=model,
                n=1,
                extra={"sides_unit": "MiB", "over_one_row": together / one},
            )
        )


def _first_peak(active: list[float]) -> float:
    """Working bytes of the first row, which ran alone: the highest value before they fall to nothing."""
    peak = 0.0
    for value in active:
        if peak and not value:
            break
        peak = max(peak, value)
    return peak


def _stored(server: Server) -> int:
    stats = server.stats()
    return int(stats.memory_bytes + stats.disk_bytes)
