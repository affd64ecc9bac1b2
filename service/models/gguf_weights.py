"""GGUF weights to MLX weights and config. Owns tensor names and layouts; tokenizers are in gguf_tokenizer.

Two architectures: `llama` and `gemma3` (text). Every tensor is dequantised to float32 and undone of what the GGUF
writer did to it.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gguf
import numpy as np

from service.models.errors import ConversionFailed
from service.models.safetensors_file import Tensor

_LAYER_NAMES = {
    "llama": {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "gemma3": {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def field(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """Value of one metadata key; `default` where the file lacks it, ConversionFailed where there is no default."""
    found = reader.get_field(key)
    if found is not None:
        return found.contents()
    if default is None:
        raise ConversionFailed(f"the GGUF file has no {key!r}")
    return default


def architecture(reader: gguf.GGUFReader) -> str:
    """`llama` or `gemma3`; ConversionFailed for any other."""
    name = field(reader, "general.architecture")
    if name not in _LAYER_NAMES:
        raise ConversionFailed(f"GGUF architecture {name!r} is not one that can be converted: {sorted(_LAYER_NAMES)}")
    return str(name)


def model_config(reader: gguf.GGUFReader, dtype: str) -> dict[str, Any]:
    """The folder's `config.json`, as mlx-lm's model classes read it."""
    arch = architecture(reader)

    def of(key: str, default: Any = None) -> Any:
        return field(reader, f"{arch}.{key}", default)

    heads = int(of("attention.head_count"))
    hidden = int(of("embedding_length"))
    head_dim = int(of("attention.key_length", hidden // heads))
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": int(of("block_count")),
        "intermediate_size": int(of("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(of("attention.head_count_kv")),
        "head_dim": head_dim,
        # GGUF stores the epsilon as float32: 1e-05 comes back as 9.999999747e-06.
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(of("rope.freq_base")),
        "max_position_embeddings": int(of("context_length")),
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "bos_token_id": int(field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(field(reader, "tokenizer.ggml.padding_token_id")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "dtype": dtype,
    }
    if arch == "llama":
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        **config,
        "sliding_window": int(of("attention.sliding_window")),
        # Not in the file; the family's fixed values.
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": head_dim,
    }


def tensors(reader: gguf.GGUFReader) -> list[Tensor]:
    """Every weight under its MLX name, row-major (out, in); each is dequantised when it is loaded."""
    arch = architecture(reader)
    return [
        Tensor(
            name=_mlx_name(arch, tensor.name),
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            load=partial(_dequantised, tensor, _undo(arch, reader, tensor.name)),
        )
        for tensor in reader.tensors
    ]


def _dequantised(tensor: gguf.ReaderTensor, undo: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return undo(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False))


def _mlx_name(arch: str, name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES[arch]:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[arch][layer[2]]}.weight"
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES and name.endswith(".weight"):
        return f"{_TOP_NAMES[stem]}.weight"
    raise ConversionFailed(f"the GGUF file holds a tensor that {arch} does not have: {name}")


def _undo(arch: str, reader: gguf.GGUFReader, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """What turns a tensor as the GGUF writer left it into the model's own."""
    if arch == "gemma3" and name.endswith("norm.weight"):
        # Written as 1 + w; the upstream class adds the 1 itself. The stored w is a bfloat16 and comes back exactly.
        return lambda value: value - np.float32(1)
    if arch == "llama" and name.endswith("attn_q.weight"):
        return lambda value: _unpermute(value, int(field(reader, "llama.attention.head_count")))
    if arch == "llama" and name.endswith("attn_k.weight"):
        return lambda value: _unpermute(value, int(field(reader, "llama.attention.head_count_kv")))
    return lambda value: value


def _unpermute(value: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs side by side, as GGUF keeps them, to rotary halves, as mlx-lm's Llama rotates them."""
    rows, columns = value.shape
    pairs = value.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
