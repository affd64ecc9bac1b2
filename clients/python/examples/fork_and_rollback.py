"""One beginning, three endings, and back to the beginning: `python fork_and_rollback.py [ADDRESS]`.

Raw text, so that it runs on any model; the three endings are decoded together in one batch.
"""

from __future__ import annotations

import asyncio
import sys

from kvfork_client import AsyncClient, AsyncSnapshot, Release, Sampling, Stopping, Usage

BEGINNING = "The lighthouse keeper climbed the stairs for the last time, opened the door and saw"
ENDINGS = (" a ship", " the sunrise", " nothing")
SHORT = Stopping(max_tokens=24)
GREEDY = Sampling(temperature=0)


def receipt(usage: Usage) -> str:
    return f"restored {usage.cached_tokens}, recomputed {usage.recomputed_tokens}, new {usage.new_tokens}"


async def tell(branch: AsyncSnapshot) -> str:
    """The rest of one story, and what it cost to get there."""
    result = await branch.generate(sampling=GREEDY, stopping=SHORT).result()
    return f"{result.text.strip()}\n    [{receipt(result.usage)}]"


async def main(address: str) -> None:
    async with AsyncClient(address, timeout=300) as client, await client.create_snapshot(BEGINNING) as beginning:
        print(f"{beginning.name}: {beginning.token_count} tokens\n")

        branches = await beginning.fork(ENDINGS)
        stories = await asyncio.gather(*(tell(branch) for branch in branches))
        for ending, story in zip(ENDINGS, stories, strict=True):
            print(f"  …{ending} {story}\n")

        # The first branch is not needed any more: go back to where it left the others, and let its name go.
        again = await branches[0].rollback(token_count=beginning.token_count, release=Release.SOURCE)
        if again.usage is not None:
            print(f"rolled back to {again.token_count} tokens [{receipt(again.usage)}], let go of {again.released}")
        print(f"  …{await tell(again)}")
        for snapshot in (again, *branches[1:]):
            await snapshot.release()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
