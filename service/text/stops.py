"""Stop strings in a stream of text. Owns the search across pieces; knows no tokens.

An Aho-Corasick automaton over all stop strings: each character is looked at once, however the text is cut. The match
that starts first wins and, among those that start there, the longest; so the result never depends on the cuts. A match
that a longer stop string could still replace waits for the next character.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None  # longest proper suffix that is a node; None for the root
    longest: int = 0  # length of the longest stop string that ends here


class StopMatcher:
    """Finds the first of `stops` in one stream. With no stops every push passes straight through.

    After a match the matcher is spent: later pushes return nothing.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:  # noqa: FBT001 - a wire field's own name
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._root = _automaton(stops)
        self._include = include_stop
        self._node = self._root
        self._held = ""  # text not handed out yet
        self._best: tuple[int, int] | None = None  # [start, end) of a match in `_held` that may still grow
        self._spent = False

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """(text that can't be part of a stop string any more, the stop string if one was found).

        With `active` false the text passes unseen, and no later match reaches back into it. On a match the text ends
        before the stop string, or after it with `include_stop`; what follows is dropped.
        """
        if self._spent:
            return "", None
        if not active or not self._root.next:
            passed, self._held, self._node, self._best = self._held + text, "", self._root, None
            return passed, None
        at = len(self._held)
        self._held += text
        while at < len(self._held):
            if self._step(self._held[at], at):
                return self._match()
            at += 1
        start = at - self._node.depth if self._best is None else min(at - self._node.depth, self._best[0])
        passed, self._held = self._held[:start], self._held[start:]
        if self._best is not None:
            self._best = (self._best[0] - start, self._best[1] - start)
        return passed, None

    def finish(self) -> tuple[str, str | None]:
        """(what was held back, the stop string if a match was waiting to grow)."""
        if self._best is not None and not self._spent:
            return self._match()
        held, self._held = self._held, ""
        return held, None

    def _step(self, character: str, at: int) -> bool:
        """Takes the character at `at` of the held text; True when the best match can't be beaten any more."""
        node = self._node
        while character not in node.next and node.fail is not None:
            node = node.fail
        node = self._node = node.next.get(character, self._root)
        end = at + 1
        if node.longest and (self._best is None or end - node.longest <= self._best[0]):
            self._best = (end - node.longest, end)
        if self._best is None:
            return False
        start = end - node.depth  # of the earliest stop string that is still possible
        return start > self._best[0] or (start == self._best[0] and not node.next)

    def _match(self) -> tuple[str, str]:
        assert self._best is not None
        start, end = self._best
        text, stop = self._held[: end if self._include else start], self._held[start:end]
        self._spent, self._held, self._best = True, "", None
        return text, stop


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(depth=node.depth + 1))
        node.longest = len(stop)
    queue = deque(root.next.values())
    for node in queue:
        node.fail = root
    while queue:
        parent = queue.popleft()
        for character, node in parent.next.items():
            fail = parent.fail
            while fail is not None and character not in fail.next:
                fail = fail.fail
            node.fail = root if fail is None else fail.next[character]
            node.longest = node.longest or node.fail.longest
            queue.append(node)
    return root
