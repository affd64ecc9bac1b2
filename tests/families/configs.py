"""Small configurations of upstream's model families. Owns sizes by field name and what single families need besides.

A configuration is a dict for upstream's `ModelArgs.from_dict`. Most of it follows from the names of the fields; a
family whose fields hang together in its own way has an entry in `families`.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

VOCAB = 512
LAYERS = 4
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
WINDOW = 64
CONTEXT = 4096

_NAMED: dict[str, Any] = {}


def _size(value: Any, *names: str) -> None:
    _NAMED.update(dict.fromkeys(names, value))


_size(VOCAB, "vocab_size", "n_vocab", "vocab_size_per_layer_input")
_size(LAYERS, "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
_size(HIDDEN, "hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim", "block_dim", "dim_model_base")
_size(HEADS, "num_attention_heads", "num_heads", "n_head", "n_heads", "global_num_attention_heads")
_size(KV_HEADS, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups")
_size(HEAD_DIM, "head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "attention_head_dim")
_size(8, "qk_rope_head_dim", "rotary_dim")
_size(32, "q_lora_rank", "kv_lora_rank", "o_lora_rank", "moe_intermediate_size", "expert_ffn_hidden_size")
_size(32, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_size(
    128,
    "intermediate_size",
    "ffn_hidden_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "ff_intermediate_size",
    "block_ff_dim",
    "n_inner",
    "dense_intermediate_size",
)
_size(4, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")
_size(2, "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_size(1, "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_size(1, "n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "num_dense_layers")
_size(WINDOW, "sliding_window", "sliding_window_size", "attention_window_size", "window_size")
_size(CONTEXT, "max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_sequence_length")
_size(1e-5, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")
_size(10_000.0, "rope_theta", "swa_rope_theta", "rotary_emb_base")
_size(1.0, "routed_scaling_factor", "partial_rotary_factor", "rotary_pct", "logits_scaling", "embedding_multiplier")
_size(1.0, "residual_multiplier", "scale_emb", "block_ffn_dim_multiplier", "scale_depth")
_size(HEAD_DIM**-0.5, "attention_multiplier")
_size(16, "state_size", "ssm_state_size", "mamba_d_state", "mamba_head_dim", "block_multiple_of", "index_topk")
_size(16, "linear_key_head_dim", "linear_value_head_dim", "time_step_rank", "group_norm_size")
_size(16, "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim", "mamba_dt_rank")
_size(4, "conv_kernel", "mamba_d_conv", "conv1d_width", "linear_conv_kernel_dim", "index_n_heads", "mamba_num_heads")
_size(2, "n_groups", "linear_num_key_heads", "mamba_expand", "layer_group_size", "zero_expert_num", "mamba_n_groups")
_size(4, "linear_num_value_heads", "mamba_n_heads", "sliding_window_pattern")
_size(3, "conv_L_cache", "conv_window")
_size(30.0, "logits_soft_cap", "gegelu_limit")
_size("silu", "hidden_act")


def derived(args: type) -> dict[str, Any]:
    """A small configuration of a `ModelArgs` class from the names and types of its fields."""
    config: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in _NAMED:
            # What is off by default stays off: a None chooses between forms of a model.
            if required or field.default is not None:
                config[field.name] = _NAMED[field.name]
        elif required:
            config[field.name] = _blank(field.type)
    return config


def _blank(kind: Any) -> Any:
    if isinstance(kind, str):
        kind = {"int": int, "float": float, "bool": bool, "str": str}.get(kind, kind)
    if kind in (int, float, bool, str):
        return {int: 1, float: 1.0, bool: False, str: "silu"}[kind]
    origin = typing.get_origin(kind)
    if origin is typing.Union:
        return _blank(typing.get_args(kind)[0])
    return {list: [], dict: {}, tuple: ()}.get(origin or kind, [] if "List" in str(kind) else {})
