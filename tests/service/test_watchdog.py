"""The watchdog: restarts are few and ever later, a hang is told once, and what it looks after may come back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from service.watchdog import PERIOD, Watchdog


@dataclass
class Thread:
    """The part of a loop that a watchdog sees."""

    has_failed: bool = False
    hung_works: int = 0
    given_up_after: list[float] = field(default_factory=list)

    def give_up(self, stuck_after: float) -> int:
        self.given_up_after.append(stuck_after)
        ended, self.hung_works = self.hung_works, 0
        return ended


class World:
    """A thread that dies when told, and a clock."""

    def __init__(self, restarts: int) -> None:
        self.now = 1000.0
        self.thread = Thread()
        self.restarted_at: list[float] = []
        self.dog = Watchdog(
            self.thread,  # type: ignore[arg-type]
            self.restart,
            stuck_after=7.0,
            restarts=restarts,
            clock=lambda: self.now,
        )

    def restart(self) -> None:
        self.restarted_at.append(self.now - 1000)
        self.thread.has_failed = False

    def run(self, seconds: int, *, dies: bool) -> None:
        """Looks once a second."""
        for _ in range(seconds):
            self.thread.has_failed = self.thread.has_failed or dies
            self.dog.look()
            self.now += 1


def test_a_thread_that_died_is_started_anew_at_once() -> None:
    world = World(3)
    world.run(5, dies=False)
    assert world.restarted_at == []
    world.thread.has_failed = True
    world.run(5, dies=False)
    assert world.restarted_at == [5]


def test_restarts_come_ever_later_and_end(caplog: pytest.LogCaptureFixture) -> None:
    world = World(3)
    world.run(int(PERIOD) - 1, dies=True)
    assert world.restarted_at == [0, 5, 15]
    assert caplog.text.count("restart the server") == 1
    world.run(30, dies=True)  # the first is long ago now
    assert world.restarted_at == [0, 5, 15, PERIOD, PERIOD + 10, PERIOD + 20]


def test_no_restarts_if_none_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    world = World(0)
    world.run(20, dies=True)
    assert world.restarted_at == []
    assert caplog.text.count("restart the server") == 1


def test_a_hang_is_told_with_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    world = World(3)
    world.thread.hung_works = 4
    world.run(3, dies=False)
    assert "more than 7 s: 4 calls were ended" in caplog.text
    assert caplog.text.count("calls were ended") == 1
    assert world.thread.given_up_after == [7.0] * 3
    assert world.restarted_at == []
