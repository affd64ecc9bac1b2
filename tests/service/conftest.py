"""Engine loops to be driven turn by turn; at the end nothing may be left in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.loop_rig import LoopRig


@pytest.fixture
def rig() -> Iterator[LoopRig]:
    made = LoopRig()
    yield made
    made.settle()


@pytest.fixture
def two() -> Iterator[LoopRig]:
    """One row at a time, and everything that can leave memory is on disk."""
    made = LoopRig(rows=1, memory=0)
    yield made
    made.settle()
