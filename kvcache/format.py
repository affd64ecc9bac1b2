"""Bytes of segments and records, version 1. Mirror of docs/format.md; owns layout and nothing else: no I/O, no keys.

Every number is little-endian. A reader trusts a header only after its CRC matched, and a payload only after its
trailer did (`kvcache.seal`).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from kvcache.errors import FormatError
from kvcache.records import KEY_BYTES, Buffer, Name, NoteId, NoteKind, RecordId, RecordKind

FORMAT_VERSION = 1

# magic, version, reserved (zero), segment number, store id, namespace digest, CRC32 of the 60 bytes before it
SEGMENT_HEADER = struct.Struct("<4sB3sI16s32sI")
SEGMENT_MAGIC = b"KVSG"

# magic, version, kind, flags, sealing key id, payload bytes, record key, nonce, CRC32 of the 60 bytes before it
RECORD_HEADER = struct.Struct("<4sBBHII32s12sI")
RECORD_MAGIC = b"KVRC"
CRC = struct.Struct("<I")

FLAG_SEALED = 1 << 0  # payload is AES-256-GCM ciphertext, trailer is its tag; otherwise clear text and a CRC32
KNOWN_FLAGS = FLAG_SEALED

NONCE_BYTES = 12
TRAILER_BYTES = 16
RECORD_OVERHEAD = RECORD_HEADER.size + TRAILER_BYTES
MAX_PAYLOAD_BYTES = (1 << 31) - 1 - RECORD_OVERHEAD  # what one AES-GCM call of `cryptography` takes

NO_NAMESPACE = bytes(32)
FIRST_NOTE_KIND = 128  # from here on records describe others


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """First 64 bytes of a segment file."""

    number: int
    store_id: bytes  # 16 random bytes of the store that wrote it
    namespace: bytes = NO_NAMESPACE  # digest of the model fingerprint; zero where the store dies with its process


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """The 64 bytes before a record's payload."""

    record: Name
    payload_bytes: int
    flags: int
    nonce: bytes = bytes(NONCE_BYTES)
    key_id: int = 0  # 0: the store's own key; others are for keys per owner

    @property
    def record_bytes(self) -> int:
        return self.payload_bytes + RECORD_OVERHEAD


def encode_segment_header(header: SegmentHeader) -> bytes:
    body = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, FORMAT_VERSION, bytes(3), header.number, header.store_id, header.namespace, 0
    )[: -CRC.size]
    return body + CRC.pack(zlib.crc32(body))


def decode_segment_header(data: Buffer) -> SegmentHeader:
    """Read and check a segment header; FormatError says what is wrong with it."""
    _check_head(data, SEGMENT_HEADER.size, SEGMENT_MAGIC)
    _, _, reserved, number, store_id, namespace, _ = SEGMENT_HEADER.unpack_from(data)
    if reserved != bytes(3):
        raise FormatError("reserved bytes are not zero")
    return SegmentHeader(number=number, store_id=store_id, namespace=namespace)


def encode_record_header(header: RecordHeader) -> bytes:
    if not 0 <= header.payload_bytes <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload has at most {MAX_PAYLOAD_BYTES} bytes, not {header.payload_bytes}")
    if len(header.record.key) != KEY_BYTES:
        raise ValueError(f"a record key has {KEY_BYTES} bytes, not {len(header.record.key)}")
    body = RECORD_HEADER.pack(
        RECORD_MAGIC,
        FORMAT_VERSION,
        header.record.kind,
        header.flags,
        header.key_id,
        header.payload_bytes,
        header.record.key,
        header.nonce,
        0,
    )[: -CRC.size]
    return body + CRC.pack(zlib.crc32(body))


def decode_record_header(data: Buffer) -> RecordHeader:
    """Read and check a record header; FormatError says what is wrong with it."""
    _check_head(data, RECORD_HEADER.size, RECORD_MAGIC)
    _, _, kind, flags, key_id, payload_bytes, key, nonce, _ = RECORD_HEADER.unpack_from(data)
    if flags & ~KNOWN_FLAGS:
        raise FormatError(f"unknown flags {flags:#x}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise FormatError(f"payload length {payload_bytes} is beyond the format")
    try:
        record: Name = NoteId(key, NoteKind(kind)) if kind >= FIRST_NOTE_KIND else RecordId(key, RecordKind(kind))
    except ValueError:
        raise FormatError(f"unknown record kind {kind}") from None
    return RecordHeader(record=record, payload_bytes=payload_bytes, flags=flags, nonce=nonce, key_id=key_id)


def _check_head(data: Buffer, size: int, magic: bytes) -> None:
    """Length, magic, CRC, version, in this order: a foreign version is named as such only if its header is intact."""
    if len(data) < size:
        raise FormatError(f"{len(data)} bytes where a header has {size}")
    if bytes(data[:4]) != magic:
        raise FormatError(f"magic is {bytes(data[:4])!r}, not {magic!r}")
    body = memoryview(data)[: size - CRC.size]
    (crc,) = CRC.unpack_from(data, size - CRC.size)
    if zlib.crc32(body) != crc:
        raise FormatError("header checksum does not match")
    if data[4] != FORMAT_VERSION:
        raise FormatError(f"format version {data[4]}, this reader knows {FORMAT_VERSION}")
