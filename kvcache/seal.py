"""Sealing of record payloads. Owns ciphers, checksums and nonces; knows nothing of files or of where a record lies.

The 64-byte record header is authenticated together with the payload, so a payload cannot be passed off under another
key, kind or length.

Nonces: 4 bytes chosen when the seal is made + an 8-byte counter that only this seal counts, from 0, once per record
it seals. A number is spent even if the write then fails. The key is random, made together with the counter and never
leaves the process, so a pair (key, nonce) cannot come twice. A store that keeps its keys across restarts
(`kvcache.keys`) instead takes the 4 bytes from a count of openings that it has made durable first; there a nonce also
says which of two records is newer.
"""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcache.buffers import new_buffer
from kvcache.errors import FormatError
from kvcache.format import (
    CRC,
    FLAG_SEALED,
    RECORD_HEADER,
    TRAILER_BYTES,
    RecordHeader,
    decode_record_header,
    encode_record_header,
)
from kvcache.records import Buffer, Name

NONCE = struct.Struct("<4sQ")
OPENING = struct.Struct("<I")  # what the first 4 bytes are in a durable store
CRC_TRAILER = struct.Struct("<I12x")


class Scratch:
    """One reusable buffer, grown to the largest size asked for. Fresh pages cost more than the encryption itself."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(0))

    def take(self, size: int) -> memoryview:
        """The first `size` bytes; their content is whatever the last user left."""
        if len(self._buffer) < size:
            self._buffer = new_buffer(size)
        return self._buffer[:size]


class Seal(Protocol):
    """Turns a payload into record bytes and back."""

    def seal(self, record: Name, payload: Buffer, scratch: Scratch, *, key_id: int = 0) -> Sequence[Buffer]:
        """The record as buffers to be written one after the other, valid until `scratch` is used again.

        `key_id` chooses the key where there are several; a seal with one key records the number and no more.
        """
        ...

    def open(self, expected: Name, data: memoryview) -> Buffer:
        """The payload of the whole record `data`; FormatError if anything differs from what was sealed as `expected`.

        The result shares memory with `data` unless `copies` is true.
        """
        ...

    def knows(self, key_id: int) -> bool:
        """Whether records under this key can be opened."""
        ...

    @property
    def flags(self) -> int:
        """Header flags of every record it seals."""
        ...

    @property
    def copies(self) -> bool:
        """Whether `open` returns memory of its own, so that `data` may be a scratch buffer."""
        ...


class AesGcmSeal:
    """AES-256-GCM with the header as associated data; the default."""

    flags = FLAG_SEALED
    copies = True

    def __init__(self, key: bytes | None = None, *, nonce_prefix: bytes | None = None) -> None:
        self._cipher = AESGCM(key if key is not None else AESGCM.generate_key(256))
        self._prefix = nonce_prefix if nonce_prefix is not None else os.urandom(4)
        self._counter = itertools.count()  # next() is atomic under the interpreter lock

    def cipher(self, key_id: int) -> AESGCM:
        """The cipher of one key; FormatError if there is none."""
        del key_id
        return self._cipher

    def knows(self, key_id: int) -> bool:
        del key_id
        return True

    def seal(self, record: Name, payload: Buffer, scratch: Scratch, *, key_id: int = 0) -> Sequence[Buffer]:
        cipher = self.cipher(key_id)
        nonce = NONCE.pack(self._prefix, next(self._counter))
        header = encode_record_header(
            RecordHeader(record=record, payload_bytes=len(payload), flags=self.flags, nonce=nonce, key_id=key_id)
        )
        sealed = scratch.take(len(payload) + TRAILER_BYTES)
        cipher.encrypt_into(nonce, payload, header, sealed)
        return (header, sealed)

    def open(self, expected: Name, data: memoryview) -> Buffer:
        header = check_header(expected, data, flags=self.flags)
        payload = new_buffer(header.payload_bytes)
        try:
            self.cipher(header.key_id).decrypt_into(
                header.nonce, data[RECORD_HEADER.size :], bytes(data[: RECORD_HEADER.size]), payload
            )
        except InvalidTag:
            raise FormatError("authentication tag does not match") from None
        return payload.toreadonly()


class ChecksumSeal:
    """Clear text and one CRC32 over header fields and payload, for stores whose owner turned encryption off.

    CRC32, since it is there to notice accidents and runs several times faster than AES-GCM; nothing without a key
    could notice intent, so a longer digest would cost more than encryption and promise no more.
    """

    flags = 0
    copies = False

    def knows(self, key_id: int) -> bool:
        del key_id
        return True

    def seal(self, record: Name, payload: Buffer, scratch: Scratch, *, key_id: int = 0) -> Sequence[Buffer]:
        header = encode_record_header(
            RecordHeader(record=record, payload_bytes=len(payload), flags=self.flags, key_id=key_id)
        )
        return (header, payload, _checksum(header, payload))

    def open(self, expected: Name, data: memoryview) -> Buffer:
        check_header(expected, data, flags=self.flags)
        payload = data[RECORD_HEADER.size : -TRAILER_BYTES]
        if data[-TRAILER_BYTES:] != _checksum(data[: RECORD_HEADER.size], payload):
            raise FormatError("payload checksum does not match")
        return payload.toreadonly()


def sequence_of(nonce: bytes) -> tuple[int, int]:
    """Opening and counter: the greater of two is the newer record of a durable store."""
    prefix, counter = NONCE.unpack(nonce)
    return OPENING.unpack(prefix)[0], counter


def _checksum(header: Buffer, payload: Buffer) -> bytes:
    # The header's own CRC must stay out: any text followed by its CRC leaves CRC32 in the same state, and the sum would
    # no longer depend on the header.
    return CRC_TRAILER.pack(zlib.crc32(payload, zlib.crc32(header[: -CRC.size])))


def check_header(expected: Name, data: memoryview, *, flags: int) -> RecordHeader:
    """The header of the whole record `data`; FormatError if it has another name, length or flags."""
    header = decode_record_header(data)
    if header.record != expected:
        raise FormatError(f"holds {header.record}")
    if header.record_bytes != len(data):
        raise FormatError(f"{len(data)} bytes where its header says {header.record_bytes}")
    if header.flags != flags:
        raise FormatError(f"flags {header.flags:#x} in a store that writes {flags:#x}")
    return header
