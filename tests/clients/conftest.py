"""A running contract peer, and both flavours of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from contract_peer import Peer
from flavours import Flavour


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as running:
        yield running


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all async tests: grpc.aio does not like a second one in the same process."""
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(params=["sync", "async"])
def flavour(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Flavour]:
    driver = Flavour(runner if request.param == "async" else None)
    yield driver
    driver.close()
