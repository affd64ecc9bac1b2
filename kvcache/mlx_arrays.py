"""MLX arrays ⇄ record payloads. The package's only MLX import; runs on the thread that owns MLX.

Only host bytes leave here: an encoded payload shares no buffer with any MLX array, so the writer thread never touches
MLX and the array it came from may be changed or freed at once.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvcache.codec import ArrayBytes, PayloadError, decode, encode

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.int64: "I64",
    mx.int16: "I16",
    mx.uint16: "U16",
    mx.int8: "I8",
    mx.uint8: "U8",
    mx.bool_: "BOOL",
}
_NUMPY = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # numpy has no bfloat16: the bits travel as they are
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "I16": np.int16,
    "U16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def to_payload(arrays: dict[str, mx.array]) -> bytearray:
    """Evaluates `arrays` and copies them into one payload. Raises TypeError on a dtype that records do not carry."""
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise TypeError(f"{name}: records do not carry {array.dtype}")
    mx.eval(list(arrays.values()))
    parts: dict[str, ArrayBytes] = {}
    for name, array in arrays.items():
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        host = np.ascontiguousarray(np.asarray(bits))
        parts[name] = ArrayBytes(_NAMES[array.dtype], tuple(array.shape), memoryview(host.reshape(-1).view(np.uint8)))
    return encode(parts)


def views(payload: bytes | bytearray | memoryview) -> dict[str, ArrayBytes]:
    """The arrays of a payload where they lie, nothing copied; each can be given to `to_array`. Raises PayloadError."""
    parts = decode(payload)
    for name, part in parts.items():
        if part.dtype not in _NUMPY:
            raise PayloadError(f"{name}: unknown dtype {part.dtype}")
    return parts


def to_array(part: ArrayBytes) -> mx.array:
    """One of `views`, copied into MLX's own memory."""
    host = np.frombuffer(part.data, dtype=_NUMPY[part.dtype]).reshape(part.shape)
    array = mx.array(host)
    return array.view(mx.bfloat16) if part.dtype == "BF16" else array


def from_payload(payload: bytes | bytearray | memoryview) -> dict[str, mx.array]:
    """The arrays of a payload, copied into MLX's own memory. Raises PayloadError."""
    return {name: to_array(part) for name, part in views(payload).items()}
