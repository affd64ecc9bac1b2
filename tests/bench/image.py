"""A picture of 1,024 x 1,024 pixels: seen the first time, asked about again, and beside text; ours and peers in turn.

*First* is the TTFT of a question about a picture that neither side has seen, *warm* of another question about it: from
a snapshot after the picture on our side; from cached features on a peer's, and with its prefix cache on as well. The
image stands before the question in both. *Apart* and *mixed* are four image calls and four text calls on our server,
first one kind after the other, then all at once with other pictures and texts of the same sizes; then each call of the
mixed run alone on an emptied store, for its tokens. The *gap* is a text chat's while a picture is prefilled beside it.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvfork.v1 import server_service_pb2 as info
from kvfork.v1 import types_pb2 as types

from service.models import resolve
from tests.bench.ours import CALL_SECONDS, Reply, Server, raw
from tests.bench.peer import MLX_VLM, MLX_VLM_PREFIX, Kind, Peer, PeerReply
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import prose
from tests.bench.vision_model import NAME, SIDE, picture, write_bench_model

PEERS = (MLX_VLM, MLX_VLM_PREFIX)
CHUNK = 256  # tokens of one prefill call
BEFORE = 8  # tokens of the chat before the picture is sent
CALLS = 4  # of each kind at once

FIRST = "What is to be seen here? Answer in a word."
AGAIN = "And what is behind it? Answer in a word or two."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is. Sides in pixels."""

    side: int
    mixed_side: int
    words: int
    answer: int


