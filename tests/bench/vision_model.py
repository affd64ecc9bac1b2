"""The model that the image bench runs on: the tiny Qwen3.5 with sizes at which its work can be measured.

Owns its recipe, and pictures to ask about. Random weights: what it says means nothing, what it computes is real work.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np

from service.models.tiny_vision import RECIPES, write_recipe

NAME = "bench-qwen3_5-vl"
SIDE = 1024  # pixels of a picture: 64 x 64 patches, 1,024 positions

_TEXT = {
    "hidden_size": 512,
    "num_hidden_layers": 8,  # every fourth one attends to all, the others are gated delta rules
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [4, 2, 2],
        "rope_theta": 100_000,
        "partial_rotary_factor": 0.25,
    },
}
_VISION = {
    "depth": 12,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "out_hidden_size": 512,
    "num_heads": 6,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_PROCESSOR = {"patch_size": 16, "size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}}


def write_bench_model(folder: Path) -> Path:
    """Writes the model into the existing `folder`, about 200 MB, and returns it."""
    tiny = RECIPES["tiny-qwen3_5-vl"]
    config = {
        **tiny.config,
        "text_config": {**tiny.config["text_config"], **_TEXT},
        "vision_config": {**tiny.config["vision_config"], **_VISION},
    }
    name = "preprocessor_config.json"
    files = {**tiny.files, name: {**tiny.files[name], **_PROCESSOR}}
    write_recipe(dataclasses.replace(tiny, config=config, files=files), NAME, folder)
    return folder


def picture(seed: int, side: int = SIDE) -> bytes:
    """A square picture as a PNG file: coarse noise, another seed another picture."""
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()
