"""Texts into values of settings: sizes, times, switches, addresses. Pure; knows no setting by name."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from pathlib import Path

from kvcache.checkpoints import CheckpointPolicy
from service.config_file import ConfigError

MIB = 2**20
GIB = 2**30

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Bytes from "2GiB", "512MiB", "1.5G" (decimal), "1048576"."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'must be a size such as 512MiB or 2GiB, is "{text}"')
    number, unit = match[1], (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    power = " kmgt".index(unit[0]) if unit else 0
    return math.floor(float(number) * math.pow(base, power))


def parse_seconds(text: str) -> float:
    """Seconds from "30s", "10m", "1.5h", "7d", "250ms" or a plain number."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'must be a time such as 30s, 10m or 2h, is "{text}"')
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def parse_count(text: str) -> int:
    """A whole number of digits."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f'must be a whole number, is "{text}"')
    return int(text)


def parse_switch(text: str) -> bool:
    """1 or 0, and what people write for them."""
    switch = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in switch:
        raise ValueError(f'must be 1 or 0, is "{text}"')
    return switch[text.lower()]


def parse_address(text: str) -> str:
    """An address as it is; none for ""."""
    return "" if text in ("", "none") else text


def parse_path(text: str) -> Path:
    """A path, with ~ for the home folder."""
    if not text:
        raise ValueError("must be a path")
    return Path(text).expanduser()


def parse_policy(text: str) -> CheckpointPolicy:
    """A checkpoint policy by its value."""
    return CheckpointPolicy(one_of(*(policy.value for policy in CheckpointPolicy))(text))


def one_of(*choices: str) -> Callable[[str], str]:
    """A reader of one of these words."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f'must be one of {", ".join(choices)}, is "{text}"')
        return text.lower()

    return parse


def split_address(address: str) -> tuple[str, int]:
    """("127.0.0.1", 50051) from "127.0.0.1:50051", "[::1]:50051" or "localhost:50051". Port 0 is any free one.

    Raises ConfigError for what is no address. A host name is none: it may come to mean another interface.
    """
    return _split("address", address, example='"127.0.0.1:50051"')


def split_page_address(name: str, address: str) -> tuple[str, int]:
    """The same of a page's address, which is on loopback if it has no host: ("127.0.0.1", 9464) from ":9464" too.

    `name` is the setting's, for ConfigError.
    """
    return _split(name, address, example='":9464" or "127.0.0.1:9464"', without_host="127.0.0.1")


def _split(name: str, address: str, *, example: str, without_host: str = "") -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or without_host
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'{name}: must look like {example}, is "{address}"')
    if host == "localhost":
        host = "127.0.0.1"  # one socket: with two, another server could hold the second unnoticed
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f'{name}: must be a loopback address, localhost or another IP address, is "{address}"'
        ) from None
    return host, int(port)
