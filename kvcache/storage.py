"""Where segment bytes live. Owns files and nothing of what is in them; used by one thread at a time, but for reading.

`FileStorage` keeps every segment nameless: created, opened and unlinked in one go, so that the kernel frees the bytes
when the process ends, however it ends. `MemoryStorage` is its double.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvcache.records import Buffer

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


class Storage(Protocol):
    """Numbered segments of bytes. Methods raise OSError unless they say otherwise."""

    def create(self, segment: int) -> None:
        """Make an empty segment; FileExistsError if there is one."""
        ...

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        """Write `parts` one after the other; on error, any prefix of them may have been written."""
        ...

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        """Fill `buffer`; returns how many bytes there were, fewer only at the segment's end.

        The one method that two threads may be in at once.
        """
        ...

    def truncate(self, segment: int, size: int) -> None: ...

    def sync(self, segment: int) -> None:
        """Return once the segment's bytes would survive a power cut."""
        ...

    def remove(self, segment: int) -> None:
        """Forget the segment and give its bytes back; never an OSError, as nothing could be done about it."""
        ...

    def sizes(self) -> Mapping[int, int]:
        """Bytes of every segment."""
        ...

    def strange(self) -> Mapping[int, str]:
        """What stands where a segment would and is none: "is a link"."""
        ...

    def free_bytes(self) -> int:
        """What the file system would still give to this process."""
        ...

    def close(self) -> None:
        """Remove everything, or, where segments are to outlive the process, shut them. Safe to repeat."""
        ...


class FileStorage:
    """Segments as unlinked files: mode 0600, in a 0700 directory that is gone before the first byte is written.

    `directory` chooses the file system; None is the system's temporary directory. It is made (0700) if it does not
    exist, and removed by `close` in that case. Segments stay open for as long as they exist: the caller bounds their
    number.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._made_directory = directory is not None and not directory.exists()
        self._directory = directory if directory is not None else Path(tempfile.gettempdir())
        if self._made_directory:
            self._directory.mkdir(mode=DIRECTORY_MODE, parents=True)
        self._files: dict[int, int] = {}

    def create(self, segment: int) -> None:
        if segment in self._files:
            raise FileExistsError(errno.EEXIST, "segment exists", str(segment))
        # A directory per file, made and removed around its creation: a crash at any instant leaves at most empty names.
        parent = Path(tempfile.mkdtemp(prefix="kvfork-", dir=self._directory))
        try:
            path = parent / f"segment-{segment:08d}.kv"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            try:
                path.unlink()
            except OSError:
                os.close(file)
                raise
        finally:
            parent.rmdir()
        self._files[segment] = file

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        # lseek + writev rather than pwritev: one system call more, but every POSIX system has it.
        file = self._files[segment]
        os.lseek(file, offset, os.SEEK_SET)
        write_fully(file, parts)

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        return read_fully(self._files[segment], offset, buffer)

    def truncate(self, segment: int, size: int) -> None:
        os.ftruncate(self._files[segment], size)

    def sync(self, segment: int) -> None:
        os.fsync(self._files[segment])

    def remove(self, segment: int) -> None:
        # Nobody will read these bytes again, so an error that the system only now reports about them is no news.
        with suppress(OSError):
            os.close(self._files.pop(segment))

    def sizes(self) -> Mapping[int, int]:
        return {segment: os.fstat(file).st_size for segment, file in self._files.items()}

    def strange(self) -> Mapping[int, str]:
        return {}  # nameless

    def free_bytes(self) -> int:
        # An open segment answers even after its directory was removed.
        where = next(iter(self._files.values()), self._directory)
        stat = os.statvfs(where)
        return stat.f_bavail * stat.f_frsize

    def close(self) -> None:
        for segment in list(self._files):
            self.remove(segment)
        if self._made_directory:
            self._made_directory = False
            # Not ours to delete if somebody put files into it meanwhile.
            if self._directory.is_dir() and not any(self._directory.iterdir()):
                self._directory.rmdir()


def write_fully(file: int, parts: Sequence[Buffer]) -> None:
    """Write `parts` at a file's position, however little the system takes at once."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        written = os.writev(file, left)
        if written == 0:
            raise OSError(errno.EIO, "no bytes written")
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def read_fully(file: int, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` from an offset on; returns how many bytes there were."""
    filled = 0
    while filled < len(buffer):
        count = _read_at(file, offset + filled, buffer[filled:])
        if count == 0:
            break
        filled += count
    return filled


_position = threading.Lock()  # of a file, where the system cannot read without moving it


def _read_at(file: int, offset: int, buffer: memoryview) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file, [buffer], offset)
    with _position:
        os.lseek(file, offset, os.SEEK_SET)
        return os.readv(file, [buffer])


class MemoryStorage:
    """Segments as byte arrays, for tests and for figures without a disk in them."""

    def __init__(self, *, size_bytes: int = 1 << 62) -> None:
        self.size_bytes = size_bytes
        self.segments: dict[int, bytearray] = {}

    def create(self, segment: int) -> None:
        if segment in self.segments:
            raise FileExistsError(errno.EEXIST, "segment exists", str(segment))
        self.segments[segment] = bytearray()

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        data = self.segments[segment]
        for part in parts:
            end = offset + len(part)
            if end - len(data) > self.free_bytes():
                raise OSError(errno.ENOSPC, "no space left")
            if len(data) < offset:
                data.extend(bytes(offset - len(data)))
            data[offset:end] = part
            offset = end

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        found = memoryview(self.segments[segment])[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def truncate(self, segment: int, size: int) -> None:
        data = self.segments[segment]
        del data[size:]
        data.extend(bytes(size - len(data)))

    def sync(self, segment: int) -> None:
        self.segments[segment]

    def remove(self, segment: int) -> None:
        del self.segments[segment]

    def sizes(self) -> Mapping[int, int]:
        return {segment: len(data) for segment, data in self.segments.items()}

    def strange(self) -> Mapping[int, str]:
        return {}

    def free_bytes(self) -> int:
        return self.size_bytes - sum(len(data) for data in self.segments.values())

    def close(self) -> None:
        self.segments.clear()


class ReadOnly:
    """Another storage, or some of its segments, of which nothing is changed: who would change it is let believe so."""

    def __init__(self, inner: Storage, only: Container[int] | None = None) -> None:
        self._inner = inner
        self._only = only

    def create(self, segment: int) -> None:
        raise OSError(errno.EROFS, "not to be written to", str(segment))

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        raise OSError(errno.EROFS, "not to be written to", str(segment))

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        return self._inner.read_into(segment, offset, buffer)

    def truncate(self, segment: int, size: int) -> None:
        """Does nothing."""

    def sync(self, segment: int) -> None:
        """Does nothing."""

    def remove(self, segment: int) -> None:
        """Does nothing."""

    def sizes(self) -> Mapping[int, int]:
        return {n: size for n, size in self._inner.sizes().items() if self._only is None or n in self._only}

    def strange(self) -> Mapping[int, str]:
        return self._inner.strange()

    def free_bytes(self) -> int:
        return self._inner.free_bytes()

    def close(self) -> None:
        """Does nothing: it is another's."""
