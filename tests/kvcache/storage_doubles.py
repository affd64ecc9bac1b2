"""Storages that misbehave on request, and short names for records. Shared by the tests of the record store."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence

from kvcache.records import Buffer, RecordId, RecordKind
from kvcache.storage import MemoryStorage, Storage


def record(name: object, kind: RecordKind = RecordKind.WINDOW) -> RecordId:
    return RecordId(hashlib.sha256(repr(name).encode()).digest(), kind)


def payload(name: object, size: int) -> bytes:
    """Bytes that differ between names and do not repeat with a short period."""
    return hashlib.shake_128(repr(name).encode()).digest(size)


class FaultyStorage:
    """Passes on to `inner`, except where told to fail.

    `fail_writes`: numbers of the writes to fail, counted from 1; `broken`: fail all of them. `torn`: bytes of a failing
    write that still reach the inner storage. `before_write` is called with each write's number.
    """

    def __init__(self, inner: Storage | None = None) -> None:
        self.inner = inner if inner is not None else MemoryStorage()
        self.error = errno.EIO
        self.fail_writes: set[int] = set()
        self.broken = False
        self.torn = 0
        self.truncate_fails = False
        self.read_fails = False
        self.create_fails = False
        self.writes = 0
        self.before_write: Callable[[int], object] = lambda number: None

    def create(self, segment: int) -> None:
        if self.create_fails:
            raise OSError(self.error, "create fails")
        self.inner.create(segment)

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        self.writes += 1
        self.before_write(self.writes)
        if self.broken or self.writes in self.fail_writes:
            self.inner.write(segment, offset, [b"".join(parts)[: self.torn]])
            raise OSError(self.error, "write fails")
        self.inner.write(segment, offset, parts)

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        if self.read_fails:
            raise OSError(self.error, "read fails")
        return self.inner.read_into(segment, offset, buffer)

    def truncate(self, segment: int, size: int) -> None:
        if self.truncate_fails:
            raise OSError(self.error, "truncate fails")
        self.inner.truncate(segment, size)

    def sync(self, segment: int) -> None:
        self.inner.sync(segment)

    def remove(self, segment: int) -> None:
        self.inner.remove(segment)

    def sizes(self) -> Mapping[int, int]:
        return self.inner.sizes()

    def strange(self) -> Mapping[int, str]:
        return self.inner.strange()

    def free_bytes(self) -> int:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.inner.close()


class GatedStorage(FaultyStorage):
    """Every write waits until the test lets it through: a disk as slow as one likes, without a clock."""

    def __init__(self, inner: Storage | None = None) -> None:
        super().__init__(inner)
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Event()  # a write stands at the gate, or stood there

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        self.waiting.set()
        self.gate.acquire()
        super().write(segment, offset, parts)

    def open_gate(self) -> None:
        self.gate.release(10_000)
