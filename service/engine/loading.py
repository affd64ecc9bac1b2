"""From a model folder to a model in memory. Owns dtype, layout and fingerprint; runs on the engine thread.

The fingerprint names everything that a stored state depends on: weights, tokenizer, template, adapter, compute dtype,
cache layout, and the versions of the code that computes. Another fingerprint never reads the state.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from kvcache.layout import CacheLayout
from service.engine import cpu
from service.footprint import Footprint
from service.media import Preparer

log = logging.getLogger("kvfork.loading")

_READ = 1 << 22
_SAMPLE, _SAMPLES = 1 << 16, 64  # bytes, and how many of them are looked at in a large file
STATE_VERSION = "kvfork-state-3"  # counts the changes of our own that give other bits
ARITHMETIC = ("compute dtype", "accelerator", "processor", "MLX compilation", "BLAS", "BLAS code path")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the service needs to know of a loaded model."""

    layout: CacheLayout
    fingerprint: str
    context_tokens: int
    vocab_size: int
    footprint: Footprint
    temperature: float | None
    top_p: float | None
    top_k: int | None
    preparer: Preparer | None = None  # of a model that sees images
    parts: Mapping[str, str] = field(default_factory=dict)  # of the fingerprint, so that a difference can be told


def load(folder: Path):
    """(model, ModelFacts); the model is upstream's, or `Calls` where it sees images.

    Raises UnsupportedLayer and UnsupportedVision by name, or upstream's error on a folder that is no model.
    """
    mx = cpu.mlx()
    from mlx.utils import tree_flatten, tree_map

    from service.engine import few_rows
    from service.engine.probe import probe
    from service.engine.upstream import load_model
    from service.engine.vision import loading as vision

    report = cpu.prepare()
    family = vision.vision_family(folder)
    preparer = opened = None
    if family is None:
        model, config = load_model(folder, lazy=True)
    else:
        model, config, preparer, opened = vision.load(folder, family)
    if report.compute_dtype == "float32" and "quantization" not in config:
        # Half precision products are fifty times slower on a CPU.
        model.update(
            tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
        )
    mx.eval(model.parameters())
    if report.blas is not None:
        few_rows.adopt(model if family is None else model.language_model)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    vocab_size = _vocab_size(model, config)
    if family is not None:
        model = vision.calls(model, family, opened)
    probed = probe(model)
    layout = probed.layout
    if preparer is not None:
        layout = replace(layout, whole_images=preparer.whole_images)
    if layout.alone:
        log.warning("rows decode in one model call each: %s", layout.alone)
    generation = _generation_config(folder)
    text = config.get("text_config", config)
    arithmetic = (report.compute_dtype or "stored", *cpu.arithmetic())
    packages = () if family is None else ("mlx-vlm", "numpy")
    facts = ModelFacts(
        layout=layout,
        fingerprint=fingerprint_of(folder, layout, arithmetic, packages),
        parts=parts_of(folder, layout, arithmetic, packages),
        context_tokens=int(text.get("max_position_embeddings") or 4096),
        vocab_size=vocab_size,
        footprint=replace(probed.footprint, weights=weights),
        temperature=generation.get("temperature"),
        top_p=generation.get("top_p"),
        top_k=generation.get("top_k"),
        preparer=preparer,
    )
    return model, facts


def fingerprint_of(folder: Path, layout: CacheLayout, arithmetic: Sequence[str], packages: Sequence[str] = ()) -> str:
    """32 hex digits over every file of the model that decides its state, and what computes it.

    `arithmetic`: dtype and what else of this machine decides last bits; `packages` compute besides mlx and mlx-lm.
    """
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(_READ):
                digest.update(block)
    versions = [version(name) for name in ("mlx", "mlx-lm", *packages)]
    for fact in (layout.describe(), *arithmetic, *versions, STATE_VERSION):
        digest.update(b"\0" + fact.encode())
    return digest.hexdigest()[:32]


def parts_of(
    folder: Path, layout: CacheLayout, arithmetic: Sequence[str], packages: Sequence[str] = ()
) -> dict[str, str]:
    """What `fingerprint_of` is over, part by part, so that a later start can tell which of them differs.

    Of large files a sample is looked at: this tells models apart for a message, the fingerprint does for state.
    """
    digests = {part: hashlib.sha256() for part in ("weights", "tokenizer", "template", "settings")}
    for path in _files(folder):
        digest = digests[_part_of(path.name)]
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE))
    parts = {part: digest.hexdigest()[:16] for part, digest in digests.items()}
    parts["cache format"] = f"{layout.describe()} {STATE_VERSION}"
    parts |= dict(zip(ARITHMETIC, arithmetic, strict=False))
    return parts | {name: version(name) for name in ("mlx", "mlx-lm", *packages)}


def _files(folder: Path) -> list[Path]:
    """The files that decide a model's state, by name."""
    suffixes = (".safetensors", ".json", ".jinja", ".model", ".txt")
    return [path for path in sorted(folder.iterdir()) if path.suffix in suffixes and path.name != "kvfork.json"]


def _part_of(name: str) -> str:
    if name.endswith(".jinja") or name == "chat_template.json":
        return "template"
    if name.endswith(".safetensors") or name in ("config.json", "model.safetensors.index.json"):
        return "weights"
    return "settings" if name == "generation_config.json" else "tokenizer"


def _generation_config(folder: Path) -> dict:
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    config = json.loads(path.read_text())
    return config if config.get("do_sample", True) else {"temperature": 0.0}


def _vocab_size(model, config: dict) -> int:
    """The number of logits, which may exceed the tokenizer's vocabulary."""
    for part in (config.get("text_config") or {}, config):
        if part.get("vocab_size"):
            return int(part["vocab_size"])
    args = model.args if hasattr(model, "args") else model.config.text_config
    return int(args.vocab_size)
