"""Snapshots to and from other instances: ExportSnapshot, CheckImport, ImportSnapshot.

Owns the order of things, what an export holds while it lasts, and how many there may be; what an import does is
`service.incoming`. Which records travel is `kvcache.travel`, the bytes and their signatures are `kvcache.export`.
Reading and hashing is done beside the event loop, and a call holds one record at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

from kvcache.cache import PrefixCache
from kvcache.errors import CorruptRecord, CutExport
from kvcache.export import Arrived, ExchangeKey, Exporter, Importer
from kvcache.manifest import ItemId, Manifest, images_of
from kvcache.media import MediaTag
from kvcache.records import Buffer, FetchResult, NoteKind, RecordId
from kvcache.snapshots import Snapshot
from kvcache.travel import Departure, Packed, pack
from service.answers import answered
from service.errors import CallError, ExchangeQuota, ExportIncomplete, ImageNotHeld, SlowSender, Unsupported
from service.events import ExportPiece, ExportView, ImportCheck, Imported
from service.export_errors import check_fingerprint, translated
from service.handles import Handles
from service.incoming import Incoming
from service.request import ExportCall, SaveOptions
from service.resolve import check_room
from service.runtime import Loaded, Runtime

PIECE_BYTES = 256 << 10  # of one message: small enough to be hashed between two tokens of others
MOST_OF_OWNER = 4  # exports, imports and checks at a time
MOST = 16  # of all owners: each may hold one record of state, or a manifest


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
                while data := await asyncio.to_thread(_gathered, parts):
                    yield ExportPiece(data)

    async def _read(self, cache: PrefixCache, packed: Packed, index: int) -> Buffer:
        source = packed.sources[index]
        if not isinstance(source, RecordId):
            return source
        result: FetchResult = await answered(lambda done: cache.store.fetch((source,), done))
        if result.error is not None or len(result.payloads[0]) != packed.items[index].size:
            if result.failed is not None and isinstance(result.error, CorruptRecord):
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
        with self._place(owner):
            with translated():
                found = await asyncio.to_thread(_manifest_of, key, manifest)
            check_fingerprint(found, loaded)
            check_room(found.end.end, loaded.view, needs=0, at="manifest")
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
        """Takes a snapshot in. Raises what is wrong with it; of one that is refused nothing stays.

        One that breaks off leaves what came of it to the next try, as ordinary state.
        """
        key = self._need_key()
        loaded, handles = self._rt.need_model("", names_snapshot=False)
        with self._place(owner), ExitStack() as stack:
            coming = Incoming(self._rt, loaded, handles, options, owner, stack)
            try:
                with translated():
                    await self._receive(Importer(key), data, coming)
                return await coming.end()
            except CallError as error:
                coming.refused = not isinstance(error, ExportIncomplete | SlowSender)
                raise

    @staticmethod
    async def _receive(reader: Importer, data: AsyncIterator[bytes], coming: Incoming) -> None:
        """Lets go of each record, and of each message, before it waits for the next."""
        async for message in data:
            parts = _parts_of(reader, message)
            del message
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                if isinstance(part, Manifest):
                    await coming.begin(part)
                else:
                    await coming.take(part)
                del part
            del parts
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
                    f"{most} exports, imports and checks {whose}are under way, and no more may be",
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
            if not self._open:
                self._rt.loop.rest_again()


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


def _gathered(parts: Iterator[Buffer]) -> bytes:
    """The next of them together, as a message has room for; nothing at the end."""
    taken: list[Buffer] = []
    for part in parts:
        taken.append(part)
        if len(part) == PIECE_BYTES:
            break
    return b"".join(taken)


def _pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


def _parts_of(reader: Importer, message: bytes) -> Iterator[Manifest | Arrived]:
    """What a message completes, one at a time: it may have many records in it."""
    view = memoryview(message)
    for at in range(0, len(view), PIECE_BYTES):
        yield from reader.feed(view[at : at + PIECE_BYTES])


def _manifest_of(key: ExchangeKey, data: bytes) -> Manifest:
    for part in Importer(key).feed(data):
        assert isinstance(part, Manifest), "it comes first"
        return part
    raise CutExport("the manifest")
