"""Best of n, first past the post: `python best_of_n.py [ADDRESS]`.

Six branches of one prompt are sampled with seeds of their own, decoded together in one batch. The first to finish a
whole sentence has won; the others are cancelled in the middle of theirs. Cancelling is leaving: the server sees it
between two steps, their rows are free for the next call, and what was not computed yet never will be.
"""

from __future__ import annotations

import asyncio
import sys

from kvfork_client import AsyncClient, AsyncSnapshot, Cancelled, Constraint, Sampling, Stopping
from stage import Stage, computed, play

PROMPT = """\
The ferry line looks for a motto to paint above the harbour gate. It must be one sentence, honest, and short enough \
to be read in passing by somebody who carries two suitcases and a child. The old one was "We go when the wind lets \
us".
The new motto: The ferry"""
BRANCHES = 6
LONGEST = 40  # tokens
PATIENCE = 60  # seconds
SENTENCE = Constraint(regex=r" [a-z ,]{8,60}\.")  # a verifier would do as well: whatever says that a branch is done


async def attempt(branch: AsyncSnapshot, seed: int) -> str:
    generation = branch.generate(
        sampling=Sampling(temperature=1.0, seed=seed), stopping=Stopping(max_tokens=LONGEST), constraint=SENTENCE
    )
    async with generation:  # leaving it, by its end or by the task's cancellation, cancels what still runs
        return (await generation.result()).text


async def race(stage: Stage) -> None:
    async with AsyncClient(stage.address, timeout=300) as client, await client.create_snapshot(PROMPT) as prompt:
        before = await client.cache_stats()
        branches = await prompt.fork(BRANCHES)
        runners = {asyncio.create_task(attempt(branch, seed)): seed for seed, branch in enumerate(branches, 1)}
        finished, running = await asyncio.wait(runners, return_when=asyncio.FIRST_COMPLETED)
        winner = min(finished, key=lambda task: runners[task])
        for loser in running:
            loser.cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)

        # Nothing waits for the losers' ends: their rows are free within one step, whenever this machine gets to it.
        give_up = asyncio.get_running_loop().time() + PATIENCE
        after = await client.cache_stats()
        while after.active_sequences and asyncio.get_running_loop().time() < give_up:
            await asyncio.sleep(0.02)
            after = await client.cache_stats()
        for branch in branches:
            await branch.release()

        cancelled = sum(isinstance(end, asyncio.CancelledError | Cancelled) for end in ended)
        written = after.completion_tokens - before.completion_tokens
        stage.say(f"Seed {runners[winner]} was first: The ferry{winner.result()}")
        stage.say(f"{cancelled} others were cancelled. Tokens written: {written}, of {BRANCHES * LONGEST} at most.\n")
        stage.expect("finished_or_cancelled", len(finished) + cancelled, exactly=BRANCHES)
        stage.expect("rows_left", after.active_sequences, exactly=0)
        stage.expect("prompt_tokens_computed", computed(after) - computed(before), exactly=0)


if __name__ == "__main__":
    sys.exit(play(lambda stage: asyncio.run(race(stage)), __doc__))
