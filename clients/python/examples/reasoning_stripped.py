"""Twenty turns, each without the reasoning of those before it: `python reasoning_stripped.py [ADDRESS]`.

A model that reasons before it answers fills its context with thoughts that nobody reads again. Orchestrators drop them:
the next turn's prompt holds the questions and the answers alone. On a model with sliding windows or recurrent layers
that is dear, since state cannot be rewound past the thoughts, and a server that only knows prompts starts over. Here
the state behind each question has a name, and Rollback goes back to it: what was thought is gone, nothing is computed
again, and the next turn pays for the answer that is kept and for the new question.
"""

from __future__ import annotations

import sys

from kvfork_client import Client, GenerationResult, Release, Sampling, Snapshot, Stopping, regex
from stage import Stage, computed, play

OPENING = """\
A traveller talks with the harbour master of Meridian. The harbour has a pier of oak, a crane that lifts nine tons, a \
fish market and a lamp that burns every night. The ferry to Skagen leaves at noon and in the evening, takes fifty \
minutes and costs twelve coins; dogs and children go free. Before each answer the harbour master thinks, both in a few \
words.

Traveller: Where do I buy a ticket for the ferry?
Thought: The office is on the pier, beside the crane.
Answer: At the office on the pier.
"""
QUESTIONS = (
    "When does the next ferry to Skagen leave, and from which side of the pier?",
    "What do I pay for two grown-ups, one child and a dog that is nearly blind?",
    "How long does the crossing take when the wind comes from the west?",
    "Is there a place on the pier where we can leave our suitcases until noon?",
    "Which of the fish at the market were caught this morning by your own boats?",
    "How heavy is the heaviest thing that the crane has lifted in your time here?",
    "Who lights the lamp at night, and what happens when that person is ill?",
    "May the children fish from the pier while the ferry is being loaded?",
    "Where do the fishermen eat when they come back before the sun is up?",
    "How old are the oak piles under the pier, and who looks after them?",
)
TURNS = 20
FORM = regex(r" [A-Z][a-z ,]{8,24}\.\nAnswer: [A-Z][a-z ,]{8,24}\.\n")  # thoughts, then what to keep
CUE = "Thought:"


def think(asked: Snapshot) -> GenerationResult[Snapshot]:
    """Thoughts and an answer behind a question; the state behind both is kept, as an agent's would be."""
    return asked.generate(
        CUE, constraint=FORM, sampling=Sampling(temperature=0), stopping=Stopping(max_tokens=80), save=True
    ).result()


def main(stage: Stage) -> None:
    with Client(stage.address, timeout=300) as client:
        state = client.create_snapshot(OPENING)
        opening, kept, text = state.token_count, "", OPENING
        before = client.cache_stats()
        turns: list[dict[str, object]] = []
        again = thoughts = 0
        for number in range(TURNS):
            # Behind the state without thoughts: the answer that is kept, and the next question.
            addition = f"{kept}\nTraveller: {QUESTIONS[number % len(QUESTIONS)]}\n"
            asked = client.create_snapshot(addition, state)
            text += addition
            result = think(asked)
            end = result.snapshot
            assert asked.usage is not None and end is not None

            # The thoughts go, with the answer behind them; the answer comes back as text in the next turn.
            back = end.rollback(ancestor=asked, release=Release.SOURCE)
            assert back.usage is not None
            kept = "Answer:" + result.text.rpartition("\nAnswer:")[2]
            thoughts += result.usage.completion_tokens
            again += back.usage.recomputed_tokens
            cost = computed(asked.usage) + computed(result.usage) + computed(back.usage)
            turns.append(
                {
                    "prompt": text + CUE,
                    "prompt_tokens": result.usage.prompt_tokens,
                    "computed_tokens": cost,
                    "generated_tokens": result.usage.completion_tokens,
                }
            )
            stage.say(
                f"{number + 1:3}. {result.usage.prompt_tokens:4} tokens of prompt, {cost:3} computed. {kept.strip()}"
            )
            for done in (state, asked):
                done.release()
            state = back
        after = client.cache_stats()

        gained = state.token_count - opening
        sent = sum(int(str(one["prompt_tokens"])) for one in turns)
        stage.say(f"\nThe conversation grew by {gained} tokens; {thoughts} of reasoning and answers were rolled back.")
        stage.say(f"Its {TURNS} prompts are {sent:,} tokens together.")
        stage.figures |= {"opening_tokens": opening, "new_tokens": gained, "prompt_tokens": sent, "turns": turns}
        # By the server's own counters; what comes on top of 1 is the cue, which every turn says anew.
        stage.expect("computed_over_new_tokens", (computed(after) - computed(before)) / gained, at_most=1.1)
        stage.expect("recomputed_by_rollbacks", again, exactly=0)
        state.release()


if __name__ == "__main__":
    sys.exit(play(main, __doc__, model="gemma3"))
