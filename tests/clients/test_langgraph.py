"""The LangGraph checkpointer with a real graph on a real server: names live and go with their checkpoints."""

from __future__ import annotations

import asyncio
import operator
import socket
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

import pytest
from kvfork_client import Client, Sampling, SnapshotNotFound, Stopping

from tests.e2e.live import LiveServer

pytest.importorskip("langgraph")

from kvfork_langgraph import SnapshotSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from whole_saver import WholeSaver

pytestmark = pytest.mark.mlx

OPENING = "The harbour of Meridian lies open to the west, and its lamp burns every night. " * 8


class Talk(TypedDict, total=False):
    said: str
    turns: Annotated[list[str], operator.add]
    kvfork: str
    ids: tuple[int, ...]
    receipt: tuple[int, int]  # new and recomputed tokens


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("tiny-gemma3") as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with server.client() as one:
        yield one
        for left in list(one.list_snapshots()):
            left.release()


def graph(client: Client, saver: SnapshotSaver) -> Any:
    def reply(state: Talk) -> Talk:
        parent, turn = state.get("kvfork"), f" Then {state['said']} came and said"
        text = turn if parent else OPENING + "".join(state.get("turns", [])) + turn
        result = client.generate(
            text,
            parent,
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=6, ignore_eos=True),
            save=True,
            token_ids=True,
        ).result()
        assert result.snapshot is not None
        return {
            "turns": [turn + result.text],
            "kvfork": result.snapshot.name,
            "ids": result.token_ids,
            "receipt": (result.usage.new_tokens, result.usage.recomputed_tokens),
        }

    built = StateGraph(Talk).add_node("reply", reply).add_edge(START, "reply").add_edge("reply", END)
    return built.compile(checkpointer=saver)


def thread(name: str, **more: str) -> Any:
    return {"configurable": {"thread_id": name, **more}}


def names(client: Client) -> set[str]:
    return {snapshot.name for snapshot in client.list_snapshots()}


def test_going_back_to_a_checkpoint_computes_the_new_turn_alone(client: Client) -> None:
    agent = graph(client, SnapshotSaver(InMemorySaver(), client))
    for who in ("Ann", "Bob", "Cleo"):
        last = agent.invoke({"said": who}, thread("t"))
    first = next(
        one
        for one in agent.get_state_history(thread("t"))
        if one.values.get("turns") and not one.next and len(one.values["turns"]) == 1
    )
    turn = client.count_tokens(" Then Dan came and said", first.values["kvfork"]).total_tokens
    before = client.get_snapshot(first.values["kvfork"]).token_count

    branch = agent.invoke({"said": "Dan"}, first.config)
    assert branch["receipt"] == (turn - before, 0)
    assert [words.split()[1] for words in branch["turns"]] == ["Ann", "Dan"]

    # The same turn again from the same checkpoint says the same; the other branch is where it was.
    again = agent.invoke({"said": "Dan"}, first.config)
    assert (again["ids"], again["receipt"][1]) == (branch["ids"], 0)
    assert client.get_snapshot(last["kvfork"]).token_count > before
    assert len(names(client)) == 5


def test_a_checkpoint_whose_snapshot_is_gone_comes_back_without_its_name(client: Client) -> None:
    agent = graph(client, SnapshotSaver(InMemorySaver(), client))
    kept = agent.invoke({"said": "Ann"}, thread("t"))
    client.delete_snapshot(kept["kvfork"])
    assert "kvfork" not in agent.get_state(thread("t")).values
    got = agent.invoke({"said": "Bob"}, thread("t"))
    whole = client.count_tokens(OPENING + got["turns"][0] + " Then Bob came and said").total_tokens
    assert got["turns"][0] == kept["turns"][0] and len(got["turns"]) == 2
    assert client.get_snapshot(got["kvfork"]).token_count == whole + 6  # sent again as text, and answered


def test_a_snapshot_goes_with_the_last_checkpoint_that_names_it(client: Client) -> None:
    agent = graph(client, SnapshotSaver(InMemorySaver(), client))
    one = agent.invoke({"said": "Ann"}, thread("one"))["kvfork"]
    two = agent.invoke({"said": "Bob"}, thread("one"))["kvfork"]
    agent.update_state(thread("two"), {"kvfork": one, "turns": ["taken over"]})

    agent.checkpointer.delete_thread("one")
    assert names(client) == {one}
    with pytest.raises(SnapshotNotFound):
        client.get_snapshot(two)
    agent.checkpointer.delete_thread("two")
    assert names(client) == set()


Tell = Callable[..., None]


@pytest.fixture(params=["sync", "async"])
def tell(request: pytest.FixtureRequest) -> Tell:
    """Calls a saver's method by its name, or the one that is awaited."""

    def told(saver: Any, method: str, *arguments: Any, **options: Any) -> None:
        if request.param == "sync":
            getattr(saver, method)(*arguments, **options)
        else:
            asyncio.run(getattr(saver, f"a{method}")(*arguments, **options))

    return told


