"""A short run of the fuzzer, and that it can find something at all."""

from __future__ import annotations

import random
from pathlib import Path

import fuzz
import pytest
from fuzz import Fuzzer

from kvcache.errors import StoreUnusable
from kvcache.keys import decode_owners
from kvcache.store_dir import decode_store_file


@pytest.mark.slow
def test_random_damage_is_refused_by_name_or_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer = Fuzzer(seed=1, folder=tmp_path)
    assert fuzzer.run(seconds=20) == 0, capsys.readouterr().err
    assert all(fuzzer.done[name] > 50 for name in fuzzer.targets), fuzzer.done
    # Damage that nobody notices would be a fuzzer that does none.
    assert all(fuzzer.refused[name] > 10 for name in ("headers", "notes", "keys", "payload", "directory"))


def test_every_target_runs_and_a_reader_that_lets_go_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzzer = Fuzzer(seed=2, folder=tmp_path)
    for target in fuzzer.targets.values():
        for number in range(3):
            target(random.Random(number))
    monkeypatch.setattr(fuzz, "PROMPTS", {name: [1] for name in fuzz.PROMPTS})
    fuzzer.targets = {"reopen": fuzzer.reopen}
    assert fuzzer.run(seconds=5) > 0
    assert "--seed 2 --case" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"format": 1, "check": "", "owners": [{"id": 1e999, "owner": "", "wrapped": ""}]}']
)
def test_small_files_that_upset_json_are_damage(text: bytes) -> None:
    """Found by the fuzzer."""
    with pytest.raises(StoreUnusable, match="damaged"):
        decode_owners(text, bytes(16), bytes(32))
    with pytest.raises(StoreUnusable, match="damaged"):
        decode_store_file(text.replace(b'"check": ""', b'"instance": 1e999'), Path("somewhere"))
