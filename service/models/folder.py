"""A model folder on disk. Owns its validation, its manifest and the step that makes it visible; knows no formats.

Invariants:
* A folder under its final name is whole: it is built beside it under a temporary name, synced, then renamed.
* `kvfork.json` lists every other file with size and SHA-256; a folder without it (a user's own) is checked by shape.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.models import safetensors_file
from service.models.errors import BadModelFolder

MANIFEST = "kvfork.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a folder as its manifest lists it."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What `kvfork.json` says about its folder."""

    name: str
    converter: int
    """Version of the code that wrote the folder; an older one is made anew."""
    source: dict[str, Any]
    """Where the weights come from: package versions and checksums, or the seed."""
    versions: dict[str, str]
    """Libraries that took part, for reports."""
    files: dict[str, FileEntry]


def write_manifest(
    folder: Path, *, name: str, converter: int, source: dict[str, Any], versions: dict[str, str]
) -> None:
    """List every file now in `folder`, checksums included, in its `kvfork.json`."""
    files = {
        path.name: FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    manifest = Manifest(name=name, converter=converter, source=source, versions=versions, files=files)
    text = json.dumps(dataclasses.asdict(manifest), indent=2, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where it has none; BadModelFolder where it can't be read."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileEntry(**entry) for name, entry in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadModelFolder(f"{path} can't be read: {error}") from error


def validate(folder: Path) -> Path:
    """Return `folder` if it looks like a whole MLX model folder, else raise BadModelFolder naming the file at fault.

    Reads config, tokenizer and the headers of the weights, not the weights: `verify` does that.
    """
    if not folder.is_dir():
        raise BadModelFolder(f"{folder} is not a folder")
    config = _json_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise BadModelFolder(f"{folder / 'config.json'} names no model_type")
    shards = sorted(folder.glob("model*.safetensors"))
    if not shards:
        raise BadModelFolder(f"{folder} holds no model*.safetensors")
    for shard in shards:
        safetensors_file.check(shard)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = _json_object(index).get("weight_map", {})
        missing = sorted({str(name) for name in listed.values()} - {shard.name for shard in shards})
        if missing:
            raise BadModelFolder(f"{folder} lacks {', '.join(missing)}, listed in {index.name}")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES) and not any(folder.glob("*.tiktoken")):
        raise BadModelFolder(f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    manifest = read_manifest(folder)
    if manifest is None:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (folder / name).exists():
                _json_object(folder / name)
    else:
        for name, entry in manifest.files.items():
            _check_size(folder / name, entry)
    return folder


def verify(folder: Path) -> str:
    """`validate`, read every file, compare with the manifest; return a hex SHA-256 that names the folder's contents.

    BadModelFolder names the first file that differs. A folder without a manifest has nothing to compare with.
    """
    validate(folder)
    manifest = read_manifest(folder)
    listed = manifest.files if manifest else {}
    names = listed or [path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    contents = hashlib.sha256()
    for name in sorted(names):
        found = sha256_of(folder / name)
        if name in listed and found != listed[name].sha256:
            raise BadModelFolder(f"{folder / name} is damaged: its checksum is not the one recorded in {MANIFEST}")
        contents.update(f"{found}  {name}\n".encode())
    return contents.hexdigest()


def publish(final: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill an empty folder beside `final`, then put it in `final`'s place. The caller holds the lock.

    A build that fails or is killed leaves `final` as it was; its remains are cleared by the next build.
    """
    partial = final.with_name(f".{final.name}.partial")
    old = final.with_name(f".{final.name}.old")
    for stale in (partial, old):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        build(partial)
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file; `progress` hears of the bytes read so far."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(done)
    return digest.hexdigest()


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModelFolder(f"{path.parent} holds no {path.name}") from None
    except (OSError, ValueError) as error:
        raise BadModelFolder(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFolder(f"{path} is damaged: not a JSON object")
    return value


def _check_size(path: Path, entry: FileEntry) -> None:
    if not path.is_file():
        raise BadModelFolder(f"{path.parent} lacks {path.name}, listed in {MANIFEST}")
    if path.stat().st_size != entry.size:
        raise BadModelFolder(f"{path} is damaged: {path.stat().st_size:,} bytes instead of {entry.size:,}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
