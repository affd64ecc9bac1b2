"""Sealing of record payloads. Owns ciphers, checksums and nonces; knows nothing of files or of where a record lies.

The 64-byte record header is authenticated together with the payload, so a payload cannot be passed off under another
key, kind or length.

Nonces: 4 bytes chosen when the seal is made + an 8-byte counter that only this seal counts, from 0, once per record
it seals. A number is spent even if the write then fails. The key is random, made together with the counter and never
leaves the process, so a pair (key, nonce) cannot come twice. A store that keeps its keys across restarts
(`kvcache.keys`) instead takes the 4 bytes from a count of openings that it has made durable first; there a nonce also
says which of two records is newer.

A record is read and opened a piece at a time, so that what was just read is still in the core's cache.
"""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

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
PIECE_BYTES = 1 << 20  # well within a core's second cache, and long enough that calls do not count

Fill: TypeAlias = Callable[[int, memoryview], None]
"""Brings the record's bytes from an offset on, as many as the view has room for; it raises where it cannot."""


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

    def open(self, expected: Name, length: int, fill: Fill, scratch: Scratch) -> Buffer:
        """The payload of a record of `length` bytes. FormatError if anything differs from what was sealed as it.

        What `fill` raises comes through. `scratch` is free again at the end.
        """
        ...

    def knows(self, key_id: int) -> bool:
        """Whether records under this key can be opened."""
        ...

    @property
    def flags(self) -> int:
        """Header flags of every record it seals."""
        ...


class AesGcmSeal:
    """AES-256-GCM with the header as associated data; the default."""

    flags = FLAG_SEALED

    def __init__(self, key: bytes | None = None, *, nonce_prefix: bytes | None = None) -> None:
        self._key = key if key is not None else AESGCM.generate_key(256)
        self._prefix = nonce_prefix if nonce_prefix is not None else os.urandom(4)
        self._counter = itertools.count()  # next() is atomic under the interpreter lock

    def key(self, key_id: int) -> bytes:
        """One key; FormatError if there is none."""
        del key_id
        return self._key

    def knows(self, key_id: int) -> bool:
        del key_id
        return True

    def seal(self, record: Name, payload: Buffer, scratch: Scratch, *, key_id: int = 0) -> Sequence[Buffer]:
        cipher = AESGCM(self.key(key_id))
        nonce = NONCE.pack(self._prefix, next(self._counter))
        header = encode_record_header(
            RecordHeader(record=record, payload_bytes=len(payload), flags=self.flags, nonce=nonce, key_id=key_id)
        )
        sealed = scratch.take(len(payload) + TRAILER_BYTES)
        cipher.encrypt_into(nonce, payload, header, sealed)
        return (header, sealed)

    def open(self, expected: Name, length: int, fill: Fill, scratch: Scratch) -> Buffer:
        head, header = _read_header(expected, length, fill, self.flags)
        opening = Cipher(AES(self.key(header.key_id)), GCM(header.nonce)).decryptor()
        opening.authenticate_additional_data(head)
        payload = new_buffer(header.payload_bytes)
        for at in range(0, len(payload), PIECE_BYTES):
            clear = payload[at : at + PIECE_BYTES]
            sealed = scratch.take(len(clear))
            fill(len(head) + at, sealed)
            opening.update_into(sealed, clear)
        tag = bytearray(TRAILER_BYTES)
        fill(len(head) + len(payload), memoryview(tag))
        try:
            opening.finalize_with_tag(bytes(tag))
        except InvalidTag:  # nobody sees what came out
            raise FormatError("authentication tag does not match") from None
        return payload.toreadonly()


class ChecksumSeal:
    """Clear text and one CRC32 over header fields and payload, for stores whose owner turned encryption off.

    CRC32, since it is there to notice accidents; nothing without a key could notice intent, so a longer digest would
    cost more than encryption and promise no more. Where the processor has instructions for AES, zlib's CRC32 costs more
    than that already: turning encryption off gains nothing there.
    """

    flags = 0

    def knows(self, key_id: int) -> bool:
        del key_id
        return True

    def seal(self, record: Name, payload: Buffer, scratch: Scratch, *, key_id: int = 0) -> Sequence[Buffer]:
        header = encode_record_header(
            RecordHeader(record=record, payload_bytes=len(payload), flags=self.flags, key_id=key_id)
        )
        return (header, payload, CRC_TRAILER.pack(zlib.crc32(payload, _checksum_of(header))))

    def open(self, expected: Name, length: int, fill: Fill, scratch: Scratch) -> Buffer:
        head, header = _read_header(expected, length, fill, self.flags)
        checksum = _checksum_of(head)
        payload = new_buffer(header.payload_bytes)
        for at in range(0, len(payload), PIECE_BYTES):
            piece = payload[at : at + PIECE_BYTES]
            fill(len(head) + at, piece)
            checksum = zlib.crc32(piece, checksum)
        trailer = bytearray(TRAILER_BYTES)
        fill(len(head) + len(payload), memoryview(trailer))
        if trailer != CRC_TRAILER.pack(checksum):
            raise FormatError("payload checksum does not match")
        return payload.toreadonly()


def sequence_of(nonce: bytes) -> tuple[int, int]:
    """Opening and counter: the greater of two is the newer record of a durable store."""
    prefix, counter = NONCE.unpack(nonce)
    return OPENING.unpack(prefix)[0], counter


def check_header(expected: Name, head: Buffer, length: int, *, flags: int) -> RecordHeader:
    """The header of a record of `length` bytes; FormatError if it has another name, length or flags."""
    header = decode_record_header(head)
    if header.record != expected:
        raise FormatError(f"holds {header.record}")
    if header.record_bytes != length:
        raise FormatError(f"{length} bytes where its header says {header.record_bytes}")
    if header.flags != flags:
        raise FormatError(f"flags {header.flags:#x} in a store that writes {flags:#x}")
    return header


def _read_header(expected: Name, length: int, fill: Fill, flags: int) -> tuple[bytes, RecordHeader]:
    head = bytearray(min(length, RECORD_HEADER.size))
    fill(0, memoryview(head))
    return bytes(head), check_header(expected, head, length, flags=flags)


def _checksum_of(header: Buffer) -> int:
    # The header's own CRC must stay out: any text followed by its CRC leaves CRC32 in the same state, and the sum would
    # no longer depend on the header.
    return zlib.crc32(header[: -CRC.size])
