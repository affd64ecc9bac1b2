"""Following snapshots: from an owner's log of changes to what one watch shows. Owns tokens, wake-ups and the bounds.

A watch holds its place in the log and nothing else (`kvcache.changes`). It reads a stretch, leaves out what its labels
do not ask for and what later changes make stale, and shows the rest as it is now. A reader that stops falls behind
until the log has passed its place; then it is told, and starts over. Nobody waits for it: who changes a name only wakes
it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
import struct
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

from kvcache.cache import PrefixCache
from kvcache.changes import Change, PlacePassed
from kvcache.snapshots import GoneReason, Snapshot, SnapshotError
from service.errors import CallError, Draining, InvalidField, ResumeTokenExpired, WatchOverflow, WatchQuota
from service.events import Bookmark, Changed, Gone, Residency, SnapshotView, Synced, Watched, WhyGone
from service.handles import Handles, full_name

BOOKMARK_SECONDS = 30.0  # of silence before a watch is told that it stands
STRETCH = 500  # changes read at once
PAGE = 200  # snapshots listed at once
LOOK_SECONDS = 1.0  # between looks at where watched state is, at least
LOOK_SHARE = 20  # and so many times what the last look took

_TOKEN = struct.Struct(">8s8sQ")  # digests of the process's start, and of owner and labels; the place


class Watches:
    """All watches of a process. On the event loop but for `_told`."""

    def __init__(self, boot_id: str, *, most: int, bookmark_seconds: float = BOOKMARK_SECONDS) -> None:
        """`most`: watches of one owner at a time."""
        self._boot = hashlib.sha256(boot_id.encode()).digest()[:8]
        self._most = most
        self._bookmark_seconds = bookmark_seconds
        self._open: Counter[str] = Counter()
        self._changed: dict[str, asyncio.Event] = {}  # by owner; set once, then replaced
        self._ready = asyncio.Event()
        self._closed = False
        self._seen: dict[tuple[str, str], tuple[Residency, bool]] = {}  # by owner and id, of watched owners
        self._cache: PrefixCache
        self._handles: Handles
        self._loop: asyncio.AbstractEventLoop

    def attach(self, cache: PrefixCache, handles: Handles) -> None:
        """The names are there: what waits for them begins."""
        self._loop = asyncio.get_running_loop()
        self._cache, self._handles = cache, handles
        cache.when_changed(self._told)
        self._ready.set()

    def close(self) -> None:
        """Ends every watch: they hear that the server goes."""
        self._closed = True
        self._ready.set()
        for news in self._changed.values():
            news.set()

    @property
    def count(self) -> int:
        """Watches that are open."""
        return self._open.total()

    async def watch(self, owner: str, labels: Mapping[str, str], resume_token: str) -> AsyncGenerator[Watched, None]:
        """Never ends but by an error: WatchQuota, ResumeTokenExpired, WatchOverflow, Draining, InvalidField."""
        place = self._place_of(resume_token, owner, labels) if resume_token else None
        if self._open[owner] >= self._most:
            raise WatchQuota(
                f"{self._most} watches are open, as many as one caller may have",
                hint="end one, or share it",
                metadata={"limit": str(self._most)},
            )
        self._open[owner] += 1
        try:
            await self._ready.wait()
            self._check_open()
            if place is None:
                place = self._cache.changes_head(owner)  # before the listing: what comes meanwhile is told after it
                async for changed in self._listing(owner, labels):
                    yield Watched(changed, "")
            else:
                self._read(owner, place, ResumeTokenExpired("more has happened since than is kept", hint=START_OVER))
            yield Watched(Synced(), self._token(place, owner, labels))
            async for watched in self._follow(owner, labels, place):
                yield watched
        finally:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]
                self._changed.pop(owner, None)

    async def _listing(self, owner: str, labels: Mapping[str, str]) -> AsyncGenerator[Changed, None]:
        after: tuple[float, str] | None = None
        while True:
            # Page by page, for the reader may be slow; who is between two pages holds nothing.
            page = [s for s in self._cache.snapshots(owner) if after is None or (s.created, s.id) > after][:PAGE]
            if not page:
                return
            after = page[-1].created, page[-1].id
            ids = [s.id for s in page if labels.items() <= s.labels.items()]
            del page
            for snapshot_id in ids:
                changed = self._now(owner, snapshot_id)
                if changed is not None:
                    yield changed
            self._check_open()

    async def _follow(self, owner: str, labels: Mapping[str, str], place: int) -> AsyncGenerator[Watched, None]:
        said = time.monotonic()
        while True:
            news = self._changed.setdefault(owner, asyncio.Event())  # before the look: nothing falls between the two
            stretch = self._read(
                owner, place, WatchOverflow("the watch was not read fast enough for all that happened", hint=START_OVER)
            )
            for index, event in shown(stretch, labels):
                changed = self._now(owner, event) if isinstance(event, str) else event
                if changed is not None:
                    yield Watched(changed, self._token(place + index + 1, owner, labels))
                    said = time.monotonic()
                    self._check_open()
            place += len(stretch)
            left = said + self._bookmark_seconds - time.monotonic()
            if not stretch and left > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await news.wait()
            elif left <= 0:
                yield Watched(Bookmark(), self._token(place, owner, labels))
                said = time.monotonic()
            else:
                await asyncio.sleep(0)  # a stretch that shows nothing must not keep others waiting
            self._check_open()

    def _now(self, owner: str, snapshot_id: str) -> Changed | None:
        """The snapshot as it is; None if it is gone, which the log has too."""
        with contextlib.suppress(SnapshotError):
            return Changed(self._view(self._cache.snapshot(owner, snapshot_id)))
        return None

    def _view(self, snapshot: Snapshot) -> SnapshotView:
        """The snapshot as it is; if its state is elsewhere than when it was looked at last, watches are told."""
        view = self._handles.view(snapshot)
        key, state = (snapshot.owner, snapshot.id), (view.residency, view.durable)
        if self._seen.get(key, state) != state:
            self._cache.state_changed(snapshot)
        self._seen[key] = state
        return view

    def _read(self, owner: str, place: int, passed: CallError) -> list[Change]:
        try:
            return self._cache.changes_since(owner, place, STRETCH)
        except PlacePassed:
            raise passed from None

    def _check_open(self) -> None:
        if self._closed:
            raise Draining("the server is shutting down", hint="watch again once it is back", retry_after=1.0)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _token(self, place: int, owner: str, labels: Mapping[str, str]) -> str:
        return base64.urlsafe_b64encode(_TOKEN.pack(self._boot, _digest(owner, labels), place)).decode()

    def _place_of(self, token: str, owner: str, labels: Mapping[str, str]) -> int:
        try:
            boot, digest, place = _TOKEN.unpack(base64.b64decode(token, altchars=b"-_", validate=True))
        except (binascii.Error, struct.error, ValueError):  # ValueError: not ASCII
            raise InvalidField.at("resume_token", "is no resume token of this server") from None
        if digest != _digest(owner, labels):
            text = "belongs to another watch: caller and labels must be the same again"
            raise InvalidField.at("resume_token", text)
        if boot != self._boot:
            raise ResumeTokenExpired("the server was started anew since", hint=START_OVER)
        return int(place)

    # -- wake-ups -------------------------------------------------------------------------------------------------

    def _told(self, owner: str) -> None:
        """A name has changed. On any thread, under the cache's lock."""
        news = self._changed.pop(owner, None)
        if news is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone and nobody waits
                self._loop.call_soon_threadsafe(news.set)

    async def look(self) -> None:
        """Until cancelled: sees where the state of watched snapshots is, which no change of a name tells."""
        await self._ready.wait()
        while not self._closed:
            began = time.monotonic()
            await asyncio.to_thread(self._look, list(self._open))
            await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * (time.monotonic() - began)))

    def _look(self, owners: Sequence[str]) -> None:
        there = set()
        for owner in owners:
            for snapshot in self._cache.snapshots(owner):
                self._view(snapshot)
                there.add((owner, snapshot.id))
        for key in list(self._seen):
            if key not in there:
                self._seen.pop(key, None)


