"""From a model folder to a model that sees images. Owns the decision whether a folder is one, and refusals by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from service.engine.vision import upstream
from service.engine.vision.families import FAMILIES, Family, Opens, opens
from service.extras import install
from service.models import safetensors_file

if TYPE_CHECKING:
    from service.engine.vision.model import VisionCalls

log = logging.getLogger("kvfork.loading")

_TOWERS = ("vision_tower", "vision_model", "vision_encoder", "visual.", "embed_vision", "vision_embed_tokens")


class UnsupportedVision(ValueError):
    """The folder is a vision model that cannot be served as one."""


def vision_family(folder: Path) -> Family | None:
    """The family of a folder that is to be served with images; None: it is a text model, or is served as one.

    Raises UnsupportedVision: the family is not served, neither with images nor as text, or what it needs is not here.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str(config.get("model_type"))
    if not config.get("vision_config"):
        return None
    if not _has_tower(folder):
        log.info("%s: the folder has no weights of a vision part; served as text", name)
        return None
    family = FAMILIES.get(name)
    if family is not None:
        if not upstream.installed():
            raise UnsupportedVision(f"{name} is a vision model, and mlx-vlm is not installed: {install('vision')}")
        return family
    if upstream.text_family(config):
        log.warning("%s: images of this family are not served; served as text (with images: %s)", name, _served())
        return None
    raise UnsupportedVision(f"the vision family {name} is not served; those that are: {_served()}")


def load(folder: Path, family: Family):
    """(upstream's model, its weights not read yet; the config; its preparer; which layers open an image)."""
    from service.engine.vision.prepare import UpstreamPreparer

    model = upstream.load_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    opened = opens(family, config)
    image_id = upstream.image_token_id(model.config)
    return model, config, UpstreamPreparer(folder, str(config["model_type"]), family, image_id, opened), opened


def calls(model, family: Family, opened: Opens) -> VisionCalls:
    """The loaded model as the engine calls it."""
    from service.engine.vision.model import VisionCalls

    merge = int(model.config.vision_config.spatial_merge_size) if family.three_axes else 0
    return VisionCalls(model, image_id=upstream.image_token_id(model.config), opens=opened, merge=merge)


def _has_tower(folder: Path) -> bool:
    names = (name for shard in sorted(folder.glob("*.safetensors")) for name in safetensors_file.names(shard))
    return any(mark in name for name in names for mark in _TOWERS)


def _served() -> str:
    return ", ".join(sorted(FAMILIES))
