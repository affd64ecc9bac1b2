"""The families of mlx-lm by model type: what each needs beyond sizes by field name, and how one is built.

Also variants: a family with caches that its own code never makes but upstream offers (a ring with a kept head,
quantised keys and values), so that every cache class is under test.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from typing import Any

from tests.families.configs import CONTEXT, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, WINDOW, derived

MOST_PARAMETERS = 20_000_000

_SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_HYBRID = ["conv", "full_attention"] * (LAYERS // 2)
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LLAMA4_SCALING = {
    "rope_theta": 10_000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 128,
    "type": "default",
    "rope_type": "default",
}
_KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
_ROPE_BY_TYPE = {
    "full_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 1_000.0, "rope_type": "default"},
}
_MLA = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32}

NEEDS: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": _SLIDING},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [1, 3]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10_000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v41": {
        "compress_ratios": [0, 4, 4, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "o_groups": 2,
        "head_dim": 32,
        "index_head_dim": 32,
    },
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma2": {"num_hidden_layers": LAYERS},
    "gemma3n": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0] * 3,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
    },
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"] * (LAYERS // 2),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "time_step_limit": [0.001, 100.0],
    },
    "hunyuan": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "cla_share_factor": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_k3": {
        **_MLA,
        "linear_attn_config": _KDA,
        "hidden_act": "situ",
        "activation_situ_beta": 1.0,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "attn_res_block_size": 2,
    },
    "kimi_linear": {**_MLA, "linear_attn_config": _KDA, "num_experts_per_token": 2},
    "laguna": {"layer_types": _SLIDING},
    "lfm2": {"layer_types": _HYBRID, "block_ff_dim": 128, "block_dim": HIDDEN},
    "lfm2_moe": {"layer_types": _HYBRID},
    "llama": {"layer_types": _SLIDING, "sliding_window": WINDOW, "num_key_value_heads": KV_HEADS},
    "llama4": {
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
    },
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba2": {
        "time_step_limit": [0.0, 100.0],
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "intermediate_size": 128,
    },
    "mellum": {"layer_types": _SLIDING, "rope_parameters": _ROPE_BY_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": KV_HEADS,
        "swa_head_dim": HEAD_DIM,
        "swa_v_head_dim": HEAD_DIM,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "add_swa_attention_sink_bias": True,
    },
    "minicpm3": {
        "rope_scaling": {
            "original_max_position_embeddings": CONTEXT,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        }
    },
    "minimax_m3_vl": {
        "index_n_heads": 2,
        "index_head_dim": HEAD_DIM,
        "index_block_size": 16,
        "index_topk_blocks": 4,
        "rotary_dim": 8,
        "sparse_attention_freq": [0, 1, 0, 1],
    },
    "ministral3": {"layer_types": _SLIDING, "sliding_window": WINDOW, "rope_parameters": _LLAMA4_SCALING},
    "mistral4": {"rope_parameters": _LLAMA4_SCALING},
    "muse_spark": {
        "layer_types": _SLIDING,
        "layer_rope_theta": [10_000.0, 0.0] * (LAYERS // 2),
        "rope_parameters": {"rope_theta": 10_000.0},
        "post_norm_eps": 1e-5,
        "final_logit_softcapping": 30.0,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ]
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "M", "*", "E"],
        "head_dim": HEAD_DIM,
        "mamba_num_heads": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "openelm": {
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
        "ffn_multipliers": [1.0] * LAYERS,
        "ffn_dim_divisor": 16,
    },
    "phi3small": {"vocab_size": 100_352},  # the ids that it masks are fixed
    "phixtral": {"num_local_experts": 4, "n_embd": HIDDEN, "n_inner": 128},
    "plamo": {"n_shared_head": 2, "num_attention_heads": HEADS},
    "plamo2": {"hidden_size_per_head": 16, "mamba_num_heads": 4, "intermediate_size": 128, "full_attention_idx": None},
    "qwen": {"kv_channels": HEAD_DIM},
    "qwen3": {"rope_theta": 10_000.0},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"rope_parameters": _ROPE_BY_TYPE, "hidden_act": "gelu"},
}

# Families whose configuration wraps another one's: the class to take sizes from, in this module or another.
_WRAPS: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}

_QWEN3_5 = {"full_attention_interval": 2, "num_experts": 0}
_INSIDE: dict[str, dict[str, Any]] = {
    "kimi_vl": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": {**_QWEN3_5, "num_experts": 4, "num_experts_per_tok": 2},
    "prism_hadamard_qwen35": {**_QWEN3_5, "hidden_size": 128},
}

_OUTSIDE: dict[str, dict[str, Any]] = {
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.0.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0}],
    }
}


def _ring_with_head() -> Any:
    from mlx_lm.models.cache import RotatingKVCache

    return RotatingKVCache(max_size=WINDOW, keep=4)


def _quantised() -> Any:
    from mlx_lm.models.cache import QuantizedKVCache

    return QuantizedKVCache(group_size=32, bits=8)


def _concatenating() -> Any:
    from mlx_lm.models.cache import ConcatenateKVCache

    return ConcatenateKVCache()


# A name, the family under it, what it changes, and the cache that stands in for every layer's.
VARIANTS: dict[str, tuple[str, dict[str, Any], Callable[[], Any]]] = {
    "llama (RotatingKVCache, keep 4)": ("llama", {"layer_types": None}, _ring_with_head),
    "llama (QuantizedKVCache)": ("llama", {"layer_types": None, "head_dim": 32}, _quantised),
    "llama (ConcatenateKVCache)": ("llama", {"layer_types": None}, _concatenating),
}


class NotBuilt(Exception):
    """The family cannot be built here; the text says why."""


def names() -> list[str]:
    """Every model type of the installed mlx-lm, then the variants. A module without `ModelArgs` is a part of models."""
    import mlx_lm.models

    found = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [name for name in found if _is_model(name)] + list(VARIANTS)


def _is_model(name: str) -> bool:
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as source:
        text = source.read()
    # A family may take its class whole from another one's module.
    return (
        "class ModelArgs" in text
        and re.search(r"^(class Model\(|from \.\w+ import .*\bModel\b)", text, re.M) is not None
    )


def config_of(name: str) -> dict[str, Any]:
    """The small configuration of a model type."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    if name not in _WRAPS:
        return {**derived(module.ModelArgs), **NEEDS.get(name, {}), "model_type": name}
    inner, args = _WRAPS[name]
    sizes = derived(getattr(importlib.import_module(f"mlx_lm.models.{inner}"), args))
    text = {**sizes, **NEEDS.get(inner, {}), **_INSIDE.get(name, {}), "model_type": inner}
    return {"model_type": name, "text_config": text, "vocab_size": VOCAB, **_OUTSIDE.get(name, {})}


