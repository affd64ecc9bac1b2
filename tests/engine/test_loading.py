"""A fingerprint names all that a stored state depends on, and a loaded model says what the service needs to know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from service.engine import loading
from service.engine.loading import fingerprint_of, load, parts_of
from service.models import resolve

LAYOUT = CacheLayout((LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.WINDOW, 512)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "model.safetensors": "weights",
        "config.json": "{}",
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_fingerprint_is_the_same_as_long_as_nothing_that_matters_changed(folder: Path) -> None:
    first = fingerprint_of(folder, LAYOUT, ["float32"])
    assert (len(first), set(first) <= set("0123456789abcdef")) == (32, True)
    (folder / "kvfork.json").write_text("when it was converted")
    (folder / "README.md").write_text("about it")
    (folder / "model.safetensors").touch()
    assert fingerprint_of(folder, LAYOUT, ["float32"]) == first


def test_anything_that_state_depends_on_changes_the_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [fingerprint_of(folder, LAYOUT, facts) for facts in (["float32"], ["bfloat16"], ["float32", "a BLAS"])]
    for window in (511, 513):
        other = CacheLayout((LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.WINDOW, window)))
        seen.append(fingerprint_of(folder, other, ["float32"]))
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "adapter.safetensors"):
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes((before or b"")[:-1] + b"!")
        seen.append(fingerprint_of(folder, LAYOUT, ["float32"]))
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
    (folder / "config.json").rename(folder / "configuration.json")
    seen.append(fingerprint_of(folder, LAYOUT, ["float32"]))
    (folder / "configuration.json").rename(folder / "config.json")
    assert fingerprint_of(folder, LAYOUT, ["float32"]) == seen[0]
    for package in ("mlx", "mlx-lm"):
        monkeypatch.setattr(loading, "version", lambda name, package=package: "9" if name == package else "0")
        seen.append(fingerprint_of(folder, LAYOUT, ["float32"]))
    assert len(set(seen)) == len(seen)


def test_the_parts_of_a_fingerprint_name_what_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts_of(folder, LAYOUT, ["float32", "cpu"])

    def changed() -> set[str]:
        now = parts_of(folder, LAYOUT, ["float32", "cpu"])
        return {part for part in now.keys() | before if now.get(part) != before.get(part)}

    for name, part in {
        "model.safetensors": "weights",
        "config.json": "weights",
        "adapter.safetensors": "weights",
        "tokenizer.json": "tokenizer",
        "preprocessor_config.json": "tokenizer",
        "chat_template.jinja": "template",
        "generation_config.json": "settings",
    }.items():
        path = folder / name
        old = path.read_bytes() if path.exists() else None
        path.write_bytes((old or b"")[:-1] + b"!")
        assert changed() == {part}, name
        path.unlink() if old is None else path.write_bytes(old)
    assert changed() == set()
    assert parts_of(folder, LAYOUT, ["float32", "gpu"]).items() - before.items() == {("accelerator", "gpu")}
    monkeypatch.setattr(loading, "version", lambda name: "9")
    assert changed() == {"mlx", "mlx-lm"}


def test_the_parts_of_large_files_are_sampled_to_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_SAMPLE", 4)
    path = folder / "model.safetensors"
    data = bytes(range(256)) * 4
    path.write_bytes(data)
    before = parts_of(folder, LAYOUT, [])["weights"]
    for at in (0, 512, len(data) - 16):  # 64 samples of 1,024 bytes: one each 16
        path.write_bytes(data[:at] + b"!" + data[at + 1 :])
        assert parts_of(folder, LAYOUT, [])["weights"] != before
    path.write_bytes(data)
    assert parts_of(folder, LAYOUT, [])["weights"] == before


def test_large_files_are_read_to_their_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint_of(folder, LAYOUT, ["float32"])
    monkeypatch.setattr(loading, "_READ", 3)
    assert fingerprint_of(folder, LAYOUT, ["float32"]) == whole


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (None, (None, None, None)),
        ({}, (None, None, None)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, (0.6, 0.9, 20)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, (0.0, None, None)),
        ({"do_sample": True, "top_k": 64}, (None, None, 64)),
    ],
    ids=str,
)
def test_a_models_own_sampling_is_its_default(
    folder: Path, config: dict[str, object] | None, wanted: tuple[float | None, ...]
) -> None:
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    read = loading._generation_config(folder)
    assert (read.get("temperature"), read.get("top_p"), read.get("top_k")) == wanted


@pytest.mark.mlx
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3-w64", "tiny-qwen3_5"])
def test_a_loaded_model_and_its_facts_agree(name: str) -> None:
    model, facts = load(resolve(name))
    import mlx.core as mx

    from service.engine.upstream import make_prompt_cache

    caches = make_prompt_cache(model)
    logits = model(mx.array([[1, 2, 3]]), cache=caches)
    assert logits.shape[-1] == facts.vocab_size
    kinds = [layer.kind for layer in facts.layout.layers]
    assert len(kinds) == len(caches)
    full = [cache for cache, kind in zip(caches, kinds, strict=True) if kind is LayerKind.FULL]
    assert facts.footprint.per_token == sum(c.keys[..., :1, :].nbytes + c.values[..., :1, :].nbytes for c in full) > 0
    assert facts.context_tokens >= 256
    assert facts.layout.trimmable == (name == "tiny-llama")
    assert facts.layout.window == (64 if name == "tiny-gemma3-w64" else 0)
    again = load(resolve(name))[1]
    assert again == facts


@pytest.mark.mlx
def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((FileNotFoundError, ValueError)):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such family"}))
    with pytest.raises((FileNotFoundError, ValueError)):
        load(tmp_path)
