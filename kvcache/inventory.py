"""The list of what a durable store should hold: segments, owner keys, models and names. Owns its bytes and its order.

The list is told of a thing after that thing is on disk, and of its end before it goes. So what a crash leaves may be
more than the list names, and is taken in again; it is never less, and whatever is less was lost.

A file of its own, so that it does not go with what it names: a head, then sealed entries, each on disk before the next.
It is written whole at the first change of every opening, and when it has grown long. docs/format.md draws the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcache.errors import StoreUnusable
from kvcache.records import ListedName
from kvcache.storage import FILE_MODE, write_fully
from kvcache.store_dir import replace_file

INVENTORY_FILE = "inventory"
LIST_KEY_BYTES = 32

# magic, version, reserved (zero), opening, salt
HEAD = struct.Struct("<4sB3sI16s")
MAGIC = b"KVIN"
LIST_VERSION = 1
LENGTH = struct.Struct("<I")  # of an entry: ciphertext and tag
MAX_ENTRY_BYTES = 1 << 28
TAG_BYTES = 16

# Written whole again once what was appended exceeds what was written whole, and this.
SLACK_BYTES = 1 << 18

Key: TypeAlias = int | str
Change: TypeAlias = tuple[str, Key, object]  # kind, which one, and what is said of it: None once it has ended

SEGMENT, OWNER, MODEL, NAME = "segment", "owner", "model", "name"
KINDS: Mapping[str, type] = {SEGMENT: int, OWNER: int, MODEL: str, NAME: str}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model that snapshots here were made with, and what its fingerprint was made of: part and digest or version."""

    fingerprint: str
    parts: Mapping[str, str]


class ListFile(Protocol):
    """Where the list lies. Methods raise OSError."""

    def read(self) -> bytes | None:
        """All of it; None if there is none."""
        ...

    def replace(self, data: bytes) -> None:
        """Whole or not at all, and on disk on return."""
        ...

    def append(self, offset: int, data: bytes) -> None:
        """Writes at `offset`, the end, and is on disk on return; after an error some of it may be there."""
        ...


