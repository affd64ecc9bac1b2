"""Exchange keys that tests give to servers, and a look into what those export. Judges nothing."""

from __future__ import annotations

from pathlib import Path

from kvcache.export import ExchangeKey, Importer
from kvcache.manifest import Manifest


def key_file(path: Path, key: str) -> Path:
    """A file with an exchange key, 64 hexadecimal digits, as a server takes it."""
    path.write_text(key)
    path.chmod(0o600)
    return path


def manifest_of(data: bytes, key: str) -> Manifest:
    """What an export says of itself, read as another server with this key would."""
    return next(part for part in Importer(ExchangeKey(bytes.fromhex(key))).feed(data) if isinstance(part, Manifest))
