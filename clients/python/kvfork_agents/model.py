"""A model of the OpenAI Agents SDK whose answers are snapshots. Owns what is sent; the conversation is the session's.

A session of the SDK holds a conversation's items, and every call sends them all. `SnapshotModel` names the state behind
each answer in the answer's last item. A call then sends what is new, behind the last such item, however the session got
there: by going on, by popping items, by branching from an earlier turn, or in another process.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from agents import (
    Handoff,
    ItemHelpers,
    ModelResponse,
    ModelSettings,
    ModelTracing,
    OpenAIChatCompletionsModel,
    Tool,
    Usage,
)
from agents.agent_output import AgentOutputSchemaBase
from agents.items import TResponseInputItem, TResponseStreamEvent
from agents.models.chatcmpl_converter import Converter
from openai import APIStatusError, AsyncOpenAI
from openai.types.responses import ResponseCompletedEvent
from openai.types.responses.response_prompt_param import ResponsePromptParam

from .conversation import MARK, Kept, Read

_LABELS = {"kvfork-agents": "answer"}
_AWAY = (
    None,
    "SERVER_DRAINING",
    "MODEL_LOADING",
)  # why one server of several takes no call; without a reason, a proxy's
_CLOSES = {"role": "assistant", "content": ""}  # the answer's end, where a limit cut it: the turn is still open there


def _new_name() -> str:
    return f"agents-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of asking: `items` behind `parent`, or, without one, all of them. `instance`: who holds the parent."""

    items: list[Any]
    parent: str | None
    instance: str = ""
    saves: bool = True
    name: str = field(default_factory=lambda: _new_name())  # chosen here, so that an answer is told by it

    def otherwise(self, refused: APIStatusError, whole: list[Any]) -> Way:
        """Another way after a refusal, which came before any work. Raises it where nothing of this module's is why."""
        facts = refused.body.get("kvfork") if isinstance(refused.body, dict) else None
        reason = facts.get("reason") if isinstance(facts, dict) else None
        if reason == "SNAPSHOT_QUOTA" and self.saves:
            return replace(self, saves=False)
        if reason == "SNAPSHOT_ID_TAKEN" and self.saves:  # a repeated request whose first answer was lost
            return Way(items=self.items, parent=self.parent, instance=self.instance)
        away = refused.status_code == 503 and reason in _AWAY and self.instance  # another server may be there
        if self.parent is None or not (away or refused.status_code in (400, 404, 409)):
            raise refused
        if reason == "TURN_OPEN" and self.items[:1] != [_CLOSES]:
            return replace(self, items=[_CLOSES, *self.items])
        # Gone, of another server or model, or nothing can be appended there: whatever else is wrong is told once more.
        return replace(self, items=whole, parent=None, instance="")