class Inventory:
    """The list of one opening. Thread-safe; what changes it waits for the disk."""

    def __init__(self, file: ListFile, key: bytes, opening: int, *, began: Callable[[], None] = lambda: None) -> None:
        """An empty list, not written yet. `began` is called when it was first written."""
        self._file = file
        self._key = key
        self._opening = opening
        self._began = began
        self._lock = threading.Lock()
        self._state: dict[str, dict[Key, object]] = {kind: {} for kind in KINDS}
        # None: what is on disk is not this state, and is replaced at the next change.
        self._cipher: AESGCM | None = None
        self._head = b""
        self._written = False  # by this opening, so that `began` was told
        self._entries = 0
        self._end = 0
        self._whole = 0  # bytes, when it was last written whole

    @classmethod
    def read(
        cls, file: ListFile, key: bytes, opening: int, *, floor: int, began: Callable[[], None] = lambda: None
    ) -> Inventory:
        """The list that an earlier opening wrote, not older than opening `floor`.

        StoreUnusable if it is missing, damaged, of another key, or older.
        """
        made = cls(file, key, opening, began=began)
        data = file.read()
        if data is None:
            raise StoreUnusable(_advice(f"{INVENTORY_FILE} is missing: it lists what this store holds"))
        written, changes = decode_list(data, key)
        if written < floor:
            raise StoreUnusable(
                _advice(
                    f"{INVENTORY_FILE} is of opening {written} and the store has one of opening {floor}: an old copy"
                )
            )
        if written >= opening:
            raise StoreUnusable(
                f"{INVENTORY_FILE} is newer than store.json: one of the two was put back from a copy. "
                "Put back both together"
            )
        made._apply(changes)
        return made

    # What it lists

    def segments(self) -> dict[int, bytes]:
        """Number and namespace."""
        with self._lock:
            return {int(number): bytes.fromhex(str(what)) for number, what in self._state[SEGMENT].items()}

    def has_segment(self, number: int) -> bool:
        with self._lock:
            return number in self._state[SEGMENT]

    def owners(self) -> dict[int, str]:
        """Key id and owner."""
        with self._lock:
            return {int(number): str(owner) for number, owner in self._state[OWNER].items()}

    def models(self) -> dict[bytes, ListedModel]:
        """By namespace."""
        with self._lock:
            return {bytes.fromhex(str(key)): _model_of(what) for key, what in self._state[MODEL].items()}

    def names(self) -> dict[bytes, ListedName]:
        """By the key of the handle's notes."""
        with self._lock:
            return {bytes.fromhex(str(key)): _name_of(what) for key, what in self._state[NAME].items()}

    # Its changes. All raise OSError: then what is on disk is as it was, and the next change brings it along

    def add_segments(self, numbers: Iterable[int], namespace: bytes) -> None:
        self._commit([(SEGMENT, number, namespace.hex()) for number in numbers])

    def drop_segments(self, numbers: Iterable[int]) -> None:
        self._commit([(SEGMENT, number, None) for number in numbers])

    def add_owner(self, key_id: int, owner: str) -> None:
        self._commit([(OWNER, key_id, owner)])

    def drop_owner(self, key_id: int, owner: str) -> None:
        """The key, and the owner's names with it."""
        names = [key for key, name in self.names().items() if name.owner == owner]
        self._commit([(OWNER, key_id, None), *((NAME, key.hex(), None) for key in names)], whole=True)

    def add_model(self, namespace: bytes, model: ListedModel) -> None:
        what = {"fingerprint": model.fingerprint, "parts": dict(model.parts)}
        self._commit([(MODEL, namespace.hex(), what)])

    def add_names(self, names: Mapping[bytes, ListedName]) -> None:
        self._commit([(NAME, key.hex(), [n.namespace.hex(), n.owner, n.id]) for key, n in names.items()])

    def drop_names(self, keys: Iterable[bytes]) -> None:
        self._commit([(NAME, key.hex(), None) for key in keys])

    def _commit(self, changes: Sequence[Change], *, whole: bool = False) -> None:
        with self._lock:
            changes = [change for change in changes if self._state[change[0]].get(change[1]) != change[2]]
            self._apply(changes)
            if self._cipher is None or (changes and (whole or self._end > 2 * self._whole + SLACK_BYTES)):
                if changes or self._entries:
                    self._write_whole()
            elif changes:
                cipher, self._cipher = self._cipher, None
                data = _seal(cipher, self._head, self._entries, changes)
                self._entries += 1
                self._file.append(self._end, data)
                self._end += len(data)
                self._cipher = cipher

    def _write_whole(self) -> None:
        self._cipher, self._entries = None, 1
        data = encode_list(self._key, self._opening, [self._changes()], salt=os.urandom(16))
        self._file.replace(data)
        if not self._written:
            self._began()
            self._written = True
        self._head = data[: HEAD.size]
        self._end = self._whole = len(data)
        self._cipher = _cipher(self._key, self._head)

    def _changes(self) -> list[Change]:
        """Those that lead from nothing to what there is."""
        return [(kind, key, what) for kind, entries in self._state.items() for key, what in entries.items()]

    def _apply(self, changes: Iterable[Change]) -> None:
        for kind, key, what in changes:
            if what is None:
                self._state[kind].pop(key, None)
            else:
                self._state[kind][key] = what


def encode_list(key: bytes, opening: int, entries: Sequence[Sequence[Change]], *, salt: bytes) -> bytes:
    """The whole file."""
    head = HEAD.pack(MAGIC, LIST_VERSION, bytes(3), opening, salt)
    cipher = _cipher(key, head)
    return head + b"".join(_seal(cipher, head, number, changes) for number, changes in enumerate(entries))


