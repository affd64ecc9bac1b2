"""A LangGraph graph that goes back to an earlier turn without computing it again: `python langgraph_time_travel.py`.

Needs the `langgraph` extra. The graph keeps a snapshot's name in its state, so each of its checkpoints
names the model's state at that moment. Three turns are taken; then the graph goes back to the checkpoint behind the
first and takes another second turn from there. Only that turn's own words go through the model.
"""

from __future__ import annotations

import operator
import sys
from typing import Annotated, Any, TypedDict

from kvfork_client import Client, Sampling, Stopping
from kvfork_langgraph import SnapshotSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from stage import Stage, computed, play, snapshots

RULES = """\
You are the night porter of the Hotel Meridian. The kitchen closes at ten; a cold plate can be had all night. The \
sauna is free until midnight. Taxis wait at the harbour and cost twelve coins to the railway station. Dogs are welcome \
on the ground floor only. The lift rests between one and four. Breakfast is served in the winter garden from seven."""
QUESTIONS = ("May my dog sleep in room 302?", "When does the lift rest?", "Where is breakfast?")
ANOTHER = "What does a taxi cost?"
THREAD: Any = {"configurable": {"thread_id": "room 302"}}


class Talk(TypedDict, total=False):
    """The graph's own state; `kvfork` is the channel that the saver looks after."""

    said: str
    turns: Annotated[list[str], operator.add]
    kvfork: str
    computed: int
    added: int
    recomputed: int


def graph(client: Client) -> Any:
    def reply(state: Talk) -> Talk:
        parent, turn = state.get("kvfork"), f"\nGuest: {state['said']}\nPorter:"
        # Behind a snapshot, the turn alone; if there is none, or none any more, the whole conversation.
        text = turn if parent else RULES + "".join(state.get("turns", [])) + turn
        shape = Stopping(max_tokens=12, ignore_eos=True)
        result = client.generate(text, parent, sampling=Sampling(temperature=0), stopping=shape, save=True).result()
        assert result.snapshot is not None
        before = client.snapshot(parent).refresh().token_count if parent else 0
        return {
            "turns": [turn + result.text],
            "kvfork": result.snapshot.name,
            "computed": computed(result.usage),
            "added": result.usage.prompt_tokens - before,
            "recomputed": result.usage.recomputed_tokens,
        }

    built = StateGraph(Talk).add_node("reply", reply).add_edge(START, "reply").add_edge("reply", END)
    return built.compile(checkpointer=SnapshotSaver(InMemorySaver(), client))


def main(stage: Stage) -> None:
    with Client(stage.address, timeout=300) as client:
        before = client.cache_stats()
        agent = graph(client)
        for question in QUESTIONS:
            now = agent.invoke({"said": question}, THREAD)
            stage.say(f"{now['computed']:4} tokens computed, {now['added']} new. {' '.join(now['turns'][-1].split())}")

        # Time travel: the checkpoint behind the first turn, and another turn from there.
        past = [
            one for one in agent.get_state_history(THREAD) if len(one.values.get("turns", ())) == 1 and not one.next
        ]
        stage.say(f"\nBack to the checkpoint behind turn 1, {past[0].values['kvfork']}:")
        now = agent.invoke({"said": ANOTHER}, past[0].config)
        stage.say(f"{now['computed']:4} tokens computed, {now['added']} new. {' '.join(now['turns'][-1].split())}\n")
        stage.expect("turns_behind_the_branch", len(now["turns"]), exactly=2)
        stage.expect("recomputed_tokens", now["recomputed"], exactly=0)
        stage.expect("computed_tokens", now["computed"], exactly=now["added"])

        agent.checkpointer.delete_thread(THREAD["configurable"]["thread_id"])  # and with it every snapshot it names
        stage.expect("snapshots_left", snapshots(client.cache_stats()) - snapshots(before), exactly=0)


if __name__ == "__main__":
    sys.exit(play(main, __doc__))
