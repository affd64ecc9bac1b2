"""Keys of a durable store: one per owner, wrapped by a master key. Owns their file and the seal that uses them.

    master key (given, never stored here) ──wraps──► owner keys (keys/owners.json) ──seal──► records

Deleting an owner's key makes all its records unreadable, wherever they lie. Changing the master key wraps the owner
keys anew and touches no record. AES-256-GCM throughout; a wrap has a random nonce, of which there are as many as
owners and rotations.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcache.errors import FormatError, StoreUnusable
from kvcache.format import NONCE_BYTES
from kvcache.inventory import INVENTORY_FILE, LIST_KEY_BYTES, Inventory
from kvcache.seal import OPENING, AesGcmSeal
from kvcache.storage import DIRECTORY_MODE
from kvcache.store_dir import NEW, replace_file, sync_directory

KEYS_VERSION = 1
KEY_BYTES = 32
OWNERS_FILE = "owners.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerKey:
    """One owner's data key. `id` is what record headers name; 0 is nobody's."""

    id: int
    owner: str
    key: bytes


class KeyRing:
    """The owner keys of one store, unwrapped in memory. Thread-safe."""

    def __init__(self, folder: Path, store_id: bytes, master: bytes, *, listed: bool = False) -> None:
        """Opens the ring, or starts one. Raises StoreUnusable if `master` is not the key that wraps it.

        `listed`: the store has an inventory, so that the ring must have the key to it.
        """
        self._file = folder / OWNERS_FILE
        self._store_id = store_id
        self._master = master
        self._lock = threading.Lock()
        self._by_owner: dict[str, OwnerKey] = {}
        self._by_id: dict[int, bytes] = {}
        self._inventory: Inventory | None = None
        self.list_key = b""  # that the inventory is sealed with
        folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        sync_directory(folder.parent)
        with suppress(FileNotFoundError):
            text = self._file.read_bytes()
            for key in decode_owners(text, store_id, master):
                self._by_owner[key.owner] = key
                self._by_id[key.id] = key.key
            self.list_key = decode_list_key(text, store_id, master)
        if not self.list_key:
            if listed:
                raise StoreUnusable(
                    f"{OWNERS_FILE} is older than {INVENTORY_FILE}: it was put back from a copy. "
                    "Nothing was changed: put back its newest copy"
                )
            self.list_key = secrets.token_bytes(LIST_KEY_BYTES)
            self._write(self._by_owner)

    def check(self, inventory: Inventory) -> None:
        """Compares the ring with the list, and tells it of every change from here on.

        StoreUnusable if keys are missing: without them what they sealed could not be read, and would be given up.
        """
        missing = {number: owner for number, owner in inventory.owners().items() if number not in self._by_id}
        if missing:
            raise StoreUnusable(
                f"{OWNERS_FILE} lacks the keys of {', '.join(sorted(missing.values()))}: it is an old copy. "
                "Nothing was changed: put back its newest copy, or give up what those keys sealed: "
                "kvfork store forget-lost"
            )
        self.follow(inventory)

    def follow(self, inventory: Inventory) -> None:
        """Tells the list of every key, of the end of those that are missing, and of every change from here on."""
        for number, owner in inventory.owners().items():
            if number not in self._by_id:
                inventory.drop_owner(number, owner)
        for key in self._by_owner.values():
            inventory.add_owner(key.id, key.owner)
        self._inventory = inventory

    def id_of(self, owner: str) -> int:
        """The id of the owner's key, which is made, and on disk, if there is none yet. Raises OSError."""
        with self._lock:
            have = self._by_owner.get(owner)
            if have is None:
                number = 0
                while number == 0 or number in self._by_id:
                    number = secrets.randbits(32)  # random, so that a deleted key's number does not come again
                have = OwnerKey(id=number, owner=owner, key=secrets.token_bytes(KEY_BYTES))
                self._write({**self._by_owner, owner: have})
                self._by_owner[owner] = have
                self._by_id[number] = have.key
                if self._inventory is not None:
                    self._inventory.add_owner(number, owner)
            return have.id

    def owners(self) -> list[str]:
        with self._lock:
            return sorted(self._by_owner)

    def key(self, key_id: int) -> bytes | None:
        return self._by_id.get(key_id)

    def rewrap(self, master: bytes) -> None:
        """Wraps every owner key under another master key. Raises OSError; then nothing has changed."""
        with self._lock:
            old, self._master = self._master, master
            try:
                self._write(self._by_owner)
            except OSError:
                self._master = old
                raise

    def shred(self, owner: str) -> bool:
        """Destroys the owner's key; False if there is none. Records under it can never be read again."""
        with self._lock:
            if owner not in self._by_owner:
                return False
            if self._inventory is not None:
                self._inventory.drop_owner(self._by_owner[owner].id, owner)
            left = {name: key for name, key in self._by_owner.items() if name != owner}
            with self._file.open("r+b") as before:  # the file that is replaced, not its name
                self._write(left)
                # Best effort: a file system that copies on write, or a flash drive, may keep the old bytes for a while.
                before.write(bytes(os.fstat(before.fileno()).st_size))
                before.flush()
                os.fsync(before.fileno())
            del self._by_id[self._by_owner.pop(owner).id]
            return True

    def _write(self, owners: dict[str, OwnerKey]) -> None:
        replace_file(self._file, encode_owners(owners.values(), self._store_id, self._master, self.list_key))


