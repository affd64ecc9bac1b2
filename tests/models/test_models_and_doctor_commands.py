"""`kvfork models` and `kvfork doctor` as a user sees them: what is printed where, and the exit code."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from service.cli import doctor, models
from service.models import KNOWN, verify

pytestmark = pytest.mark.mlx


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFORK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _kvfork(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="kvfork")
    subparsers = parser.add_subparsers()
    models.add_parser(subparsers)
    doctor.add_parser(subparsers)
    args = parser.parse_args(argv)
    return int(args.run(args))


def test_list_shows_every_known_model_and_which_are_here(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert _kvfork("models", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(KNOWN)]] == list(KNOWN)
    assert _kvfork("models", "get", "tiny-llama") == 0
    capsys.readouterr()
    assert _kvfork("models", "list", "--json") == 0
    states = {entry["name"]: entry["state"] for entry in json.loads(capsys.readouterr().out)}
    assert states == {name: "here" if name == "tiny-llama" else "absent" for name in KNOWN}


def test_get_path_and_verify_follow_one_model(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    folder = cache / "models" / "tiny-lfm2"
    assert _kvfork("models", "path", "tiny-lfm2") == 1
    assert "kvfork models get tiny-lfm2" in capsys.readouterr().err
    assert not folder.exists()

    assert _kvfork("models", "get", "tiny-lfm2") == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert _kvfork("models", "path", "tiny-lfm2", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"name": "tiny-lfm2", "path": str(folder)}
    assert _kvfork("models", "verify", "tiny-lfm2", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"name": "tiny-lfm2", "path": str(folder), "sha256": verify(folder), "compared": True}

    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert _kvfork("models", "verify", "tiny-lfm2") == 1
    assert "model.safetensors" in capsys.readouterr().err
    os.truncate(weights, 100)
    assert _kvfork("models", "path", "tiny-lfm2") == 1
    assert _kvfork("models", "list", "--json") == 0
    assert {entry["name"]: entry["state"] for entry in json.loads(capsys.readouterr().out)}["tiny-lfm2"] == "damaged"
    assert _kvfork("models", "get", "tiny-lfm2") == 0
    assert _kvfork("models", "verify", "tiny-lfm2") == 0


def test_unknown_names_and_missing_verbs_fail_with_words(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (("get", "smollm3"), ("path", "smollm3"), ("verify", "./smollm3"), ("get", "./x", "--again")):
        assert _kvfork("models", *argv) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "smollm2" in err
    assert _kvfork("models") == 2


def test_doctor_reports_every_part_of_the_machine(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert _kvfork("doctor", "--json") == 0
    checks = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in checks]
    assert names == [
        *("python", "platform", "files", "mlx", "blas", "compile", "speed"),
        *("cache", "models", "go", "node", "java", "rust"),
    ]
    by_name = {check["name"]: check for check in checks}
    assert str(cache) in by_name["cache"]["found"]
    assert by_name["models"]["found"].startswith("none yet")
    assert all(check["advice"] for check in checks if check["state"] != "ok")
    assert _kvfork("doctor") == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "->" not in line] == names


def test_doctor_says_what_is_absent_and_what_is_damaged(
    capsys: pytest.CaptureFixture[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "models" / "smollm2").mkdir(parents=True)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert _kvfork("doctor", "--json") == 0
    by_name = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {by_name[name]["state"] for name in ("go", "node", "java", "rust")} == {"absent"}
    assert by_name["models"]["state"] == "warning"
    assert by_name["models"]["advice"] == "kvfork models get smollm2 makes it anew"
