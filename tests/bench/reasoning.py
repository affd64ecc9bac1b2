"""Twenty turns without the reasoning of those before: prompt tokens computed, beside servers that only see prompts.

Ours is the example `clients/python/examples/reasoning_stripped.py` as it is, which rolls each turn's reasoning back.
The others get the same twenty prompts as texts, one after the other, and generate as many tokens behind each: the peer,
and a second server of ours that is asked for no handle. What they computed is what they did not report as cached. All
of it is counted, so nothing depends on how busy the machine is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from service.models import resolve
from tests.bench.ours import Server, raw
from tests.bench.peer import NAME, Peer
from tests.bench.report import Figure, Options, emit, note

EXAMPLE = Path(__file__).parents[2] / "clients" / "python" / "examples" / "reasoning_stripped.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn as the example played it; counts in tokens."""

    prompt: str
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int


def run(options: Options) -> None:
    model = options.model or ("tiny-gemma3" if options.quick else "gemma3")
    with Server(model) as ours:
        told = _played(ours.address)
        turns = [Turn(**turn) for turn in told["turns"]]  # type: ignore[attr-defined]
    note(f"  ours: {sum(turn.computed_tokens for turn in turns)} tokens computed, the opening aside")
    with Server(model) as plain:
        without = []
        for turn in turns:
            usage = plain.generate(raw(turn.prompt), turn.generated_tokens).usage
            without.append(usage.prompt_tokens - usage.cached_tokens)
    note(f"  ours, asked for no handle: {sum(without)}")
    with Peer(resolve(model)) as peer:
        theirs = []
        for turn in turns:
            reply = peer.complete(turn.prompt, turn.generated_tokens)
            theirs.append(reply.prompt_tokens - reply.cached_tokens)
    note(f"  {NAME}: {sum(theirs)}")
    mine = [turn.computed_tokens for turn in turns]
    mine[0] += int(str(told["opening_tokens"]))  # the others meet it in their first prompt
    emit(
        Figure(
            metric="reasoning.computed_over_new_tokens",
            value=float(str(told["computed_over_new_tokens"])),
            unit="ratio",
            model=model,
            n=len(turns),
            extra={"new_tokens": told["new_tokens"], "prompt_tokens": told["prompt_tokens"]},
        )
    )
    for suffix, against, who in (
        ("peer", theirs, NAME),
        ("no_handles", without, "the same prompts on our server, without handles"),
    ):
        emit(
            Figure(
                metric=f"reasoning.computed_over_{suffix}",
                value=sum(mine) / sum(against),
                unit="ratio",
                ours=sum(mine),
                against=sum(against),
                peer=who,
                model=model,
                n=len(turns),
                extra={"sides_unit": "tokens", "per_turn": {"ours": mine, "against": against}},
            )
        )
    if options.plots is not None:
        from tests.bench.plots import draw_reasoning

        draw_reasoning(
            options.plots / "reasoning.png",
            ours=mine,
            others={NAME: theirs, "kvfork, no handles": without},
            prompts=[turn.prompt_tokens for turn in turns],
            model=model,
        )


def _played(address: str) -> dict[str, object]:
    """The example's own figures; raises with what it said if one was missed."""
    done = subprocess.run([sys.executable, str(EXAMPLE), address, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the example ended with {done.returncode}:\n{done.stderr}")
    told: dict[str, object] = json.loads(done.stdout)
    return told
