"""The tiny models: the same bytes each time, loadable by upstream, lively enough to tell a right state from a wrong."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from service.engine import cpu
from service.models import KNOWN, ensure, resolve, verify
from service.models.progress import Quiet
from service.models.registry import TinyModel
from service.models.tiny import build_tiny

mx = cpu.mlx()

pytestmark = pytest.mark.mlx

QUIET = Quiet()
TINY = [name for name, model in KNOWN.items() if isinstance(model, TinyModel)]

# They come from integers alone, so every machine makes the same. A change of recipe changes them, and then the
# generator's version in the registry has to be raised, or caches keep the old ones.
WEIGHTS_SHA256 = {
    "tiny-llama": "1f08de57cce228a894ca0c8399c0327e6c4b0829863251cb0bf8a62f69e764db",
    "tiny-gemma3": "642ef45f9fb1965c90f8b63e4e583fcf2ab14c76c77fa6b36ad1a5756d79d3f3",
    "tiny-gemma3-w64": "45b52fc29a46181429ca3721cc8c5c7e59bb9f9de602650bca9c64692cc98c5c",
    "tiny-gpt-oss": "e0368f8206d16496f8e5c2ca13ff4fe180178a709479df65880c6d097a9f6152",
    "tiny-qwen3_5": "5415915c9060e5c49e6ed8ebde1b1170604050ae433dddc57223ce59f5e226d5",
    "tiny-lfm2": "78b78184436b4646ab0d79646669bf49c606a2c0cd6e76c4da24fc64270d1d22",
}

LAYERS = {
    "tiny-llama": ["KVCache"] * 4,
    "tiny-gemma3": (["RotatingKVCache"] * 2 + ["KVCache"]) * 2,
    "tiny-gemma3-w64": (["RotatingKVCache"] * 2 + ["KVCache"]) * 2,
    "tiny-gpt-oss": ["RotatingKVCache", "KVCache"] * 2,
    "tiny-qwen3_5": ["ArraysCache"] * 3 + ["KVCache"],
    "tiny-lfm2": ["ArraysCache", "ArraysCache", "KVCache", "ArraysCache", "KVCache", "ArraysCache"],
}
WINDOWS = {"tiny-gemma3": 512, "tiny-gemma3-w64": 64, "tiny-gpt-oss": 128}

TEXTS = [
    "",
    " leading and trailing ",
    "Hello  world 123 4567\n\n\n x",
    "def f(x):\n\treturn x ** 2  # €\r\n",
    "日本語の文、한국어, العربية, été, 🙂🌊👨‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n<think>hm</think>",
    "\x00\x01\x7f" + " " * 40 + "\t" * 9 + "\n" * 9,
]


@pytest.fixture(scope="module", params=TINY)
def loaded(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    from mlx_lm.utils import load_model, load_tokenizer

    path = resolve(request.param, progress=QUIET)
    return request.param, load_model(path)[0], load_tokenizer(path)


@pytest.mark.parametrize("name", TINY)
def test_the_same_bytes_each_time(name: str, tmp_path: Path) -> None:
    kept = resolve(name, progress=QUIET)
    build_tiny(name, tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (kept / path.name).read_bytes(), path.name
    assert {path.name for path in tmp_path.iterdir()} | {"kvfork.json"} == {path.name for path in kept.iterdir()}
    weights = (kept / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == WEIGHTS_SHA256[name]


def test_upstream_gives_the_caches_that_the_family_is_for(loaded: tuple[str, Any, Any]) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    name, model, _ = loaded
    caches = make_prompt_cache(model)
    assert [type(cache).__name__ for cache in caches] == LAYERS[name]
    windows = {cache.max_size for cache in caches if type(cache).__name__ == "RotatingKVCache"}
    assert windows == ({WINDOWS[name]} if name in WINDOWS else set())


def test_logits_are_lively_after_a_thousand_tokens(loaded: tuple[str, Any, Any]) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    _, model, _ = loaded
    prompt = mx.array([[5 + (7919 * i) % 500 for i in range(1000)]])
    cache = make_prompt_cache(model)
    for start in range(0, 1000, 256):
        logits = model(prompt[:, start : start + 256], cache=cache)
    greedy = []
    for _ in range(100):
        logits = logits[:, -1]
        assert mx.isfinite(logits).all().item()
        deviation = mx.std(logits).item()
        assert 1.0 < deviation < 10.0
        token = mx.argmax(logits, axis=-1)
        greedy.append(token.item())
        logits = model(token[None], cache=cache)
    assert len(set(greedy)) >= 15, greedy


def test_the_last_logits_depend_on_the_first_tokens(loaded: tuple[str, Any, Any]) -> None:
    """Else a restored state could be wrong and no test would see it. Longer than every window below 512."""
    _, model, _ = loaded
    tokens = [5 + (7919 * i) % 500 for i in range(300)]
    other = [6, *tokens[1:]]
    difference = mx.abs(model(mx.array([tokens]))[0, -1] - model(mx.array([other]))[0, -1]).max().item()
    assert difference > 1e-4


def test_tokens_turn_back_into_the_text(loaded: tuple[str, Any, Any]) -> None:
    name, _, tokenizer = loaded
    plain = Tokenizer.from_file(str(resolve(name, progress=QUIET) / "tokenizer.json"))
    for text in TEXTS:
        ids = plain.encode(text).ids
        assert plain.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.encode(text) == ids  # upstream's loader takes the file as it is
    assert plain.get_vocab_size() == 512
    assert [plain.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]


def test_chat_and_thinking_are_set_up(loaded: tuple[str, Any, Any]) -> None:
    _, _, tokenizer = loaded
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_ids == {2}
    assert (tokenizer.think_start, tokenizer.think_end) == ("<think>", "</think>")
    thought = tokenizer.encode("<think>a</think>b")
    assert thought[0] == tokenizer.think_start_id
    assert tokenizer.decode(thought, skip_special_tokens=True) == "<think>a</think>b"


def _race(name: str, barrier: Barrier, results: Any) -> None:
    barrier.wait(60)
    path = ensure(name, progress=QUIET)
    results.put((str(path), verify(path)))


def test_two_processes_at_once_make_one_good_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = verify(resolve("tiny-llama", progress=QUIET))
    monkeypatch.setenv("KVFORK_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_race, args=("tiny-llama", barrier, results)) for _ in range(2)]
    for racer in racers:
        racer.start()
    got = [results.get(timeout=120) for _ in racers]
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert got == [(str(tmp_path / "models" / "tiny-llama"), expected)] * 2
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-llama"]


def test_a_known_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = resolve("tiny-llama", progress=QUIET)
    (tmp_path / "tiny-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny-llama", progress=QUIET) == kept
    assert json.loads((kept / "kvfork.json").read_text())["name"] == "tiny-llama"
