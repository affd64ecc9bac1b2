"""What the process does before its first import of MLX. Each case runs in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.mlx

_LINUX_X86 = sys.platform == "linux" and platform.machine() == "x86_64"
_ON_LINUX_X86 = pytest.mark.skipif(not _LINUX_X86, reason="MKL is for Linux x86-64")


def _run(code: str, **environment: str) -> Any:
    """Run `code` in a fresh Python; it prints one JSON value."""
    env = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_module_imports_no_mlx() -> None:
    code = "import json, sys, service.engine.cpu; print(json.dumps(sorted(n for n in sys.modules if n[:3] == 'mlx')))"
    assert _run(code) == []


_REPORT = """
import dataclasses, json
from service.engine import cpu
mx = cpu.mlx()
report = dataclasses.asdict(cpu.prepare())
print(json.dumps({**report, "same": cpu.prepare() is cpu.prepare(), "gpu": mx.default_device() != mx.cpu}, default=str))
"""


def test_the_report_names_the_device_and_the_dtype_for_it() -> None:
    report = _run(_REPORT)
    assert report["same"] and not report["mlx_was_imported"]
    assert (report["accelerator"] != "cpu") == report["gpu"]
    assert report["compute_dtype"] == (None if report["gpu"] else "float32")


@_ON_LINUX_X86
def test_mkl_is_loaded_in_a_strict_mode_unless_the_user_chose_one() -> None:
    report = _run(_REPORT)
    assert "libmkl_rt" in report["blas"]
    assert report["cbwr"] == "AUTO,STRICT"
    assert _run(_REPORT, MKL_CBWR="COMPATIBLE")["cbwr"] == "COMPATIBLE"


@_ON_LINUX_X86
def test_whatever_last_bits_depend_on_is_told_apart() -> None:
    code = "import json; from service.engine import cpu; print(json.dumps(cpu.arithmetic()))"
    usual = _run(code)
    assert _run(code) == usual
    others = [_run(code, MKL_CBWR="COMPATIBLE"), _run(code, MLX_DISABLE_COMPILE="1"), _run("import mlx.core\n" + code)]
    assert len({tuple(facts) for facts in (usual, *others)}) == 4


@_ON_LINUX_X86
def test_a_late_call_says_that_it_came_too_late() -> None:
    report = _run("import mlx.core\n" + _REPORT)
    assert report["mlx_was_imported"]
    assert report["blas"] is None


@_ON_LINUX_X86
def test_without_a_compiler_compiled_functions_run_uncompiled() -> None:
    code = """
import json
from service.engine import cpu
mx = cpu.mlx()
square_sum = mx.compile(lambda x: (x * x).sum() + mx.exp(x).sum())
print(json.dumps([cpu.prepare().compile_enabled, square_sum(mx.zeros(4)).item()]))
"""
    assert _run(code, PATH="/nonexistent") == [False, 4.0]


def test_a_model_whose_compilation_was_switched_off_from_outside_stays_so_behind_an_image() -> None:
    code = """
import json
from service.engine import cpu
mx = cpu.mlx()
from service.engine.vision import upstream
calls = []
double = mx.compile(lambda x: calls.append(1) or x + x)
with upstream.attention_by(lambda fused, *a, **k: fused(*a, **k)):
    pass
for _ in range(3):
    mx.eval(double(mx.zeros(4)))
print(json.dumps([cpu.prepare().compile_enabled, len(calls)]))
"""
    assert _run(code, MLX_DISABLE_COMPILE="1") == [False, 3]  # a compiled function is traced once


@_ON_LINUX_X86
def test_a_product_has_the_same_bits_wherever_its_inputs_lie() -> None:
    code = """
import hashlib, json
import numpy as np
from service.engine import cpu
mx = cpu.mlx()
rng = np.random.default_rng(0)
def shifted(values, by):
    buffer = np.zeros(values.size + 32, "f4")
    buffer[by:by + values.size] = values.ravel()
    return mx.array(buffer)[by:by + values.size].reshape(values.shape)
found = {}
for rows in (1, 4, 16, 256):
    x, w = rng.standard_normal((rows, 640), dtype="f4"), rng.standard_normal((2048, 640), dtype="f4")
    digests = {hashlib.sha256(np.array(shifted(x, i) @ shifted(w, j).T).tobytes()).hexdigest()
               for i in (0, 1, 5, 16) for j in (0, 3, 8)}
    found[rows] = sorted(digests)
print(json.dumps(found))
"""
    first = _run(code)
    assert {rows: len(digests) for rows, digests in first.items()} == {"1": 1, "4": 1, "16": 1, "256": 1}
    assert _run(code) == first
