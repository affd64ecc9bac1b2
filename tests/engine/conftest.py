"""Rigs over real models, one for each model and session; the real ones are fetched on first use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from rig import Rig

from service.models import resolve

TINY = ("tiny-llama", "tiny-gemma3", "tiny-gemma3-w64", "tiny-gpt-oss", "tiny-qwen3_5", "tiny-lfm2")
REAL = ("smollm2", "gemma3")


def open_rig(name: str, **how: object) -> Rig:
    if name == "gemma3" and os.environ.get("KVFORK_ACCEPT_GEMMA_TERMS") != "1":
        pytest.skip("gemma3 needs KVFORK_ACCEPT_GEMMA_TERMS=1 (make test sets it)")
    return Rig(resolve(name), **how)  # type: ignore[arg-type]


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
