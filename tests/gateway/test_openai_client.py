"""The official Python client's calls against a gateway in front of a real server."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as http
import openai
import pytest
from jsonschema import validate

from tests.e2e.live import PATIENCE, LiveServer, until
from tests.gateway.live import KEPT, LiveGateway

pytestmark = [pytest.mark.mlx]

MODEL = "tiny-gemma3"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
OPENING = 6  # tokens that open an answer, at most
ASK: Any = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "What is the capital?"}]


def test_a_chat_is_answered_with_its_usage_and_receipt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=ASK, max_completion_tokens=12)
    (choice,) = answer.choices
    usage, receipt = answer.usage, answer.model_extra["kvfork"]["receipt"]
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("fp_")
    assert choice.message.role == "assistant" and choice.message.content and choice.logprobs is None
    assert choice.finish_reason == "length" and usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert usage.prompt_tokens_details.cached_tokens == receipt["cached_tokens"]
    parts = [receipt[name] for name in ("cached_tokens", "recomputed_tokens", "new_tokens")]
    assert sum(parts) == receipt["prompt_tokens"] == usage.prompt_tokens


def test_a_stream_says_the_same_as_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=12)
    stream = client.chat.completions.create(
        **GREEDY, messages=ASK, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert {c.id for c in chunks} == {chunks[0].id}
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1) and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-2].model_extra["kvfork"]["receipt"]["prompt_tokens"] == whole.usage.prompt_tokens


def test_a_stream_has_no_usage_unless_asked(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=2, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=24, logprobs=True)
    text = plain.choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(
        **GREEDY, messages=ASK, max_tokens=24, stop=["never this", stop], logprobs=True
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text[: text.index(stop)]
    # Tokens of the stop string have a probability, and nobody was shown their text.
    shown = cut.choices[0].logprobs.content
    assert [t.token for t in shown] == [t.token for t in plain.choices[0].logprobs.content[: len(shown)]]
    assert len(shown) <= cut.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_of_each_token_with_alternatives(client: openai.OpenAI, stream: bool) -> None:
    asked = client.chat.completions.create(
        **GREEDY, messages=ASK, max_tokens=6, logprobs=True, top_logprobs=3, stream=stream
    )
    if stream:
        entries = [e for c in asked if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        entries = asked.choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
        assert entry.bytes is not None


def test_several_choices_share_one_prompt(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 8, "n": 3, "seed": 11, "temperature": 1.5}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    assert [choice.model_extra["kvfork"]["seed"] for choice in first.choices] == [11, 12, 13]
    assert first.usage.completion_tokens == 24
    one = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=1)
    assert first.usage.prompt_tokens == one.usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_json_by_a_schema_and_json_at_all(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["size", "count"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}
    # The form is that of the answer: a model that has marks around reasoning may reason first, and this one would.
    unthinking = {"logit_bias": {"3": -100}}
    answer = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=200, response_format=form, **unthinking)
    assert answer.choices[0].finish_reason == "stop", answer.choices[0].message.content
    validate(json.loads(answer.choices[0].message.content), schema)
    some = client.chat.completions.create(
        **GREEDY, messages=ASK, max_tokens=20, response_format={"type": "json_object"}, **unthinking
    )
    assert some.choices[0].message.content.lstrip().startswith("{")


def test_bias_penalties_and_sampling_reach_the_model(client: openai.OpenAI) -> None:
    forced = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=3, logit_bias={"77": 100}, logprobs=True)
    tokens = [entry.token for entry in forced.choices[0].logprobs.content]
    assert len(set(tokens)) == 1
    freed = client.chat.completions.create(
        **GREEDY,
        messages=ASK,
        max_tokens=3,
        logit_bias={"77": 1},
        frequency_penalty=2.0,
        presence_penalty=2.0,
        logprobs=True,
        extra_body={"repetition_penalty": 5.0, "top_k": 1, "min_p": 0.1},
    )
    assert len({entry.token for entry in freed.choices[0].logprobs.content}) == 3


def test_models_health_and_aliases(client: openai.OpenAI, gateway: LiveGateway) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL and model.owned_by == "kvfork"
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.models.retrieve("small").id == MODEL
    answer = client.chat.completions.create(model="small", messages=ASK, max_tokens=1)
    assert answer.model == MODEL
    health = http.get(f"{gateway.url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "serving"})


def test_what_is_asked_for_wrongly_is_named(client: openai.OpenAI) -> None:
    def refused(**asked: Any) -> tuple[type, str | None, str | None]:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**{**GREEDY, "messages": ASK, "max_tokens": 1, **asked})
        return type(caught.value), caught.value.param, caught.value.code

    bad, missing = openai.BadRequestError, openai.NotFoundError
    assert refused(temperature=-1) == (bad, "temperature", "invalid_value")
    assert refused(top_p=7) == (bad, "top_p", "invalid_value")
    assert refused(stop=[""]) == (bad, "stop", "invalid_value")
    assert refused(logit_bias={"4294967295": 1}) == (bad, "logit_bias", "invalid_value")
    assert refused(model="gpt-0") == (missing, "model", "model_not_found")
    assert refused(extra_body={"novelty": 1}) == (bad, "novelty", "unsupported_parameter")
    assert refused(extra_body={"kvfork": {"parent": "snapshots/unknown-one"}}) == (missing, None, "snapshot_not_found")
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    turn = [{"role": "user", "content": [image]}]
    assert refused(messages=turn) == (bad, "messages[0].content[0].image_url.url", "unsupported_parameter")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    assert refused(response_format=form) == (bad, "response_format", "invalid_value")
    long = [{"role": "user", "content": "word " * 60_000}]
    assert refused(messages=long) == (bad, "messages", "context_length_exceeded")
    # In a stream too, as a status and not as an event.
    assert refused(temperature=-1, stream=True) == (bad, "temperature", "invalid_value")


def test_http_that_is_no_call_is_refused(gateway: LiveGateway) -> None:
    url = f"{gateway.url}/v1/chat/completions"

    def post(body: bytes, **headers: str) -> tuple[int, str]:
        answer = http.post(url, content=body, headers={"content-type": "application/json", **headers})
        return answer.status_code, answer.json()["error"]["code"]

    assert post(b"{") == (400, "invalid_json")
    assert post(b"[" * 100_000) == (400, "invalid_json")
    assert post(b'{"model": NaN}') == (400, "invalid_json")
    assert post(b"{}") == (400, "missing_required_parameter")
    assert post(b"{}", **{"content-type": "text/plain"}) == (415, "unsupported_media_type")
    assert post(b"{}", host="evil.example:8080") == (421, "wrong_host")
    assert http.get(url).status_code == 405
    assert http.get(f"{gateway.url}/v1/nothing").status_code == 404


def test_handles_keep_and_continue_a_state(client: openai.OpenAI, server: LiveServer) -> None:
    first = client.chat.completions.create(
        **GREEDY,
        messages=ASK,
        max_tokens=5,
        extra_body={"kvfork": {"save": {"ttl": 60, "labels": {"case": "handles"}, "snapshot_id": "kept-by-hand"}}},
    )
    name = first.model_extra["kvfork"]["snapshot"]
    assert name == "snapshots/kept-by-hand" == first.choices[0].model_extra["kvfork"]["snapshot"]
    with server.client() as direct:
        kept = direct.get_snapshot(name)
        assert kept.info.labels == {"case": "handles"}
        assert kept.token_count == first.usage.prompt_tokens + 5
        later: Any = [{"role": "assistant", "content": ""}, {"role": "user", "content": "And now?"}]
        further = client.chat.completions.create(
            **GREEDY, messages=later, max_tokens=2, extra_body={"kvfork": {"parent": name}}
        )
        assert further.usage.prompt_tokens > kept.token_count
        assert further.usage.prompt_tokens_details.cached_tokens >= kept.token_count
        assert further.model_extra["kvfork"]["snapshot"] is None
        kept.release()


def test_a_growing_conversation_goes_on_from_its_last_answer(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "First of all, tell me something about this place."}]
    before = OPENING
    for turn in range(4):
        answer = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=30)
        # Random weights write what no tokenizer would: then the answer is read again, but nothing that came before it.
        assert answer.usage.prompt_tokens_details.cached_tokens >= before - OPENING
        before = answer.usage.prompt_tokens
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"Go on with number {turn}."},
        ]


@pytest.mark.parametrize("choices", [1, 2])
def test_a_place_that_is_gone_is_forgotten_and_computed_again(
    client: openai.OpenAI, server: LiveServer, choices: int
) -> None:
    asked: dict[str, Any] = {
        **GREEDY,
        "messages": [{"role": "user", "content": f"Will it be there, {choices}?"}],
        "max_tokens": 4,
        "n": choices,
    }
    first = client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked)  # from where the turns end
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    with server.client() as direct:
        for kept in direct.list_snapshots(labels=KEPT):
            direct.delete_snapshot(kept.name, allow_missing=True)
    gone = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in gone.choices] == [c.message.content for c in first.choices]
    back = client.chat.completions.create(**asked)
    assert back.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens_details.cached_tokens


def test_the_same_tokens_are_asked_for_with_and_without_a_kept_place(client: openai.OpenAI, server: LiveServer) -> None:
    opening: Any = [{"role": "user", "content": "Count the things on this table, please."}]
    answer = client.chat.completions.create(**GREEDY, messages=opening, max_tokens=20)
    content = answer.choices[0].message.content
    # An answer that was shortened by hand: what is kept holds more than the history has.
    history: Any = [
        *opening,
        {"role": "assistant", "content": content[: len(content) // 2]},
        {"role": "user", "content": "And?"},
    ]
    saved = client.chat.completions.create(
        **GREEDY, messages=history, max_tokens=1, extra_body={"kvfork": {"save": {"snapshot_id": "as-it-was-sent"}}}
    )
    with server.client() as direct:
        from kvfork_client import Message

        made = direct.get_snapshot("snapshots/as-it-was-sent")
        turns = [getattr(Message, m["role"])(m["content"]) for m in history]
        rendered = direct.count_tokens(turns, rendered=True)
        assert made.tokens()[: saved.usage.prompt_tokens] == rendered.token_ids
        made.release()
    assert saved.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - OPENING


def test_eight_callers_at_once_get_what_each_would_get_alone(gateway: LiveGateway) -> None:
    def ask(number: int) -> str:
        with gateway.client() as own:
            chunks = own.chat.completions.create(
                **GREEDY,
                messages=[{"role": "user", "content": f"Question number {number} of eight."}],
                max_tokens=16,
                stream=True,
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone and all(together)


def test_who_leaves_a_stream_frees_the_row_and_its_prompt_can_be_gone_on_from(
    gateway: LiveGateway, server: LiveServer
) -> None:
    server.idle()
    before = server.stats().completion_tokens
    asked: Any = {**GREEDY, "messages": [{"role": "user", "content": "Who stays until the end of this?"}]}
    with gateway.client() as own:
        chunks = own.chat.completions.create(**asked, max_tokens=4000, stream=True)
        for _ in range(4):
            next(chunks)
        chunks.close()
        server.idle()
        assert server.stats().completion_tokens - before < 2000
        again = own.chat.completions.create(**asked, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - OPENING


def test_who_leaves_before_the_answer_frees_the_row(gateway: LiveGateway, server: LiveServer) -> None:
    server.idle()
    before = server.stats().completion_tokens
    body = json.dumps({**GREEDY, "messages": ASK, "max_tokens": 4000}).encode()
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), PATIENCE) as raw:
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: server.stats().active_sequences == 1, what="the call to run")
    server.idle()
    assert server.stats().completion_tokens - before < 2000


def test_a_gateway_that_ends_lets_go_of_what_it_kept(server: LiveServer) -> None:
    def kept() -> int:
        with server.client() as direct:
            return len(list(direct.list_snapshots(labels=KEPT)))

    before = kept()
    with LiveGateway(server) as short, short.client() as own:
        own.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": "A conversation of its own."}], max_tokens=3
        )
        assert kept() == before + 2  # at the prompt's end and the answer's
    assert kept() == before