def decode_list(data: bytes, key: bytes) -> tuple[int, list[Change]]:
    """The opening that wrote it, and its changes in order. An entry that a crash cut short at the end is left out.

    StoreUnusable if it is damaged elsewhere, is of another version, or was not written under this key.
    """
    if len(data) < HEAD.size:
        raise StoreUnusable(_advice(f"{INVENTORY_FILE} is damaged: it is shorter than its head"))
    head = data[: HEAD.size]
    magic, version, reserved, opening, _ = HEAD.unpack(head)
    if magic != MAGIC or reserved != bytes(3):
        raise StoreUnusable(_advice(f"{INVENTORY_FILE} is damaged: it is not what a store writes"))
    if version != LIST_VERSION:
        raise StoreUnusable(f"{INVENTORY_FILE} has format {version}, this program knows {LIST_VERSION}")
    cipher = _cipher(key, head)
    changes: list[Change] = []
    at, number = HEAD.size, 0
    while at < len(data) or number == 0:
        (length,) = LENGTH.unpack_from(data, at) if at + LENGTH.size <= len(data) else (0,)
        end = at + LENGTH.size + length
        try:
            text = cipher.decrypt(_nonce(number), data[at + LENGTH.size : end], head) if length else None
        except InvalidTag:
            text = None
        if text is None:
            if number and not any(data[end:]):
                break  # the last one, which was not acknowledged
            raise StoreUnusable(_advice(f"{INVENTORY_FILE} is damaged: an entry of it does not verify"))
        changes += _changes_of(text)
        at, number = end, number + 1
    return opening, changes


def _changes_of(text: bytes) -> list[Change]:
    """What an entry that verifies says; it was written by a program like this one."""
    try:
        changes = [(str(kind), key, what) for kind, key, what in json.loads(text)]
        if all(type(key) is KINDS[kind] for kind, key, _ in changes):
            return changes
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise StoreUnusable(f"{INVENTORY_FILE} holds what this program does not know: a newer one wrote it")


def _seal(cipher: AESGCM, head: bytes, number: int, changes: Sequence[Change]) -> bytes:
    text = json.dumps(changes, separators=(",", ":")).encode()
    if len(text) > MAX_ENTRY_BYTES:
        raise OSError(f"the list of what the store holds would have an entry of {len(text)} bytes")
    return LENGTH.pack(len(text) + TAG_BYTES) + cipher.encrypt(_nonce(number), text, head)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _cipher(key: bytes, head: bytes) -> AESGCM:
    """Under a key of this file's own, as its salt is: entries are numbered from 0 in each."""
    return AESGCM(hmac.new(key, b"kvfork inventory v1" + head, hashlib.sha256).digest())


def _name_of(what: object) -> ListedName:
    assert isinstance(what, list)
    return ListedName(namespace=bytes.fromhex(what[0]), owner=what[1], id=what[2])


def _model_of(what: object) -> ListedModel:
    assert isinstance(what, dict)
    return ListedModel(fingerprint=what["fingerprint"], parts=what["parts"])


def _advice(wrong: str) -> str:
    return (
        f"{wrong}. Nothing was changed: put back the newest copy, or let the store be taken as it is, "
        "with whatever it has lost: kvfork store forget-lost"
    )


class DirectoryList:
    """The list as a file beside the segments, mode 0600."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / INVENTORY_FILE

    def read(self) -> bytes | None:
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(file, "rb") as opened:
            return opened.read()

    def replace(self, data: bytes) -> None:
        replace_file(self._path, data)

    def append(self, offset: int, data: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            os.lseek(file, offset, os.SEEK_SET)
            write_fully(file, [data])
            os.fsync(file)
        finally:
            os.close(file)


class MemoryList:
    """The list without a disk, for a store that lies in memory."""

    def __init__(self) -> None:
        self.data: bytes | None = None

    def read(self) -> bytes | None:
        return self.data

    def replace(self, data: bytes) -> None:
        self.data = data

    def append(self, offset: int, data: bytes) -> None:
        assert self.data is not None
        self.data = self.data[:offset] + data
