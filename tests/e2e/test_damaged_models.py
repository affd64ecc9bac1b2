"""Model folders that cannot be served: whoever starts the server reads what is wrong with which file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import types_pb2 as pb

from service.models import resolve
from tests.e2e.live import LiveServer, ServerDidNotStart, generate, greedy, prompt_of, raw, refused, until

MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 16,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": False,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, 10.0],
    "time_step_rank": "auto",
}
LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 64,
        "head_dim": 16,
        "hidden_size": 64,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 4096,
        "model_type": "llama4_text",
        "num_attention_heads": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": True,
        "vocab_size": 512,
    },
}


def edit(**values: object) -> Callable[[Path], None]:
    """Changes entries of config.json."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return apply


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def weights_of(config: dict[str, object]) -> Callable[[Path], None]:
    """Random weights for another architecture, from the upstream class itself."""

    def apply(folder: Path) -> None:
        from service.engine import cpu

        mx = cpu.mlx()
        from mlx.utils import tree_flatten
        from mlx_lm.utils import _get_classes

        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
        (folder / "config.json").write_text(json.dumps(config))

    return apply


@dataclass(frozen=True)
class Damage:
    """`says`: what the message must name. `at_once`: before the server listens."""

    do: Callable[[Path], None]
    says: tuple[str, ...]
    at_once: bool = True


AT_START = {
    "weights cut short": Damage(truncate("model.safetensors"), ("model.safetensors",)),
    "no weights": Damage(remove("model.safetensors"), ("model*.safetensors",)),
    "empty weights": Damage(write("model.safetensors", ""), ("model.safetensors",)),
    "config is no JSON": Damage(write("config.json", "{"), ("config.json",)),
    "config is a list": Damage(write("config.json", "[]"), ("config.json",)),
    "config without a type": Damage(edit(model_type=None), ("config.json", "model_type")),
    "no config": Damage(remove("config.json"), ("config.json",)),
    "no tokenizer": Damage(remove("tokenizer.json"), ("tokenizer",)),
    "tokenizer cut short": Damage(truncate("tokenizer.json"), ("tokenizer.json",)),
}

WHILE_LOADING = {
    "architecture that is not known": Damage(edit(model_type="nonsense9"), ("nonsense9",)),
    "config without sizes": Damage(write("config.json", '{"model_type": "llama"}'), ("hidden_size",)),
    "weights of another size": Damage(edit(hidden_size=128), ("shape",)),
    "fewer layers than the config says": Damage(edit(num_hidden_layers=6), ("model.layers.4",)),
    "tokenizer that is none": Damage(write("tokenizer.json", "{}"), ("tokenizer",)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model folder of one's own."""
    copy = tmp_path / "my-model"
    shutil.copytree(resolve("tiny-llama"), copy)
    (copy / "kvfork.json").unlink()
    return copy


@pytest.mark.parametrize("name", AT_START)
def test_a_damaged_folder_ends_the_server_with_one_clear_line(folder: Path, name: str) -> None:
    damage = AT_START[name]
    damage.do(folder)
    with pytest.raises(ServerDidNotStart) as ended:
        LiveServer(folder)
    assert ended.value.code == 1
    (line,) = ended.value.log.strip().splitlines()
    assert line.startswith("error: ") and str(folder) in line
    assert all(word in line for word in damage.says), line


@pytest.mark.parametrize("name", WHILE_LOADING)
def test_a_model_that_cannot_be_loaded_is_failed_calls_say_so_and_the_log_says_why(folder: Path, name: str) -> None:
    damage = WHILE_LOADING[name]
    damage.do(folder)
    server = LiveServer(folder, wait=False)
    try:
        until(lambda: server.model().state == server_pb.Model.STATE_FAILED, what="the load to fail")
        answer = refused(lambda: server.inference.Generate(greedy(raw("Hello"))))
        assert answer.code == "UNAVAILABLE" and "my-model could not be loaded" in answer.text
        assert server.terminate() == 0
        log = server.log.read_text()
        told = [line for line in log.splitlines() if " ERROR " in line and "my-model" in line]
        assert any(all(word in line for word in damage.says) for line in told), log
        assert "Traceback" not in log
    finally:
        server.close()


@pytest.mark.parametrize("config", [MAMBA2, LLAMA4], ids=["mamba2", "llama4"])
def test_an_unusual_cache_is_restored_exactly(folder: Path, config: dict[str, object]) -> None:
    """Recurrent layers alone, and chunked attention: served from a folder that no list of ours knows."""
    weights_of(config)(folder)
    with LiveServer(folder) as server:
        question = greedy(raw(prompt_of(600, 1)), tokens=12, save=pb.SnapshotOptions())
        cold, warm = generate(server, question), generate(server, question)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 512)
        assert warm.ids == cold.ids
        rest = generate(server, greedy(None, parent=cold.finished.snapshot.name, tokens=8))
        assert rest.usage.recomputed_tokens == 0
        assert cold.ids + rest.ids == generate(server, greedy(raw(prompt_of(600, 1)), tokens=20)).ids


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerDidNotStart) as ended:
        LiveServer(tmp_path / "nowhere")
    assert ended.value.code == 1 and "nowhere" in ended.value.log and "Traceback" not in ended.value.log


def test_a_second_server_on_the_same_port_is_told_so() -> None:
    with LiveServer("tiny-llama") as server, pytest.raises(ServerDidNotStart) as ended:
        LiveServer("tiny-llama", "--address", server.address)
    assert ended.value.code == 3 and server.address in ended.value.log
