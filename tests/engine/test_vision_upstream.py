"""What the vision engine takes for granted of mlx-vlm, and which folders it takes."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from service.engine import cpu

cpu.mlx()

pytest.importorskip("mlx_vlm")

from service.engine.vision import upstream  # noqa: E402
from service.engine.vision.families import FAMILIES, Opens, opens  # noqa: E402
from service.engine.vision.loading import UnsupportedVision, vision_family  # noqa: E402
from service.models.safetensors_file import Tensor, write  # noqa: E402

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_embeddings_of_its_own_and_a_language_model(name: str) -> None:
    from mlx_vlm.utils import get_model_and_args

    family, found = get_model_and_args({"model_type": name})
    assert found == name
    assert {"input_ids", "pixel_values"} <= inspect.signature(family.Model.get_input_embeddings).parameters.keys()
    call = inspect.signature(family.LanguageModel.__call__).parameters
    assert {"inputs", "inputs_embeds", "cache"} <= call.keys()
    if FAMILIES[name].three_axes:
        assert "position_ids" in inspect.getsource(family.LanguageModel.__call__)


def test_embeddings_come_with_what_the_calls_pass_on() -> None:
    from mlx_vlm.models.base import InputEmbeddingsFeatures, LanguageModelOutput

    made = InputEmbeddingsFeatures.__dataclass_fields__.keys()
    assert {"inputs_embeds", "deepstack_visual_embeds", "visual_pos_masks", "per_layer_inputs"} <= made
    assert "logits" in LanguageModelOutput.__dataclass_fields__


def test_the_batched_caches_have_the_fields_that_rows_are_read_by() -> None:
    from mlx_vlm.models import cache as caches

    full, window = caches.BatchKVCache([0]), caches.BatchRotatingKVCache(8, [0])
    assert {"keys", "values", "_idx", "left_padding", "offset"} <= vars(full).keys()
    assert {"keys", "values", "_idx", "left_padding", "offset", "max_size", "rotated"} <= vars(window).keys()
    for kind in (caches.KVCache, caches.RotatingKVCache):
        assert callable(kind.merge)
    for kind in (caches.BatchKVCache, caches.BatchRotatingKVCache, caches.ArraysCache):
        assert all(callable(getattr(kind, name)) for name in ("extend", "filter", "extract"))


@pytest.mark.parametrize("name", upstream.PADDING_MATTERS)
def test_the_bodies_whose_rows_stay_apart_exist_under_these_names(name: str) -> None:
    module, _, bare = name.rpartition(".")
    assert hasattr(importlib.import_module(module), bare)


def test_gemma_4_opens_images_only_where_its_configuration_says_so() -> None:
    family = FAMILIES["gemma4"]
    assert opens(family, {"text_config": {"use_bidirectional_attention": "vision"}}) is Opens.WINDOWS
    assert opens(family, {"text_config": {"use_bidirectional_attention": None}}) is Opens.NO_LAYER
    assert opens(FAMILIES["gemma3"], {}) is Opens.EVERY_LAYER


# -- folders


def folder_of(path: Path, config: dict, *tensors: str) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    parts = [Tensor(name=name, shape=(1,), load=lambda: np.zeros(1, np.float32)) for name in tensors]
    write(path / "model.safetensors", parts, "float32")
    return path


def test_a_folder_without_a_vision_part_or_without_its_weights_is_text(tmp_path: Path) -> None:
    assert vision_family(folder_of(tmp_path, {"model_type": "qwen3_5"}, "visual.x")) is None
    config = {"model_type": "gemma3", "vision_config": {"hidden_size": 1}}
    assert vision_family(folder_of(tmp_path, config, "language_model.model.norm.weight")) is None
    assert vision_family(folder_of(tmp_path, config, "vision_tower.x")) is FAMILIES["gemma3"]


def test_a_family_that_only_mlx_lm_has_is_served_as_text_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, {"model_type": "gemma3n", "vision_config": {"x": 1}}, "vision_tower.x")
    with caplog.at_level(logging.WARNING):
        assert vision_family(folder) is None
    assert "gemma3n: images of this family are not served; served as text" in caplog.text


def test_a_family_that_nobody_serves_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"model_type": "florence2", "vision_config": {"x": 1}}, "vision_tower.x")
    with pytest.raises(UnsupportedVision, match="the vision family florence2 is not served; those that are: gemma3, "):
        vision_family(folder)


def test_without_mlx_vlm_a_vision_model_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "installed", lambda: False)
    folder = folder_of(tmp_path, {"model_type": "llava", "vision_config": {"x": 1}}, "vision_tower.x")
    with pytest.raises(
        UnsupportedVision, match=r"mlx-vlm is not installed: pip install -e '\.\[vision\]' in a clone of kvfork"
    ):
        vision_family(folder)
