"""A chat as a tree of snapshots: turns, branches, and the way back. Owns no terminal."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.cli.opening import admitted, closing, first_taken

if TYPE_CHECKING:
    from kvfork_client import Client, Generation, Image, InputLike, Sampling, SaveOptions, Snapshot, Stopping
    from kvfork_client.blocking import Event


@dataclass(frozen=True, slots=True)
class Turn:
    """What was said, and the state after it. `clean`: the state continues that of the turn before as it stood.

    `images` came before the user's text.
    """

    user: str
    answer: str
    after: Snapshot
    clean: bool = True
    images: tuple[Image, ...] = ()


@dataclass(slots=True, eq=False)
class Branch:
    """One line of the conversation. `taken_back`: the turn that was rolled back last, if nothing was said since."""

    turns: list[Turn] = field(default_factory=list)
    taken_back: Turn | None = None

    @property
    def here(self) -> Snapshot | None:
        return self.turns[-1].after if self.turns else None


@dataclass(slots=True)
class Reply:
    """A turn under way in a branch: read `events` to the end, then hand it to `Conversation.finish`."""

    branch: Branch
    user: str
    generation: Generation
    events: Iterator[Event]
    clean: bool
    images: tuple[Image, ...] = ()


class NothingSaid(Exception):
    """There is no turn to answer again or to roll back."""


class Conversation:
    """The branches of one chat, each turn's state a snapshot.

    What is said is appended to the last turn's snapshot; a turn that was stopped before its end is closed first. Where
    the template cannot append, the whole chat is sent again; stored prefixes are used all the same.
    """

    def __init__(
        self,
        client: Client,
        *,
        root: Snapshot | None = None,
        system: str | None = None,
        raw: bool = False,
        model: str = "",
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        save: SaveOptions | None = None,
    ) -> None:
        self._client = client
        self._root = root
        self._system = system
        self._raw = raw
        self._model = model
        self._sampling = sampling
        self._stopping = stopping
        self._save = save
        self._made: dict[str, Snapshot] = {}
        self.branches = [Branch()]
        self.current = 0

    @property
    def branch(self) -> Branch:
        return self.branches[self.current]

    def number(self, branch: Branch) -> int:
        """A branch's number, from 1; that of one under way is the next."""
        return self.branches.index(branch) + 1 if branch in self.branches else len(self.branches) + 1

    @property
    def made(self) -> list[Snapshot]:
        """Snapshots of this chat that were not given up, oldest first."""
        return list(self._made.values())

    def say(self, text: str, images: Sequence[Image] = ()) -> Reply:
        """Starts the answer to `text` behind `images`; returns once the server has admitted it. Raises KVForkError."""
        return self._start(self.branch, text, images, self._sampling)

    def again(self, count: int) -> list[Reply]:
        """Starts that many answers to what was said last, each in a branch of its own; the branch here stays as it is.

        What was rolled back last counts as said last, and the first answer to it goes on from here. Raises NothingSaid
        where nothing was said, KVForkError as `say` does.
        """
        here = self.branch
        last = here.taken_back or (here.turns[-1] if here.turns else None)
        if last is None:
            raise NothingSaid
        before = here.turns if here.taken_back else here.turns[:-1]
        branches = [Branch([*before]) for _ in range(count)]
        if here.taken_back:
            branches[0] = here
        replies: list[Reply] = []
        try:
            for number, branch in enumerate(branches):
                replies.append(self._start(branch, last.user, last.images, self._another(number)))
        except BaseException:  # Ctrl-C too must leave none of them running; it is raised on
            for reply in replies:
                reply.generation.cancel()
            raise
        return replies

    def _another(self, number: int) -> Sampling | None:
        """How to draw one of several answers: with one seed for all, they would be the same answer."""
        if self._sampling is None or self._sampling.seed is None:
            return self._sampling
        return dataclasses.replace(self._sampling, seed=self._sampling.seed + number)

    def _start(self, branch: Branch, text: str, images: Sequence[Image], sampling: Sampling | None) -> Reply:
        here = branch.here or self._root
        attempts = self._attempts(branch, text, images)

        def start(parent: Snapshot | None, given: InputLike) -> tuple[Generation, Iterator[Event]]:
            return admitted(
                self._client.generate(
                    given,
                    parent,
                    model=self._model,
                    sampling=sampling,
                    stopping=self._stopping,
                    save=self._save or True,
                )
            )

        index, (generation, events) = first_taken([functools.partial(start, *attempt) for attempt in attempts])
        return Reply(branch, text, generation, events, clean=attempts[index][0] == here, images=tuple(images))

    def finish(self, reply: Reply) -> Turn | None:
        """Keeps the turn in its branch. None if its state could not be kept: the conversation then stays as it was."""
        finished = reply.generation.finished
        if finished is None or finished.snapshot is None:
            return None
        turn = Turn(reply.user, reply.generation.text, self._keep(finished.snapshot), reply.clean, reply.images)
        reply.branch.turns.append(turn)
        reply.branch.taken_back = None
        if reply.branch not in self.branches:
            self.branches.append(reply.branch)
        return turn

    def back(self) -> Snapshot | None:
        """Rolls this branch back to before its last turn. Returns the rollback's result; None if nothing is left.

        Raises NothingSaid without a turn.
        """
        from kvfork_client import Release

        turns = self.branch.turns
        if not turns:
            raise NothingSaid
        last = self.branch.taken_back = turns[-1]
        if len(turns) == 1 or not last.clean:
            turns.pop()
            if not self._shared(last):
                last.after.release(stop_active=True)
                self._made.pop(last.after.name, None)
            return self.branch.here
        before = turns[-2]
        result = last.after.rollback(
            ancestor=before.after,
            release=Release.NONE if self._shared(last) else Release.SOURCE,
            options=self._save,
        )
        self._keep(result)
        for name in result.released:
            self._made.pop(name, None)
        turns[-2:] = [dataclasses.replace(before, after=result)]
        return result

    def use(self, number: int) -> Branch:
        """Switches to a branch, counted from 1. Raises IndexError if there is no such."""
        if not 1 <= number <= len(self.branches):
            raise IndexError(number)
        self.current = number - 1
        return self.branch

    def release(self) -> None:
        """Drops every snapshot this chat made."""
        while self._made:
            _, snapshot = self._made.popitem()
            snapshot.release(stop_active=True)

    def _attempts(self, branch: Branch, text: str, images: Sequence[Image]) -> list[tuple[Snapshot | None, InputLike]]:
        """What to append to what: the cheapest that a server may take first."""
        from kvfork_client import Message
        from kvfork_client import raw as raw_input

        here = branch.here
        if self._raw:
            return [(here or self._root, raw_input(*images, text))]
        new = Message.user(*images, text)
        whole = [Message.system(self._system)] if self._system else []
        for turn in branch.turns:
            whole += [Message.user(*turn.images, turn.user), Message.assistant(turn.answer)]
        from_start: tuple[Snapshot | None, InputLike] = (self._root, [*whole, new])
        if here is None:
            return [from_start]
        return [(here, [new]), (here, closing([new])), from_start]

    def _shared(self, turn: Turn) -> bool:
        """Whether another branch stands on the same snapshot: forks share the turns before them."""
        others = (branch for branch in self.branches if branch is not self.branch)
        return any(theirs.after == turn.after for branch in others for theirs in branch.turns)

    def _keep(self, snapshot: Snapshot) -> Snapshot:
        self._made[snapshot.name] = snapshot
        return snapshot