def test_a_run_that_is_deleted_takes_the_snapshots_that_no_other_run_names(client: Client, tell: Tell) -> None:
    agent = graph(client, SnapshotSaver(WholeSaver(), client))
    one = agent.invoke({"said": "Ann"}, thread("t", run_id="one"))["kvfork"]
    two = agent.invoke({"said": "Bob"}, thread("t", run_id="two"))["kvfork"]
    three = agent.invoke({"said": "Cleo"}, thread("u", run_id="three"))["kvfork"]

    tell(agent.checkpointer, "delete_for_runs", ["one"])
    assert names(client) == {one, two, three}, "the second run's first checkpoint names what it began behind"
    assert [one.metadata["run_id"] for one in agent.checkpointer.list(thread("t"))] == ["two"] * 3
    tell(agent.checkpointer, "delete_for_runs", ["two", "never was"])
    assert names(client) == {three}


def test_pruning_leaves_the_snapshots_of_what_it_keeps(client: Client, tell: Tell) -> None:
    agent = graph(client, SnapshotSaver(WholeSaver(), client))
    for name in ("t", "u"):
        agent.invoke({"said": "Ann"}, thread(name))
    last = {name: agent.invoke({"said": "Bob"}, thread(name))["kvfork"] for name in ("t", "u")}
    assert len(names(client)) == 4

    tell(agent.checkpointer, "prune", ["t", "u"])
    assert names(client) == set(last.values())
    assert agent.invoke({"said": "Cleo"}, thread("t"))["receipt"][1] == 0
    tell(agent.checkpointer, "prune", ["t"], strategy="delete")
    assert names(client) == {last["u"]}


def test_a_copied_thread_keeps_the_snapshots_when_the_first_one_goes(client: Client, tell: Tell) -> None:
    agent = graph(client, SnapshotSaver(WholeSaver(), client))
    kept = agent.invoke({"said": "Ann"}, thread("t"))["kvfork"]
    tell(agent.checkpointer, "copy_thread", "t", "u")
    tell(agent.checkpointer, "delete_thread", "t")
    assert names(client) == {kept}
    gone_on = agent.invoke({"said": "Bob"}, thread("u"))
    assert ([words.split()[1] for words in gone_on["turns"]], gone_on["receipt"][1]) == (["Ann", "Bob"], 0)
    tell(agent.checkpointer, "delete_thread", "u")
    assert names(client) == set()


def test_what_the_inner_saver_does_not_offer_is_told_and_costs_no_snapshot(client: Client, tell: Tell) -> None:
    agent = graph(client, SnapshotSaver(InMemorySaver(), client))
    kept = agent.invoke({"said": "Ann"}, thread("t", run_id="one"))["kvfork"]
    for method, arguments in (("delete_for_runs", (["one"],)), ("prune", (["t"],)), ("copy_thread", ("t", "u"))):
        with pytest.raises(NotImplementedError):
            tell(agent.checkpointer, method, *arguments)
    assert names(client) == {kept} and agent.get_state(thread("t")).values["kvfork"] == kept


def test_every_step_gives_the_snapshot_more_time(client: Client) -> None:
    saver = SnapshotSaver(InMemorySaver(), client, ttl=3000)
    name = graph(client, saver).invoke({"said": "Ann"}, thread("t"))["kvfork"]
    short = client.snapshot(name).update(ttl=60).info.expire_time
    assert saver.get_tuple(thread("t")) is not None
    longer = client.get_snapshot(name).info.expire_time
    assert short is not None and longer is not None
    assert (longer - short).total_seconds() >= 2900


def loses_no_checkpoint(address: str) -> None:
    with Client(address, timeout=0.5, retry=False) as nobody:
        saver = SnapshotSaver(InMemorySaver(), nobody)
        built = StateGraph(Talk).add_node("note", lambda state: {"kvfork": "snapshots/far-away"})
        agent = built.add_edge(START, "note").add_edge("note", END).compile(checkpointer=saver)
        agent.invoke({"said": "Ann"}, thread("t"))
        assert agent.get_state(thread("t")).values["kvfork"] == "snapshots/far-away"
        saver.delete_thread("t")
        assert saver.get_tuple(thread("t")) is None


def test_a_server_that_is_away_loses_no_checkpoint() -> None:
    loses_no_checkpoint("127.0.0.1:9")


def test_a_server_that_hangs_loses_no_checkpoint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing on any of them
        loses_no_checkpoint(f"127.0.0.1:{mute.getsockname()[1]}")


def test_the_async_methods_do_the_same(client: Client) -> None:
    agent = graph(client, SnapshotSaver(InMemorySaver(), client))

    async def play() -> tuple[Any, Any]:
        await agent.ainvoke({"said": "Ann"}, thread("t"))
        second = await agent.ainvoke({"said": "Bob"}, thread("t"))
        state = await agent.aget_state(thread("t"))
        await agent.checkpointer.adelete_thread("t")
        return second, state

    second, state = asyncio.run(play())
    assert second["receipt"][1] == 0
    assert state.values["kvfork"] == second["kvfork"]
    assert names(client) == set()
