"""Snapshots to and from other instances: ExportSnapshot, CheckImport, ImportSnapshot.

Owns the order of things, what a call holds while it lasts, and the limits on that. Which records travel and what a
snapshot becomes here is `kvcache.travel`, the bytes and their signatures are `kvcache.export`. Reading and hashing is
done beside the event loop, and a call holds one record at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from kvcache.cache import PrefixCache
from kvcache.errors import CutExport, DamagedExport, ExportError, ForeignKey
from kvcache.export import Arrived, ExchangeKey, Exporter, Importer
from kvcache.manifest import Item, ItemId, Manifest, images_of
from kvcache.media import MediaTag
from kvcache.records import Buffer, FetchResult, NoteKind, PutResult, RecordId
from kvcache.snapshots import Snapshot
from kvcache.travel import Arrival, Departure, Packed, pack
from service.errors import (
    CallError,
    ExchangeKeyDiffers,
    ExchangeQuota,
    ExportDamaged,
    ExportIncomplete,
    ExportUnreadable,
    FingerprintDiffers,
    ImageNotHeld,
    SlowSender,
    Unsupported,
)
from service.events import ExportPiece, ExportView, ImportCheck, Imported
from service.handles import Handles
from service.request import ExportCall, SaveOptions
from service.runtime import Loaded, Runtime, store_full

PIECE_BYTES = 256 << 10  # of one message: small enough to be hashed between two tokens of others
MOST_OF_OWNER = 4  # exports and imports at a time
MOST = 16  # of all owners: each may hold one record of state


class Exchange:
    """One per process; runs on the event loop."""

    def __init__(self, runtime: Runtime, key: ExchangeKey | None) -> None:
        """`key` None: every call is refused with what to do about it."""
        self._rt = runtime
        self._key = key
        self._open: Counter[str] = Counter()

    # Out

    async def export_snapshot(self, call: ExportCall, owner: str) -> AsyncGenerator[ExportPiece, None]:
        """The pieces of an export, in order. What is read is pinned until the generator is closed."""
        key = self._need_key()
        await self._rt.until_named(owner, call.name)
        handles = self._rt.need_store(call.name)
        loaded = self._rt.loaded
        assert loaded is not None
        cache = loaded.cache
        with self._place(owner), ExitStack() as stack:
            snapshot = stack.enter_context(handles.using(call.name, owner))
            files = _files(loaded, snapshot)
            departure = cache.depart(snapshot)
            stack.callback(cache.departed, departure)
            packed = await asyncio.to_thread(pack, snapshot, departure, cache.fingerprint, files)
            writer = await asyncio.to_thread(Exporter, key, packed.manifest)
            held = call.held & {item.id for item in packed.items}
            sent = [] if call.manifest_only else [i for i, item in enumerate(packed.items) if item.id not in held]
            about: ExportView | None = _about(handles, snapshot, departure, packed, writer, sent, len(held))
            for data in _pieces(b"".join(writer.opening())):
                yield ExportPiece(data, about)
                about = None
            for index in sent:
                payload = await self._read(cache, packed, index)
                parts = writer.record(index, payload, piece=PIECE_BYTES)
                gathered = b""
                while part := await asyncio.to_thread(_next, parts):
                    gathered += part
                    if len(part) == PIECE_BYTES:  # else a head, an end or a signature, which the next goes along with
                        yield ExportPiece(gathered)
                        gathered = b""
                yield ExportPiece(gathered)

    async def _read(self, cache: PrefixCache, packed: Packed, index: int) -> Buffer:
        source = packed.sources[index]
        if not isinstance(source, RecordId):
            return source
        result = await _fetched(cache, source)
        if result.error is not None or len(result.payloads[0]) != packed.items[index].size:
            if result.failed is not None:
                cache.note_corrupt(source)
            item = str(packed.items[index])
            raise ExportIncomplete(
                f"{item} was lost on the way out: it could not be read from the store",
                hint="export again: what is left travels, and the rest is computed where it is used",
                metadata={"record": item},
            )
        return result.payloads[0]

    # In

    async def check_import(self, manifest: bytes, owner: str) -> ImportCheck:
        """What of an export is here; `manifest` is its beginning."""
        key = self._need_key()
        loaded, _ = self._rt.need_model("", names_snapshot=False)
        cache = loaded.cache
        with _translated():
            found = await asyncio.to_thread(_manifest_of, key, manifest)
        _check_fingerprint(found, loaded)
        held: set[ItemId] = await asyncio.to_thread(cache.held_of, owner, found)
        tags = _images_here(loaded, owner, found)
        held |= {item.id for item in found.items if item.kind is NoteKind.MEDIA and item.key in tags}
        missing = [item for item in found.items if item.id not in held]
        return ImportCheck(
            held=tuple(item.id for item in found.items if item.id in held),
            missing_records=len(missing),
            missing_bytes=sum(item.size for item in missing),
        )

    async def import_snapshot(self, options: SaveOptions, data: AsyncIterator[bytes], owner: str) -> Imported:
        """Takes a snapshot in. Raises what is wrong with it, and then nothing of it stays."""
        key = self._need_key()
        loaded, handles = self._rt.need_model("", names_snapshot=False)
        with self._place(owner), ExitStack() as stack:
            coming = _Coming(self._rt, loaded, handles, options, owner, stack)
            try:
                with _translated():
                    await self._receive(Importer(key), data, coming)
                return await coming.end()
            except CallError as error:
                coming.refused = not isinstance(error, ExportIncomplete | SlowSender)
                raise

    @staticmethod
    async def _receive(reader: Importer, data: AsyncIterator[bytes], coming: _Coming) -> None:
        def read(piece: bytes) -> list[Manifest | Arrived]:
            return list(reader.feed(piece))

        async for piece in data:
            for part in await asyncio.to_thread(read, piece):
                if isinstance(part, Manifest):
                    coming.begin(part)
                else:
                    await coming.take(part)
        reader.finish()

    # Both

    def _need_key(self) -> ExchangeKey:
        if self._key is None:
            raise Unsupported(
                "this server exchanges no snapshots with others: it has no key to sign and check them with",
                hint="start it, and the others, with --exchange-key FILE",
                reason="EXCHANGE_UNSUPPORTED",
            )
        return self._key

    @contextmanager
    def _place(self, owner: str) -> Iterator[None]:
        for have, most, whose in (
            (self._open[owner], MOST_OF_OWNER, f"of {owner} "),
            (self._open.total(), MOST, ""),
        ):
            if have >= most:
                raise ExchangeQuota(
                    f"{most} exports and imports {whose}are under way, and no more may be",
                    hint="wait for some of them to end",
                    metadata={"limit": str(most)},
                )
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]


class _Coming:
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
        self._arrival: Arrival | None = None
        self._images: set[MediaTag] = set()  # that are held
        self.refused = False
        self._records = self._bytes = 0

    def begin(self, manifest: Manifest) -> None:
        """Refuses what cannot be kept before any state has come."""
        loaded, owner, came = self._loaded, self._owner, manifest.snapshot
        _check_fingerprint(manifest, loaded)
        self._options = replace(
            self._options,
            snapshot_id=self._options.snapshot_id or came.id,
            ttl=self._options.ttl if self._options.ttl is not None else min(came.ttl, self._rt.config.max_ttl),
            labels=self._options.labels or tuple(sorted(came.labels.items())),
            lineage=came.lineage,
        )
        self._handles.check_new(owner, [self._options])
        self._handles.check_id(owner, self._options, manifest.end.all_tokens())
        arrival = self._arrival = loaded.cache.arrive(owner, manifest)
        self._stack.callback(lambda: loaded.cache.arrived(arrival, forget=self.refused))
        for tag in arrival.images.values():
            uploads = loaded.uploads.hold(owner, (tag,))
            if uploads is not None:
                self._stack.callback(loaded.uploads.release, uploads)
                self._images.add(tag)

    async def take(self, part: Arrived) -> None:
        """Waits, not for long, while the store has no room."""
        assert self._arrival is not None
        item = self._arrival.manifest.items[part.index]
        if item.kind is NoteKind.MEDIA:
            self._take_image(item, part.payload)
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

    def _take_image(self, item: Item, file: Buffer) -> None:
        assert self._arrival is not None
        tag = self._arrival.images.get(item.key)
        if tag is not None and tag not in self._images:
            upload = self._loaded.uploads.receive(self._owner, tag, bytes(file))
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
            raise _incomplete(lacking[0])
        node = cache.hold(arrival.end)
        snapshot = await self._rt.add(self._owner, node, self._options, None)
        if snapshot.node is not arrival.end and not cache.stands(snapshot.node) and cache.stands(arrival.end):
            cache.rehome(snapshot, arrival.end)
        return Imported(
            snapshot=self._handles.view(snapshot),
            received_records=self._records,
            received_bytes=self._bytes,
            held_records=len(arrival.manifest.items) - self._records,
        )


def _files(loaded: Loaded, snapshot: Snapshot) -> dict[MediaTag, bytes]:
    """The files of a snapshot's images. Raises ImageNotHeld."""
    files: dict[MediaTag, bytes] = {}
    for tag in sorted(snapshot.media):
        file = loaded.uploads.file_of(snapshot.owner, tag)
        if file is None:
            raise ImageNotHeld(
                "an image of the snapshot is not held any more", hint="send the whole context with the image's bytes"
            )
        files[tag] = file
    return files


