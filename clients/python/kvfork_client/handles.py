"""What both flavours of a snapshot and of a generation have in common: facts and receipts. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Self, TypeVar

from .errors import KVForkError, SnapshotNotFound, WrongInstance
from .folding import Folding
from .values import Channel, Finished, Progress, Residency, SnapshotInfo, Started, Usage

H = TypeVar("H")


class SnapshotHandle:
    """A snapshot by name. `info` is what the server last said of it; the snapshot itself never changes.

    `usage` is the receipt of the call that made it (None if it was only looked up), `released` the names its rollback
    let go of, `gone` the error by which the server told that it no longer exists.
    """

    def __init__(
        self,
        info: SnapshotInfo,
        *,
        usage: Usage | None = None,
        marks: Mapping[int, Self] | None = None,
        released: tuple[str, ...] = (),
    ) -> None:
        self.info = info
        self.usage = usage
        self.marks: Mapping[int, Self] = marks or {}
        self.released = released
        self.gone: SnapshotNotFound | None = None

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def instance(self) -> str:
        """The server that holds it; empty for a handle made of a name alone, until `refresh()`."""
        return self.info.instance

    @property
    def parent(self) -> str:
        return self.info.parent

    @property
    def model(self) -> str:
        return self.info.model

    @property
    def token_count(self) -> int:
        return self.info.token_count

    @property
    def residency(self) -> Residency:
        return self.info.residency

    @property
    def labels(self) -> Mapping[str, str]:
        return self.info.labels

    @property
    def pinned(self) -> bool:
        return self.info.pinned

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} tokens={self.token_count} {self.residency.name.lower()}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SnapshotHandle) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def noted(self, error: KVForkError) -> KVForkError:
        """Remembers that the snapshot is gone if this error says so; hands the error back."""
        if isinstance(error, WrongInstance) and not self.instance:
            return error  # the client's own route is wrong: nothing is known of the snapshot
        if isinstance(error, SnapshotNotFound) and error.resource in ("", self.name):
            self.gone = error
        return error

    def vanished(self) -> KVForkError:
        """The error for a snapshot that the server no longer lists."""
        return self.noted(SnapshotNotFound(f"{self.name} is gone", resource=self.name))


class ForkResult(list[H], Generic[H]):
    """The children of a fork, in the order of the branches, and the one receipt for all of them."""

    def __init__(self, children: list[H], usage: Usage) -> None:
        super().__init__(children)
        self.usage = usage


class GenerationHandle(Generic[H]):
    """What is known of a running generation; all of it may be read at any time."""

    def __init__(self, folding: Folding[H], began: float) -> None:
        self._folding = folding
        self._began = began

    @property
    def started(self) -> Started | None:
        return self._folding.started

    @property
    def progress(self) -> Progress | None:
        return self._folding.progress

    @property
    def finished(self) -> Finished[H] | None:
        return self._folding.finished

    @property
    def marks(self) -> Mapping[int, H]:
        """Snapshots made so far, by the index of their mark."""
        return self._folding.marks

    @property
    def snapshot(self) -> H | None:
        """The saved final state, once finished."""
        return None if self.finished is None else self.finished.snapshot

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._folding.text()

    @property
    def reasoning(self) -> str:
        """The reasoning so far, if the model's template tells it apart."""
        return self._folding.text(Channel.REASONING)

    @property
    def ttft(self) -> float | None:
        """Seconds from the call to its first Delta as seen here; None before it."""
        first = self._folding.first_delta_at
        return None if first is None else first - self._began
