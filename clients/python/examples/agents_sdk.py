"""The OpenAI Agents SDK, which turns back and takes another turn: `python agents_sdk.py [ADDRESS]`.

Needs the extras `agents` and `gateway`. An agent of the SDK converses through `kvfork gateway`, first with nothing
but the base URL changed: what it has said before is not computed again. Then with `SnapshotModel`, whose answers carry
the handle of the state behind them: it goes back to its first turn, and on from there, and a gateway that has never
seen it takes the conversation over. Every call computes what is new to it and nothing else.
"""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.extensions.memory import AdvancedSQLiteSession
from kvfork_agents import SnapshotModel, snapshots_of
from kvfork_client import AsyncClient
from openai import AsyncOpenAI
from stage import Stage, gateway, play

RULES = """\
You are the night porter of the Hotel Meridian. You answer in one short sentence. The kitchen closes at ten; a cold \
plate can be had all night. The sauna is free until midnight. Taxis wait at the harbour and cost twelve coins to the \
railway station. Dogs are welcome on the ground floor only. The lift rests between one and four."""
QUESTIONS = (
    "May my dog sleep in room 302?",
    "When does the lift rest?",
    "Until when is the sauna free?",
    "And at four?",
)
ANOTHER = "What does a taxi to the railway station cost?"
SHORT = ModelSettings(temperature=0, max_tokens=12)
MOST = 0.2  # of the prompt tokens behind the first turn, where nothing but the base URL is changed


class Talk:
    """One agent's conversation: what its calls computed, and how far the state behind its last answer reaches."""

    def __init__(self, stage: Stage, model: OpenAIChatCompletionsModel, kept: AdvancedSQLiteSession) -> None:
        self._stage, self._session = stage, kept
        self._agent = Agent(name="porter", instructions=RULES, model=model, model_settings=SHORT)

    async def ask(self, question: str) -> tuple[int, int, int]:
        """(prompt tokens, computed ones, prompt and answer together) by the usage that the SDK was told."""
        ran = await Runner.run(self._agent, question, session=self._session)
        usage = ran.context_wrapper.usage
        computed = usage.input_tokens - usage.input_tokens_details.cached_tokens
        said = " ".join(ran.final_output.split())
        self._stage.say(f"  {usage.input_tokens:4} tokens of prompt, {computed:3} computed. {question} {said}")
        return usage.input_tokens, computed, usage.input_tokens + usage.output_tokens


async def nothing_but_the_base_url(stage: Stage, client: AsyncOpenAI) -> None:
    stage.say("With nothing but the base URL changed:")
    talk = Talk(stage, OpenAIChatCompletionsModel("porter", client), session("plain"))
    _, *further = [await talk.ask(question) for question in QUESTIONS]
    share = sum(computed for _, computed, _ in further) / sum(prompt for prompt, _, _ in further)
    stage.expect("computed_share_behind_the_first_turn", share, at_most=MOST)


async def with_snapshots(stage: Stage, first: AsyncOpenAI, second: AsyncOpenAI) -> set[str]:
    """The names of the snapshots behind all answers."""
    stage.say("\nWith snapshots behind the answers:")
    kept = session("kept")
    talk = Talk(stage, SnapshotModel("porter", first), kept)
    turns = [await talk.ask(question) for question in QUESTIONS]
    new = turns[0][0] + sum(prompt - reach for (prompt, _, _), (_, _, reach) in zip(turns[1:], turns, strict=False))
    stage.expect("computed", sum(computed for _, computed, _ in turns), exactly=new)
    names = snapshots_of(await kept.get_items())

    await kept.create_branch_from_turn(2)
    stage.say("\nBack behind the first answer, and on from there:")
    prompt, computed, _ = await talk.ask(ANOTHER)
    stage.expect("computed_on_the_branch", computed, exactly=prompt - turns[0][2])
    names += snapshots_of(await kept.get_items())

    await kept.switch_to_branch("main")
    stage.say("\nAnother gateway takes the first conversation over:")
    prompt, computed, _ = await Talk(stage, SnapshotModel("porter", second), kept).ask(QUESTIONS[1])
    stage.expect("computed_behind_another_gateway", computed, exactly=prompt - turns[-1][2])
    return {*names, *snapshots_of(await kept.get_items())}


def session(name: str) -> AdvancedSQLiteSession:
    """The SDK's own, in memory; nothing in it knows of this example."""
    return AdvancedSQLiteSession(session_id=name, create_tables=True)


async def main(stage: Stage) -> None:
    set_tracing_disabled(True)  # else the SDK sends what was said to OpenAI
    async with AsyncClient(stage.address, timeout=300) as server:
        with gateway(stage.address) as one, gateway(stage.address) as two:
            clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none") for url in (one, two)]
            await nothing_but_the_base_url(stage, clients[0])
            left = await with_snapshots(stage, *clients)
            for client in clients:
                await client.close()
        held = {snapshot.name async for snapshot in server.list_snapshots()}
        stage.say()
        stage.expect("answers_kept", len(held & left), exactly=len(QUESTIONS) + 2)
        for name in left:
            await server.delete_snapshot(name)


if __name__ == "__main__":
    sys.exit(play(lambda stage: asyncio.run(main(stage)), __doc__))