def _images_here(loaded: Loaded, owner: str, manifest: Manifest) -> set[bytes]:
    """Keys of a manifest's images whose files are here."""
    return {key for key, tag in images_of(manifest).items() if loaded.uploads.file_of(owner, tag) is not None}


def _about(
    handles: Handles,
    snapshot: Snapshot,
    departure: Departure,
    packed: Packed,
    writer: Exporter,
    sent: list[int],
    held: int,
) -> ExportView:
    payload = sum(packed.items[index].size for index in sent)
    return ExportView(
        snapshot=handles.view(snapshot),
        records=len(sent),
        held_records=held,
        bytes=writer.size(payload, len(sent)),
        state_tokens=departure.position,
    )


def _next(parts: Iterator[Buffer]) -> Buffer:
    return next(parts, b"")


def _pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


def _manifest_of(key: ExchangeKey, data: bytes) -> Manifest:
    for part in Importer(key).feed(data):
        assert isinstance(part, Manifest), "it comes first"
        return part
    raise CutExport("the manifest")


def _check_fingerprint(manifest: Manifest, loaded: Loaded) -> None:
    here = loaded.cache.fingerprint
    if manifest.fingerprint != here:
        raise FingerprintDiffers(
            f"the snapshot is of a model with fingerprint {manifest.fingerprint}, {loaded.view.name} has {here}",
            hint="its state fits the same weights, tokenizer and software alone; make it again from its tokens",
            metadata={"have": here, "want": manifest.fingerprint, "model": loaded.view.name},
        )


