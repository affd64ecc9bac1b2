"""The one home of mlx-vlm names that are not documented API; `tests/engine/test_vision_upstream.py` is its contract.

mlx-vlm is imported when a model needs it and not before: a server of text models runs without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from service.engine import cpu

PADDING_MATTERS = {
    "mlx_vlm.models.mistral3.language.Ministral3": "attention is scaled for all rows by the place of the first of them",
}
"""Bodies that compute something else for a row beside others once one of them is long: no short call shows it."""

_NOT_THE_IMAGE = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
"""What processors give besides the image: the text around it."""

# Ahead of any family's own copy: these files decide what a processor makes of a picture.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "config.json")


def installed() -> bool:
    """Whether mlx-vlm is here."""
    return importlib.util.find_spec("mlx_vlm") is not None


def text_family(config: dict) -> bool:
    """Whether mlx-lm has a text model for this configuration."""
    from mlx_lm.utils import _get_classes

    try:
        _get_classes(config)
    except ValueError:
        return False
    return True


def load_model(folder: Path):
    """The model with its weights not read yet, through the family's own sanitizers."""
    from mlx_vlm.utils import load_model as load

    return load(folder, lazy=True)


def build(config: dict):
    """A model of a configuration, with the values that upstream's classes begin with."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config = json.loads(json.dumps(config))  # the classes change what they are given
    family, _ = get_model_and_args(config)
    made = family.ModelConfig.from_dict(config)
    made = update_module_configs(made, family, config, ["text", "vision", "perceiver", "projector", "audio"])
    return family.Model(made)


def load_processor(folder: Path, model_type: str):
    """The family's processor: image side and tokenizer, without torch."""
    from mlx_vlm.utils import load_image_processor
    from transformers import AutoProcessor

    importlib.import_module(f"mlx_vlm.models.{model_type}")  # its processor is known once it is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the sides of it that hear and read videos
        processor = AutoProcessor.from_pretrained(folder)
    own = load_image_processor(folder)
    if own is not None:
        processor.image_processor = own
    return processor


def image_inputs(processor, text: str, image) -> tuple[list[int], dict[str, np.ndarray]]:
    """(ids, arrays) that a processor makes of `text` with one image in it; `image` is a PIL one."""
    if _one_side_for_all(processor):
        made = processor(text=text, images=[image])
    else:
        made = processor(text=text, images=[image], add_special_tokens=False)
    ids = np.asarray(made["input_ids"]).reshape(-1).tolist()
    if ids[0] == processor.tokenizer.bos_token_id:
        ids = ids[1:]
    if ids[-1] == processor.tokenizer.eos_token_id:
        ids = ids[:-1]
    arrays = {
        name: np.asarray(value) for name, value in made.items() if name not in _NOT_THE_IMAGE and value is not None
    }
    return ids, arrays


def _one_side_for_all(processor) -> bool:
    """Whether it hands the keywords for its tokenizer to its image side too, which refuses them."""
    return type(processor).__name__ == "LlavaProcessor"


def language_model(model):
    """The part that is called with tokens and caches."""
    return model.language_model


def why_alone(model) -> str:
    """Why rows of this model must not share a decode call though short ones could; empty if they may."""
    body = type(getattr(language_model(model), "model", model))
    return PADDING_MATTERS.get(f"{body.__module__}.{body.__qualname__}", "")


def image_token_id(config) -> int:
    """The id that stands at image positions."""
    for name in ("image_token_id", "image_token_index"):
        with suppress(AttributeError):
            value = getattr(config, name)
            if value is not None:
                return int(value)
    raise ValueError("the model's configuration names no image token")


def embeddings(model, ids: mx.array, inputs: Mapping[str, mx.array]):
    """What goes into the language model for `ids` (1, n); `inputs` of the one image among them, or none."""
    if not inputs:
        return model.get_input_embeddings(ids)
    more = dict(inputs)
    pixels = more.pop("pixel_values")
    return model.get_input_embeddings(ids, pixels, mask=mx.ones(ids.shape, dtype=mx.int32), **more)


@contextmanager
def attention_by(attend: Callable[..., mx.array]) -> Iterator[None]:
    """Inside, models call `attend(fused, ...)` in place of `fused`, MLX's own attention. For the engine thread alone.

    Nothing is compiled meanwhile: upstream has attention in a compiled function, whose values are not there to look at.
    """
    fused = mx.fast.scaled_dot_product_attention
    mx.disable_compile()
    mx.fast.scaled_dot_product_attention = partial(attend, fused)
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = fused
        if cpu.prepare().compile_enabled:
            mx.enable_compile()


def prompt_caches(model) -> list:
    """Fresh caches for one row."""
    from mlx_vlm.models.cache import make_prompt_cache

    return make_prompt_cache(language_model(model))


def logits_of(output) -> mx.array:
    """Logits (rows, positions, vocab) of what a language model returned."""
    return output.logits
