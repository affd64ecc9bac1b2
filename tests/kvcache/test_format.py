"""The layout of segments and records: round trips, refusal of everything else, and bytes of version 1 kept for ever."""

from __future__ import annotations

import ast
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache
from kvcache.errors import FormatError
from kvcache.format import (
    FLAG_SEALED,
    MAX_PAYLOAD_BYTES,
    RECORD_HEADER,
    RECORD_OVERHEAD,
    SEGMENT_HEADER,
    RecordHeader,
    SegmentHeader,
    decode_record_header,
    decode_segment_header,
    encode_record_header,
    encode_segment_header,
)
from kvcache.records import RecordId, RecordKind

GOLDEN = Path(__file__).parent / "golden"

SEGMENT = SegmentHeader(number=7, store_id=bytes(range(16)), namespace=bytes(range(32, 64)))
RECORD = RecordHeader(
    record=RecordId(bytes(range(32)), RecordKind.STATE),
    payload_bytes=1000,
    flags=FLAG_SEALED,
    nonce=bytes(range(100, 112)),
    key_id=3,
)


def with_crc(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def test_every_struct_format_of_the_package_is_little_endian_and_unpadded() -> None:
    formats = []
    for source in Path(kvcache.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("struct.", "Struct")):
                formats.append((source.name, ast.unparse(node.args[0])))
    assert {name for name, _ in formats} >= {"format.py", "seal.py"}
    assert [found for found in formats if not found[1].startswith("'<")] == []


def test_headers_have_the_documented_sizes() -> None:
    assert (SEGMENT_HEADER.size, RECORD_HEADER.size, RECORD_OVERHEAD) == (64, 64, 80)
    assert MAX_PAYLOAD_BYTES == 2**31 - 81


def test_headers_survive_a_round_trip() -> None:
    assert decode_segment_header(encode_segment_header(SEGMENT)) == SEGMENT
    for kind in RecordKind:
        header = RecordHeader(record=RecordId(bytes(32), kind), payload_bytes=MAX_PAYLOAD_BYTES, flags=0)
        assert decode_record_header(encode_record_header(header)) == header
    assert decode_record_header(encode_record_header(RECORD)) == RECORD


def test_headers_of_version_1_stay_readable() -> None:
    assert decode_segment_header((GOLDEN / "segment_header_v1.bin").read_bytes()) == SEGMENT
    assert decode_record_header((GOLDEN / "record_header_v1.bin").read_bytes()) == RECORD


def test_headers_are_written_as_they_always_were() -> None:
    assert encode_segment_header(SEGMENT) == (GOLDEN / "segment_header_v1.bin").read_bytes()
    assert encode_record_header(RECORD) == (GOLDEN / "record_header_v1.bin").read_bytes()


@pytest.mark.parametrize(
    ("decode", "good"),
    [
        (decode_segment_header, encode_segment_header(SEGMENT)),
        (decode_record_header, encode_record_header(RECORD)),
    ],
    ids=["segment", "record"],
)
def test_a_header_with_any_bit_flipped_or_any_byte_missing_is_refused(decode: object, good: bytes) -> None:
    assert callable(decode)
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            decode(bad)
    for size in range(len(good)):
        with pytest.raises(FormatError, match="bytes where a header has"):
            decode(good[:size])


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"KVSG", "magic"),
        (4, b"\x02", "format version 2"),
        (5, b"\x00", "unknown record kind 0"),
        (5, b"\x84", "unknown record kind 132"),
        (6, b"\x02\x00", "unknown flags 0x2"),
        (12, b"\xff\xff\xff\xff", "beyond the format"),
    ],
)
def test_an_intact_header_of_what_this_version_does_not_know_is_refused_by_name(
    offset: int, value: bytes, reason: str
) -> None:
    body = bytearray(encode_record_header(RECORD)[:-4])
    body[offset : offset + len(value)] = value
    with pytest.raises(FormatError, match=reason):
        decode_record_header(with_crc(bytes(body)))


def test_reserved_bytes_of_a_segment_header_must_be_zero() -> None:
    body = bytearray(encode_segment_header(SEGMENT)[:-4])
    body[6] = 1
    with pytest.raises(FormatError, match="reserved"):
        decode_segment_header(with_crc(bytes(body)))


def test_a_payload_beyond_the_format_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode_record_header(RecordHeader(record=RECORD.record, payload_bytes=MAX_PAYLOAD_BYTES + 1, flags=0))


@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoders_raise_anything_but_a_format_error(data: bytes) -> None:
    for decode in (decode_segment_header, decode_record_header):
        for attempt in (data, with_crc(b"KVRC\x01" + data), with_crc(b"KVSG\x01" + data)):
            try:
                decode(attempt)
            except FormatError:
                continue
            assert len(attempt) >= 64


@given(st.binary(min_size=55, max_size=55))
def test_any_header_that_is_accepted_encodes_to_the_same_bytes(fields: bytes) -> None:
    data = with_crc(b"KVRC\x01" + fields)
    try:
        header = decode_record_header(data)
    except FormatError:
        return
    assert encode_record_header(header) == data