@contextmanager
def _translated() -> Iterator[None]:
    """What is wrong with an export as the contract's errors."""
    try:
        yield
    except ForeignKey as error:
        raise ExchangeKeyDiffers(
            "the export was signed with another exchange key than this server's",
            hint="give both instances the same --exchange-key",
            metadata={"have": error.ours.hex(), "want": error.theirs.hex()},
        ) from None
    except DamagedExport as error:
        raise ExportDamaged(
            f"the export is damaged: {error.part} is not what was signed",
            hint="nothing of it was kept; export the snapshot again",
            metadata={"record": error.part},
        ) from None
    except CutExport as error:
        raise _incomplete(error.part) from None
    except ExportError as error:
        raise ExportUnreadable(
            f"what was sent {error}", hint="send the data of ExportSnapshot as it is, from its first byte on"
        ) from None


def _incomplete(part: str) -> CallError:
    return ExportIncomplete(
        f"the export ends before {part} was there, or it was left out and is not held here any more",
        hint="call CheckImport and ExportSnapshot again; what came is not sent twice",
        metadata={"record": part},
    )


async def _fetched(cache: PrefixCache, record: RecordId) -> FetchResult:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[FetchResult] = loop.create_future()

    def arrived(result: FetchResult) -> None:
        if not answer.done():
            answer.set_result(result)

    def from_there(result: FetchResult) -> None:
        loop.call_soon_threadsafe(arrived, result)

    cache.store.fetch((record,), from_there)
    return await answer


async def _until_written(cache: PrefixCache, seconds: float) -> None:
    """Until the store has written something, or time is up."""
    loop, written = asyncio.get_running_loop(), asyncio.Event()

    def from_there() -> None:
        loop.call_soon_threadsafe(written.set)

    cache.store.when_written(from_there)
    try:
        async with asyncio.timeout(seconds):
            await written.wait()
    except TimeoutError:
        pass
