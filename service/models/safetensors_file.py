"""The safetensors container: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.

Owns writing one tensor after another (so a conversion never holds a whole model) and checking a file's shape.
The bytes written depend on the tensors alone, not on a library's version.
"""

import contextlib
import dataclasses
import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from service.models.errors import BadModelFolder, ConversionFailed

_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]
    """Returns the float32 values, row-major; called once, when its turn comes."""


def write(path: Path, tensors: Sequence[Tensor], dtype: str, report: Callable[[int, int], None] | None = None) -> None:
    """Write `tensors` as `dtype` (`float32`, `float16` or `bfloat16`), sorted by name, each rounded once to nearest.

    `report` hears of (bytes written, bytes in all). Raises ConversionFailed for a value that does not fit.
    """
    code, width = _DTYPES[dtype]
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + width * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        done = 0
        for tensor in ordered:
            values = tensor.load()
            if values.shape != tensor.shape:
                raise ConversionFailed(f"{tensor.name} has shape {values.shape}, expected {tensor.shape}")
            done += file.write(_round(tensor.name, values, dtype).tobytes())
            if report:
                report(done, end)


def check(path: Path) -> None:
    """Raise BadModelFolder unless the header parses and the tensors end where the file does; reads no tensor."""
    size = path.stat().st_size
    with path.open("rb") as file, contextlib.suppress(struct.error, ValueError, LookupError, TypeError, AttributeError):
        (length,) = struct.unpack("<Q", file.read(8))
        if 8 + length <= size:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            if 8 + length + max(entry["data_offsets"][1] for entry in header.values()) == size:
                return
    raise BadModelFolder(f"{path} is damaged or cut short ({size:,} bytes)")


def names(path: Path) -> list[str]:
    """The tensors' names, from the header alone. Raises BadModelFolder."""
    check(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return [name for name in json.loads(file.read(length)) if name != "__metadata__"]


def _round(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 to the stored dtype, little-endian; bfloat16 comes back as its 16 bits, which numpy has no type for."""
    if not np.isfinite(values).all():
        raise ConversionFailed(f"{name} holds a value that is not finite")
    if dtype == "float32":
        return values.astype("<f4", copy=False)
    if dtype == "float16":
        if np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
            raise ConversionFailed(f"{name} holds a value beyond float16")
        return values.astype("<f2")
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Round to nearest, ties to even; finite values this far below the largest float32 can't overflow.
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