class OwnerSeal(AesGcmSeal):
    """Seals with the keys of a ring. `openings` makes nonces unique across restarts: see `kvcache.seal`."""

    def __init__(self, ring: KeyRing, openings: int) -> None:
        super().__init__(nonce_prefix=OPENING.pack(openings))
        self._ring = ring

    def key(self, key_id: int) -> bytes:
        key = self._ring.key(key_id)
        if key is None:
            raise FormatError(f"key {key_id:08x} is not in this store: it was destroyed, or never was")
        return key

    def knows(self, key_id: int) -> bool:
        return self._ring.key(key_id) is not None


def encode_owners(owners: Iterable[OwnerKey], store_id: bytes, master: bytes, list_key: bytes = b"") -> bytes:
    """owners.json: each key wrapped, bound to the store, its number and its owner; `list_key` is the inventory's."""
    cipher = AESGCM(master)

    def wrap(key: bytes, about: bytes) -> str:
        nonce = os.urandom(NONCE_BYTES)
        return (nonce + cipher.encrypt(nonce, key, about)).hex()

    return json.dumps(
        {
            "format": KEYS_VERSION,
            "check": wrap(b"", _about(store_id, 0, "")),
            **({"list": wrap(list_key, _about_list(store_id))} if list_key else {}),
            "owners": [
                {"id": key.id, "owner": key.owner, "wrapped": wrap(key.key, _about(store_id, key.id, key.owner))}
                for key in owners
            ],
        },
        indent=1,
    ).encode()


def decode_owners(text: bytes, store_id: bytes, master: bytes) -> list[OwnerKey]:
    """The unwrapped keys. StoreUnusable if the file is damaged, of an unknown version, or wrapped by another key."""
    cipher = AESGCM(master)

    def unwrap(wrapped: str, about: bytes) -> bytes:
        data = bytes.fromhex(wrapped)
        return cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], about)

    try:
        content = json.loads(text)
        if content["format"] != KEYS_VERSION:
            raise StoreUnusable(
                f"the owner keys have format {content['format']}, this program knows {KEYS_VERSION}; "
                "nothing was changed"
            )
        check = content["check"]
        wrapped = [(int(entry["id"]), str(entry["owner"]), str(entry["wrapped"])) for entry in content["owners"]]
        bytes.fromhex(check + "".join(data for _, _, data in wrapped))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise StoreUnusable(f"{OWNERS_FILE} is damaged: without it no record of this store can be read") from None
    try:
        unwrap(check, _about(store_id, 0, ""))
    except (InvalidTag, ValueError):
        raise StoreUnusable(
            "the master key given does not open this store: its owner keys are wrapped by another one. "
            "Without that key nothing in the store can be read; `kvfork store rotate-key` changes it"
        ) from None
    keys: list[OwnerKey] = []
    for number, owner, data in wrapped:
        try:
            keys.append(OwnerKey(id=number, owner=owner, key=unwrap(data, _about(store_id, number, owner))))
        except (InvalidTag, ValueError, OverflowError):
            raise StoreUnusable(f"{OWNERS_FILE} is damaged: the key of owner {owner!r} does not verify") from None
    return keys


