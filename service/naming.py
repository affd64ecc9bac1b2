"""The names that one call makes. Owns that a call which does not come to its end leaves none that it did not tell.

The engine thread hands out nodes; they become snapshots here and nowhere else. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvcache.errors import StoreError
from kvcache.snapshots import GoneReason, Snapshot, new_call_id
from kvcache.tree import Node
from service import facts
from service.answers import answered
from service.errors import CallError, StoreFull
from service.events import Marked, SnapshotView
from service.handles import Handles, bare_id
from service.request import Durability, Mark, SaveOptions
from service.runtime import Loaded, store_full
from service.work import NodeAt


class Naming:
    """As a context: what leaves it by an error or a cancel takes the names along that were not `told` by then.

    A name that was there before, under an id that the caller chose, is nobody's to take along.
    """

    def __init__(
        self, loaded: Loaded, handles: Handles, owner: str, parent: Snapshot | None, *, one_line: bool = True
    ) -> None:
        """`parent`: what the names are derived from. `one_line`: each prefix begins the next longer one."""
        self._cache = loaded.cache
        self._handles = handles
        self._owner = owner
        self._parent = parent
        self._call = new_call_id() if one_line else ""
        self._untold: list[Snapshot] = []

    def __enter__(self) -> Naming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            while self._untold:
                self._undo(self._untold[-1])

    def told(self, name: str) -> None:
        """The caller has heard of it, or has asked for it whatever becomes of the call."""
        self._untold = [snapshot for snapshot in self._untold if snapshot.id != bare_id(name)]

    async def add_all(self, wanted: Sequence[tuple[Node, SaveOptions]]) -> list[Snapshot]:
        """Names every node, taking over the caller's holds; those of nodes not named are let go of."""
        left = list(wanted)
        try:
            return [await self.add(*left.pop(0)) for _ in wanted]
        finally:
            for node, _ in left:
                self._cache.let_go(node)

    async def add(self, node: Node, options: SaveOptions) -> Snapshot:
        """Names `node`, taking over the caller's hold, and waits until the name is as safe as was asked for.

        Raises StoreFull if it cannot be; then the name is gone again.
        """
        parent, owner = self._parent, self._owner
        facts.note(parent=f"snapshots/{parent.id}" if parent is not None else "")
        there = self._handles.has(options.snapshot_id, owner)
        snapshot = self._handles.add(owner, node, options, parent, call=self._call)
        if not there:
            self._untold.append(snapshot)  # before anything is waited for
        facts.note(snapshot=f"snapshots/{snapshot.id}")
        try:
            await self._as_safe_as_asked(snapshot, options)
        except StoreFull:
            if not there:
                self._undo(snapshot)
            raise
        return snapshot

    async def try_save(self, event: NodeAt, options: SaveOptions | None) -> tuple[SnapshotView | None, str]:
        """Names a node if all of it was stored; the reason if not."""
        if event.lost or options is None:
            self._cache.let_go(event.node)
            return None, "STORE_FULL" if event.lost else ""
        try:
            return self._handles.view(await self.add(event.node, options)), ""
        except CallError as error:
            return None, error.reason

    async def parent_marks(self, marks: Sequence[Mark], places: Sequence[int | None]) -> list[Marked]:
        """Marks at or before the parent's end: kept if a state stands there already, and said so if not."""
        parent = self._parent
        if parent is None:
            return []
        found: list[Marked] = []
        for i, (mark, place) in enumerate(zip(marks, places, strict=True)):
            if place is None or place > parent.token_count:
                continue
            node = self._cache.cut(parent.node, place)
            if node is None:
                found.append(Marked(mark=i, snapshot=None, save_error_reason="NOT_STORED"))
            else:
                found.append(await self._mark(i, NodeAt(node, "", final=False), mark))
        return found

    async def marked(self, event: NodeAt, marks: Sequence[Mark], places: Sequence[int | None]) -> list[Marked]:
        """Every mark at the node's place, None being the reasoning's end; takes over the hold on the node."""
        found: list[Marked] = []
        try:
            for i, (mark, place) in enumerate(zip(marks, places, strict=True)):
                if place == (None if event.reasoning_end else event.node.end):
                    copy = NodeAt(self._cache.hold(event.node), event.lost, final=False)
                    found.append(await self._mark(i, copy, mark))
        finally:
            self._cache.let_go(event.node)
        return found

    async def _mark(self, index: int, event: NodeAt, mark: Mark) -> Marked:
        view, reason = await self.try_save(event, mark.options)
        return Marked(mark=index, snapshot=view, save_error_reason=reason)

    async def _as_safe_as_asked(self, snapshot: Snapshot, options: SaveOptions) -> None:
        """Raises StoreFull if it cannot be made durable."""
        cache = self._cache
        if options.durability is Durability.DISK and not cache.state_of(snapshot).on_disk:
            error: StoreError | None = await answered(lambda done: cache.make_durable(snapshot, done))
            if error is not None:
                raise store_full(str(error))

    def _undo(self, snapshot: Snapshot) -> None:
        self._untold.remove(snapshot)
        self._handles.delete(snapshot, GoneReason.DELETED, in_use_ok=True)
