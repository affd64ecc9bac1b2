"""Finding records in a segment file that nothing else describes. Owns resynchronization; pure but for the reads.

Only headers are looked at: a header whose checksum is right says where the next record starts. Where none is, the scan
looks for the next one that is: what lies between is damage. What follows the last record is a torn write. Nothing here
trusts a payload; its seal is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcache.errors import FormatError
from kvcache.format import RECORD_HEADER, RECORD_MAGIC, SEGMENT_HEADER, RecordHeader, decode_record_header

WINDOW_BYTES = 1 << 20  # read at once while looking for the next header

Read = Callable[[int, memoryview], int]
"""Fills a buffer from an offset on; returns how many bytes there were."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record whose header is right and whose bytes are all there."""

    offset: int
    header: RecordHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a segment holds."""

    found: tuple[Found, ...]
    end: int  # where the last record ends: what follows can be cut off
    damaged: int  # stretches between records that no header describes


def scan_records(read: Read, size: int) -> Scan:
    """All records of a segment file of `size` bytes, in order."""
    found: list[Found] = []
    damaged = 0
    at = end = SEGMENT_HEADER.size
    while (header := _next_header(read, at, size)) is not None:
        damaged += header.offset > end
        found.append(header)
        at = end = header.offset + header.header.record_bytes
    return Scan(found=tuple(found), end=min(end, size), damaged=damaged)


def _next_header(read: Read, at: int, size: int) -> Found | None:
    """The first whole record at or behind `at`."""
    there = _header_at(read, at, size)
    if there is not None:
        return there
    at += 1
    window = memoryview(bytearray(min(WINDOW_BYTES, max(0, size - at))))
    while at + RECORD_HEADER.size <= size:
        data = bytes(window[: read(at, window)])
        candidate = data.find(RECORD_MAGIC)
        while candidate >= 0:
            there = _header_at(read, at + candidate, size)
            if there is not None:
                return there
            candidate = data.find(RECORD_MAGIC, candidate + 1)
        if len(data) < len(window):
            return None
        at += len(data) - len(RECORD_MAGIC) + 1
    return None


def _header_at(read: Read, offset: int, size: int) -> Found | None:
    if offset + RECORD_HEADER.size > size:
        return None
    data = memoryview(bytearray(RECORD_HEADER.size))
    if read(offset, data) < len(data):
        return None
    try:
        header = decode_record_header(data)
    except FormatError:
        return None
    return Found(offset, header) if offset + header.record_bytes <= size else None
