"""What the gateway keeps on the server of its own accord: both ends of an answer, and no call the worse for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.live import LiveServer, until
from tests.gateway.live import KEPT, LiveGateway

pytestmark = [pytest.mark.mlx]


def lengths(server: LiveServer) -> list[int]:
    """Of what is kept, in tokens."""
    with server.client() as direct:
        return sorted(snapshot.token_count for snapshot in direct.list_snapshots(labels=KEPT))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3"])
def test_both_ends_of_an_answer_are_kept_however_often_it_is_asked_for(
    server_for: Callable[[str], LiveServer], model: str
) -> None:
    server = server_for(model)
    before = lengths(server)
    assert before == []
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
