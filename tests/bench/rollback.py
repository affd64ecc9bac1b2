"""The main job: roll an answer back to the prompt's end and go on, against computing it all again and the peer.

One round: a prompt (its end marked: A), an answer (saved: B); then some turns, each one *warm* (Rollback of B to A's
position, generate one token behind a new turn) beside the peer's way to the same place (the same prompt and turn as
one text, the answer left out); then one *cold* run: another prompt of the same shape with a mark at A's position, so
that both runs make the same calls. Warm time includes the Rollback call.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from service.models import resolve
from tests.bench.ours import Server, raw
from tests.bench.peer import NAME, Peer
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import fitted


def run(options: Options) -> None:
    model = options.model or ("tiny-gemma3" if options.quick else "gemma3")
    prompt_tokens = 300 if options.quick else 2100
    answer_tokens = 20 if options.quick else 100
    turn_tokens = 16
    rounds = options.runs or (1 if options.quick else 3)
    turns = 2 if options.quick else 3
    warm: list[float] = []
    cold: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    peer_ratios: list[float] = []
    computed: list[float] = []
    receipts: dict[str, int] = {}
    with ExitStack() as stack:
        peer = stack.enter_context(Peer(resolve(model)))
        ours = stack.enter_context(Server(model))
        others = Bystanders([ours.pid, peer.pid])
        quiet = Quiet([ours.pid, peer.pid], patience=5 if options.quick else 60)
        ours.generate(raw("Warm up."), 4)
        for number in range(rounds):
            seed = 1000 * (number + 1)
            note(f"  round {number + 1} of {rounds}: prompt of {prompt_tokens} tokens, {answer_tokens} more")
            prompt = fitted(prompt_tokens, seed, ours.count)
            first = ours.generate(raw(prompt), answer_tokens, mark_prompt_end=True, save=True)
            assert first.marked[0].token_count == prompt_tokens, first.marked
            quiet.wait()
            before = peer.complete(prompt, answer_tokens)
            assert before.prompt_tokens == prompt_tokens, (before.prompt_tokens, prompt_tokens)
            for turn_number in range(turns):
                turn = _turn(ours, prompt, seed + 1 + turn_number, turn_tokens)
                quiet.wait()
                began = time.perf_counter()
                cut = ours.rollback(first.snapshot, prompt_tokens)
                reply = ours.generate(raw(turn, special=False), 1, parent=cut.snapshot.name)
                warm.append(reply.times[0] - began)
                usage = reply.usage
                done_again = cut.usage.recomputed_tokens + cut.usage.new_tokens
                computed.append((done_again + usage.recomputed_tokens + usage.new_tokens) / turn_tokens)
                receipts = {
                    "cached": usage.cached_tokens,
                    "recomputed": usage.recomputed_tokens,
                    "new": usage.new_tokens,
                    "from_memory": usage.memory_tokens,
                    "from_disk": usage.disk_tokens,
                    "disk_bytes_read": usage.disk_bytes_read,
                }
                quiet.wait()
                answer = peer.complete(prompt + turn, 1)
                theirs.append(answer.ttft)
                peer_ratios.append(warm[-1] / theirs[-1])
                receipts["peer_cached"] = answer.cached_tokens
                note(f"    warm {warm[-1]:.3f} s, peer {theirs[-1]:.3f} s ({answer.cached_tokens} cached)")
            quiet.wait()
            other = fitted(prompt_tokens, seed + 500, ours.count)  # 1000 and 500 differ in their first words
            turn = _turn(ours, other, seed + 501, turn_tokens)
            again = ours.generate(raw(other + turn), 1, mark_at=prompt_tokens)
            assert again.usage.cached_tokens == 0, again.usage
            cold.append(again.ttft)
            ratios += [cold[-1] / w for w in warm[-turns:]]
            note(f"    cold {cold[-1]:.2f} s: {cold[-1] / median(warm[-turns:]):.1f} times a warm turn")
        busy = others.cores()
    emit(
        Figure(
            metric="rollback.cold_over_warm_ttft",
            value=median(ratios),
            unit="ratio",
            ours=median(warm),
            against=median(cold),
            peer="cold run of the same shape on the same server",
            model=model,
            n=len(ratios),
            extra={"spread": spread(ratios), "times_unit": "s"},
        ),
        others=busy,
    )
    emit(
        Figure(
            metric="rollback.computed_over_new_tokens",
            value=max(computed),
            unit="ratio",
            model=model,
            n=len(computed),
            extra={"receipt": receipts},
        )
    )
    emit(
        Figure(
            metric="rollback.warm_ttft_over_peer",
            value=median(peer_ratios),
            unit="ratio",
            ours=median(warm),
            against=median(theirs),
            peer=NAME,
            model=model,
            n=len(peer_ratios),
            extra={"spread": spread(peer_ratios), "times_unit": "s"},
        ),
        others=busy,
    )


def _turn(server: Server, prompt: str, seed: int, tokens: int) -> str:
    """A turn that adds exactly `tokens` tokens, both tokenized alone and as part of the whole text."""
    size = server.count(prompt)
    for attempt in range(20):
        turn = " " + fitted(tokens, seed + 32 * attempt, lambda text: server.count(prompt + " " + text) - size)
        if server.count(turn, special=False) == tokens:
            return turn
    raise ValueError(f"no turn of {tokens} tokens keeps its size behind the prompt")
