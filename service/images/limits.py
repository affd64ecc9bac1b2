"""What is refused of images. Owns the bounds, and what a refusal is called."""

from __future__ import annotations

from dataclasses import dataclass

CALL_PICTURES = 4  # a call's images may have this many times the pixels of the largest one
MAX_SIDE = 65_535  # pixels; what JPEG can say, and more than any model looks at
MAX_SCANS = 100  # of a progressive JPEG; encoders write about ten
SCAN_WORK = 16  # scans × pixels may be this many times the most pixels

INVALID = "IMAGE_INVALID"
UNSUPPORTED = "IMAGE_UNSUPPORTED"
TOO_LARGE = "IMAGE_TOO_LARGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Of one image, unless it says otherwise."""

    max_bytes: int
    max_pixels: int

    @property
    def call_pixels(self) -> int:
        """Of all images of one call."""
        return CALL_PICTURES * self.max_pixels