@dataclass(slots=True)
class Seen:
    """TTFTs of one side, in seconds, a round each."""

    first: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A text chat and a picture at once. Seconds."""

    step: float
    gap: float  # longest between two tokens of the chat, from the picture's arrival on


def run(options: Options) -> None:
    sizes = (
        Sizes(side=256, mixed_side=128, words=20, answer=6)
        if options.quick
        else Sizes(side=SIDE, mixed_side=SIDE // 2, words=60, answer=48)
    )
    rounds = options.runs or (1 if options.quick else 3)
    model = options.model or ("tiny-qwen3_5-vl" if options.quick else NAME)
    ours, theirs = Seen(), {kind: Seen() for kind in PEERS}
    chunks: list[float] = []
    mine: list[Meeting] = []
    other: list[Meeting] = []
    gains: list[tuple[float, float]] = []
    same = total = 0
    with ExitStack() as stack:
        folder = _folder(model, stack)
        peers = [stack.enter_context(Peer(folder, kind=kind)) for kind in PEERS]
        server = stack.enter_context(Server(str(folder)))
        pids = [server.pid, *(peer.pid for peer in peers)]
        quiet, others = Quiet(pids, patience=2 if options.quick else 60), Bystanders(pids)
        for peer in peers:
            peer.complete(FIRST, 1, image=picture(1, 128))
        server.generate(_turn(picture(1, 128), FIRST), 1)
        for number in range(rounds):
            shown = picture(100 + number, sizes.side)
            turns: list[Callable[[], None]] = [lambda s=shown: _see(server, s, ours)]
            turns += [lambda p=peer, s=shown: _see_peer(p, s, theirs[p.kind]) for peer in peers]
            for turn in turns if number % 2 == 0 else reversed(turns):
                quiet.wait()
                turn()
            _say(number, rounds, ours, theirs)
        for number in range(rounds):
            quiet.wait()
            long = server.generate(raw(prose(2 * CHUNK, 300 + number)), 1)
            chunks.append(long.ttft / (long.usage.prompt_tokens / CHUNK))
            shown, chat = picture(200 + number, sizes.side), prose(30, 200 + number)
            turns = [
                lambda s=shown, c=chat: mine.append(_meet_ours(server, c, s)),
                lambda s=shown, c=chat: other.append(_meet_peer(peers[0], c, s, server.get_model().eos_token_ids)),
            ]
            for turn in turns if number % 2 == 0 else reversed(turns):
                quiet.wait()
                turn()
            note(
                f"  round {number + 1} of {rounds}: chunk {chunks[-1]:.2f} s, step {mine[-1].step:.3f} s, longest gap "
                f"{mine[-1].gap:.2f} s ({MLX_VLM.name} {other[-1].gap:.2f} s)"
            )
        for number in range(rounds):
            apart, mixed = _calls(server, 1000 + 20 * number, sizes), _calls(server, 1010 + 20 * number, sizes)
            quiet.wait()
            separately = sum(_aggregate(server, kind, sizes.answer)[0] for kind in apart)
            quiet.wait()
            both = [*mixed[0], *mixed[1]]
            together, replies = _aggregate(server, both, sizes.answer)
            gains.append((2 * CALLS * sizes.answer / together, 2 * CALLS * sizes.answer / separately))
            alone = [_alone(server, call, sizes.answer) for call in both]
            same += sum(reply.ids == ids for reply, ids in zip(replies, alone, strict=True))
            total += len(both)
            note(
                f"  round {number + 1} of {rounds}: 4 + 4 calls, tok/s: mixed {gains[-1][0]:.1f}, apart "
                f"{gains[-1][1]:.1f}; {same} of {total} with the tokens that they have alone"
            )
        busy = others.cores()

    def figure(metric: str, values: Sequence[float], unit: str = "ratio", **about: object) -> None:
        extra = {"spread": spread(values), "sides_unit": "s", **about.pop("extra", {})}  # type: ignore[dict-item]
        emit(
            Figure(metric=metric, value=median(values), unit=unit, model=model, n=len(values), extra=extra, **about),  # type: ignore[arg-type]
            others=busy,
        )

    for what in ("first", "warm"):
        _over_peer(figure, what, ours, theirs)
    figure(
        "image.mixed_over_apart",
        [mixed / apart for mixed, apart in gains],
        ours=median(mixed for mixed, _ in gains),
        against=median(apart for _, apart in gains),
        peer="four image calls at once, then four text calls at once",
        extra={"sides_unit": "tok/s"},
    )
    figure(
        "image.tokens_as_alone",
        [same / total],
        "share",
        ours=same,
        against=total,
        peer="each call of the mixed run alone on an emptied store",
        extra={"sides_unit": "calls"},
    )
    figure(
        "image.longest_gap_in_chunks",
        [(meeting.gap - meeting.step) / chunk for meeting, chunk in zip(mine, chunks, strict=True)],
        "chunks",
        ours=median(meeting.gap for meeting in mine),
        against=median(chunks),
        peer="one prefill call of a text alone; a decode step is taken off the gap",
    )
    figure(
        "image.longest_gap_over_peer",
        [a.gap / b.gap for a, b in zip(mine, other, strict=True)],
        ours=median(meeting.gap for meeting in mine),
        against=median(meeting.gap for meeting in other),
        peer=MLX_VLM.name,
    )


def _folder(model: str, stack: ExitStack) -> Path:
    if model != NAME:
        return resolve(model)
    return write_bench_model(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfork-bench-"))))


def _over_peer(figure: Callable[..., None], what: str, ours: Seen, theirs: dict[Kind, Seen]) -> None:
    """Against the peer that is faster at it; the other's ratio beside it."""
    mine: list[float] = getattr(ours, what)
    by_kind: dict[Kind, list[float]] = {kind: getattr(seen, what) for kind, seen in theirs.items()}
    ratios = {kind: [a / b for a, b in zip(mine, times, strict=True)] for kind, times in by_kind.items()}
    better, other = sorted(PEERS, key=lambda kind: median(by_kind[kind]))
    figure(
        f"image.{what}_ttft_over_peer",
        ratios[better],
        ours=median(mine),
        against=median(by_kind[better]),
        peer=better.name,
        extra={"other": other.name, "over_other": median(ratios[other])},
    )


def _say(number: int, rounds: int, ours: Seen, theirs: dict[Kind, Seen]) -> None:
    sides = [("ours", ours), *((kind.name, seen) for kind, seen in theirs.items())]
    told = ", ".join(f"{name} {seen.first[-1]:.2f} then {seen.warm[-1]:.2f}" for name, seen in sides)
    note(f"  round {number + 1} of {rounds}, TTFT in s: {told}")


