"""The events of one generation added up. Pure: no I/O, no clock of its own; shared by both flavours of `Generation`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

from .decode import WireEvent
from .errors import Cancelled, Internal, KVForkError
from .values import Channel, Delta, Finished, GenerationResult, Marked, Progress, SnapshotInfo, Started

S = TypeVar("S")


class Folding(Generic[S]):
    """What is known of a generation so far.

    `wrap` makes the caller's handle of a snapshot's info. Exactly one end is recorded: `finished`, or `error`.
    """

    def __init__(self, wrap: Callable[[SnapshotInfo], S]) -> None:
        self._wrap = wrap
        self._text: dict[Channel, list[str]] = {}
        self._token_ids: list[int] = []
        self.started: Started | None = None
        self.progress: Progress | None = None
        self.marks: dict[int, S] = {}
        self.finished: Finished[S] | None = None
        self.error: KVForkError | None = None
        self.completion_tokens = 0
        self.first_delta_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    def add(self, event: WireEvent, now: float) -> Started | Progress | Marked[S] | Delta | Finished[S]:
        """Takes one event in and returns it with handles in place of infos. `now`: monotonic seconds."""
        match event:
            case Started():
                self.started = event
                return event
            case Progress():
                self.progress = event
                return event
            case Delta():
                if self.first_delta_at is None:
                    self.first_delta_at = now
                self._text.setdefault(event.channel, []).append(event.text)
                self._token_ids.extend(event.token_ids)
                self.completion_tokens += event.token_count
                return event
            case Marked():
                marked: Marked[S] = dataclasses.replace(event, snapshot=self._handle(event.snapshot))  # type: ignore[assignment, arg-type]
                if marked.snapshot is not None:
                    self.marks[marked.mark] = marked.snapshot
                return marked
            case Finished():
                self.finished = dataclasses.replace(event, snapshot=self._handle(event.snapshot))  # type: ignore[assignment, arg-type]
                assert self.finished is not None
                return self.finished

    def cut_short(self) -> KVForkError:
        """Records that the stream ended well but without Finished: the text may be truncated."""
        return self.fail(Internal("the stream ended without a Finished event", reason="TRUNCATED"))

    def fail(self, error: KVForkError) -> KVForkError:
        """Records the error that ended the stream, unless an end is known already."""
        if not self.ended:
            self.error = error
        return error

    def text(self, channel: Channel = Channel.ANSWER) -> str:
        return "".join(self._text.get(channel, ()))

    def result(self) -> GenerationResult[S]:
        """The whole. Raises the error that ended the stream, or Cancelled if it is not over."""
        if self.error is not None:
            raise self.error
        if self.finished is None:
            raise Cancelled("the generation was given up before its end")
        return GenerationResult(
            text=self.text(),
            finished=self.finished,
            token_ids=tuple(self._token_ids),
            reasoning=self.text(Channel.REASONING),
            tool_calls=self.text(Channel.TOOL_CALL),
        )

    def _handle(self, info: SnapshotInfo | None) -> S | None:
        return None if info is None else self._wrap(info)
