"""The committed stubs are what the generator makes of the contract: byte for byte, none missing, none left over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def stubs(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for pattern in STUBS for path in sorted(folder.rglob(pattern))
    }


def test_generated_stubs_are_up_to_date(tmp_path: Path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools comes with the dev extra")
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    assert sources
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO), *outputs, *sources]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    committed, generated = stubs(PROTO), stubs(tmp_path)
    assert committed.keys() == generated.keys()
    stale = [name for name in committed if committed[name] != generated[name]]
    assert stale == [], "run `make gen`"