# -- calls ------------------------------------------------------------------------------------------------------------


def _turn(image: bytes, text: str) -> types.Input:
    """One user's turn, the image before the text."""
    parts = [types.Part(image=types.Image(data=image)), types.Part(text=text)]
    message = types.Message(role=types.ROLE_USER, parts=parts)
    return types.Input(chat=types.ChatInput(messages=[message]))


def _next_turn(text: str) -> types.Input:
    """The user's next turn, behind an answer of a word."""
    said = types.Message(role=types.ROLE_ASSISTANT, parts=[types.Part(text="Yes.")])
    asks = types.Message(role=types.ROLE_USER, parts=[types.Part(text=text)])
    return types.Input(chat=types.ChatInput(messages=[said, asks]))


def _see(server: Server, shown: bytes, seen: Seen) -> None:
    seen.first.append(server.generate(_turn(shown, FIRST), 1).ttft)
    kept = server.create_snapshot(_turn(shown, "Here is a picture.")).snapshot.name
    again = server.generate(_next_turn(AGAIN), 1, parent=kept)
    assert again.usage.recomputed_tokens == 0
    seen.warm.append(again.ttft)
    server.delete(kept)


def _see_peer(peer: Peer, shown: bytes, seen: Seen) -> None:
    seen.first.append(peer.complete(FIRST, 1, image=shown).ttft)
    seen.warm.append(peer.complete(AGAIN, 1, image=shown).ttft)


def _calls(server: Server, seed: int, sizes: Sizes) -> tuple[list[types.Input], list[types.Input]]:
    """(image calls, text calls), all different."""
    seen = [_turn(picture(seed + n, sizes.mixed_side), FIRST) for n in range(CALLS)]
    return seen, [raw(prose(sizes.words, seed + n)) for n in range(CALLS)]


def _aggregate(server: Server, calls: Sequence[types.Input], answer: int) -> tuple[float, list[Reply]]:
    """(seconds until the last of the calls has ended, what they said); all begin at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        replies = list(pool.map(lambda call: server.generate(call, answer, ids=True), calls))
    assert all(len(reply.times) == answer for reply in replies)
    return max(reply.times[-1] for reply in replies) - min(reply.sent for reply in replies), replies


def _alone(server: Server, call: types.Input, answer: int) -> list[int]:
    server.info.TrimCache(info.TrimCacheRequest(memory_bytes=0, disk_bytes=0), timeout=CALL_SECONDS)
    reply = server.generate(call, answer, ids=True)
    assert reply.usage.cached_tokens == 0
    return reply.ids


def _meet_ours(server: Server, chat: str, shown: bytes) -> Meeting:
    reply = Reply(sent=0.0)
    talking = threading.Thread(target=lambda: server.generate(raw(chat), 10 * BEFORE, into=reply))
    return _meet(reply, talking, lambda: server.generate(_turn(shown, FIRST), 1))


def _meet_peer(peer: Peer, chat: str, shown: bytes, ends: Sequence[int]) -> Meeting:
    reply = PeerReply(sent=0.0)
    talking = threading.Thread(target=lambda: peer.complete(chat, 10 * BEFORE, into=reply, never=ends))
    return _meet(reply, talking, lambda: peer.complete(FIRST, 1, image=shown))


def _meet(chat: Reply | PeerReply, talking: threading.Thread, ask: Callable[[], Reply | PeerReply]) -> Meeting:
    talking.start()
    while len(chat.times) < BEFORE and talking.is_alive():
        time.sleep(0.002)
    asked = ask()
    talking.join()
    gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(chat.times)]
    if not any(at > asked.sent for at, _ in gaps):
        raise RuntimeError(f"the chat ended after {len(chat.times)} tokens, before the picture was sent")
    return Meeting(
        step=median(gap for at, gap in gaps if at <= asked.sent),
        gap=max(gap for at, gap in gaps if at > asked.sent),
    )
