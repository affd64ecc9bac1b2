"""Concurrent chats: tokens per second of all together, ours and each peer's in turn with the same texts.

A chat is a raw text of about 100 words and a greedy answer of fixed length. *Aggregate* counts every new token over
the time from the first request to the last token, prefill included. *Decode* counts those tokens that came while every
chat was already answering and none had ended. `chat.aggregate_over_peer_N` is against the better peer at N chats; the
other's line ends in `_other`.

The host's share of a step comes from one more run of our server with a stop watch around its model thread
(`tests.bench.timed_serve`), so that the stop watch is in none of the other figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from service.models import resolve
from tests.bench.ours import TIMED, Reply, Server, raw
from tests.bench.peer import MLX_LM, MLX_VLM, Kind, Peer, PeerReply
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import prose

WIDTHS = (1, 2, 4, 8)
PEERS = (MLX_LM, MLX_VLM)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second."""

    aggregate: float
    decode: float


def run(options: Options) -> None:
    model = options.model or ("tiny-gemma3" if options.quick else "gemma3")
    words, answer = (20, 8) if options.quick else (100, 128 if options.full else 48)
    widths = (1, 2) if options.quick else WIDTHS
    rounds = options.runs or (1 if options.quick else 3)
    mine: dict[int, list[Speed]] = {width: [] for width in widths}
    theirs: dict[Kind, dict[int, list[Speed]]] = {kind: {width: [] for width in widths} for kind in PEERS}
    seed = 5000
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(resolve(model), kind=kind)) for kind in PEERS]
        ours = stack.enter_context(Server(model))
        pids = [ours.pid, *(peer.pid for peer in peers)]
        quiet, others = Quiet(pids, patience=2 if options.quick else 40), Bystanders(pids)
        ours.generate(raw("Warm up."), 4)
        for number in range(rounds):
            for width in widths:
                seed += width
                prompts = [prose(words, seed + chat) for chat in range(width)]
                turns: list[Callable[[], None]] = [
                    lambda p=prompts, w=width: mine[w].append(_ours(ours, p, answer)),
                    *(
                        lambda k=peer, p=prompts, w=width: theirs[k.kind][w].append(_peer(k, p, answer))
                        for peer in peers
                    ),
                ]
                for turn in turns if number % 2 == 0 else reversed(turns):
                    quiet.wait()
                    turn()
                said = [("ours", mine[width][-1]), *((kind.name, theirs[kind][width][-1]) for kind in PEERS)]
                told = ", ".join(f"{name} {speed.aggregate:.1f} (decode {speed.decode:.1f})" for name, speed in said)
                note(f"  round {number + 1} of {rounds}, {width} chats, tok/s: {told}")
        busy = others.cores()
    for width in widths:
        better = max(PEERS, key=lambda kind, w=width: median(s.aggregate for s in theirs[kind][w]))
        for kind in PEERS:
            suffix = str(width) if kind is better else f"{width}_other"
            _over_peer(suffix, model, mine[width], theirs[kind][width], kind, busy)
    widest = widths[-1]
    gains = [a.decode / b.decode for a, b in zip(mine[widest], mine[1], strict=True)]
    emit(
        Figure(
            metric=f"chat.decode_{widest}_over_1",
            value=median(gains),
            unit="ratio",
            ours=median(s.decode for s in mine[widest]),
            against=median(s.decode for s in mine[1]),
            peer="one chat alone on the same server",
            model=model,
            n=rounds,
            extra={"spread": spread(gains), "sides_unit": "tok/s"},
        ),
        others=busy,
    )
    _host_share(model, [prose(words, seed + 100 + chat) for chat in range(widest)], answer)
    if options.plots is not None:
        from tests.bench.plots import draw_chat

        draw_chat(
            options.plots / "chat.png",
            widths,
            ours=[median(s.aggregate for s in mine[w]) for w in widths],
            peers={kind.name: [median(s.aggregate for s in theirs[kind][w]) for w in widths] for kind in PEERS},
            model=model,
        )


def _over_peer(
    suffix: str, model: str, mine: Sequence[Speed], theirs: Sequence[Speed], kind: Kind, busy: float | None
) -> None:
    """The figure for one number of chats beside one peer."""
    ratios = [a.aggregate / b.aggregate for a, b in zip(mine, theirs, strict=True)]
    emit(
        Figure(
            metric=f"chat.aggregate_over_peer_{suffix}",
            value=median(ratios),
            unit="ratio",
            ours=median(s.aggregate for s in mine),
            against=median(s.aggregate for s in theirs),
            peer=kind.name,
            model=model,
            n=len(ratios),
            extra={
                "spread": spread(ratios),
                "ours_decode": median(s.decode for s in mine),
                "against_decode": median(s.decode for s in theirs),
                "sides_unit": "tok/s",
            },
        ),
        others=busy,
    )


def _ours(server: Server, prompts: Sequence[str], answer: int) -> Speed:
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: server.generate(raw(prompt), answer), prompts))
    assert all(len(reply.times) == answer for reply in replies)
    return _speed(replies, [len(reply.times) for reply in replies])


def _peer(peer: Peer, prompts: Sequence[str], answer: int) -> Speed:
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: peer.complete(prompt, answer), prompts))
    # Its answers may end at an end-of-text token: what counts is what was made.
    return _speed(replies, [reply.completion_tokens for reply in replies])


def _speed(replies: Sequence[Reply | PeerReply], counts: Sequence[int]) -> Speed:
    began = min(reply.sent for reply in replies)
    aggregate = sum(counts) / (max(reply.times[-1] for reply in replies) - began)
    opened, closed = max(reply.times[0] for reply in replies), min(reply.times[-1] for reply in replies)
    # A peer's event can carry several tokens, or a token no event: spread each reply's tokens over its events.
    per_event = [count / len(reply.times) for reply, count in zip(replies, counts, strict=True)]
    inside = sum(
        weight * sum(opened < at <= closed for at in reply.times)
        for reply, weight in zip(replies, per_event, strict=True)
    )
    return Speed(aggregate, inside / (closed - opened) if closed > opened else 0.0)


def _host_share(model: str, prompts: Sequence[str], answer: int) -> None:
    width = len(prompts)
    with Server(model, program=TIMED) as server:
        server.generate(raw("Warm up."), 4)
        speed = _ours(server, prompts, answer)
        steps = [step for step in server.ended_steps() if step["rows"] == width and not step["prefill"]]
    shares = [1 - step["eval"] / step["wall"] for step in steps]
    emit(
        Figure(
            metric="chat.host_share_of_step",
            value=median(shares),
            unit="share",
            ours=1000 * median(step["wall"] - step["eval"] for step in steps),
            against=1000 * median(step["wall"] for step in steps),
            peer="the whole step, from the end of the one before it",
            model=model,
            n=len(shares),
            extra={"rows": width, "sides_unit": "ms", "decode_tok_s": speed.decode},
        )
    )