def build(name: str) -> Any:
    """The model, with random weights that depend on nothing but names. Raises NotBuilt."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from service.models.tiny import initial_value

    family, changes, cache = VARIANTS.get(name, (name, {}, None))
    try:
        module = importlib.import_module(f"mlx_lm.models.{family}")
        model = module.Model(module.ModelArgs.from_dict({**config_of(family), **changes}))
        shapes = tree_flatten(model.parameters())
        size = sum(value.size for _, value in shapes)
        if size > MOST_PARAMETERS:
            raise NotBuilt(f"{size:,} parameters in its smallest known configuration")
        for key, value in shapes:
            if value.ndim and mx.issubdtype(value.dtype, mx.floating):
                value[...] = mx.array(initial_value(family, key, value.shape)).astype(value.dtype)
        mx.eval(model.parameters())
        if cache is not None:
            model.make_cache = lambda: [cache() for _ in model.layers]
        # A family may need a kernel that this machine has not.
        with contextlib.suppress(AttributeError):
            model.eval()
        mx.eval(model(mx.array([[1, 2, 3]])))
    except NotBuilt:
        raise
    except SystemExit as error:  # upstream's manner of asking for a package
        raise NotBuilt("its module exits on import: a package that it needs is not installed") from error
    except Exception as error:  # whatever a family's own code raises, it is that row's reason
        raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from error
    return model
