"""The bytes of a snapshot that travels: manifest, records, and the signature of each. Owns framing; pure, no I/O.

    head ─ manifest ─ signature ─┬─ index ─ payload ─ signature ─┬─ … until the end
                                 ╰─ of a record that is sent ────╯

The manifest's signature covers all before it. A record's covers that signature, its place in the manifest, and its
bytes: none can be left in the place of another, or come from another export. So everything is checked as it comes, and
the manifest can be made without reading a record. Which records are sent is the sender's choice; they come in the
manifest's order. Mirror of docs/format.md, section 10.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NewType

from kvcache.buffers import new_buffer
from kvcache.errors import CutExport, DamagedExport, ExportError, ForeignKey
from kvcache.manifest import Manifest, decode_manifest
from kvcache.records import Buffer

ExchangeKey = NewType("ExchangeKey", bytes)
"""32 bytes that the instances which trust each other's exports have in common."""

MAGIC = b"KVEX"
VERSION = 1
SIGNATURE_BYTES = 32
MAX_MANIFEST_BYTES = 64 << 20  # some ten million tokens

# magic, version, reserved (zero), bytes of the manifest, what tells the key apart
_HEAD = struct.Struct("<4sB3sI8s")
_INDEX = struct.Struct("<I")
_MANIFEST = b"kvfork export v1"
_RECORD = b"kvfork exported record v1"


def key_mark(key: ExchangeKey) -> bytes:
    """8 bytes that tell keys apart and nothing about one."""
    return hashlib.sha256(b"kvfork exchange key v1" + key).digest()[:8]


class Exporter:
    """Writes one export. Every part is to be sent in the order in which it was asked for."""

    def __init__(self, key: ExchangeKey, manifest: bytes) -> None:
        self._key = key
        self._manifest = manifest
        self._head = _HEAD.pack(MAGIC, VERSION, bytes(3), len(manifest), key_mark(key))
        signing = hmac.new(key, _MANIFEST + self._head, "sha256")
        signing.update(manifest)  # apart, since only this lets other threads run meanwhile
        self._signature = signing.digest()

    def opening(self) -> list[Buffer]:
        """Head, manifest and signature."""
        return [self._head, self._manifest, self._signature]

    def record(self, index: int, payload: Buffer, *, piece: int) -> Iterator[Buffer]:
        """One record in pieces of at most so many bytes, each signed for as it is taken."""
        head = _INDEX.pack(index)
        signing = hmac.new(self._key, _RECORD + self._signature + head, "sha256")
        yield head
        view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
        for at in range(0, len(view), piece):
            part = view[at : at + piece]
            signing.update(part)
            yield part
        yield signing.digest()

    def size(self, payload_bytes: int, records: int) -> int:
        """Bytes of an export with so many records of so many bytes together."""
        opening = sum(len(part) for part in self.opening())
        return opening + payload_bytes + records * (_INDEX.size + SIGNATURE_BYTES)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A record that is what was signed."""

    index: int  # in the manifest's items
    payload: Buffer  # its own memory


class Importer:
    """Reads one export as it comes, in parts of any size. What it hands out was signed with the key."""

    def __init__(self, key: ExchangeKey) -> None:
        self.manifest: Manifest | None = None  # once it was there, and was what was signed
        self._key = key
        self._part = "the manifest"  # that is being read
        self._between = False  # records: the export may end here
        self._signing: hmac.HMAC | None = None  # what is read next, as it comes
        self._done: list[Manifest | Arrived] = []
        self._reading = self._read()
        self._hole = next(self._reading)
        self._filled = 0

    def feed(self, data: Buffer) -> Iterator[Manifest | Arrived]:
        """What `data` completes; take all of it before the next. Raises ExportError, after which nothing more is read.

        Holds one record, from its first byte on.
        """
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            part, view = view[: len(self._hole) - self._filled], view[len(self._hole) - self._filled :]
            self._hole[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self._between = False
            if self._signing is not None:
                self._signing.update(part)
            if self._filled == len(self._hole):
                self._hole, self._filled = next(self._reading), 0
                while self._done:
                    yield self._done.pop()  # one at most, and whoever took it is the only one who has it

    def finish(self) -> Manifest:
        """At the end: the manifest. CutExport if the end has come too soon."""
        if self.manifest is None or not self._between:
            raise CutExport(self._part)
        return self.manifest

    def _read(self) -> Generator[memoryview, None, None]:
        """Yields what is to be filled next."""
        head = bytearray(_HEAD.size)
        yield memoryview(head)
        magic, version, reserved, length, mark = _HEAD.unpack(head)
        if magic != MAGIC or reserved != bytes(3):
            raise ExportError("is no export of a snapshot")
        if version != VERSION:
            raise ExportError(f"is an export of version {version}, this reader knows {VERSION}")
        if mark != key_mark(self._key):
            raise ForeignKey(mark, key_mark(self._key))
        if not 0 < length <= MAX_MANIFEST_BYTES:
            raise ExportError(f"has a manifest of {length} bytes, of at most {MAX_MANIFEST_BYTES}")
        # Who sent the length is not known yet: pages are taken as the text fills them.
        text, signature = new_buffer(length), bytearray(SIGNATURE_BYTES)
        self._signing = hmac.new(self._key, _MANIFEST + bytes(head), "sha256")
        yield text
        signed, self._signing = self._signing.digest(), None
        yield memoryview(signature)
        if not hmac.compare_digest(signature, signed):
            raise DamagedExport(self._part)
        self.manifest = decode_manifest(bytes(text))
        del text
        self._done.append(self.manifest)
        after = 0
        while True:
            index_bytes, tag = bytearray(_INDEX.size), bytearray(SIGNATURE_BYTES)
            self._part = f"what comes behind {self._part}"
            self._between = True
            yield memoryview(index_bytes)
            (index,) = _INDEX.unpack(index_bytes)
            if not after <= index < len(self.manifest.items):
                raise DamagedExport(self._part)
            after = index + 1
            item = self.manifest.items[index]
            self._part = str(item)
            payload = new_buffer(item.size)
            self._signing = hmac.new(self._key, _RECORD + bytes(signature) + bytes(index_bytes), "sha256")
            yield payload
            digest, self._signing = self._signing.digest(), None
            yield memoryview(tag)
            if not hmac.compare_digest(tag, digest):
                raise DamagedExport(self._part)
            self._done.append(Arrived(index, payload.toreadonly()))
            del payload
