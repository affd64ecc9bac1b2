"""A durable store, opened before the model is loaded. Owns where its master key comes from; `kvcache` owns the rest."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcache.cache import Durable
from kvcache.errors import StoreUnusable
from kvcache.inventory import DirectoryList, Inventory
from kvcache.keys import OWNERS_FILE, KeyRing, OwnerSeal, own_master_key, parse_master_key, read_key_file
from kvcache.store import StoreConfig, TieredStore
from kvcache.store_dir import StoreDirectory
from kvcache.survey import Holdings, survey

log = logging.getLogger("kvfork.store")

KEYS = "keys"
COMMAND_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySource:
    """Where the master key comes from; neither: from inside the store."""

    file: Path | None = None
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """A locked store directory and its keys. `close` after everything that uses it."""

    directory: StoreDirectory
    ring: KeyRing
    inventory: Inventory

    @property
    def instance(self) -> str:
        return self.directory.instance

    @property
    def boot_id(self) -> str:
        return self.directory.boot_id

    def store(self, config: StoreConfig, fingerprint: str) -> TieredStore:
        """The records of one model. Raises OSError or StoreUnusable."""
        directory = self.directory
        seal = OwnerSeal(self.ring, directory.openings)
        return TieredStore(
            config,
            directory.storage(),
            seal=seal,
            identity=directory.identity(fingerprint),
            inventory=self.inventory,
        )

    def about(self, parts: Mapping[str, str]) -> Durable:
        """`parts`: what the model's fingerprint is made of."""
        return Durable(ring=self.ring, instance=self.instance, opening=self.directory.openings, parts=parts)

    def survey(self) -> Holdings:
        """What the store holds, and what it should; nothing of it is changed. OSError."""
        seal = OwnerSeal(self.ring, self.directory.openings)
        identity = self.directory.identity("")
        return survey(self.directory.storage(), seal, identity, self.inventory, self.ring.owners(), now=time.time())

    def close(self) -> None:
        self.directory.close()


def open_store(path: Path, source: KeySource, *, create: bool = True, forget: bool = False) -> OpenStore:
    """Raises StoreUnusable with what is wrong and what to do.

    `forget`: keys that are missing, and a list that is, are given up rather than refused.
    """
    directory = StoreDirectory(path, create=create)
    try:
        keys = path / KEYS
        file = DirectoryList(path)
        listed = directory.listed > 0 or file.read() is not None
        if not (keys / OWNERS_FILE).exists() and (listed or directory.has_segments):
            raise StoreUnusable(
                f"{KEYS}/{OWNERS_FILE} is missing from {path}, and without it nothing in this store can be read. "
                "Nothing was changed: put it back from a backup, or begin another store in an empty folder"
            )
        master, own = master_key(keys, directory.store_id, source)
        if own:
            log.warning(
                "the master key of %s was made inside it, in %s/master.key: who copies the whole folder can read it. "
                "It protects segment files that leave the folder by themselves, and lets an owner's data be shredded. "
                "Give --key-file or --key-command to keep the key elsewhere",
                path,
                KEYS,
            )
        ring = KeyRing(keys, directory.store_id, master, listed=listed and not forget)
        inventory = _inventory(directory, file, ring, listed=listed, forget=forget)
        return OpenStore(directory=directory, ring=ring, inventory=inventory)
    except OSError as error:
        directory.close()
        raise StoreUnusable(f"the keys and the list of {path} cannot be used: {error.strerror or error}") from error
    except BaseException:  # whatever it was, the lock must not outlive it; it is raised on
        directory.close()
        raise


def _inventory(
    directory: StoreDirectory, file: DirectoryList, ring: KeyRing, *, listed: bool, forget: bool
) -> Inventory:
    opening, began = directory.openings, directory.inventory_began
    inventory = Inventory(file, ring.list_key, opening, began=began)
    if listed:
        try:
            inventory = Inventory.read(file, ring.list_key, opening, floor=directory.listed, began=began)
        except StoreUnusable:
            if not forget:
                raise
    if forget:
        ring.follow(inventory)
    else:
        ring.check(inventory)
    return inventory


def master_key(keys: Path, store_id: bytes, source: KeySource) -> tuple[bytes, bool]:
    """The key, and whether the store has just made its own."""
    if source.file is not None:
        return read_key_file(source.file), False
    if source.command:
        return run_key_command(source.command), False
    return own_master_key(keys, store_id)


def run_key_command(command: str) -> bytes:
    """What a command prints, as a master key. Its own complaints go to our stderr."""
    try:
        done = subprocess.run(
            shlex.split(command),
            env=os.environ,  # as the process was given it: C's own has settings for libraries
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=COMMAND_SECONDS,
            check=True,
        )
    except ValueError as error:
        raise StoreUnusable(f"the key command cannot be read: {error}") from None
    except OSError as error:
        raise StoreUnusable(f"the key command cannot be run: {error.strerror or error}") from None
    except subprocess.CalledProcessError as error:
        raise StoreUnusable(f"the key command failed with exit code {error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise StoreUnusable(f"the key command gave no key within {COMMAND_SECONDS:g} s") from None
    return parse_master_key(done.stdout, "the key command")
