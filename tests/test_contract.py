"""The contract against the one that was released last: what old clients send and read stays valid."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
RELEASED = PROTO / "released" / "kvfork.v1.binpb"


@pytest.fixture(scope="module")
def buf() -> str:
    beside = Path(sys.executable).with_name("buf")
    found = str(beside) if beside.exists() else shutil.which("buf")
    if found is None:
        pytest.skip("buf comes with the dev extra")
    return found


def breaking(buf: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [buf, "breaking", str(folder), "--against", str(RELEASED)], capture_output=True, text=True, cwd=ROOT
    )


def test_nothing_that_was_released_is_broken(buf: str) -> None:
    done = breaking(buf, PROTO)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("types.proto", "uint32 token_count = 5;", "uint64 token_count = 5;"),
        ("types.proto", "bool pinned = 13;", "bool kept = 13;"),
        ("inference_service.proto", "  rpc Fork(ForkRequest) returns (ForkResponse);\n", ""),
        ("snapshot_service.proto", "  GONE_REASON_EXPIRED = 3;", "  GONE_REASON_OVER = 3;"),
    ],
    ids=["a field's type", "a field's name, which JSON has", "a method", "an enum's value"],
)
def test_a_change_that_breaks_clients_is_found(buf: str, tmp_path: Path, file: str, old: str, new: str) -> None:
    shutil.copytree(PROTO, tmp_path / "proto", ignore=shutil.ignore_patterns("*.py", "*.pyi", "released"))
    path = tmp_path / "proto" / "kvfork" / "v1" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert breaking(buf, tmp_path / "proto").returncode != 0


def test_the_image_is_a_contract_and_holds_no_path_of_a_machine() -> None:
    image = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())
    names = {file.name for file in image.file}
    assert {f"kvfork/v1/{path.name}" for path in (PROTO / "kvfork" / "v1").glob("*.proto")} <= names
    assert not any(name.startswith("/") for name in names)
