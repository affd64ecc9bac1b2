"""Tiny models: random weights in the shape of a family, built from the upstream class. Owns recipes and initial values.

Made for exactness tests, so the values matter in three ways: no logit is flat, greedy text does not repeat one token
for ever, and recurrent layers keep a memory of hundreds of tokens. The same bytes each time: values come from the raw
stream of a counter-based generator keyed by model and parameter name, not from a library's idea of a distribution.
"""

import hashlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from service.engine import cpu
from service.models import safetensors_file
from service.models.convert import write_json
from service.models.safetensors_file import Tensor
from service.models.tiny_tokenizer import VOCAB_SIZE, build_tiny_tokenizer, tiny_tokenizer_config

EOS = 2  # <|im_end|>
PAD = 0  # <|endoftext|>
CONTEXT = 32768

_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 3,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    },
    "tiny-gemma3": {**_GEMMA3, "sliding_window": 512},
    "tiny-gemma3-w64": {**_GEMMA3, "sliding_window": 64},
    "tiny-gpt-oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000},  # else the tokenizer's loader assumes YaRN
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    },
    "tiny-qwen3_5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "full_attention_interval": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "vocab_size": VOCAB_SIZE,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 100_000,
                "partial_rotary_factor": 0.25,
            },
        },
    },
    "tiny-lfm2": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": 1_000_000.0,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    },
}

_TIED = frozenset(name for name, config in CONFIGS.items() if config["tie_word_embeddings"])
_HEAD_GAIN = 3.0  # logits with a deviation of 3: clear favourites, no certainty


def build_tiny(name: str, folder: Path) -> None:
    """Write the tiny model `name` into the existing `folder`: float32 weights, config and tokenizer."""
    config = {**CONFIGS[name], "vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "pad_token_id": PAD, "dtype": "float32"}
    shapes = _parameter_shapes(config)
    weights = [
        Tensor(name=key, shape=shape, load=partial(initial_value, name, key, shape)) for key, shape in shapes.items()
    ]
    safetensors_file.write(folder / "model.safetensors", weights, "float32")
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    build_tiny_tokenizer(config["model_type"]).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tiny_tokenizer_config())


def initial_value(model: str, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Value of one parameter, float32; depends on nothing but the three arguments."""
    noise = _uniform(f"{model}/{key}", shape)  # mean 0, deviation 1
    stem, _, leaf = key.rpartition(".")
    if leaf == "A_log":
        return np.float32(-2.5) + noise  # decays between 0.5 and 0.99 a token: memories short and long
    if leaf in ("bias", "dt_bias", "sinks"):
        return np.float32(0.5) * noise
    if "norm" in stem.rsplit(".", 1)[-1]:
        centre = 0.0 if "gemma" in model else 1.0  # gemma's class adds the 1 itself
        return np.float32(centre) + np.float32(0.1) * noise
    if stem.endswith("embed_tokens"):
        # Where the embedding is also the head it is small, so that a token does not simply predict itself.
        return noise if model not in _TIED else np.float32(_HEAD_GAIN / math.sqrt(shape[-1])) * noise
    if "conv" in stem:
        return noise / np.float32(math.sqrt(shape[1]))
    gain = _HEAD_GAIN if stem.endswith("lm_head") else 1.5
    return np.float32(gain / math.sqrt(shape[-1])) * noise


def _parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the upstream class asks for."""
    cpu.mlx()
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    return {key: tuple(value.shape) for key, value in tree_flatten(model.parameters())}


def _uniform(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform float32 of mean 0 and deviation 1, of 24 random bits each."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    bits = np.random.Philox(key=seed).random_raw(math.prod(shape))
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return ((unit - np.float32(0.5)) * np.float32(math.sqrt(12))).reshape(shape)
