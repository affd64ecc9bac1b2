"""What a long prompt does to others, and others to it: one chat decodes while a prompt of 2,500 words arrives.

Units come from the same run: a *chunk* is the long prompt's TTFT on an idle server over its 256-token calls, a *step*
the median gap of the chat before the prompt came. The peer gets the same texts in turn. Then four prompts of 20 tokens
come behind one of 8,192 that is being computed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvfork.v1 import inference_service_pb2 as inference
from kvfork.v1 import types_pb2 as types

from service.models import resolve
from tests.bench.ours import CALL_SECONDS, Reply, Server, raw
from tests.bench.peer import NAME, Peer, PeerReply
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import prose

CHUNK = 256  # tokens of one prefill call
BEFORE = 12  # tokens of the chat before the long prompt is sent
SHORT, COUNT = 20, 4  # tokens and number of the short prompts


@dataclass(frozen=True, slots=True)
class Meeting:
    """A chat and a long prompt at once. Seconds."""

    step: float
    gap: float  # longest between two tokens of the chat, from the prompt's arrival on
    ttft: float  # of the long prompt


def run(options: Options) -> None:
    model = options.model or ("tiny-gemma3" if options.quick else "gemma3")
    words, behind = (300, 1024) if options.quick else (2500, 8192)
    rounds = options.runs or (1 if options.quick else 3)
    alone: list[float] = []
    mine: list[Meeting] = []
    theirs: list[Meeting] = []
    starts: list[float] = []
    chunks: list[float] = []
    with ExitStack() as stack:
        peer = stack.enter_context(Peer(resolve(model)))
        ours = stack.enter_context(Server(model))
        pids = [ours.pid, peer.pid]
        quiet, others = Quiet(pids, patience=2 if options.quick else 30), Bystanders(pids)
        ours.generate(raw(prose(300, 6000)), 4)
        for number in range(rounds):
            seed = 6100 + 10 * number
            quiet.wait()
            first = ours.generate(raw(prose(words, seed)), 1)
            alone.append(first.ttft)
            chunks.append(first.ttft / -(-first.usage.prompt_tokens // CHUNK))
            long, chat = prose(words, seed + 1), prose(100, seed + 2)
            turns: list[Callable[[], None]] = [
                lambda long=long, chat=chat: mine.append(_ours(ours, chat, long)),
                lambda long=long, chat=chat: theirs.append(_peer(peer, chat, long)),
            ]
            for turn in turns if number % 2 == 0 else reversed(turns):
                quiet.wait()
                turn()
            quiet.wait()
            starts.append(_behind(ours, ours.tokens(prose(behind, seed + 3))[:behind], seed))
            note(
                f"  round {number + 1} of {rounds}: chunk {chunks[-1]:.2f} s, step {mine[-1].step:.3f} s, longest gap "
                f"{mine[-1].gap:.2f} s ({NAME} {theirs[-1].gap:.2f} s), long TTFT {mine[-1].ttft:.1f} s "
                f"({alone[-1]:.1f} s alone), short ones behind {behind} tokens after {starts[-1]:.2f} s"
            )
        busy = others.cores()

    def figure(metric: str, values: list[float], unit: str, **about: object) -> None:
        emit(
            Figure(
                metric=metric,
                value=median(values),
                unit=unit,
                model=model,
                n=rounds,
                extra={"spread": spread(values), "sides_unit": "s"},
                **about,  # type: ignore[arg-type]
            ),
            others=busy,
        )

    figure(
        "fair.longest_gap_in_chunks",
        [(meeting.gap - meeting.step) / chunk for meeting, chunk in zip(mine, chunks, strict=True)],
        "chunks",
        ours=median(meeting.gap for meeting in mine),
        against=median(chunks),
        peer="one prefill call of the long prompt alone; a decode step is taken off the gap",
    )
    figure(
        "fair.longest_gap_over_peer",
        [a.gap / b.gap for a, b in zip(mine, theirs, strict=True)],
        "ratio",
        ours=median(meeting.gap for meeting in mine),
        against=median(meeting.gap for meeting in theirs),
        peer=NAME,
    )
    figure(
        "fair.long_ttft_over_alone",
        [meeting.ttft / ttft for meeting, ttft in zip(mine, alone, strict=True)],
        "ratio",
        ours=median(meeting.ttft for meeting in mine),
        against=median(alone),
        peer="a prompt of the same length on the idle server",
    )
    figure(
        "fair.short_ttft_in_chunks",
        [ttft / chunk for ttft, chunk in zip(starts, chunks, strict=True)],
        "chunks",
        ours=median(starts),
        against=median(chunks),
        peer="one prefill call of the long prompt alone",
    )


def _ours(server: Server, chat: str, long: str) -> Meeting:
    reply = Reply(sent=0.0)
    talking = threading.Thread(target=lambda: server.generate(raw(chat), 5 * BEFORE, into=reply))
    return _meet(reply, talking, lambda: server.generate(raw(long), 1))


def _peer(peer: Peer, chat: str, long: str) -> Meeting:
    reply = PeerReply(sent=0.0)
    talking = threading.Thread(target=lambda: peer.complete(chat, 5 * BEFORE, into=reply))
    return _meet(reply, talking, lambda: peer.complete(long, 1))


def _meet(chat: Reply | PeerReply, talking: threading.Thread, ask: Callable[[], Reply | PeerReply]) -> Meeting:
    talking.start()
    while len(chat.times) < BEFORE:
        time.sleep(0.002)
    asked = ask()
    talking.join()
    gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(chat.times)]
    return Meeting(
        step=median(gap for at, gap in gaps if at <= asked.sent),
        gap=max(gap for at, gap in gaps if at > asked.sent),
        ttft=asked.ttft,
    )


def _behind(server: Server, long: list[int], seed: int) -> float:
    """The last first token of the short prompts, in seconds from their sending."""
    request = inference.GenerateRequest(
        input=raw(tokens=long),
        stopping=types.Stopping(max_tokens=1, ignore_eos=True),
        output=inference.OutputOptions(progress=True),
    )
    call = server.inference.Generate(request, timeout=CALL_SECONDS)
    for response in call:
        if response.WhichOneof("event") == "progress":
            break  # its first call is done, and the next has begun
    texts = [server.tokens(prose(60, seed + 4 + i))[:SHORT] for i in range(COUNT)]
    replies: list[Reply] = []
    asking = [
        threading.Thread(target=lambda text=text: replies.append(server.generate(raw(tokens=text), 1)))  # type: ignore[misc]
        for text in texts
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    call.cancel()
    return max(reply.ttft for reply in replies)
