"""`SnapshotModel` in runs of the OpenAI Agents SDK, through a real gateway: what a session does, the state follows."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kvfork_client import Client

from service.models import resolve
from tests.absent import missing
from tests.e2e import proxy
from tests.e2e.live import PATIENCE, LiveServer, until
from tests.e2e.templates import with_template
from tests.e2e.test_replicas import Replicas
from tests.gateway.live import LiveGateway
from tests.gateway.test_gateway_agents import TOOL, TOOLS_TEMPLATE

if importlib.util.find_spec("agents") is None:
    missing("NO TEST OF THE OPENAI AGENTS SDK: openai-agents is not installed (the dev extra has it)", module=True)

from agents import Agent, FunctionTool, ModelSettings, Runner, SQLiteSession, Tool, set_tracing_disabled
from kvfork_agents import SnapshotModel, snapshots_of

pytestmark = pytest.mark.mlx

RULES = "The harbour of Meridian lies open to the west, and its lamp burns every night. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("tiny-gemma3") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: LiveServer) -> Iterator[LiveGateway]:
    with LiveGateway(server, "--alias", "*=tiny-gemma3") as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with server.client() as one:
        yield one
        for left in list(one.list_snapshots()):
            left.release()


def tool(*, strict: bool = True, description: str = "") -> FunctionTool:
    async def weather(_context: Any, arguments: str) -> str:
        return f"{json.loads(arguments)['city']}: rain"

    schema = copy.deepcopy(TOOL["function"]["parameters"])  # which the SDK changes where it is to be strict
    return FunctionTool("get_weather", description, schema, weather, strict_json_schema=strict)


class Talk:
    """An agent and its session; each question is a run with a connection of its own."""

    def __init__(
        self,
        gateway: LiveGateway,
        *,
        streams: bool = False,
        rules: str = RULES,
        tools: Sequence[Tool] = (),
        model: str = "keeper",
        max_tokens: int = 6,
        **options: Any,
    ) -> None:
        set_tracing_disabled(True)
        self._url, self._streams, self._rules, self._options = gateway.url, streams, rules, options
        self._tools, self._model, self._max_tokens = list(tools), model, max_tokens
        self.session = SQLiteSession("talk")
        self.sent: list[Any] = []  # the bodies of all requests

    def ask(self, question: str, **settings: Any) -> tuple[int, int]:
        """(cached tokens of the prompt, tokens of prompt and answer together)."""
        return asyncio.run(self._ask(question, settings))

    async def _ask(self, question: str, settings: dict[str, Any]) -> tuple[int, int]:
        http = httpx.AsyncClient(event_hooks={"request": [self._note]}, timeout=PATIENCE)
        async with openai.AsyncOpenAI(
            base_url=f"{self._url}/v1", api_key="none", max_retries=0, http_client=http
        ) as connection:
            agent = Agent(
                name="keeper",
                instructions=self._rules,
                tools=self._tools,
                model=SnapshotModel(self._model, connection, **self._options),
                model_settings=ModelSettings(
                    temperature=0, max_tokens=self._max_tokens, include_usage=True, **settings
                ),
            )
            if self._streams:
                streamed = Runner.run_streamed(agent, question, session=self.session)
                async for _ in streamed.stream_events():
                    pass
                usage = streamed.context_wrapper.usage
            else:
                usage = (await Runner.run(agent, question, session=self.session)).context_wrapper.usage
        return usage.input_tokens_details.cached_tokens, usage.total_tokens

    async def _note(self, request: httpx.Request) -> None:
        self.sent.append(json.loads(request.content))

    @property
    def items(self) -> list[Any]:
        return list(asyncio.run(self.session.get_items()))

    def names(self) -> list[str]:
        return snapshots_of(self.items)

    def back(self, turns: int) -> None:
        """A turn is a question and its answer."""
        for _ in range(2 * turns):
            asyncio.run(self.session.pop_item())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_turn_goes_on_from_the_end_of_the_one_before(gateway: LiveGateway, client: Client, streams: bool) -> None:
    talk = Talk(gateway, streams=streams)
    first, second, third = (talk.ask(question) for question in ("Who is there?", "And now?", "And then?"))
    assert (first[0], second[0], third[0]) == (0, first[1], second[1])
    assert [client.get_snapshot(name).token_count for name in talk.names()] == [first[1], second[1], third[1]]


def test_popped_turns_take_the_state_back_with_them(gateway: LiveGateway, client: Client) -> None:
    talk = Talk(gateway)
    reach = [talk.ask(f"Question {n}?")[1] for n in range(5)]
    talk.back(4)
    assert talk.ask("Another one?")[0] == reach[0]
    talk.back(2)
    assert talk.ask("From the start?")[0] == 0


def test_a_conversation_that_reads_otherwise_is_sent_whole(gateway: LiveGateway, client: Client) -> None:
    talk = Talk(gateway)
    talk.ask("Who is there?")
    kept = talk.items
    other = Talk(gateway)
    asyncio.run(other.session.add_items([{**kept[0], "content": "Who else is there?"}, *kept[1:]]))
    told = Talk(gateway, rules="Be brief.")
    asyncio.run(told.session.add_items(kept))
    same = Talk(gateway)
    asyncio.run(same.session.add_items(kept))
    parents = []
    for one in (other, told, same):
        one.ask("And now?")
        parents.append(client.get_snapshot(one.names()[-1]).info.parent)
    assert talk.names()[0] not in parents[:2] and parents[2] == talk.names()[0]


def test_what_the_template_is_given_otherwise_is_another_conversation(tmp_path: Path) -> None:
    """Tools, their strictness among them, and whatever of the body comes to the template."""
    tools = [tool(), tool(strict=False), tool(description="Rain or shine.")]
    low, high = ({"extra_body": {"reasoning_effort": effort}} for effort in ("low", "high"))
    model = with_template(resolve("tiny-llama"), tmp_path / "caller", TOOLS_TEMPLATE)
    with LiveServer(model) as server, LiveGateway(server, "--alias", "*=caller") as gateway:
        first = Talk(gateway, tools=tools[:1])
        first.ask("Who is there?", **low)
        went_on = []
        for offered, settings in ((tools[:1], low), (tools[:1], high), (tools[1:2], low), (tools[2:], low), ([], low)):
            talk = Talk(gateway, tools=offered)
            asyncio.run(talk.session.add_items(first.items))
            talk.ask("And now?", **settings)
            went_on.append(talk.sent[0]["kvfork"].get("parent"))
        assert went_on == [*first.names(), None, None, None, None]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_could_not_be_kept_names_no_snapshot(streams: bool) -> None:
    room = ("--memory-bytes", "300KiB", "--disk-bytes", "300KiB", "--snapshot-wait", "1")
    with (
        LiveServer("tiny-llama", *room) as server,
        LiveGateway(server, "--alias", "*=tiny-llama") as gateway,
        server.client() as client,
    ):
        talk = Talk(gateway, streams=streams, rules=RULES * 10)
        talk.ask("Who is there?")
        assert talk.sent[0]["kvfork"]["save"] and list(client.list_snapshots()) == []
        assert talk.names() == []


def test_a_snapshot_that_is_gone_costs_its_computing_and_no_answer(gateway: LiveGateway, client: Client) -> None:
    talk = Talk(gateway)
    _, reach = talk.ask("Who is there?")
    client.delete_snapshot(talk.names()[0])
    cached, further = talk.ask("And now?")
    assert cached < reach
    assert client.get_snapshot(talk.names()[-1]).token_count == further
    assert talk.ask("And then?")[0] == further


def test_a_name_that_a_lost_answer_took_is_not_taken_again(
    gateway: LiveGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, drawn = Talk(gateway), iter(["agents-one", "agents-one", "agents-two"])
    monkeypatch.setattr("kvfork_agents.model._new_name", lambda: next(drawn))
    _, reach = talk.ask("Who is there?")
    assert talk.ask("And now?")[0] == reach
    assert talk.names() == ["snapshots/agents-one", "snapshots/agents-two"]


def test_what_is_kept_is_as_it_was_asked_for(gateway: LiveGateway, client: Client) -> None:
    talk = Talk(gateway, ttl=900, labels={"topic": "harbour"})
    talk.ask("Who is there?", extra_body={"kvfork": {"priority": 3}})
    assert talk.ask("And now?", extra_body={"kvfork": None})[1]
    info = client.get_snapshot(talk.names()[0]).info
    assert info.labels == {"topic": "harbour"} and info.expire_time is not None
    assert (info.expire_time - info.create_time).total_seconds() == pytest.approx(900, abs=60)


def test_a_refusal_of_another_kind_is_the_callers(gateway: LiveGateway) -> None:
    talk = Talk(gateway)
    talk.ask("Who is there?")
    with pytest.raises(openai.BadRequestError) as refused:
        talk.ask("And now?", extra_args={"audio": {}})
    assert refused.value.param == "audio"


def test_where_no_more_is_kept_answers_come_all_the_same() -> None:
    with (
        LiveServer("tiny-gemma3", "--max-snapshots", "1") as full,
        LiveGateway(full, "--alias", "*=tiny-gemma3") as gateway,
    ):
        talk = Talk(gateway)
        _, reach = talk.ask("Who is there?")
        assert talk.ask("And now?")[0] == reach
        assert len(talk.names()) == 1
        for save in ({"snapshot_id": "of-the-callers"}, None):
            assert talk.ask("And then?", extra_body={"kvfork": {"save": save}})[1] > 0
        assert len(talk.names()) == 1


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_turn_names_the_server_that_holds_its_parent(
    server: LiveServer, gateway: LiveGateway, client: Client, streams: bool
) -> None:
    talk = Talk(gateway, streams=streams)
    talk.ask("Who is there?")
    talk.ask("And now?", extra_body={"kvfork": {"priority": 3}})
    first, *more = [body["kvfork"] for body in talk.sent]
    home = client.server_info().instance
    assert "parent" not in first and "instance" not in first
    assert {(one["parent"], one["instance"], one["priority"]) for one in more} == {(talk.names()[0], home, 3)}


@pytest.mark.slow
def test_behind_a_proxy_a_turn_goes_on_where_the_one_before_was(tmp_path: Path) -> None:
    proxy.program()
    with ExitStack() as stack:
        replicas = Replicas(tmp_path)
        stack.callback(replicas.close)
        for name in ("a", "b"):
            replicas.start(name)
        envoy = stack.enter_context(proxy.Envoy(replicas.addresses))
        until(lambda: len(envoy.healthy()) == 2, what="both replicas to be called healthy")
        talk = Talk(stack.enter_context(LiveGateway(envoy, "--alias", "*=tiny-gemma3")))
        reach = 0
        for number in range(6):
            cached, further = talk.ask(f"Question {number}?")
            assert cached == reach
            reach = further
        homes = {body["kvfork"]["instance"] for body in talk.sent[1:]}
        (home,) = homes
        replicas.kill(home)
        moved = talk.ask("Are you still there?")  # computed anew on the other one
        assert moved[0] == 0
        assert talk.ask("And to stay?")[0] == moved[1]
        assert {home, talk.sent[-1]["kvfork"]["instance"]} == {"a", "b"}


def shown_items() -> list[Any]:
    """Earlier turns in which the tool was called, as a session holds them."""
    items: list[Any] = []
    for number, city in enumerate(("Rome", "Cairo")):
        call = {"type": "function_call", "call_id": f"shown-{number}", "name": "get_weather"}
        items += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {**call, "arguments": json.dumps({"city": city})},
            {"type": "function_call_output", "call_id": f"shown-{number}", "output": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ]
    return items


@pytest.mark.slow
def test_a_run_with_a_tool_goes_on_behind_each_of_its_answers(tmp_path: Path) -> None:
    """A call, its result and the answer are two requests. Both answers end by themselves, so the next turn is one."""
    template = TOOLS_TEMPLATE.replace(
        "tool.function | tojson",
        "{'name': tool.function.name, 'parameters': tool.function.parameters} | tojson",
    )
    model = with_template(resolve("smollm2"), tmp_path / "smollm2", template)
    with LiveServer(model) as server, LiveGateway(server) as gateway, server.client() as client:
        for streams in (False, True):
            talk = Talk(gateway, streams=streams, model="smollm2", rules="", tools=[tool(strict=False)], max_tokens=60)
            asyncio.run(talk.session.add_items(shown_items()))
            cached, _ = talk.ask("What is the weather in Paris?")
            results = [item["output"] for item in talk.items if item.get("type") == "function_call_output"]
            assert results == ["sunny", "sunny", "Paris: rain"]
            call, answer = map(client.get_snapshot, talk.names())
            assert cached == call.token_count and answer.parent == call.name
            assert talk.ask("Thank you.")[0] == answer.token_count
            assert [body["kvfork"].get("parent") for body in talk.sent] == [None, call.name, answer.name]
            assert [[m["role"] for m in body["messages"]] for body in talk.sent[1:]] == [["tool"], ["user"]]
            for left in list(client.list_snapshots()):
                left.release()
