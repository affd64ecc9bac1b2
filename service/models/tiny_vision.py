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
}


def build_tiny_vision(name: str, folder: Path) -> None:
    """Write the tiny model `name` into the existing `folder`: weights, configuration, tokenizer and processor."""
    recipe = RECIPES[name]
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
    other = f"{model.replace('gemma', 'g')}"  # whose norms add no 1 themselves
    value = initial_value(other, key, shape)
    return value * np.float32(math.sqrt(shape[-1] / math.prod(shape[1:]))) if len(shape) > 3 else value


def _parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the upstream class asks for."""
    cpu.mlx()
    from mlx.utils import tree_flatten

    from service.engine.vision import upstream

    model = upstream.build(config)
    return {key: tuple(value.shape) for key, value in tree_flatten(model.parameters())}
