"""Two agents, one system prompt: `python shared_system_prompt.py [ADDRESS]`.

Whoever starts them computes the prompt and gives its state a name of its choice. The name is all that an agent needs,
in whatever process it runs. Each has a conversation of its own: two turns, each behind the state in which the one
before ended. The prompt goes through the model once, every turn goes through it once, and nothing else does.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from kvfork_client import Client, Sampling, SaveOptions, Stopping
from stage import Stage, computed, play

RULES = """\
You work at the Hotel Meridian, a small house by the sea with forty rooms on four floors. You answer briefly, kindly \
and truthfully. The kitchen closes at ten in the evening and opens at six in the morning; a cold plate can be had \
all night. The sauna is on the fourth floor and is free until midnight. The last ferry leaves at a quarter past \
eleven, the first one at five. Taxis wait at the harbour and cost about twelve coins to the railway station. Dogs \
are welcome on the ground floor only. Wake-up calls are written into the red book. The lift rests between one and \
four.

"""
AGENTS = {
    "porter": (
        "You are the night porter.\nGuest: May my dog sleep in room 302?\nPorter:",
        "\nGuest: And in 4?\nPorter:",
    ),
    "cook": ("You are the cook.\nGuest: Can I eat at midnight?\nCook:", "\nGuest: And at seven?\nCook:"),
}
GREEDY, SHORT = Sampling(temperature=0), Stopping(max_tokens=10, ignore_eos=True)


def converse(address: str, name: str, turns: tuple[str, ...]) -> tuple[list[str], int, int]:
    """(what the agent said, tokens its turns were long, tokens that its calls computed again); a client of its own."""
    with Client(address, timeout=300) as client:
        at = client.get_snapshot(name)
        said, length, again = [], 0, 0
        for turn in turns:
            result = at.generate(turn, sampling=GREEDY, stopping=SHORT, save=True).result()
            assert result.snapshot is not None
            said.append(result.text.strip().replace("\n", " "))
            length += result.usage.prompt_tokens - at.token_count
            again += result.usage.recomputed_tokens
            if at.name != name:  # that one is everybody's
                at.release()
            at = result.snapshot
        at.release()
        return said, length, again


def main(stage: Stage) -> None:
    with Client(stage.address, timeout=300) as client:
        before = client.cache_stats()
        shared = client.create_snapshot(RULES, options=SaveOptions(snapshot_id="house-rules"))
        stage.say(f"{shared.name}: {shared.token_count} tokens\n")
        with ThreadPoolExecutor() as threads:
            work = [threads.submit(converse, stage.address, shared.name, turns) for turns in AGENTS.values()]
            done = [one.result() for one in work]
        after = client.cache_stats()
        for agent, (said, length, _) in zip(AGENTS, done, strict=True):
            stage.say(f"{agent}, two turns of {length} tokens together: {said}")
        turns = sum(length for _, length, _ in done)
        once = computed(after) - computed(before)  # by the server's own counters
        stage.say(f"\nSent anew with every turn, the prompt alone is {4 * shared.token_count:,} tokens.")
        stage.expect("computed_tokens", once, at_most=shared.token_count + turns)
        stage.expect("recomputed_tokens", sum(again for _, _, again in done), exactly=0)
        shared.release()


if __name__ == "__main__":
    sys.exit(play(main, __doc__))
