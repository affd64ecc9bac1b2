"""The vision families that are served, and which mechanism each needs. One that is not here is refused by name."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Opens(enum.Enum):
    """Which layers let an image's tokens see each other both ways."""

    NO_LAYER = "none"
    EVERY_LAYER = "every"
    WINDOWS = "windows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family takes images.

    `marker`: the processor's attribute with the text that a template puts where an image goes; the span in its place
    has all that the processor makes of it. `around`: what a template writes before and behind the marker itself.
    """

    marker: str = "image_token"
    around: tuple[str, str] = ("", "")
    three_axes: bool = False  # rotary places in time, height and width
    opens: Opens = Opens.NO_LAYER


_QWEN = Family(around=("<|vision_start|>", "<|vision_end|>"), three_axes=True)

FAMILIES = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    # Every layer opens an image in Gemma 3, the windows alone in Gemma 4, and only where its configuration says so.
    "gemma3": Family(marker="boi_token", opens=Opens.EVERY_LAYER),
    "gemma4": Family(opens=Opens.WINDOWS),
    "idefics3": Family(),
    "smolvlm": Family(),
    "mistral3": Family(),
    "pixtral": Family(),
    "lfm2_vl": Family(),
    "llava": Family(),
}
"""By `model_type`."""


def opens(family: Family, config: dict) -> Opens:
    """Which layers of a model of this configuration open an image."""
    text = config.get("text_config") or {}
    if family.opens is Opens.WINDOWS and text.get("use_bidirectional_attention") != "vision":
        return Opens.NO_LAYER
    return family.opens