class SnapshotModel(OpenAIChatCompletionsModel):
    """Chat completions of `kvfork gateway` that keep the state behind every answer.

    ttl: seconds that a snapshot is kept without use; None: the server's default. durable: on the server's disk, beyond
    its restarts. labels: of the snapshots. What a call is refused for is raised as by the SDK's own model; a snapshot
    that is gone, or no room for another one, is no reason: the conversation is sent whole, the answer not kept.
    A `kvfork` object of the settings' extra_body goes along, but for its `save`; its `parent` is where a conversation
    begins.
    """

    def __init__(
        self,
        model: str,
        openai_client: AsyncOpenAI,
        *,
        ttl: float | None = None,
        durable: bool = False,
        labels: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """options: of `OpenAIChatCompletionsModel`."""
        super().__init__(model, openai_client, **options)
        self._turns: WeakValueDictionary[str, Turn] = WeakValueDictionary()  # under way, by the name that they ask for
        self._save = {"ttl": ttl, "durable": durable, "labels": dict(_LABELS if labels is None else labels)}

    async def get_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff],
        tracing: ModelTracing,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> ModelResponse:
        rest = (tools, output_schema, handoffs, tracing, previous_response_id, conversation_id, prompt)
        turn = self._turn(system_instructions, input, model_settings, tools, handoffs)
        while True:
            system, items, settings = self._asked(turn)
            try:
                response = await super().get_response(system, items, settings, *rest)
            except APIStatusError as refused:
                turn.otherwise(refused)
            else:
                turn.mark(response.output)
                return response

    async def stream_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff],
        tracing: ModelTracing,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> AsyncIterator[TResponseStreamEvent]:
        rest = (tools, output_schema, handoffs, tracing, previous_response_id, conversation_id, prompt)
        turn = self._turn(system_instructions, input, model_settings, tools, handoffs)
        while True:
            system, items, settings = self._asked(turn)
            try:  # a status comes before the first event, or not at all
                async for event in super().stream_response(system, items, settings, *rest):
                    if isinstance(event, ResponseCompletedEvent):
                        turn.mark(event.response.output)
                    yield event
                return
            except APIStatusError as refused:
                turn.otherwise(refused)

    def _turn(
        self,
        system: str | None,
        given: str | list[TResponseInputItem],
        settings: ModelSettings,
        tools: list[Tool],
        handoffs: list[Handoff],
    ) -> Turn:
        items: list[Any] = ItemHelpers.input_to_new_input_list(given)
        return Turn(items, self._setting(system, settings, tools, handoffs), system, settings)

    def _setting(self, system: str | None, settings: ModelSettings, tools: list[Tool], handoffs: list[Handoff]) -> Any:
        """What the template is given besides the items."""
        offered = [Converter.tool_to_openai(tool) for tool in tools]
        offered += [Converter.convert_handoff_tool(one) for one in handoffs]
        body = _body(settings)
        own = _own(body)
        body.pop("kvfork", None)
        effort = settings.reasoning.effort if settings.reasoning is not None else None
        return [str(self.model), system, offered, str(settings.tool_choice), own.get("parent"), body, effort]

    def _asked(self, turn: Turn) -> tuple[str | None, list[Any], ModelSettings]:
        """The first three arguments of a call: instructions, items, settings."""
        way, body = turn.way, _body(turn.settings)
        own = _own(body)
        own.pop("save", None)
        if way.parent:
            own |= {"parent": way.parent, "instance": way.instance}
        if way.saves:
            own["save"] = {**self._save, "snapshot_id": way.name}
            self._turns[way.name] = turn
        settings = replace(turn.settings, extra_body={**body, "kvfork": own})
        return (None if way.parent else turn.system), way.items, settings

    async def _fetch_response(self, *args: Any, **options: Any) -> Any:
        """The SDK's answer, or its stream of chunks: nothing else that it hands on has what the gateway says of it."""
        answer: Any = await super()._fetch_response(*args, **options)
        settings: ModelSettings = args[2]
        turn = self._turns.get(_own(_body(settings)).get("save", {}).get("snapshot_id", ""))
        if turn is None:
            return answer
        if not options["stream"]:
            turn.hear(answer)
            return answer
        response, chunks = answer
        return response, _Heard(chunks, turn.hear)


class _Heard(AsyncIterator[Any]):
    """A stream of chunks, each heard on its way."""

    def __init__(self, chunks: Any, hear: Callable[[Any], None]) -> None:
        self._chunks = chunks
        self._hear = hear
        self.response = getattr(chunks, "response", None)  # its headers are read

    async def __anext__(self) -> Any:
        chunk = await anext(self._chunks)
        self._hear(chunk)
        return chunk

    async def close(self) -> None:
        await self._chunks.close()


class Turn:
    """One turn of a conversation: what is to be said, and the `way` in which it is asked now."""

    def __init__(self, items: list[Any], setting: Any, system: str | None, settings: ModelSettings) -> None:
        self.system = system
        self.settings = settings
        self._items = items
        self._read = Read(items, setting)
        self._kept: Kept | None = None
        self.way = Way(items=items, parent=None)
        place = self._read.latest
        if place is not None and place.length < len(items):  # behind a snapshot there must be something to say
            self.way = Way(items=items[place.length :], parent=place.kept.snapshot, instance=place.kept.instance)

    def otherwise(self, refused: APIStatusError) -> None:
        """As `Way.otherwise`."""
        self.way = self.way.otherwise(refused, self._items)

    def hear(self, answer: Any) -> None:
        """What the gateway says of a completion, or of a chunk of one."""
        told = (answer.model_extra or {}).get("kvfork")
        if told is not None and told["snapshot"] is not None:  # else it could not be kept in the end
            self._kept = Kept(snapshot=told["snapshot"], instance=told["instance"])

    def mark(self, output: list[Any]) -> None:
        """Names the kept state in the answer's last item, if it is kept."""
        if not output or self._kept is None:
            return
        said = ModelResponse(output=output, usage=Usage(), response_id=None).to_input_items()
        mark = self._read.mark(said, self._kept)
        last = output[-1]
        last.provider_data = {**(getattr(last, "provider_data", None) or {}), MARK: mark}


def _body(settings: ModelSettings) -> dict[str, Any]:
    return dict(settings.extra_body) if isinstance(settings.extra_body, Mapping) else {}


def _own(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the body says to the gateway alone."""
    return dict(body.get("kvfork") or {})
