"""The directory of a durable store. Owns its lock, its identity and its segment files; knows nothing of their content.

    DIR/lock             held for as long as the store is open
    DIR/store.json       format version, identity, number of openings
    DIR/inventory        `kvcache.inventory`
    DIR/keys/…           `kvcache.keys`
    DIR/segments/…       segment-00000000.kv and on

Everything is 0700 or 0600. A file that is replaced is written beside, synced, and renamed over.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvcache.errors import StoreUnusable
from kvcache.format import SEGMENT_HEADER
from kvcache.records import Buffer
from kvcache.storage import DIRECTORY_MODE, FILE_MODE, read_fully, write_fully

STORE_VERSION = 2
BEFORE_INVENTORY = 1  # the version whose stores have no list of what they hold
STORE_FILE = "store.json"
LOCK_FILE = "lock"
NEW = ".new"

_SEGMENT_NAME = re.compile(r"segment-(\d{8,10})\.kv")
# What a crash may leave of a store that was never finished: a directory with nothing else in it may become one.
_LEFT_BY_A_CRASH = {LOCK_FILE, STORE_FILE + NEW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What segment headers say about whose they are."""

    store_id: bytes  # 16 bytes, the same for the store's whole life
    namespace: bytes  # 32 bytes: digest of the model fingerprint
    opening: int  # the number of this opening: everything sealed before has a smaller one


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFile:
    """What store.json says. `listed`: the last opening that wrote the inventory; 0: none did, there is none yet."""

    instance: str
    openings: int
    listed: int = 0


