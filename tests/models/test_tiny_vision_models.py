"""The tiny vision models: the same bytes each time, and a processor whose ids are those of the engine's preparer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from service.engine import cpu
from service.models import KNOWN, resolve
from service.models.progress import Quiet
from service.models.registry import TinyVisionModel

cpu.mlx()

pytest.importorskip("mlx_vlm")

from service.engine.vision import upstream  # noqa: E402
from service.engine.vision.loading import load, vision_family  # noqa: E402
from service.media import ImageRefused, Picture  # noqa: E402
from service.models.tiny_vision import build_tiny_vision  # noqa: E402

pytestmark = pytest.mark.mlx

NAMES = [name for name, model in KNOWN.items() if isinstance(model, TinyVisionModel)]

# From integers alone, so every machine makes the same; a change of recipe raises the generator's version.
WEIGHTS_SHA256 = {
    "tiny-qwen3_5-vl": "9f354412e7afa6d020d684aec784e82b97fa94796c3ea0b11939c254c5b680be",
    "tiny-qwen3-vl": "1f73a79074f98be8b67a079671d63e0969debf4038b1ca7ac15415b2d479d450",
    "tiny-gemma3-vl": "8b5058c954d5575cf1438e7b7cbd36d7b3ae9a3931ea62a4873f025e9de61bcf",
    "tiny-gemma4-vl": "18a37e44851d9e86b825d35b8d64ecac701574b7135e93069417867aac90436a",
    "tiny-smolvlm": "2855d522108db8dadc83fd3dbbcb4bdded14aafda523464e572ab508b3fc0efc",
    "tiny-mistral3": "5ad719483213141fa03fff5c43bd1a072c1724b4473bc138b7a3f9fca0206761",
    "tiny-lfm2-vl": "56298cfe7922cbd2a2f6baeac79a1922c76dfc04a64bea36138e79308550d83e",
    "tiny-llava": "4c948d48a96dc58acae6fe458ace62f6d6828cffb871ff9795bc53175c8bccec",
}


def picture(width: int, height: int) -> Picture:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3)).astype(np.uint8)
    return Picture(pixels=pixels, digest=hashlib.sha256(pixels.tobytes()).digest())


def preparer_of(name: str):
    folder = resolve(name, progress=Quiet())
    family = vision_family(folder)
    assert family is not None
    return load(folder, family)[2]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes_each_time(name: str, tmp_path: Path) -> None:
    kept = resolve(name, progress=Quiet())
    build_tiny_vision(name, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} | {"kvfork.json"} == {path.name for path in kept.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (kept / path.name).read_bytes(), path.name
    assert hashlib.sha256((kept / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_with_images_has_the_ids_that_the_processor_gives_it(name: str) -> None:
    """The template's marker becomes what is written, that text is tokenized, and the span replaces the marker."""
    from PIL import Image

    preparer = preparer_of(name)
    processor = upstream.load_processor(resolve(name, progress=Quiet()), _model_type(name))
    tokenizer = processor.tokenizer
    content = [
        {"type": "text", "text": "Which is the larger?\n"},
        {"type": "image"},
        {"type": "text", "text": "\nThis?"},
    ]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert text.count(preparer.marker) == 1
    pixels = picture(96, 64)
    ids: list[int] = []
    for token in tokenizer(text.replace(preparer.marker, preparer.written), add_special_tokens=False)["input_ids"]:
        ids += preparer.prepare(pixels).ids if token == preparer.marker_id else [token]
    theirs = processor(text=text, images=[Image.fromarray(pixels.pixels)])["input_ids"]
    assert ids == np.asarray(theirs).reshape(-1).tolist()
    assert preparer.placeholder_id in ids


@pytest.mark.parametrize("name", NAMES)
def test_pictures_of_extreme_shapes_are_prepared_as_the_processor_does(name: str) -> None:
    preparer = preparer_of(name)
    for width, height in ((40, 33), (640, 17), (33, 57), (500, 400)):
        prepared = preparer.prepare(picture(width, height))
        assert prepared.key == preparer.prepare(picture(width, height)).key
        assert prepared.inputs is not None
        assert preparer.placeholder_id in prepared.ids


def test_a_picture_that_takes_too_few_positions_is_refused() -> None:
    with pytest.raises(ImageRefused, match="an image of 1 x 1 pixels takes 2 positions only") as caught:
        preparer_of("tiny-mistral3").prepare(picture(1, 1))
    assert caught.value.reason == "IMAGE_SHAPE"


def test_a_key_names_pixels_and_settings() -> None:
    one, other = preparer_of("tiny-qwen3-vl"), preparer_of("tiny-qwen3_5-vl")
    keys = {preparer.prepare(picture(*size)).key for preparer in (one, other) for size in ((64, 64), (65, 64))}
    assert len(keys) == 4


def _model_type(name: str) -> str:
    from service.models.tiny_vision import RECIPES

    return str(RECIPES[name].config["model_type"])
