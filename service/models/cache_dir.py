"""The user's cache directory for models. Owns where it is and what lies where in it.

<root>/models/NAME/          converted folders
<root>/downloads/NAME/       wheels on their way; gone once the folder is there
<root>/terms/NAME/           texts to read before accepting
<root>/locks/NAME.lock       held by the one process that makes NAME
"""

import os
import shutil
import sys
from pathlib import Path

from service.models.errors import NotEnoughSpace

VARIABLE = "KVFORK_CACHE_DIR"
_SPARE_BYTES = 200_000_000  # never fill a disk to its last byte


def cache_root() -> Path:
    """`$KVFORK_CACHE_DIR`, else the platform's cache directory for kvfork. Not necessarily there yet."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvfork"
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say to ignore a relative path.
    if base and Path(base).is_absolute():
        return Path(base) / "kvfork"
    return Path.home() / ".cache" / "kvfork"


def model_dir(name: str) -> Path:
    return cache_root() / "models" / name


def downloads_dir(name: str) -> Path:
    return cache_root() / "downloads" / name


def terms_dir(name: str) -> Path:
    return cache_root() / "terms" / name


def lock_path(name: str) -> Path:
    path = cache_root() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def free_bytes() -> int:
    """Free bytes where the cache directory is or will be."""
    place = cache_root()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(needed: int, purpose: str) -> None:
    """Raise NotEnoughSpace unless `needed` bytes and a reserve are free."""
    free = free_bytes()
    if free < needed + _SPARE_BYTES:
        raise NotEnoughSpace(
            f"{purpose} needs {(needed + _SPARE_BYTES) / 1e6:,.0f} MB of free disk, {cache_root()} has"
            f" {free / 1e6:,.0f} MB; make room or set {VARIABLE}"
        )
