"""Before any test module imports MLX: MKL has to be in front of it, or real models take minutes, not seconds.

Where several workers share the machine (`pytest -n`), each of them and every server that it starts computes on one
thread: two that spin for each other's core take longer than one after the other.

A shell that starts the suite in the background has it ignore Ctrl-C, and so would every program that tests interrupt.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest

from service.engine import cpu

if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when the libraries are loaded
        os.environ.setdefault(variable, "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

cpu.prepare()


@pytest.fixture(autouse=True, scope="module")
def what_is_old_is_not_walked_through() -> None:
    """Python's collector visits all that a worker ever made, many thousand tests among it: tests that allocate much
    took eight times as long as alone. What lives when a module begins is left out from then on."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def levels_stay_as_they_were() -> Iterator[None]:
    """A test that runs `kvfork serve` in this process sets its log levels."""
    ours = [logging.getLogger(name) for name in ("", "kvfork", "kvcache", "service")]
    before = [logger.level for logger in ours]
    yield
    for logger, level in zip(ours, before, strict=True):
        logger.setLevel(level)
