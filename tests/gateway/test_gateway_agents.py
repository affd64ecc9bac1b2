"""Agents that know of nothing but a base URL: what a growing conversation computes, tools, reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.models import resolve
from tests.e2e.live import LiveServer
from tests.e2e.templates import with_template
from tests.gateway.live import LiveGateway
from tests.text import chat_templates

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

TURNS = 20

SYSTEM = (
    "You look after a small library. You answer in one sentence. You may look at the shelves, at the list of readers, "
    "and at what was lent to whom; the results are given to you as the next message. Say what you do, then do it. "
    "Never make up a title, a reader or a date. If something is missing, say so and go on with what there is. "
)


def test_a_twenty_turn_agent_reuses_nine_tenths_of_its_prompts(tmp_path: Path) -> None:
    model = with_template(resolve("gemma3"), tmp_path / "gemma3", chat_templates.GEMMA3)
    messages: Any = [{"role": "system", "content": SYSTEM}]
    prompts, reused, new, whole, reach = 0, 0, 0, 0, 0
    with LiveServer(model) as server, LiveGateway(server, "--alias", "*=gemma3") as gateway, gateway.client() as agent:
        for turn in range(TURNS):
            words = f"Result {turn}: shelf {turn % 7} has {turn + 3} books. What next?"
            messages.append({"role": "user", "content": words})
            answer = agent.chat.completions.create(
                model="an-assistant", messages=messages, max_tokens=6, temperature=0.7, seed=turn
            )
            usage, cached = answer.usage, answer.usage.prompt_tokens_details.cached_tokens
            whole += bool(reach and cached >= reach)
            prompts += usage.prompt_tokens
            reused += cached
            new += answer.model_extra["kvfork"]["receipt"]["new_tokens"]
            reach = usage.prompt_tokens + usage.completion_tokens
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    print(f"\n{TURNS} turns: {reused} of {prompts} prompt tokens reused, {reused / prompts:.1%}; {new} were new")
    print(f"{whole} answers were gone on from at their end")
    assert whole == TURNS - 1
    assert reused >= 0.9 * prompts
    assert new == prompts - reused


TOOLS_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' }}Call tools so: <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:
{%- for tool in tools %}{{ '\n' + (tool.function | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- set tool = m.role == 'tool' %}
{{- '<|im_start|>' + ('user' if tool else m.role) + '\n' }}
{{- '<tool_response>\n' + m.content + '\n</tool_response>' if tool else m.content }}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def shown(number: int, city: str) -> list[Any]:
    """A question, the call that answers it, and its result."""
    call = {"id": f"shown-{number}", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"shown-{number}", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]


def test_a_model_calls_a_tool_and_goes_on_with_its_result(tmp_path: Path) -> None:
    model = with_template(resolve("smollm2"), tmp_path / "smollm2", TOOLS_TEMPLATE)
    messages: Any = [m for i, city in enumerate(("Rome", "Cairo")) for m in shown(i, city)]
    messages.append({"role": "user", "content": "What is the weather in Paris?"})
    asked: dict[str, Any] = {"model": "smollm2", "tools": [TOOL], "max_tokens": 40, "temperature": 0}
    with LiveServer(model) as server, LiveGateway(server) as gateway, gateway.client() as agent:
        answer = agent.chat.completions.create(**asked, messages=messages)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
        assert choice.message.content is None
        streamed = list(agent.chat.completions.create(**asked, messages=messages, stream=True))
        calls = [c for chunk in streamed for part in chunk.choices for c in part.delta.tool_calls or ()]
        assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [
            (0, call.function.name, call.function.arguments)
        ]
        assert streamed[-1].choices[0].finish_reason == "tool_calls"
        messages += [
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        asked["max_tokens"] = 1
        further = agent.chat.completions.create(**asked, messages=messages)
        # The call reads as the model wrote it: not a token of it is read again.
        assert further.usage.prompt_tokens_details.cached_tokens >= answer.usage.total_tokens
        plain = agent.chat.completions.create(**asked, messages=messages, tool_choice="none")
        assert plain.usage.prompt_tokens < further.usage.prompt_tokens


def test_reasoning_is_a_field_of_its_own_and_leaves_no_trace_in_the_next_turn(tmp_path: Path) -> None:
    model = with_template(resolve("tiny-llama"), tmp_path / "thinker", chat_templates.QWEN3_THINKING)
    messages: Any = [{"role": "user", "content": "Think about it."}]
    asked: dict[str, Any] = {"model": "thinker", "max_tokens": 12, "temperature": 0}
    with LiveServer(model) as server, LiveGateway(server) as gateway, gateway.client() as agent:
        answer = agent.chat.completions.create(**asked, messages=messages)
        message = answer.choices[0].message
        assert message.content == "" and message.model_extra["reasoning_content"]
        assert answer.usage.completion_tokens_details.reasoning_tokens == 12
        streamed = agent.chat.completions.create(**asked, messages=messages, stream=True)
        pieces = [chunk.choices[0].delta.model_extra.get("reasoning_content", "") for chunk in streamed]
        assert "".join(pieces) == message.model_extra["reasoning_content"]
        messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now?"}]
        further = agent.chat.completions.create(**asked, messages=messages)
        assert further.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 3
