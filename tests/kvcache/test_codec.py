"""A payload gives back the arrays it was made of, is a safetensors file, and is refused if it does not add up."""

from __future__ import annotations

import json
import random
import struct

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy

from kvcache.codec import ITEM_BYTES, ArrayBytes, PayloadError, decode, encode
from kvcache.mlx_arrays import from_payload, to_payload

DTYPES = [
    mx.float32, mx.float16, mx.bfloat16, mx.int64, mx.int32, mx.int16, mx.int8,
    mx.uint32, mx.uint16, mx.uint8, mx.bool_,
]  # fmt: skip


def array(dtype: str, *shape: int) -> ArrayBytes:
    size = ITEM_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
    return ArrayBytes(dtype, shape, memoryview(bytes(n * 7 % 256 for n in range(size))))


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_arrays_come_back_as_views_of_the_payload() -> None:
    arrays = {
        "scalar": array("F64"),
        "0.k": array("F32", 1, 2, 3),
        "empty": array("F16", 0, 5),
        "snow ❄": array("BOOL", 9),
    }
    payload = encode(arrays)
    back = decode(payload)
    assert {name: (a.dtype, a.shape, bytes(a.data)) for name, a in back.items()} == {
        name: (a.dtype, a.shape, bytes(a.data)) for name, a in arrays.items()
    }
    assert list(back) == list(arrays)
    payload[-1] ^= 255
    assert bytes(back["snow ❄"].data) != bytes(arrays["snow ❄"].data)
    assert decode(encode({})) == {}


def test_a_payload_is_a_safetensors_file() -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    payload = encode({"x": ArrayBytes("F32", (3, 4), memoryview(numbers).cast("B"))})
    assert np.array_equal(safetensors.numpy.load(bytes(payload))["x"], numbers)
    ours = decode(safetensors.numpy.save({"x": numbers}))
    assert (ours["x"].shape, bytes(ours["x"].data)) == ((3, 4), numbers.tobytes())


def test_array_data_is_aligned() -> None:
    for length in range(1, 20):
        payload = encode({"n" * length: array("F64", 2)})
        (header,) = struct.unpack_from("<Q", payload)
        assert (8 + header) % 8 == 0


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\x00" * 7,
        raw(b"{}")[:9],
        struct.pack("<Q", 1 << 63) + b"{}",
        raw(b"[]"),
        raw(b"3"),
        raw(b"{"),
        raw(b"\xff\xfe"),
        raw(b"[" * 100_000),
        raw({"a": 3}),
        raw({"a": {}}),
        raw(entry(dtype="F8"), bytes(4)),
        raw(entry(dtype=["F32"]), bytes(4)),
        raw(entry(shape=(2,)), bytes(4)),
        raw(entry(shape=(-1,), offsets=(4, 0)), bytes(4)),
        raw(entry(shape=(-1, -1)), bytes(4)),
        raw(entry(shape="x"), bytes(4)),
        raw(entry(offsets=(0, 4, 8)), bytes(8)),
        raw(entry(offsets=(0, 8)), bytes(4)),
        raw(entry(offsets=(-4, 0)), bytes(4)),
        raw(entry(offsets=(0.0, 4.0)), bytes(4)),
        raw(entry(offsets="04"), bytes(4)),
        raw(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', bytes(4)),
    ],
)
def test_what_does_not_add_up_is_refused(wrong: bytes) -> None:
    with pytest.raises(PayloadError):
        decode(wrong)


def test_damage_never_raises_anything_else() -> None:
    rng = random.Random(3)
    good = bytes(encode({"0.k": array("F32", 1, 2, 3), "0.v": array("BF16", 4), "logits": array("F32", 1, 7)}))
    refused = 0
    for _ in range(5_000):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.choice([rng.randrange(256), ord("0"), ord("-"), ord('"')])
        if rng.random() < 0.3:
            del bad[rng.randrange(len(bad)) :]
        try:
            arrays = decode(bad)
        except PayloadError:
            refused += 1
        else:
            for part in arrays.values():
                assert part.data.nbytes == ITEM_BYTES[part.dtype] * int(np.prod(part.shape, dtype=np.int64))
    assert 1_000 < refused < 5_000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlx_arrays_come_back_bit_for_bit(dtype: mx.Dtype) -> None:
    source = (mx.random.uniform(shape=(2, 3, 8), key=mx.random.key(1)) * 200 - 50).astype(dtype)
    arrays = {"whole": source, "slice": source[:, 1:, ::2], "turned": source.transpose(2, 0, 1), "empty": source[:0]}
    back = from_payload(to_payload(arrays))
    for name, value in arrays.items():
        assert (back[name].dtype, back[name].shape) == (dtype, value.shape)
        assert mx.array_equal(back[name], value)


def test_special_values_keep_their_bits() -> None:
    bits = mx.array([0x7F80, 0xFF80, 0x7FC1, 0xFFC1, 0x8000, 0x0001, 0x7F7F], dtype=mx.uint16)
    back = from_payload(to_payload({"x": bits.view(mx.bfloat16)}))["x"]
    assert back.view(mx.uint16).tolist() == bits.tolist()


def test_a_payload_shares_no_memory_with_the_array_it_came_from() -> None:
    source = mx.arange(8, dtype=mx.float32)
    payload = to_payload({"x": source})
    before = bytes(payload)
    source[3] = 99.0
    mx.eval(source)
    assert bytes(payload) == before
    restored = from_payload(payload)["x"]
    payload[-4:] = b"\xff" * 4
    assert restored.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_dtypes_that_records_do_not_carry_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"2\.v: .*complex64"):
        to_payload({"2.v": mx.array([1j])})
    with pytest.raises(PayloadError, match="x: unknown dtype F64"):
        from_payload(encode({"x": array("F64", 1)}))
