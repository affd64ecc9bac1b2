"""One GGUF file to one MLX model folder. Owns the folder's file names; weights and tokenizer have their modules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from service.models import gguf_tokenizer, gguf_weights, safetensors_file
from service.models.progress import Progress


def convert_gguf(source: Path, folder: Path, *, dtype: str, progress: Progress) -> None:
    """Write config, weights (as `dtype`) and tokenizer of `source` into the existing `folder`.

    Raises ConversionFailed for an architecture, a tensor or a tokenizer that it does not know.
    """
    reader = gguf.GGUFReader(source)
    config = gguf_weights.model_config(reader, dtype)
    write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", tokens)
    gguf_tokenizer.build_tokenizer(reader).save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(reader))
    safetensors_file.write(
        folder / "model.safetensors",
        gguf_weights.tensors(reader),
        dtype,
        lambda done, total: progress.bytes("converting", done, total),
    )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