def decode_list_key(text: bytes, store_id: bytes, master: bytes) -> bytes:
    """The inventory's key, of a file that `decode_owners` took; b"" if it was written before there was one."""
    wrapped = json.loads(text).get("list", "")
    try:
        data = bytes.fromhex(wrapped)
        return AESGCM(master).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], _about_list(store_id)) if data else b""
    except (InvalidTag, ValueError, TypeError):
        raise StoreUnusable(f"{OWNERS_FILE} is damaged: the key of {INVENTORY_FILE} does not verify") from None


def _about_list(store_id: bytes) -> bytes:
    return b"kvfork list key v1" + store_id


def _about(store_id: bytes, number: int, owner: str) -> bytes:
    return b"kvfork owner key v1" + store_id + number.to_bytes(4, "little") + owner.encode()


# The master key


def parse_master_key(data: bytes, where: str) -> bytes:
    """32 bytes as they are, or 64 hexadecimal digits. StoreUnusable names `where` and never the key."""
    if len(data) == KEY_BYTES:
        return data
    with suppress(ValueError):
        key = bytes.fromhex(data.decode("ascii").strip())
        if len(key) == KEY_BYTES:
            return key
    raise StoreUnusable(f"{where} must give 32 bytes or 64 hexadecimal digits, and gave {len(data)} bytes")


def read_key_file(path: Path) -> bytes:
    """The master key in a file that only its owner may read."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise StoreUnusable(f"{path} can be read by others (mode {mode & 0o777:04o}): chmod 600 it first")
            data = file.read(4096)
    except OSError as error:
        raise StoreUnusable(f"the key file {path} cannot be read: {error.strerror or error}") from error
    return parse_master_key(data, f"the key file {path}")


OWN_KEY_FILE = "master.key"


def own_master_key(folder: Path, store_id: bytes) -> tuple[bytes, bool]:
    """The master key that lies beside the keys it wraps, and whether it was made just now.

    Finishes a change of the key that a crash cut short. StoreUnusable if owner keys are there and it is not.
    """
    path, beside = folder / OWN_KEY_FILE, folder / (OWN_KEY_FILE + NEW)
    owners = folder / OWNERS_FILE
    if owners.exists():
        if beside.exists():
            with suppress(StoreUnusable):
                key = read_key_file(beside)
                decode_owners(owners.read_bytes(), store_id, key)
                beside.rename(path)
                sync_directory(folder)
        if not path.exists():
            raise StoreUnusable(
                "this store's keys are wrapped by a master key that was not given: use --key-file or --key-command. "
                "If that key is lost, nothing in the store can be read again"
            )
        return read_key_file(path), False
    if path.exists():
        return read_key_file(path), False
    folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    key = secrets.token_bytes(KEY_BYTES)
    replace_file(path, key.hex().encode() + b"\n")
    return key, True


def replace_own_master_key(folder: Path, ring: KeyRing) -> None:
    """A new master key beside the owner keys; whole or not at all, whenever it is cut short."""
    key = secrets.token_bytes(KEY_BYTES)
    beside = folder / (OWN_KEY_FILE + NEW)
    replace_file(beside, key.hex().encode() + b"\n")
    ring.rewrap(key)
    beside.rename(folder / OWN_KEY_FILE)
    sync_directory(folder)


def drop_own_master_key(folder: Path) -> None:
    """The owner keys are wrapped by a key kept elsewhere now."""
    for name in (OWN_KEY_FILE, OWN_KEY_FILE + NEW):
        (folder / name).unlink(missing_ok=True)
    sync_directory(folder)
