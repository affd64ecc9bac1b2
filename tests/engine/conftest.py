"""Rigs over real models, one for each model and module; the real ones are fetched on first use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.engine import cpu
from tests.engine.rig import Rig, open_rig

TINY = ("tiny-llama", "tiny-gemma3", "tiny-gemma3-w64", "tiny-gpt-oss", "tiny-qwen3_5", "tiny-lfm2")
REAL = ("smollm2", "gemma3")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Payloads of records that were decoded, each as often as it was."""
    cpu.mlx()
    from service.engine import layers

    payloads: list[object] = []
    decode = layers.views

    def counted(payload):
        payloads.append(payload)
        return decode(payload)

    monkeypatch.setattr(layers, "views", counted)
    return payloads


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = open_rig(request.param)
    yield rig
    rig.close()


@pytest.fixture(scope="module", params=TINY + REAL)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = open_rig(request.param)
    yield made
    made.close()
