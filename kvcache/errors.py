"""What can go wrong in the cache. Owns the error classes; knows nothing of how they are reported over a wire.

KVCacheError
├── FormatError            bytes are not what docs/format.md draws (bad magic, version, checksum, length)
│   └── ExportError            an export cannot be taken in
│       ├── ForeignKey             it was signed with another key
│       ├── DamagedExport          a part of it is not what was signed; `part` says which
│       └── CutExport              it ends before its end
└── StoreError
    ├── RecordError        one record is to blame; `record` says which
    │   ├── MissingRecord      never stored, or evicted since
    │   ├── CorruptRecord      stored, but the bytes do not verify
    │   └── UnreadableRecord   stored, but the operating system refused the read
    ├── DiskFull           no room under the budget or above the free-space floor
    ├── StoreClosed        the store was closed
    └── StoreUnusable      a store's directory, or its master key, cannot be used
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.records import Name


class KVCacheError(Exception):
    """Base of every error this package raises on purpose."""


class FormatError(KVCacheError):
    """Bytes that were read do not follow the format, or fail their checksum or tag."""


class ExportError(FormatError):
    """Bytes that were to be a snapshot of another instance are none, or of a version that nobody here knows."""


class ForeignKey(ExportError):
    """They were signed with another key than the one that they were to be checked with."""

    def __init__(self, theirs: bytes, ours: bytes) -> None:
        super().__init__(f"signed with key {theirs.hex()}, this one is {ours.hex()}")
        self.theirs = theirs
        self.ours = ours


class DamagedExport(ExportError):
    """A part is not what was signed."""

    def __init__(self, part: str) -> None:
        super().__init__(f"{part} is not what was signed")
        self.part = part


class CutExport(ExportError):
    """They end in the middle of a part, or before what is needed has come."""

    def __init__(self, part: str) -> None:
        super().__init__(f"ends before {part} was there")
        self.part = part


class StoreError(KVCacheError):
    """The record store could not do what was asked."""


class RecordError(StoreError):
    """One record could not be served."""

    def __init__(self, record: Name, reason: str) -> None:
        super().__init__(f"{record}: {reason}")
        self.record = record
        self.reason = reason


class MissingRecord(RecordError):
    """The record is in no tier."""


class CorruptRecord(RecordError):
    """The record's bytes did not verify; it has been dropped."""


class UnreadableRecord(RecordError):
    """Reading the record failed below this package; it has been dropped."""


class DiskFull(StoreError):
    """Neither eviction nor cleaning makes room for one more record."""


class StoreClosed(StoreError):
    """The store was closed before or while it was asked."""


class StoreUnusable(StoreError):
    """A durable store's directory or master key cannot be used; the text says why and what to do."""
