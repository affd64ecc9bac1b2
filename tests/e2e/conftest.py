"""Servers that tests share: one process per model, started when the first test asks for it, ended with the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.live import LiveServer


@pytest.fixture(scope="session")
def server_for() -> Iterator[Callable[[str], LiveServer]]:
    """The session's server of a model, with default limits."""
    yield from _servers()


@pytest.fixture(scope="session")
def cold_server_for() -> Iterator[Callable[[str], LiveServer]]:
    """A second server of a model, for runs that nothing was kept for."""
    yield from _servers()


def _servers() -> Iterator[Callable[[str], LiveServer]]:
    servers: dict[str, LiveServer] = {}

    def get(model: str) -> LiveServer:
        if model not in servers:
            servers[model] = LiveServer(model)
        return servers[model]

    yield get
    complaints = [server.complaints() for server in servers.values()]
    for server in servers.values():
        server.close()
    assert not any(complaints), "\n".join(complaints)


@pytest.fixture
def server(server_for: Callable[[str], LiveServer]) -> LiveServer:
    """A sliding-window model: its state can be cut nowhere but where it was kept."""
    return server_for("tiny-gemma3")


@pytest.fixture
def llama(server_for: Callable[[str], LiveServer]) -> LiveServer:
    """Full attention: its state can be cut anywhere."""
    return server_for("tiny-llama")


@pytest.fixture
def hybrid(server_for: Callable[[str], LiveServer]) -> LiveServer:
    """Recurrent layers beside full attention."""
    return server_for("tiny-qwen3_5")
