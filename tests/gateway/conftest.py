"""One server and one gateway for all tests of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pytest

from tests.e2e.conftest import server_for  # noqa: F401 - a fixture
from tests.e2e.live import LiveServer
from tests.gateway.live import LiveGateway


@pytest.fixture(scope="session")
def server(server_for: Callable[[str], LiveServer]) -> LiveServer:  # noqa: F811
    """A sliding-window model: its state can be cut nowhere but where it was kept."""
    return server_for("tiny-gemma3")


@pytest.fixture(scope="session")
def gateway(server: LiveServer) -> Iterator[LiveGateway]:
    with LiveGateway(server, "--alias", "small=tiny-gemma3") as live:
        yield live


@pytest.fixture
def client(gateway: LiveGateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as made:
        yield made