class StoreDirectory:
    """An open store directory. `instance` never changes; `openings` counts up each time, and is on disk before use."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Raises StoreUnusable: in use, foreign, of an unknown version, or not accessible."""
        self.path = path
        self._lock: int | None = None
        try:
            self._open(create=create)
        except OSError as error:
            self.close()
            raise StoreUnusable(f"{path} cannot be used as a store: {error.strerror or error}") from error
        except BaseException:  # whatever it was, the lock must not outlive it; it is raised on
            self.close()
            raise

    def _open(self, *, create: bool) -> None:
        path = self.path
        if not path.is_dir():
            if not create:
                raise StoreUnusable(f"there is no store at {path}")
            path.mkdir(mode=DIRECTORY_MODE, parents=True)
        names = {entry.name for entry in path.iterdir()}
        if STORE_FILE not in names and (not create or names - _LEFT_BY_A_CRASH):
            what = "is not empty and holds no store" if create else "holds no store"
            raise StoreUnusable(f"{path} {what} ({STORE_FILE} is missing)")
        os.chmod(path, DIRECTORY_MODE)
        self._take_lock()
        before = self._read()
        self._about = replace(before, openings=before.openings + 1)
        if self.openings >= 1 << 32:
            raise StoreUnusable(f"{path} has been opened too often: no nonces are left")
        replace_file(path / STORE_FILE, encode_store_file(self._about))

    def inventory_began(self) -> None:
        """The inventory is this opening's from now on: an older one is no longer taken for it."""
        self._about = replace(self._about, listed=self.openings)
        replace_file(self.path / STORE_FILE, encode_store_file(self._about))

    @property
    def instance(self) -> str:
        return self._about.instance

    @property
    def openings(self) -> int:
        return self._about.openings

    @property
    def listed(self) -> int:
        """The last opening that wrote the inventory; 0: there is none yet."""
        return self._about.listed

    @property
    def has_segments(self) -> bool:
        """Whether any file is there that may hold records."""
        return any(
            _SEGMENT_NAME.fullmatch(file.name) and file.lstat().st_size > SEGMENT_HEADER.size
            for file in self.path.glob("segments/*")
        )

    @property
    def store_id(self) -> bytes:
        return bytes.fromhex(self.instance)

    @property
    def boot_id(self) -> str:
        return boot_id(self.instance, self.openings)

    def identity(self, fingerprint: str) -> Identity:
        namespace = hashlib.sha256(fingerprint.encode()).digest()
        return Identity(store_id=self.store_id, namespace=namespace, opening=self.openings)

    def storage(self) -> DirectoryStorage:
        return DirectoryStorage(self.path / "segments")

    def close(self) -> None:
        """Gives the lock back. Safe to repeat."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _take_lock(self) -> None:
        # The file stays when the lock is given back: whoever removed it could remove another's.
        self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            who = f"process {holder}" if holder else "another process"
            raise StoreUnusable(f"{self.path} is in use by {who}: a store has one server at a time") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _read(self) -> StoreFile:
        try:
            text = (self.path / STORE_FILE).read_bytes()
        except FileNotFoundError:
            return StoreFile(instance=secrets.token_hex(16), openings=0)
        return decode_store_file(text, self.path)


def encode_store_file(about: StoreFile) -> bytes:
    """store.json; of the version before, for as long as there is no inventory."""
    version = {"format": STORE_VERSION if about.listed else BEFORE_INVENTORY}
    listed = {"listed": about.listed} if about.listed else {}
    return json.dumps({**version, "instance": about.instance, "openings": about.openings, **listed}).encode() + b"\n"


def decode_store_file(text: bytes, where: Path) -> StoreFile:
    """What store.json says; StoreUnusable if this program cannot work with it."""
    try:
        about = json.loads(text)
        version = about["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreUnusable(f"{where / STORE_FILE} is damaged: it is not what a store writes") from None
    if version not in (BEFORE_INVENTORY, STORE_VERSION):
        raise StoreUnusable(
            f"{where} has store format {version}, this program knows {STORE_VERSION}; nothing was changed"
        )
    instance, openings = about.get("instance"), about.get("openings")
    if not isinstance(instance, str) or not re.fullmatch(r"[0-9a-f]{32}", instance):
        raise StoreUnusable(f"{where / STORE_FILE} is damaged: it is not what a store writes")
    listed = about.get("listed") if version == STORE_VERSION else 0
    if not isinstance(openings, int) or not isinstance(listed, int) or not openings >= listed >= version - 1:
        raise StoreUnusable(f"{where / STORE_FILE} is damaged: it is not what a store writes")
    return StoreFile(instance=instance, openings=openings, listed=listed)


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"segment-{number:08d}.kv"


def boot_id(instance: str, opening: int) -> str:
    """The name of one opening of one store."""
    return f"{instance[:8]}-{opening}"


def replace_file(path: Path, data: bytes) -> None:
    """Puts `data` in the place of `path`, whole or not at all, and on disk when this returns."""
    beside = path.with_name(path.name + NEW)
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        write_fully(file, [data])
        os.fsync(file)
    finally:
        os.close(file)
    beside.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Return once the names in a directory would survive a power cut."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class DirectoryStorage:
    """Segments as named files, mode 0600, that stay when the store is closed. The counterpart of `FileStorage`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        sync_directory(directory.parent)
        sync_directory(directory)  # whoever was killed may have left names that are not on disk
        self._files: dict[int, int] = {}  # opened when first used: files of other models stay shut
        self._opening = threading.Lock()  # two threads may read
        self._unnamed: set[int] = set()  # created, and the directory not yet synced

    def create(self, segment: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._files[segment] = os.open(self._path(segment), flags, FILE_MODE)
        self._unnamed.add(segment)

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        file = self._file(segment)
        os.lseek(file, offset, os.SEEK_SET)
        write_fully(file, parts)

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        return read_fully(self._file(segment), offset, buffer)

    def truncate(self, segment: int, size: int) -> None:
        os.ftruncate(self._file(segment), size)

    def sync(self, segment: int) -> None:
        os.fsync(self._file(segment))
        if segment in self._unnamed:
            sync_directory(self._directory)
            self._unnamed.discard(segment)

    def remove(self, segment: int) -> None:
        file = self._files.pop(segment, None)
        self._unnamed.discard(segment)
        with suppress(OSError):
            if file is not None:
                os.close(file)
        # A file that stays is found at the next opening, and is as old there as it is here.
        with suppress(OSError):
            self._path(segment).unlink()
            sync_directory(self._directory)

    def sizes(self) -> Mapping[int, int]:
        sizes: dict[int, int] = {}
        for entry in os.scandir(self._directory):
            match = _SEGMENT_NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                sizes[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def strange(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        for entry in os.scandir(self._directory):
            match = _SEGMENT_NAME.fullmatch(entry.name)
            if match and not entry.is_file(follow_symlinks=False):
                found[int(match[1])] = "is a link" if entry.is_symlink() else "is no file"
        return found

    def free_bytes(self) -> int:
        stat = os.statvfs(next(iter(self._files.values()), self._directory))
        return stat.f_bavail * stat.f_frsize

    def close(self) -> None:
        """Shuts the files and leaves them where they are."""
        while self._files:
            _, file = self._files.popitem()
            with suppress(OSError):
                os.close(file)

    def _file(self, segment: int) -> int:
        with self._opening:
            file = self._files.get(segment)
            if file is None:
                if not self._path(segment).exists():
                    raise FileNotFoundError(errno.ENOENT, "no such segment", str(segment))
                file = os.open(self._path(segment), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                self._files[segment] = file
            return file

    def _path(self, segment: int) -> Path:
        return self._directory / segment_name(segment)
