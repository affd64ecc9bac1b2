"""Pause for a tool, and lose nothing while others fill the cache: `python tool_pause.py [ADDRESS]`.

A model asks for a tool and must wait for it, for a second or for an hour. Its state is kept under a *pinned* handle:
whatever else the server has to make room for, this stays. Here the room is taken by force, with TrimCache down to zero
bytes. A second conversation, kept without a pin, loses its state and has to be computed again; its handle still works.

TrimCache is for admins; on a server without tokens, that is everybody.
"""

from __future__ import annotations

import sys

from kvfork_client import Client, Sampling, SaveOptions, Stopping, regex
from stage import Stage, computed, play

MANUAL = """\
You are the clerk of a ferry line. You know the timetable and the prices by heart: the crossing takes fifty minutes \
and costs twelve coins, children and dogs go free, bicycles cost three. What you do not know by heart you look up \
with a tool. Call it in this form and no other, then wait for its result:

Call: {"tool": "wind", "harbour": "Meridian"}
Result: 9 knots from the west

Answer briefly and truthfully. If the wind is above thirty knots, the ferry stays in the harbour.

"""
QUESTION = MANUAL + "Guest: Does the ferry to Skagen go this evening?\nCall:"
# Its first word is another, so that the two conversations share no state.
ANOTHER = "Second desk. " + MANUAL + "Guest: What does it cost to take two children and a bicycle to Meridian?\nClerk:"
CALL = regex(r' \{"tool": "(wind|tide)", "harbour": "(Meridian|Skagen|Lund)"\}')
GREEDY, SHORT = Sampling(temperature=0), Stopping(max_tokens=12, ignore_eos=True)


def wind(harbour: str) -> str:
    """The tool. This one is quick; nothing below depends on that."""
    return f"34 knots from the west, gusts above, harbour {harbour}"


def main(stage: Stage) -> None:
    with Client(stage.address, timeout=300) as client:
        # The call is held to its form; the state behind it is kept, pinned.
        asked = client.generate(QUESTION, constraint=CALL, sampling=GREEDY, save=SaveOptions(pinned=True)).result()
        paused, other = asked.snapshot, client.create_snapshot(ANOTHER)
        assert paused is not None
        stage.say(f"The model calls{asked.text}")
        stage.say(f"It waits, pinned, at {paused.token_count} tokens; another conversation at {other.token_count}.\n")

        held = client.trim_cache(memory_bytes=0, disk_bytes=0)
        stage.say(f"Meanwhile the cache is trimmed to nothing; {held.memory_bytes + held.disk_bytes:,} bytes stay.")
        for who, snapshot in (("waiting", paused), ("other", other)):
            stage.say(f"  {who:8} {snapshot.refresh().residency.name.lower()}")

        result = f"\nResult: {wind('Skagen')}\nClerk:"
        answer = paused.generate(result, sampling=GREEDY, stopping=SHORT).result()
        stage.say(f"\nThe tool answers, the model goes on:{answer.text.rstrip()}")
        length = answer.usage.prompt_tokens - paused.token_count
        stage.expect("recomputed_after_the_pause", answer.usage.recomputed_tokens, exactly=0)
        stage.expect("computed_after_the_pause", computed(answer.usage), exactly=length)

        # What the pin was worth. The handle without one answers all the same, and its receipt says what that took.
        again = other.generate(sampling=GREEDY, stopping=SHORT).result()
        stage.say(f"\nThe other conversation goes on too:{again.text.rstrip()}")
        stage.expect("recomputed_without_a_pin", again.usage.recomputed_tokens, exactly=other.token_count)
        stage.expect("unpinned_state_lost", int(again.usage.cached_tokens == 0), exactly=1)

        paused.update(pinned=False)  # the pause is over: from here on it may make room like any other
        for snapshot in (paused, other):
            snapshot.release()


if __name__ == "__main__":
    sys.exit(play(main, __doc__))
