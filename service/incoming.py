"""One snapshot on its way in: what of it is kept, held and counted until it has a name. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from kvcache.cache import PrefixCache
from kvcache.export import Arrived
from kvcache.manifest import Item, Manifest
from kvcache.media import MediaTag
from kvcache.names import without_opening
from kvcache.records import Buffer, NoteKind, PutResult
from kvcache.travel import Arrival
from service.answers import answered
from service.events import Imported
from service.export_errors import check_fingerprint, check_images, image_refused, incomplete
from service.handles import Handles
from service.images.decode import judge
from service.images.uploads import digest_of
from service.media import ImageRefused
from service.naming import Naming
from service.request import SaveOptions
from service.resolve import check_room
from service.runtime import Loaded, Runtime, store_full


class Incoming:
    """One import under way. What it holds is let go of with `stack`.

    What came of one that broke off stays as any state that nobody has named does, so that the next need not bring it
    again; of one that was refused nothing does.
    """

    def __init__(
        self, rt: Runtime, loaded: Loaded, handles: Handles, options: SaveOptions, owner: str, stack: ExitStack
    ) -> None:
        self._rt = rt
        self._loaded = loaded
        self._handles = handles
        self._options = options
        self._owner = owner
        self._stack = stack
        self._intake = rt.images(loaded, owner, stack).intake
        self._arrival: Arrival | None = None
        self._images: set[MediaTag] = set()  # that are held
        self.refused = False
        self._records = self._bytes = 0

    async def begin(self, manifest: Manifest) -> None:
        """Refuses what cannot be kept before any state has come."""
        loaded, owner, came = self._loaded, self._owner, manifest.snapshot
        check_fingerprint(manifest, loaded)
        check_room(manifest.end.end, loaded.view, needs=0, at="data")
        check_images(manifest, self._intake.limits)
        self._options = replace(
            self._options,
            snapshot_id=self._options.snapshot_id or without_opening(came.id),
            ttl=self._options.ttl if self._options.ttl is not None else min(came.ttl, self._rt.config.max_ttl),
            labels=self._options.labels or tuple(sorted(came.labels.items())),
            lineage=tuple(map(without_opening, came.lineage)),
            origins=came.origins,
        )
        self._handles.check_new(owner, [self._options])
        self._handles.check_id(owner, self._options, manifest.end.all_tokens())
        arrival = self._arrival = await self._arrive(manifest)
        for tag in arrival.images.values():
            uploads = loaded.uploads.hold(owner, (tag,))
            if uploads is not None:
                self._stack.callback(loaded.uploads.release, uploads)
                self._images.add(tag)

    async def _arrive(self, manifest: Manifest) -> Arrival:
        """Beside the event loop: a context's blocks are hashed, and an owner's first key is written to disk."""
        cache = self._loaded.cache
        arriving = asyncio.ensure_future(asyncio.to_thread(cache.arrive, self._owner, manifest))

        def left(done: asyncio.Future[Arrival]) -> None:
            if done.exception() is None:
                cache.arrived(done.result(), forget=self.refused)

        try:
            arrival = await asyncio.shield(arriving)
        except asyncio.CancelledError:
            arriving.add_done_callback(left)  # the thread cannot be stopped: what it makes is let go of then
            raise
        except OSError as error:
            raise store_full(f"the owner's key could not be written ({error.strerror})") from error
        self._stack.callback(lambda: cache.arrived(arrival, forget=self.refused))
        return arrival

    async def take(self, part: Arrived) -> None:
        """Waits, not for long, while the store has no room."""
        assert self._arrival is not None
        item = self._arrival.manifest.items[part.index]
        if item.kind is NoteKind.MEDIA:
            await self._take_image(item, part.payload)
            return
        cache, loop = self._loaded.cache, asyncio.get_running_loop()
        until = loop.time() + self._rt.config.snapshot_wait
        while True:
            left = until - loop.time()
            result = cache.take(self._arrival, item, part.payload, patient=left > 0)
            if result.held:
                if result is PutResult.STORED:
                    self._count(item)
                return
            if not result.may_pass or left <= 0:
                raise store_full(result.name)
            await _until_written(cache, left)

    async def _take_image(self, item: Item, payload: Buffer) -> None:
        assert self._arrival is not None
        tag = self._arrival.images.get(item.key)
        if tag is not None and tag not in self._images:

            def looked_at() -> tuple[bytes, bytes]:
                file = bytes(payload)
                judge(file, "", self._intake.limits)
                return digest_of(file), file

            try:
                digest, file = await self._intake.on_thread(looked_at)
            except ImageRefused as refused:
                raise image_refused(item, refused) from None
            upload = self._loaded.uploads.receive(self._owner, tag, digest, file)
            self._stack.callback(lambda: self._loaded.uploads.release((upload,), forget=self.refused))
            self._images.add(tag)
            self._count(item)

    def _count(self, item: Item) -> None:
        self._records += 1
        self._bytes += item.size

    async def end(self) -> Imported:
        """Names it, once all of it is there."""
        arrival, cache = self._arrival, self._loaded.cache
        assert arrival is not None
        lacking = [str(item) for item in cache.lacking(arrival)]
        lacking += [f"image {key[:8].hex()}" for key, tag in arrival.images.items() if tag not in self._images]
        if lacking:
            raise incomplete(lacking[0])
        node = cache.hold(arrival.end)
        with Naming(self._loaded, self._handles, self._owner, None) as names:
            snapshot = await names.add(node, self._options)
            return Imported(
                snapshot=self._handles.view(snapshot),
                received_records=self._records,
                received_bytes=self._bytes,
                held_records=len(arrival.manifest.items) - self._records,
            )


async def _until_written(cache: PrefixCache, seconds: float) -> None:
    """Until the store has written something, or time is up."""

    def order(written: Callable[[None], None]) -> None:
        cache.store.when_written(lambda: written(None))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await answered(order)
