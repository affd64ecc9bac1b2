"""Whose calls they are is the server's to say: a caller's token goes through, and nothing of one reaches another."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from kvfork_client import Client

from service.auth.tokens import new_token
from tests.e2e.live import PATIENCE, LiveServer
from tests.gateway.live import LiveGateway

pytestmark = [pytest.mark.mlx]


@pytest.fixture(scope="module")
def people() -> dict[str, Any]:
    return {name: new_token(name) for name in ("alice", "bob")}


@pytest.fixture(scope="module")
def server(people: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path: Path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text("".join(f"{line}\n" for _, line in people.values()))
    path.chmod(0o600)
    with LiveServer("tiny-llama", "--tokens", str(path), token=people["alice"][0]) as live:
        yield live


def test_a_callers_token_is_passed_on(server: LiveServer, people: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": "Something long enough to be worth keeping for the next time."}]
    asked: dict[str, Any] = {"model": "tiny-llama", "messages": messages, "max_tokens": 4, "temperature": 0}
    with LiveGateway(server) as gateway:
        alice, bob = (gateway.client(people[name][0]) for name in ("alice", "bob"))
        first = alice.chat.completions.create(**asked, extra_body={"kvfork": {"save": True}})
        name = first.model_extra["kvfork"]["snapshot"]
        alice.chat.completions.create(**asked)
        again = alice.chat.completions.create(**asked)
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        foreign = bob.chat.completions.create(**asked)
        assert foreign.usage.prompt_tokens_details.cached_tokens == 0
        with pytest.raises(openai.NotFoundError):
            bob.chat.completions.create(**asked, extra_body={"kvfork": {"parent": name}})
        with Client(server.address, token=people["alice"][0], timeout=PATIENCE) as direct:
            assert direct.get_snapshot(name).name == name
        for key in ("kvf_wrong", "päss wörd".encode("ascii", "ignore").decode()):
            with pytest.raises(openai.AuthenticationError) as caught:
                gateway.client(key).chat.completions.create(**asked)
            assert caught.value.code == "invalid_api_key" and key not in str(caught.value)


def test_who_may_not_call_is_told_before_a_body_is_sent(server: LiveServer) -> None:
    with LiveGateway(server) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), PATIENCE) as raw:
            raw.sendall(f"{head}Authorization: Bearer kvf_wrong\r\nContent-Length: 1000000\r\n\r\n".encode())
            assert raw.recv(1000).startswith(b"HTTP/1.1 401 ")
