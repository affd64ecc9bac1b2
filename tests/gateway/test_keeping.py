"""What the gateway keeps on the server of its own accord: both ends of an answer, and no call the worse for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvfork_client as kv
import openai
import pytest
from kvfork_gateway.completions import Completions
from kvfork_gateway.conversations import Bounds
from kvfork_gateway.keeping import Caller, Held, Keeper

from service.models import resolve
from tests.e2e.live import LiveServer, until
from tests.e2e.templates import with_template
from tests.gateway.live import KEPT, LiveGateway

pytestmark = [pytest.mark.mlx]


def lengths(server: LiveServer) -> list[int]:
    """Of what is kept, in tokens."""
    with server.client() as direct:
        return sorted(snapshot.token_count for snapshot in direct.list_snapshots(labels=KEPT))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3_5"])
def test_both_ends_of_an_answer_are_kept_however_often_it_is_asked_for(
    server_for: Callable[[str], LiveServer], model: str
) -> None:
    server = server_for(model)
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 3}
    asked["messages"] = [{"role": "user", "content": "Once, and then again."}]
    with LiveGateway(server) as gateway, gateway.client() as client:
        first = client.chat.completions.create(**asked)
        kept = lengths(server)
        assert len(kept) == 2 and kept[0] < first.usage.prompt_tokens
        assert kept[1] == first.usage.prompt_tokens + 3
        for _ in range(3):
            client.chat.completions.create(**asked)
            until(lambda: lengths(server) == kept, what="the same two to be kept")


def test_what_is_kept_takes_no_room_from_a_call() -> None:
    """A server with room for three snapshots, of which a first answer takes two, and a short life for each."""
    asked: dict[str, Any] = {"model": "tiny-llama", "temperature": 0, "max_tokens": 8}
    opening = {"role": "user", "content": "Something with an end."}
    flags = ("--max-snapshots", "3", "--default-ttl", "30s", "--max-ttl", "60s")
    with LiveServer("tiny-llama", *flags) as server, LiveGateway(server) as gateway, gateway.client() as client:
        first = client.chat.completions.create(**asked, messages=[opening])
        kept = lengths(server)
        assert len(kept) == 2
        others = client.chat.completions.create(**asked, messages=[{"role": "user", "content": "Two?"}], n=2)
        assert len(others.choices) == 2 and others.usage.completion_tokens == 16
        until(lambda: lengths(server) == kept, what="the first answer alone to be kept")
        # An answer that was cut short goes on from a cut, which takes the last place: the caller's own save needs it.
        said = first.choices[0].message.content
        history = [opening, {"role": "assistant", "content": said[: len(said) // 2]}, {"role": "user", "content": "?"}]
        saved = client.chat.completions.create(**asked, messages=history, extra_body={"kvfork": {"save": True}})
        assert saved.model_extra["kvfork"]["snapshot"]
        assert saved.usage.prompt_tokens_details.cached_tokens >= kept[0]
        # The server is full. A second save takes the place of what is kept, and a fourth one has none to take.
        for number in (2, 3):
            saved = client.chat.completions.create(**asked, messages=history, extra_body={"kvfork": {"save": True}})
            assert saved.model_extra["kvfork"]["snapshot"], number
            assert lengths(server) == []
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**asked, messages=history, extra_body={"kvfork": {"save": True}})
        assert caught.value.code == "rate_limit_exceeded"
        again = client.chat.completions.create(**asked, messages=[opening])
        assert again.choices[0].message.content == said


def test_a_call_that_fails_leaves_no_cut_behind(server_for: Callable[[str], LiveServer]) -> None:
    server = server_for("tiny-llama")
    asked: dict[str, Any] = {"model": "tiny-llama", "temperature": 0, "max_tokens": 8}
    opening = {"role": "user", "content": "Something to go on from."}
    with LiveGateway(server) as gateway, gateway.client() as client:
        said = client.chat.completions.create(**asked, messages=[opening]).choices[0].message.content
        kept = lengths(server)
        asked["messages"] = [
            opening,
            {"role": "assistant", "content": said[: len(said) // 2]},
            {"role": "user", "content": "word " * 60_000},
        ]
        for choices in (1, 2):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**asked, n=choices)
            assert caught.value.code == "context_length_exceeded"
            until(lambda: lengths(server) == kept, what="the cut to be gone", patience=30.0)


class _Counting:
    """A client whose deletions take a while, counted where the server counts a caller's calls."""

    def __init__(self) -> None:
        self.under_way = self.most = self.done = 0

    async def delete_snapshot(self, name: str, **options: Any) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        self.done += 1


