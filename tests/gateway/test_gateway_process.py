"""The gateway as a process: what it says before it listens, what it holds of a body, and how it ends."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as http
import openai
import pytest
from kvfork_gateway.serving import MOST_CONNECTIONS

from tests.certificates import Authority
from tests.e2e.live import PATIENCE, ROOT, LiveServer, until
from tests.gateway.live import KEPT, LiveGateway

pytestmark = [pytest.mark.mlx]

ASK: Any = [{"role": "user", "content": "Is anybody there?"}]


@pytest.fixture
def server(server_for: Callable[[str], LiveServer]) -> LiveServer:
    return server_for("tiny-llama")


def test_a_certificate_that_is_of_no_use_is_told_instead_of_a_url(tmp_path: Path) -> None:
    certificate, key = Authority().server().write(tmp_path, "right")
    _, other = Authority().server().write(tmp_path, "other")
    empty = tmp_path / "empty"
    empty.touch()
    for pair in ((certificate, tmp_path / "missing"), (certificate, other), (empty, key)):
        command = [sys.executable, "-m", "service", "gateway", "--address", "127.0.0.1:0"]
        ended = subprocess.run(
            [*command, "--tls-cert", pair[0], "--tls-key", pair[1]], capture_output=True, text=True, cwd=ROOT
        )
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith(f"error: cannot use {pair[0]} with {pair[1]}: ")
        assert ended.stderr.count("\n") == 1


def test_a_listener_with_tls_answers_who_trusts_its_certificate(server: LiveServer, tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.server().write(tmp_path, "gateway")
    trusted = ssl.create_default_context(cadata=authority.pem.decode())
    with LiveGateway(server, "--tls-cert", str(certificate), "--tls-key", str(key)) as gateway:
        assert gateway.url.startswith("https://")
        with gateway.client(http_client=http.Client(verify=trusted)) as client:
            answer = client.chat.completions.create(model="tiny-llama", messages=ASK, max_tokens=3)
            assert answer.usage.completion_tokens == 3
        with gateway.client() as stranger, pytest.raises(openai.APIConnectionError):
            stranger.models.list()


def test_a_body_over_the_limit_is_refused(server: LiveServer) -> None:
    with LiveGateway(server, "--max-body-bytes", "2000") as gateway, gateway.client() as client:
        short = client.chat.completions.create(model="tiny-llama", messages=ASK, max_tokens=1)
        assert short.usage.completion_tokens == 1
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="tiny-llama", messages=[{"role": "user", "content": "long " * 500}])
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
        assert "2,000 bytes" in caught.value.message


def test_beyond_its_connections_a_request_is_told_to_come_again(server: LiveServer) -> None:
    gateway = LiveGateway(server)
    health = f"{gateway.url}/health"
    with ExitStack() as silent:
        for _ in range(MOST_CONNECTIONS):
            silent.enter_context(socket.create_connection(address_of(gateway), PATIENCE))
        until(lambda: http.get(health).status_code == 503, what="the limit to be reached")
    until(lambda: http.get(health).status_code == 200, what="the gateway to serve again")
    assert gateway.terminate() == 0
    assert set(gateway.close().splitlines()) == {"WARNING:  Exceeded concurrency limit."}


def test_told_to_end_it_finishes_what_runs_and_takes_nothing_new(server: LiveServer) -> None:
    gateway = LiveGateway(server)
    with gateway, gateway.client() as client:
        chunks = client.chat.completions.create(
            **endless(server, 400), stream=True, stream_options={"include_usage": True}
        )
        next(chunks)
        gateway.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(gateway), what="the listener to be closed")
        *_, last = chunks
        assert last.usage.completion_tokens == 400
        assert gateway.process.wait(PATIENCE) == 0
    assert kept(server) == 0


def test_told_twice_it_cuts_off_what_runs_and_lets_go_of_it(server: LiveServer) -> None:
    gateway = LiveGateway(server)
    with gateway, gateway.client() as client:
        chunks = client.chat.completions.create(**endless(server, 4000), stream=True)
        for _ in range(3):
            next(chunks)
        for _ in range(2):
            gateway.process.send_signal(signal.SIGTERM)
            until(lambda: refuses(gateway), what="the listener to be closed")
        assert gateway.process.wait(PATIENCE) == 0
        with pytest.raises(openai.APIError) as caught:
            list(chunks)
        assert caught.value.code == "shutting_down"
    server.idle()
    assert kept(server) == 0


def endless(server: LiveServer, tokens: int) -> dict[str, Any]:
    """What is answered with exactly so many tokens."""
    never = {str(token): -100 for token in server.model().eos_token_ids}
    return {"model": "tiny-llama", "messages": ASK, "max_tokens": tokens, "logit_bias": never}


def refuses(gateway: LiveGateway) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address_of(gateway)) != 0


def address_of(gateway: LiveGateway) -> tuple[str, int]:
    return "127.0.0.1", int(gateway.url.rpartition(":")[2])


def kept(server: LiveServer) -> int:
    with server.client() as direct:
        return len(list(direct.list_snapshots(labels=KEPT)))
