"""The two real models after conversion, held against what another implementation makes of the same GGUF files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from service.engine import cpu
from service.models import KNOWN, read_manifest, resolve, verify

mx = cpu.mlx()

pytestmark = pytest.mark.mlx

RECORDED = json.loads(Path(__file__).with_name("other_implementation.json").read_text())

EOS = {"smollm2": 2, "gemma3": 1}

_ACCEPTED = os.environ.get("KVFORK_ACCEPT_GEMMA_TERMS") == "1"
_GEMMA = pytest.mark.skipif(not _ACCEPTED, reason="the Gemma terms are not accepted (KVFORK_ACCEPT_GEMMA_TERMS=1)")


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=_GEMMA)])
def name(request: pytest.FixtureRequest) -> str:
    resolve(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    loaded, _ = load_model(resolve(name), lazy=True)
    if cpu.prepare().compute_dtype == "float32":
        loaded.update(tree_map(lambda value: value.astype(mx.float32), loaded.parameters()))
    return loaded


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(resolve(name) / "tokenizer.json"))


def test_the_folder_is_the_recorded_one(name: str) -> None:
    path = resolve(name)
    assert len(verify(path)) == 64
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.source["gguf_sha256"] == KNOWN[name].sha256


def test_text_becomes_the_tokens_of_the_other_implementation(name: str, tokenizer: Tokenizer) -> None:
    for text, ids in RECORDED[name]["tokens"]:
        assert tokenizer.encode(text).ids == ids, text


def test_tokens_turn_back_into_the_text(name: str, tokenizer: Tokenizer) -> None:
    for text, _ in RECORDED[name]["tokens"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        # SentencePiece writes a space as ▁, so it can't tell the two apart.
        expected = text.replace("▁", " ") if name == "gemma3" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_every_text_of_bytes_survives_or_is_known_to_lack_a_token(name: str, tokenizer: Tokenizer) -> None:
    lost = {chr(code) for code in range(128) if tokenizer.decode(tokenizer.encode(chr(code)).ids) != chr(code)}
    # SmolLM2 has no token for six control characters: they vanish, as they do in its own tokenizer.
    assert lost == (set("\x04\x06\x13\x14\x16\x1d") if name == "smollm2" else set())


def test_upstream_loads_the_tokenizer_as_it_is(name: str) -> None:
    from mlx_lm.utils import load_tokenizer

    loaded = load_tokenizer(resolve(name))
    for text, ids in RECORDED[name]["tokens"]:
        assert loaded.encode(text) == ids
    assert loaded.eos_token_ids == {EOS[name]}
    assert loaded.has_chat_template == (name == "smollm2")


def test_greedy_decoding_agrees_with_the_other_implementation(name: str, model: Any) -> None:
    """Teacher-forced: at every position of its continuation, our likeliest token is the one it chose."""
    for prompt, continuation in RECORDED[name]["greedy"]:
        logits = model(mx.array([prompt + continuation[:-1]]))[0, len(prompt) - 1 :]
        assert mx.argmax(logits, axis=-1).tolist() == continuation


def test_english_is_likely(name: str, model: Any, tokenizer: Tokenizer) -> None:
    text = (
        "The river had risen during the night, and by morning the lower fields were under water. People stood on the"
        " bridge and watched the trees go by. In the afternoon the rain stopped, and a thin light came over the hills."
    )
    ids = mx.array(tokenizer.encode(text).ids)
    logits = model(ids[None, :-1])[0].astype(mx.float32)
    chosen = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), ids[1:, None], axis=-1)
    perplexity = mx.exp(-chosen.mean()).item()
    assert 5 < perplexity < 60  # a wrong layout of one matrix gives thousands
