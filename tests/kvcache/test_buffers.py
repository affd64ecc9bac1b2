"""Buffers are used again, never while anybody can still see them, and what lies idle is bounded."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvcache.buffers import MAPPED_BUFFER_BYTES, BufferPool, new_buffer

MIB = 1 << 20


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_a_buffer_that_nobody_sees_any_more_serves_the_next() -> None:
    pool = BufferPool(8 * MIB)
    first = pool.take(MIB)
    where = address(first)
    del first
    assert pool.idle_bytes == MIB
    assert address(pool.take(MIB - 1000)) == where


@pytest.mark.parametrize("kind", ["part", "read-only", "cast", "array"])
def test_a_view_of_a_view_keeps_the_memory_from_being_used_again(kind: str) -> None:
    pool = BufferPool(8 * MIB)
    whole = pool.take(MIB)
    whole[:] = b"\x07" * MIB
    views = {"part": whole[5:9], "read-only": whole.toreadonly(), "cast": whole.cast("I")}
    kept: object = np.frombuffer(whole.toreadonly(), np.uint8) if kind == "array" else views[kind]
    del whole, views
    assert pool.idle_bytes == 0
    other = pool.take(MIB)
    other[:] = bytes(MIB)
    assert bytes(memoryview(kept).cast("B")[:4]) == b"\x07" * 4  # type: ignore[arg-type]
    del kept
    assert pool.idle_bytes == MIB


def test_what_lies_idle_is_bounded_and_the_size_used_last_stays() -> None:
    pool = BufferPool(4 * MIB)
    views = [pool.take(size * MIB) for size in (3, 2, 1, 5)]
    while views:
        views.pop(0)
        assert pool.idle_bytes <= 4 * MIB
    assert sorted(size for size, regions in pool._idle.items() if regions) == [MIB, 2 * MIB]


def test_what_lies_idle_can_be_given_up_and_nothing_that_is_seen() -> None:
    pool = BufferPool(8 * MIB)
    kept, idle = pool.take(MIB), pool.take(2 * MIB)
    kept[:] = b"\x07" * MIB
    del idle
    assert pool.idle_bytes == 2 * MIB
    pool.give_up_idle()
    assert pool.idle_bytes == 0
    pool.give_up_idle()
    assert bytes(kept) == b"\x07" * MIB
    del kept
    assert pool.idle_bytes == MIB


def test_every_size_is_served_exactly() -> None:
    pool = BufferPool(4 * MIB)
    rng = random.Random(1)
    for _ in range(200):
        size = rng.randrange(MAPPED_BUFFER_BYTES, 3 * MIB)
        view = pool.take(size)
        assert (len(view), view.readonly, view.itemsize, view.format) == (size, False, 1, "B")
        view[0], view[-1] = 1, 2
        del view
    small, large = new_buffer(10), new_buffer(MAPPED_BUFFER_BYTES)
    assert (len(small), len(large)) == (10, MAPPED_BUFFER_BYTES)


def test_threads_that_take_and_give_back_never_share_a_buffer() -> None:
    pool = BufferPool(8 * MIB)
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(300):
            views = [pool.take(MAPPED_BUFFER_BYTES) for _ in range(3)]
            for view in views:
                view[:8] = bytes([number]) * 8
            wrong.extend(number for view in views if bytes(view[:8]) != bytes([number]) * 8)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.idle_bytes == sum(size * len(regions) for size, regions in pool._idle.items()) <= 8 * MIB