def test_letting_go_of_much_leaves_a_callers_quota_to_its_calls() -> None:
    counting = _Counting()

    async def end() -> None:
        keeper = Keeper(Bounds())
        keeper.release(Caller(b"", counting), map(str, range(1000)))  # type: ignore[arg-type] - what it uses of one
        await keeper.close()

    asyncio.run(end())
    assert (counting.done, counting.most) == (1000, 8)


class _Hanging:
    """A client whose deletions take until they are cancelled."""

    async def delete_snapshot(self, name: str, **options: Any) -> None:
        await asyncio.Event().wait()


def test_a_caller_waits_for_nobody_elses_deletions() -> None:
    counting = _Counting()

    async def settle() -> tuple[int, list[bool]]:
        keeper = Keeper(Bounds())
        mine, other = Caller(b"mine", counting), Caller(b"other", _Hanging())  # type: ignore[arg-type]
        keeper.release(other, [Held("theirs", "")])
        keeper.release(mine, [Held("mine", "")])
        waiting = [asyncio.ensure_future(keeper.settle(mine)), asyncio.ensure_future(keeper.settle())]
        for _ in range(20):  # turns of the loop: more than it takes to delete one and to hear of it
            await asyncio.sleep(0)
        done = [one.done() for one in waiting]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return counting.done, done

    assert asyncio.run(settle()) == (1, [True, False])


class _Door:
    """A client that knows one token, and counts who asks."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def with_token(self, token: str | None) -> _Asking:
        return _Asking(self, token)


class _Asking:
    def __init__(self, door: _Door, token: str | None) -> None:
        self._door, self._token = door, token

    async def server_info(self, **options: Any) -> Any:
        self._door.asked.append(self._token)
        if self._token == "wrong":
            raise kv.TokenUnknown
        return SimpleNamespace(limits=SimpleNamespace(max_ttl=60.0))


def test_who_was_let_in_is_not_asked_about_again_for_some_seconds() -> None:
    door, now = _Door(), [0.0]
    completions = Completions(door, bounds=Bounds(), aliases={}, clock=lambda: now[0])  # type: ignore[arg-type]

    async def come(token: str) -> None:
        await completions.let_in(completions.caller(token))

    async def story() -> None:
        for seconds in (0.0, 9.9, 10.0, 19.9, 20.0):
            now[0] = seconds
            await come("one")
        await come("two")
        for _ in range(2):
            with pytest.raises(kv.TokenUnknown):
                await come("wrong")
        assert door.asked == ["one"] * 3 + ["two", "wrong", "wrong"]
        for number in range(1000):  # as many as are remembered
            await come(f"further {number}")
        await come("further 0")
        await come("two")
        assert len(door.asked) == 6 + 1000 + 1

    asyncio.run(story())


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt and not silent %}[assistant] {% endif %}"
)


def test_a_prompt_that_opens_no_answer_moves_no_others_end(tmp_path: Path) -> None:
    model = with_template(resolve("tiny-llama"), tmp_path / "terse", TEMPLATE)
    asked: dict[str, Any] = {"model": "terse", "temperature": 0, "max_tokens": 3}
    with LiveServer(model) as server, LiveGateway(server) as gateway, gateway.client() as client:
        silent = {"chat_template_kwargs": {"silent": True}}
        plain = client.chat.completions.create(**asked, messages=[{"role": "user", "content": "Hm"}], extra_body=silent)
        assert lengths(server) == [plain.usage.prompt_tokens, plain.usage.prompt_tokens + 3]
        usual = client.chat.completions.create(**asked, messages=[{"role": "user", "content": "Well, what is it?"}])
        (_, end) = sorted(set(lengths(server)) - {plain.usage.prompt_tokens, plain.usage.prompt_tokens + 3})
        assert end == usual.usage.prompt_tokens + 3
        assert usual.usage.prompt_tokens not in lengths(server)
