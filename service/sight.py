"""What rows see of their images: features that prefill calls are about to need. Owns where these are, and who waits.

    stored features ───────────────────────────────► given to the engine ─┐
    none ─► inputs made (on a thread) ─► encoded, a step of its own ───────┴─► calls that touch the image may run

Only images that a row has still to prefill are looked at: what is restored is never encoded. Rows that need the same
image wait for the same features. Features are stored by image and owner, so that one caller's are no other's.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from kvcache.blocks import root_key
from kvcache.cache import PrefixCache
from kvcache.media import MediaKey
from kvcache.records import FetchResult, RecordId, RecordKind
from service.media import Prepared
from service.plan import Encode, GivenFeatures, RowId, RowImage, StepResult
from service.scheduler import Scheduler
from service.sequence import Sequence
from service.totals import Totals
from service.work import Work, WorkImage

log = logging.getLogger("kvfork.sight")

TOWER_SECONDS = 0.25  # for an image between two tokens of those who write, unless one part of the tower takes longer
AHEAD = 2  # images whose inputs are made or wait for the tower at the same time: they take more bytes than pixels


class _Where(enum.Enum):
    STORE = enum.auto()  # asked for
    QUEUED = enum.auto()  # not stored, and its inputs are still to be made
    MAKING = enum.auto()  # of inputs
    READY = enum.auto()  # to be encoded
    ENGINE = enum.auto()  # there, for as long as an open row needs it


@dataclass(slots=True, eq=False)
class _Image:
    key: MediaKey
    owner: str
    source: WorkImage
    where: _Where = _Where.STORE
    rows: set[RowId] = field(default_factory=set)
    inputs: Prepared | None = None


@dataclass(frozen=True, slots=True)
class _Need:
    start: int
    end: int
    key: MediaKey


class Sight:
    """Engine thread only; nothing here waits. What was read or made comes back through `post`."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        totals: Totals,
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[RowId, Exception], None],
    ) -> None:
        """`post` has a thing done on the engine thread, from any; `fail` ends a row."""
        self._cache = cache
        self._scheduler = scheduler
        self._totals = totals
        self._post = post
        self._fail = fail
        self._images: dict[MediaKey, _Image] = {}
        self._needs: dict[RowId, list[_Need]] = {}
        self._queue: deque[MediaKey] = deque()
        self._give: list[GivenFeatures] = []

    def row_images(self, work: Work) -> tuple[RowImage, ...]:
        """A work's images as the engine knows them."""
        return tuple(
            RowImage(
                start=image.start,
                key=feature_key(self._cache.fingerprint, work.owner, image.layout.key),
                ids=image.layout.ids,
                grid=image.layout.grid,
            )
            for image in work.images
        )

    def want(self, seq: Sequence, position: int) -> None:
        """The row goes on from `position`: what it has to prefill from there is looked for."""
        self.forget(seq.row)
        needs = []
        for image in seq.work.images:
            end = image.start + len(image.layout.ids)
            if end > position:
                key = feature_key(self._cache.fingerprint, seq.work.owner, image.layout.key)
                needs.append(_Need(image.start, end, key))
                self._look_for(key, seq, image)
        if needs:
            self._needs[seq.row] = needs
            self._let_run(seq.row)

    def passed(self, row: RowId, position: int) -> None:
        """The row's state stands at `position`: images before it are not needed any more."""
        needs = self._needs.get(row)
        if needs and needs[0].end <= position:
            self._keep_only(row, [need for need in needs if need.end > position])

    def forget(self, row: RowId) -> None:
        """The row needs nothing any more."""
        if row in self._needs:
            self._keep_only(row, [])

    # -- one step -------------------------------------------------------------------------------------------------

    def take_given(self) -> tuple[GivenFeatures, ...]:
        """Features that the next plan hands to the engine."""
        given, self._give = self._give, []
        return tuple(each for each in given if each.key in self._images)

    def orders(self, keys: Iterable[MediaKey], *, beside: bool) -> tuple[Encode, ...]:
        """What the scheduler has chosen to be encoded: a while at a time `beside` rows that decode."""
        orders: list[Encode] = []
        for key in keys:
            image = self._images.get(key)
            if image is not None and image.inputs is not None:
                seconds = TOWER_SECONDS if beside else math.inf
                orders.append(Encode(image=replace(image.inputs, key=key), seconds=seconds))
        return tuple(orders)

    def waiting_for(self, keys: Iterable[MediaKey]) -> set[RowId]:
        """Rows that need one of these."""
        return {row for key in keys if key in self._images for row in self._images[key].rows}

    def encodings(self, result: StepResult) -> None:
        """What came of a step's encodings: features are stored, and whoever waited goes on."""
        for key, payload in result.encoded.items():
            self._totals.images_encoded += 1
            image = self._images.get(key)
            if image is None:
                continue  # nobody waits any more, and whose they are is forgotten
            record = RecordId(key, RecordKind.FEATURES)
            self._cache.store.put(record, payload, explicit=False, key_id=self._cache.root(image.owner).key_id)
            self._is_there(image)
        for key in result.encoding:
            image = self._images.get(key)
            if image is not None:
                self._scheduler.offer_image(key, image.rows)
        for key in result.unencoded:  # the engine has ended the rows that needed it
            image = self._images.get(key)
            if image is not None:
                self._drop(image)
        self._make_inputs()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _look_for(self, key: MediaKey, seq: Sequence, source: WorkImage) -> None:
        image = self._images.get(key)
        if image is None:
            image = self._images[key] = _Image(key, seq.work.owner, source)
            record = RecordId(key, RecordKind.FEATURES)
            if self._cache.store.locate(record) is None:
                self._queue_up(image)
            else:
                self._cache.store.touch([record])
                self._cache.store.fetch([record], lambda result: self._post(lambda: self._was_read(image, result)))
        image.rows.add(seq.row)
        self._make_inputs()

    def _was_read(self, image: _Image, result: FetchResult) -> None:
        if self._images.get(image.key) is not image:
            return
        if result.ok:
            self._give.append(GivenFeatures(key=image.key, payload=result.payloads[0]))
            self._is_there(image)
        else:
            log.warning("features of an image could not be read (%s); it is encoded again", result.error)
            self._queue_up(image)
            self._make_inputs()

    def _queue_up(self, image: _Image) -> None:
        image.where = _Where.QUEUED
        self._queue.append(image.key)

    def _make_inputs(self) -> None:
        """Begins with as many of the queue as may be under way."""
        under_way = sum(image.where in (_Where.MAKING, _Where.READY) for image in self._images.values())
        while self._queue and under_way < AHEAD:
            image = self._images.get(self._queue.popleft())
            if image is None or image.where is not _Where.QUEUED:
                continue
            image.where = _Where.MAKING
            under_way += 1
            self._ask_for_inputs(image)

    def _ask_for_inputs(self, image: _Image) -> None:
        image.source.load(lambda made: self._post(lambda: self._were_made(image, made)))

    def _were_made(self, image: _Image, made: Prepared | Exception) -> None:
        if self._images.get(image.key) is not image:
            self._make_inputs()
            return
        if isinstance(made, Exception):
            for row in list(image.rows):
                self._fail(row, made)
            self._make_inputs()
            return
        image.where, image.inputs = _Where.READY, made
        self._scheduler.offer_image(image.key, image.rows)

    def _is_there(self, image: _Image) -> None:
        image.where, image.inputs = _Where.ENGINE, None
        for row in image.rows:
            self._let_run(row)

    def _let_run(self, row: RowId) -> None:
        """Lets the row's calls run up to the first image whose features are missing."""
        missing = [need.start for need in self._needs[row] if self._images[need.key].where is not _Where.ENGINE]
        self._scheduler.stop_at(row, min(missing, default=None))

    def _keep_only(self, row: RowId, needs: list[_Need]) -> None:
        before = self._needs.pop(row)
        if needs:
            self._needs[row] = needs
        for key in {need.key for need in before} - {need.key for need in needs}:
            image = self._images.get(key)
            if image is not None:
                image.rows.discard(row)
                if not image.rows:
                    self._drop(image)

    def _drop(self, image: _Image) -> None:
        del self._images[image.key]
        self._scheduler.withdraw_image(image.key)


def feature_key(fingerprint: str, owner: str, key: MediaKey) -> MediaKey:
    """What an image's features go by in the engine and in the store: an owner's own."""
    return MediaKey(hashlib.sha256(b"kvfork features v1" + root_key(fingerprint, owner) + key).digest())
