"""Before any test module imports MLX: MKL has to be in front of it, or real models take minutes, not seconds.

Where several workers share the machine (`pytest -n`), each of them and every server that it starts computes on one
thread: two that spin for each other's core take longer than one after the other.
"""

from __future__ import annotations

import os

from service.engine import cpu

if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when the libraries are loaded
        os.environ.setdefault(variable, "1")

cpu.prepare()
