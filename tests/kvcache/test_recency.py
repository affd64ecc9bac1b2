"""Recency order: exactly least recently used, however members come, are used and go."""

from __future__ import annotations

import random

from kvcache.recency import RecencyQueue


def test_the_member_used_longest_ago_comes_first() -> None:
    queue: RecencyQueue[str] = RecencyQueue()
    for tick, name in enumerate("abcd"):
        queue.add(name, tick)
    queue.touch("a", 10)
    queue.touch("c", 11)
    assert [queue.pop_oldest() for _ in range(5)] == ["b", "d", "a", "c", None]


def test_a_member_may_come_with_an_old_tick() -> None:
    queue: RecencyQueue[str] = RecencyQueue()
    queue.add("new", 5)
    queue.add("old", 1)
    assert queue.pop_oldest() == "old"


def test_using_what_is_no_member_changes_nothing() -> None:
    queue: RecencyQueue[str] = RecencyQueue()
    queue.add("a", 0)
    queue.touch("b", 1)
    queue.discard("b")
    assert (len(queue), "b" in queue, queue.pop_oldest(), queue.pop_oldest()) == (1, False, "a", None)


def test_thousands_of_random_steps_agree_with_a_sorted_dict() -> None:
    rng = random.Random(1)
    queue: RecencyQueue[int] = RecencyQueue()
    naive: dict[int, int] = {}
    for tick in range(20_000):
        member = rng.randrange(60)
        match rng.randrange(5):
            case 0 if member not in naive:
                age = rng.randrange(tick + 1)
                if age not in naive.values():
                    queue.add(member, age)
                    naive[member] = age
            case 1 | 2:
                queue.touch(member, tick)
                if member in naive:
                    naive[member] = tick
            case 3:
                queue.discard(member)
                naive.pop(member, None)
            case 4 if rng.random() < 0.3:
                oldest = min(naive, key=naive.__getitem__, default=None)
                assert queue.pop_oldest() == oldest
                if oldest is not None:
                    del naive[oldest]
        assert len(queue) == len(naive)
    assert len(queue._heap) <= 2 * 60 + 65
