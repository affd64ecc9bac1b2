"""One GGUF file to one MLX model folder. Owns the folder's file names; weights and tokenizers have their own modules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from service.models import gguf_tokenizer, gguf_weights


def convert_gguf(source: Path, folder: Path, *, dtype: str) -> None:
    """Write config, weights and tokenizer of `source` into the existing `folder`. ConversionFailed says what is unknown."""
    reader = gguf.GGUFReader(source)
    config = gguf_weights.model_config(reader, dtype)
    write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", tokens)
    gguf_tokenizer.build_tokenizer(reader).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(reader))
    save_weights(folder, dict(gguf_weights.weights(reader, np.dtype(dtype))))


def save_weights(folder: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write the folder's one weights file."""
    save_file(dict(weights), str(folder / "model.safetensors"), metadata={"format": "mlx"})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
