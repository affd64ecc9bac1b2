"""Tiny models that see images: random weights in the shape of a vision family, and the files of a working processor.

As in `tiny`, the values come from model and parameter name alone, so that every machine makes the same bytes. Images of
a few hundred pixels take from four to some hundred positions, in the form that the family gives them.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from service.engine import cpu
from service.models import safetensors_file
from service.models.convert import write_json
from service.models.safetensors_file import Tensor
from service.models.tiny import CONFIGS, CONTEXT, EOS, PAD, initial_value
from service.models.tiny_tokenizer import VOCAB_SIZE, build_tiny_tokenizer, tiny_tokenizer_config

_VOCAB = VOCAB_SIZE + 32  # room for the tokens that stand for images


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model. `specials` get the ids from VOCAB_SIZE on; `image`: what the chat template writes for an image."""

    config: dict[str, Any]
    specials: tuple[str, ...]
    image: str
    files: dict[str, dict[str, Any]]
    tokenizer: dict[str, Any] = dataclasses.field(default_factory=dict)  # more for tokenizer_config.json


def _id(place: int) -> int:
    return VOCAB_SIZE + place


_QWEN_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_IDS = {
    "vision_start_token_id": _id(0),
    "vision_end_token_id": _id(1),
    "image_token_id": _id(2),
    "video_token_id": _id(3),
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
_QWEN_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 1 << 18},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

_HALVES: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
    "patch_size": 8,
}
_GEMMA_SPECIALS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")


def _named(**tokens: str) -> dict[str, Any]:
    """Tokens that the family's processor asks its tokenizer for by name."""
    return {"extra_special_tokens": {f"{name}_token": token for name, token in tokens.items()}}


RECIPES: dict[str, Recipe] = {
    "tiny-qwen3_5-vl": Recipe(
        config={
            **CONFIGS["tiny-qwen3_5"],
            "text_config": {**CONFIGS["tiny-qwen3_5"]["text_config"], "vocab_size": _VOCAB},
            "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5"},
            **_QWEN_IDS,
        },
        specials=_QWEN_SPECIALS,
        image="<|vision_start|><|image_pad|><|vision_end|>",
        files={"preprocessor_config.json": _QWEN_PROCESSOR},
    ),
    "tiny-qwen3-vl": Recipe(
        config={
            "model_type": "qwen3_vl",
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rms_norm_eps": 1e-6,
                "rope_theta": 100_000,
                "max_position_embeddings": CONTEXT,
                "tie_word_embeddings": False,
                "vocab_size": _VOCAB,
                "rope_scaling": {"type": "default", "mrope_section": [6, 5, 5]},
            },
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen3_vl",
                "depth": 3,
                "deepstack_visual_indexes": [0, 1],
            },
            **_QWEN_IDS,
        },
        specials=_QWEN_SPECIALS,
        image="<|vision_start|><|image_pad|><|vision_end|>",
        files={"preprocessor_config.json": _QWEN_PROCESSOR},
    ),
    "tiny-gemma3-vl": Recipe(
        config={
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "hidden_size": 64,
            "image_token_index": _id(0),
            "text_config": {
                **CONFIGS["tiny-gemma3-w64"],
                "rope_global_base_freq": 1_000_000.0,
                "mm_tokens_per_image": 64,
                "vocab_size": _VOCAB,
            },
            "vision_config": {**_SIGLIP, "image_size": 128, "vision_use_head": False},
        },
        specials=_GEMMA_SPECIALS,
        image="<start_of_image>",
        files={
            "preprocessor_config.json": {
                **_HALVES,
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": 128, "width": 128},
            },
            "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 64},
        },
        tokenizer=_named(image="<image_soft_token>", boi="<start_of_image>", eoi="<end_of_image>"),
    ),
    "tiny-gemma4-vl": Recipe(
        config={
            "model_type": "gemma4",
            "architectures": ["Gemma4ForConditionalGeneration"],
            "tie_word_embeddings": True,
            "hidden_size": 64,
            "image_token_id": _id(0),
            "boi_token_id": _id(1),
            "eoi_token_id": _id(2),
            "audio_config": None,
            "vision_soft_tokens_per_image": 64,
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": 64,
                "num_hidden_layers": 6,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "head_dim": 32,
                "global_head_dim": 32,
                "rms_norm_eps": 1e-6,
                "vocab_size": _VOCAB,
                "vocab_size_per_layer_input": _VOCAB,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 16,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "use_bidirectional_attention": "vision",
                "use_double_wide_mlp": False,
                "max_position_embeddings": CONTEXT,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                "patch_size": 8,
                "pooling_kernel_size": 2,
                "position_embedding_size": 256,
                "default_output_length": 64,
            },
        },
        specials=_GEMMA_SPECIALS,
        image="<image_soft_token>",
        files={
            "processor_config.json": {
                "processor_class": "Gemma4Processor",
                "image_processor": {"patch_size": 8, "max_soft_tokens": 64, "pooling_kernel_size": 2},
            },
        },
        tokenizer=_named(image="<image_soft_token>", boi="<start_of_image>", eoi="<end_of_image>"),
    ),
    "tiny-smolvlm": Recipe(
        config={
            "model_type": "smolvlm",
            "architectures": ["SmolVLMForConditionalGeneration"],
            "tie_word_embeddings": False,
            "scale_factor": 2,
            "image_token_id": _id(0),
            "text_config": {**CONFIGS["tiny-llama"], "vocab_size": _VOCAB},
            "vision_config": {**_SIGLIP, "image_size": 64},
        },
        specials=(
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)),
        ),
        image="<image>",
        files={
            "preprocessor_config.json": {
                **_HALVES,
                "image_processor_type": "SmolVLMImageProcessor",
                "size": {"longest_edge": 256},
                "max_image_size": {"longest_edge": 64},
                "do_image_splitting": True,
                "do_pad": True,
                "do_resize": True,
                "resample": 1,
            },
            "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 16},
        },
    ),
    "tiny-mistral3": Recipe(
        config={
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "image_token_index": _id(0),
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "text_config": {
                **CONFIGS["tiny-llama"],
                "model_type": "mistral",
                "head_dim": 16,
                "vocab_size": _VOCAB,
            },
            "vision_config": {
                "model_type": "pixtral",
                "num_hidden_layers": 2,
                "hidden_size": 32,
                "head_dim": 16,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "image_size": 128,
                "patch_size": 8,
            },
        },
        specials=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image="[IMG]",
        files={
            "preprocessor_config.json": {
                **_HALVES,
                "image_processor_type": "PixtralImageProcessor",
                "patch_size": {"height": 8, "width": 8},
                "size": {"longest_edge": 128},
            },
            "processor_config.json": {
                "processor_class": "PixtralProcessor",
                "patch_size": 8,
                "spatial_merge_size": 2,
                "image_token": "[IMG]",
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
            },
        },
    ),
    "tiny-lfm2-vl": Recipe(
        config={
            "model_type": "lfm2_vl",
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "tie_word_embeddings": True,
            "image_token_id": _id(0),
            "downsample_factor": 2,
            "encoder_patch_size": 8,
            "tile_size": 64,
            "projector_hidden_size": 64,
            "text_config": {**CONFIGS["tiny-lfm2"], "vocab_size": _VOCAB},
            "vision_config": {**_SIGLIP, "model_type": "siglip2_vision_model", "image_size": 64, "num_patches": 64},
        },
        specials=(
            "<image>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{col}|>" for row in range(1, 11) for col in range(1, 11) if row * col <= 10),
        ),
        image="<image>",
        files={
            "preprocessor_config.json": {
                **_HALVES,
                "image_processor_type": "Lfm2VlImageProcessorFast",
                "downsample_factor": 2,
                "encoder_patch_size": 8,
                "tile_size": 64,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
            },
            "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
        },
        tokenizer=_named(
            image="<image>",
            image_start="<|image_start|>",
            image_end="<|image_end|>",
            image_thumbnail="<|img_thumbnail|>",
        ),
    ),
    "tiny-llava": Recipe(
        config={
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "tie_word_embeddings": False,
            "image_token_index": _id(0),
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": {**CONFIGS["tiny-llama"], "vocab_size": _VOCAB},
            "vision_config": {
                **_SIGLIP,
                "model_type": "clip_vision_model",
                "num_hidden_layers": 3,
                "image_size": 64,
                "projection_dim": 32,
            },
        },
        specials=("<image>",),
        image="<image>",
        files={
            "preprocessor_config.json": {
                **_HALVES,
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 64},
                "crop_size": {"height": 64, "width": 64},
                "do_center_crop": True,
                "do_resize": True,
            },
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "patch_size": 8,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
                "image_token": "<image>",
            },
        },
    ),
}


