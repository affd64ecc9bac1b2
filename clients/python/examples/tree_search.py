"""Search a tree of thoughts, four branches wide and three levels deep: `python tree_search.py [ADDRESS]`.

Each level forks the best thought so far into four, gives each branch its first words, and lets the model finish all
four in one batch. The likeliest goes on, the other three are let go of. What the branches share is computed once: every
level pays for the first words of its branches, and for nothing before them.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from kvfork_client import AsyncClient, AsyncSnapshot, Sampling, Stopping
from stage import Stage, computed, play, snapshots

TASK = """\
The harbour of Meridian is to be rebuilt after the storm. The old pier stands on oak piles, half of them rotten; the \
crane is on the pier and weighs nine tons; the ferry needs four metres of water and comes twice a day. There are two \
masons, one diver, a barge that carries six tons, and money for eight weeks. Stone comes from the quarry behind the \
dunes, a day's haul by cart. In October the west wind begins and no work is done in the water until March. The fish \
market must stay open, the lamp on the pier's head must burn every night, and nobody may be sent below without a \
line. The council wants a plan with its steps in order, each in one short sentence.

Plan:
1."""
FIRST_WORDS = (" First, the diver", " To begin with, the masons", " The barge", " Before October, the council")
LEVELS = 3
THOUGHT = Stopping(max_tokens=12, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Thought:
    """One branch, finished: where it ends, what it says, how likely that is."""

    end: AsyncSnapshot
    text: str
    score: float  # mean log-probability of its tokens


async def think(branch: AsyncSnapshot) -> Thought:
    likelihoods: list[float] = []
    generation = branch.generate(sampling=Sampling(temperature=0), stopping=THOUGHT, save=True, top_logprobs=0)
    async for delta in generation:
        likelihoods += [token.logprob for token in delta.logprobs]
    result = await generation.result()
    assert result.snapshot is not None
    return Thought(result.snapshot, result.text, sum(likelihoods) / len(likelihoods))


async def search(stage: Stage) -> None:
    async with AsyncClient(stage.address, timeout=300) as client:
        before = await client.cache_stats()
        node = await client.create_snapshot(TASK)
        stage.say(f"The task: {node.token_count} tokens, computed once.\n")
        shared, added, prompts = node.token_count, 0, 0

        for level in range(1, LEVELS + 1):
            branches = await node.fork(FIRST_WORDS)
            thoughts = await asyncio.gather(*(think(branch) for branch in branches))
            best = max(thoughts, key=lambda thought: thought.score)
            stage.say(f"Level {level}, from {node.token_count} tokens:")
            for words, branch, thought in zip(FIRST_WORDS, branches, thoughts, strict=True):
                sign = ">" if thought is best else " "
                stage.say(f"  {sign} {thought.score:6.2f} {words}{thought.text}".replace("\n", " "))
                added += branch.token_count - node.token_count
                prompts += branch.token_count
                await branch.release()
                if thought is not best:
                    await thought.end.release()
            await node.release()
            node = best.end
        await node.release()

        after = await client.cache_stats()
        once = computed(after) - computed(before)  # by the server's own counters
        stage.say(f"\n{LEVELS * len(FIRST_WORDS)} thoughts. Each by itself, they are {prompts:,} tokens of prompt.")
        stage.expect("computed_tokens", once, at_most=shared + added)
        stage.expect("recomputed_tokens", after.recomputed_tokens - before.recomputed_tokens, exactly=0)
        stage.expect("snapshots_left", snapshots(after) - snapshots(before), exactly=0)


if __name__ == "__main__":
    sys.exit(play(lambda stage: asyncio.run(search(stage)), __doc__))
