"""A durable store, opened before the model is loaded. Owns where its master key comes from; `kvcache` owns the rest."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvcache.cache import Durable
from kvcache.errors import StoreUnusable
from kvcache.keys import KeyRing, OwnerSeal, own_master_key, parse_master_key, read_key_file
from kvcache.store import StoreConfig, TieredStore
from kvcache.store_dir import StoreDirectory

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
        return TieredStore(config, directory.storage(), seal=seal, identity=directory.identity(fingerprint))

    @property
    def about(self) -> Durable:
        return Durable(ring=self.ring, instance=self.instance, opening=self.directory.openings)

    def close(self) -> None:
        self.directory.close()


def open_store(path: Path, source: KeySource, *, create: bool = True) -> OpenStore:
    """Raises StoreUnusable with what is wrong and what to do."""
    directory = StoreDirectory(path, create=create)
    try:
        keys = path / KEYS
        master, own = master_key(keys, directory.store_id, source)
        if own:
            log.warning(
                "the master key of %s was made inside it, in %s/master.key: who copies the whole folder can read it. "
                "It protects segment files that leave the folder by themselves, and lets an owner's data be shredded. "
                "Give --key-file or --key-command to keep the key elsewhere",
                path,
                KEYS,
            )
        return OpenStore(directory=directory, ring=KeyRing(keys, directory.store_id, master))
    except OSError as error:
        directory.close()
        raise StoreUnusable(f"the keys of {path} cannot be used: {error.strerror or error}") from error
    except BaseException:  # whatever it was, the lock must not outlive it; it is raised on
        directory.close()
        raise


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