START_OVER = "start over without a resume token, and drop what the new listing does not name"


def shown(stretch: Sequence[Change], labels: Mapping[str, str]) -> Iterator[tuple[int, Gone | str]]:
    """What a watch for `labels` shows of a stretch, with its index there: Gone, or the id of what is to be told anew.

    Only the last of several changes is shown, and nothing of what came and went within the stretch. What is left out is
    left out for a change behind it, so that every index is a place to go on from.
    """
    last = {change.id: index for index, change in enumerate(stretch)}
    fresh: set[str] = set()  # appeared within the stretch
    for index, change in enumerate(stretch):
        was = change.before is not None and labels.items() <= change.before.items()
        if change.after is not None and labels.items() <= change.after.items():
            if not was:
                fresh.add(change.id)
            if last[change.id] == index:
                yield index, change.id
        elif was and change.id in fresh:
            fresh.remove(change.id)
        elif was:
            yield index, Gone(full_name(change.id), _WHY[change.reason])


_WHY = {
    GoneReason.DELETED: WhyGone.DELETED,
    GoneReason.ROLLED_BACK: WhyGone.ROLLED_BACK,
    GoneReason.EXPIRED: WhyGone.EXPIRED,
    None: WhyGone.UNLISTED,
}


def _digest(owner: str, labels: Mapping[str, str]) -> bytes:
    return hashlib.sha256(json.dumps([owner, sorted(labels.items())]).encode()).digest()[:8]
