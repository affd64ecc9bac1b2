"""What a user may name, and what happens when it isn't there or isn't whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from service.models import KNOWN, BadModelFolder, UnknownModel, ensure, resolve
from service.models.cache_dir import cache_root
from service.models.safetensors_file import Tensor, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The smallest folder that looks like a whole MLX model."""
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    write(path / "model.safetensors", [Tensor(name="w", shape=(4, 3), load=lambda: np.ones((4, 3), "f4"))], "float32")
    return path


def test_a_folder_resolves_to_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(folder) == folder
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve("my-model") == folder
    assert resolve("./my-model") == folder


@pytest.mark.parametrize("name", ["smollm3", "./missing", "/missing/model", "", "tiny"])
def test_an_unknown_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve(name)
    assert all(known in str(caught.value) for known in KNOWN)
    with pytest.raises(UnknownModel):
        ensure(name)


def _without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()

    return damage


def _with(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def _cut(name: str, by: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size - by)

    return damage


def _sharded_without_one(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without("config.json"), "config.json"),
        (_with("config.json", b'{"model_type": "lla'), "config.json"),
        (_with("config.json", b"[]"), "config.json"),
        (_with("config.json", b"{}"), "model_type"),
        (_with("config.json", b"\xff\xfe"), "config.json"),
        (_without("tokenizer.json"), "tokenizer"),
        (_with("tokenizer.json", b"{"), "tokenizer.json"),
        (_with("tokenizer_config.json", b"nonsense"), "tokenizer_config.json"),
        (_without("model.safetensors"), "safetensors"),
        (_cut("model.safetensors", 1), "model.safetensors"),
        (_cut("model.safetensors", 60), "model.safetensors"),
        (_with("model.safetensors", b""), "model.safetensors"),
        (_with("model.safetensors", b"\xff" * 64), "model.safetensors"),
        (_with("model.safetensors", b"\x02\0\0\0\0\0\0\0{}"), "model.safetensors"),
        (_with("model.safetensors", b"\x02\0\0\0\0\0\0\0[]"), "model.safetensors"),
        (_sharded_without_one, "model-00002-of-00002.safetensors"),
        (_with("kvfork.json", b"{}"), "kvfork.json"),
        (_with("kvfork.json", b"not json"), "kvfork.json"),
        (shutil.rmtree, "my-model"),
    ],
)
def test_a_damaged_folder_is_refused_and_the_file_is_named(
    folder: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(folder)
    with pytest.raises((BadModelFolder, UnknownModel)) as caught:
        resolve(folder)
    assert said in str(caught.value)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadModelFolder, match="not a folder"):
        resolve(tmp_path / "model.gguf")


def test_a_hub_id_that_cannot_be_had_says_so() -> None:
    code = (
        "import sys; from service.models import DownloadFailed, resolve\n"
        "try: resolve('some-owner/some-model')\n"
        "except DownloadFailed as error: sys.exit(f'said: {error}')"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "said: some-owner/some-model is no folder here and could not be had from the model hub" in done.stderr


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("KVFORK_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "kvfork"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "kvfork"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_root() == tmp_path / "Library" / "Caches" / "kvfork"
    monkeypatch.setenv("KVFORK_CACHE_DIR", "~/models")
    assert cache_root() == tmp_path / "models"