def build_tiny_vision(name: str, folder: Path) -> None:
    """Write the tiny model `name` into the existing `folder`: weights, configuration, tokenizer and processor."""
    write_recipe(RECIPES[name], name, folder)


def write_recipe(recipe: Recipe, name: str, folder: Path) -> None:
    """The same for a recipe of another size; `name` decides its values."""
    config = {**recipe.config, "vocab_size": _VOCAB, "eos_token_id": EOS, "pad_token_id": PAD, "dtype": "float32"}
    shapes = _parameter_shapes(config)
    weights = [Tensor(name=key, shape=shape, load=partial(_value, name, key, shape)) for key, shape in shapes.items()]
    safetensors_file.write(folder / "model.safetensors", weights, "float32")
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    build_tiny_tokenizer(config["model_type"], recipe.specials).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {**tiny_tokenizer_config(recipe.image), **recipe.tokenizer})
    for file, content in recipe.files.items():
        write_json(folder / file, content)


def _value(model: str, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """As for text models; towers have norms around 1 in every family, and convolutions over patches."""
    if key.startswith("language_model."):
        return initial_value(model, key, shape)
    other = model.replace("gemma", "gem")  # whose norms add no 1 themselves
    if len(shape) < 2 and "norm" not in key and not key.endswith("bias"):
        return np.float32(0.5) * initial_value(other, f"{key}.bias", shape)
    value = initial_value(other, key, shape)
    return value * np.float32(math.sqrt(shape[-1] / math.prod(shape[1:]))) if len(shape) > 3 else value


def _parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the upstream class asks for."""
    cpu.mlx()
    from mlx.utils import tree_flatten

    from service.engine.vision import upstream

    model = upstream.build(config)
    return {key: tuple(value.shape) for key, value in tree_flatten(model.parameters())}
