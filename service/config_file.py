"""The settings file: one flat TOML table with the names of the flags. Owns its form; knows no setting by itself.

    address   = "0.0.0.0:50051"
    max-batch = 4
    tls-cert  = "/etc/kvfork/server.pem"

A value may be a string as the flag takes it, a number, true or false; a list of strings stands for names with commas
between them.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path


class ConfigError(Exception):
    """A setting that cannot be used; the text names it."""


def read_file(path: Path, parsers: Mapping[str, Callable[[str], object]]) -> dict[str, object]:
    """The values of a file by the keys of `parsers`, which are the flags without dashes in front.

    Raises ConfigError that names the file and the key, with the one that was meant where there is no such key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"config: {path} is no TOML file: {error}") from None
    values: dict[str, object] = {}
    for key, value in table.items():
        if key not in parsers:
            close = difflib.get_close_matches(key.replace("_", "-"), parsers, n=1)
            raise ConfigError(f"{path}: {key}: no such setting" + (f"; did you mean {close[0]}?" if close else ""))
        try:
            values[key] = parsers[key](_text(value))
        except ValueError as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    return values


def _text(value: object) -> str:
    """A TOML value as a flag would have it."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    raise ValueError("must be a string, a number, true, false or a list of strings")
