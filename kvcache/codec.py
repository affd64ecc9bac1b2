"""Record payloads. Owns the bytes of named arrays: the safetensors layout, written with one copy and read with none.

A payload is a valid safetensors file, so any tool can open a record that was decrypted. Arrays cross this seam as
(dtype name, shape, buffer); what they mean is the engine's business.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_LENGTH = struct.Struct("<Q")

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class PayloadError(ValueError):
    """The bytes are not a payload."""


@dataclass(frozen=True, slots=True)
class ArrayBytes:
    """One array, C order, little-endian."""

    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    data: memoryview


def encode(arrays: Mapping[str, ArrayBytes]) -> bytearray:
    """One payload holding `arrays` by name."""
    header: dict[str, object] = {}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.data.nbytes],
        }
        offset += array.data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    payload = bytearray(_LENGTH.size + len(text) + offset)
    _LENGTH.pack_into(payload, 0, len(text))
    at = _LENGTH.size
    payload[at : at + len(text)] = text
    at += len(text)
    view = memoryview(payload)
    for array in arrays.values():
        view[at : at + array.data.nbytes] = array.data.cast("B")
        at += array.data.nbytes
    return payload


def decode(payload: bytes | bytearray | memoryview) -> dict[str, ArrayBytes]:
    """The arrays of a payload, as views into it. Raises PayloadError on anything that does not add up."""
    view = memoryview(payload).cast("B")
    if len(view) < _LENGTH.size:
        raise PayloadError("shorter than its length field")
    (length,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + length
    if start > len(view):
        raise PayloadError("header reaches past the end")
    try:
        header = json.loads(bytes(view[_LENGTH.size : start]))
        arrays: dict[str, ArrayBytes] = {}
        for name, entry in header.items():
            dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            begin, end = entry["data_offsets"]
            size = ITEM_BYTES[dtype]
            for n in shape:
                size *= n
            if not 0 <= begin <= end <= len(view) - start or end - begin != size or min(shape, default=0) < 0:
                raise PayloadError(f"array {name!r} does not fit its bytes")
            arrays[name] = ArrayBytes(dtype, shape, view[start + begin : start + end])
    except PayloadError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise PayloadError(f"header is not a safetensors header: {error}") from error
    return arrays
