"""Memory for record bytes. Owns where it comes from and that it is used again; knows nothing of what is in it.

Fresh pages cost several times what reading and decrypting into them does: the kernel zeroes them one by one. So the
memory of a large buffer goes back to a pool when the last view of it is gone, whoever holds that, and serves the next
one of about its size. The pool holds what a long restore takes; what lies idle counts as memory of the process, so
whoever knows that nothing is going on calls `give_up_idle`.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

# From here on a buffer is mapped instead of allocated: bytearray zeroes its memory while holding the interpreter lock,
# about a millisecond per MiB of fresh pages, which a decoding thread would feel.
MAPPED_BUFFER_BYTES = 256 * 1024
HUGE_PAGE_BUFFER_BYTES = 4 << 20  # from here on worth asking for large pages: fewer to fault in
IDLE_BYTES = 256 << 20


class BufferPool:
    """Mapped memory, used again. Thread-safe."""

    def __init__(self, idle_bytes: int) -> None:
        """`idle_bytes`: bound on what is kept while nobody uses it."""
        self._limit = idle_bytes
        self._idle: dict[int, list[mmap.mmap]] = {}  # by capacity
        self.idle_bytes = 0
        # A view may die anywhere, in this thread within these methods too.
        self._lock = threading.RLock()

    def take(self, size: int) -> memoryview:
        """`size` writable bytes of any content, given back when no view of them is left."""
        capacity = _capacity(size)
        with self._lock:
            same = self._idle.get(capacity)
            region = same.pop() if same else None
            if region is not None:
                self.idle_bytes -= capacity
        if region is None:
            region = _map(capacity)
        # Views of views keep this object alive, not the first view: it is what has to be watched.
        lease = (ctypes.c_char * size).from_buffer(region)
        weakref.finalize(lease, self._give_back, region).atexit = False
        return memoryview(lease).cast("B")

    def give_up_idle(self) -> None:
        """Unmap what nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, {}
            self.idle_bytes = 0
        idle.clear()  # not under the lock: it takes the system a while

    def _give_back(self, region: mmap.mmap) -> None:
        capacity = len(region)
        with self._lock:
            if capacity > self._limit:
                return
            while self.idle_bytes + capacity > self._limit:
                other, regions = next(iter(self._idle.items()))
                if regions:
                    regions.pop()
                    self.idle_bytes -= other
                if not regions:
                    del self._idle[other]
            self._idle[capacity] = [*self._idle.pop(capacity, ()), region]  # moved to the end: used last
            self.idle_bytes += capacity


_POOL = BufferPool(IDLE_BYTES)


def new_buffer(size: int) -> memoryview:
    """Writable bytes of any content."""
    return memoryview(bytearray(size)) if size < MAPPED_BUFFER_BYTES else _POOL.take(size)


def give_up_idle() -> None:
    """Unmap the memory of large buffers that nobody uses now."""
    _POOL.give_up_idle()


def _capacity(size: int) -> int:
    """Rounded up by an eighth at most, so that records of about one size share buffers."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def _map(capacity: int) -> mmap.mmap:
    # Private, as the default (shared) makes a file in shared memory, whose pages cost twice as much.
    region = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if capacity >= HUGE_PAGE_BUFFER_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
