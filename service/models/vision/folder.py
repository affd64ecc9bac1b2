"""The model folder of tiny-vision. Owns its configuration and its files; the weights come from the training.

An ordinary folder of upstream's qwen3_5 class: mlx-vlm loads it by itself. Weights are stored as float16, which halves
them; `docs/models.md` says what that costs.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from service.models import safetensors_file
from service.models.convert import write_json
from service.models.errors import ConversionFailed
from service.models.safetensors_file import Tensor
from service.models.vision import tokens

WEIGHTS = Path(__file__).with_name("tiny-vision.safetensors")
"""The trained weights of the package; the tokenizer that they were trained with lies beside them."""

PATCH, MERGE, FRAMES = 16, 2, 2
SIDE = 96
"""Pixels: a square picture is brought to this width and height, which is 3 × 3 tokens; others to about the area."""

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "vocab_size": tokens.VOCAB_SIZE,
    "eos_token_id": tokens.SPECIALS.index(tokens.TURN_END),
    "pad_token_id": tokens.SPECIALS.index(tokens.END_OF_TEXT),
    "image_token_id": tokens.SPECIALS.index(tokens.IMAGE),
    "video_token_id": tokens.SPECIALS.index(tokens.VIDEO),
    "vision_start_token_id": tokens.SPECIALS.index(tokens.VISION_START),
    "vision_end_token_id": tokens.SPECIALS.index(tokens.VISION_END),
    "tie_word_embeddings": True,
    "dtype": "float16",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "vocab_size": tokens.VOCAB_SIZE,
        "eos_token_id": tokens.SPECIALS.index(tokens.TURN_END),
        "rope_parameters": {
            "type": "default",
            "mrope_section": [4, 2, 2],
            "rope_theta": 10_000,
            "partial_rotary_factor": 0.5,
        },
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 384,
        "out_hidden_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "in_channels": 3,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [],
    },
}

_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": FRAMES,
    "merge_size": MERGE,
    "min_pixels": SIDE**2,
    "max_pixels": SIDE**2,
    "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build(folder: Path, weights: Path = WEIGHTS) -> None:
    """Write the model into the existing `folder`. Raises ConversionFailed where there are no weights."""
    tokenizer = weights.with_suffix(".tokenizer.json")
    if not weights.is_file() or not tokenizer.is_file():
        raise ConversionFailed(f"{weights} is missing: train it with python -m service.models.vision.train")
    shutil.copyfile(weights, folder / "model.safetensors")
    # Not trained anew: another version of the library might number the words otherwise than the weights know them.
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    write_json(folder / "tokenizer_config.json", tokens.tokenizer_config())
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {key: CONFIG[key] for key in ("eos_token_id", "pad_token_id")})
    write_json(folder / "preprocessor_config.json", _PREPROCESSOR)


def write_weights(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Store trained parameters as float16, in upstream's names and shapes, and the tokenizer beside them."""
    tensors = [
        Tensor(name=name, shape=tuple(value.shape), load=partial(np.asarray, value, dtype=np.float32))
        for name, value in values.items()
    ]
    safetensors_file.write(path, tensors, "float16")
    tokens.build_tokenizer().save(str(path.with_suffix(".tokenizer.json")))
