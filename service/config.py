"""The server's settings. Owns every flag and variable of `kvfork serve`: nothing else of the server reads either.

Each setting is one row of `OPTIONS`: a flag, the variable KVFORK_<NAME>, a default. A flag beats the variable, the
variable the default. Unknown KVFORK_ variables are refused, for a typo there is silent otherwise. A `Config` that
exists is valid.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "KVFORK_"

# Read elsewhere: the address by the command-line client as well, the other two by the model commands.
FOREIGN_VARIABLES = frozenset({"KVFORK_CACHE_DIR", "KVFORK_ACCEPT_GEMMA_TERMS"})

MIB = 2**20
GIB = 2**30

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class ConfigError(Exception):
    """A setting that cannot be used; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one server. Sizes are bytes, times seconds. Raises ConfigError if they contradict each other."""

    address: str = "127.0.0.1:50051"  # "" for no TCP listener
    unix_socket: Path | None = None
    model: str = "smollm2"
    max_batch: int = 8
    max_queue: int = 64
    max_request_bytes: int = 64 * MIB
    max_fork_branches: int = 64
    max_snapshots: int = 10_000
    max_pinned: int = 1_000
    max_watches: int = 16
    default_ttl: float = 3600.0
    max_ttl: float = 7 * 86400.0
    default_max_tokens: int = 512
    active_bytes: int = 1 * GIB
    memory_bytes: int = 1 * GIB
    disk_bytes: int = 8 * GIB
    scratch_dir: Path = Path(tempfile.gettempdir())
    store_dir: Path | None = None  # None: nothing outlives the process
    key_file: Path | None = None
    key_command: str = ""
    checkpoints: str = "through"
    state_spacing: int = 4
    daily_write_bytes: int | None = None  # None: no limit
    snapshot_wait: float = 10.0
    prefill_budget: int = 320
    share_decoded: bool = False
    drain_seconds: float = 30.0
    write_stall_seconds: float = 30.0
    watchdog_seconds: float = 60.0
    engine_restarts: int = 3
    metrics: str = ""  # "" for none
    traces: str = "off"
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not self.address and self.unix_socket is None:
            raise ConfigError("address: nowhere to listen: give an address or a unix socket")
        if self.address:
            split_address(self.address)
        if self.metrics:
            split_metrics_address(self.metrics)
        if self.unix_socket is not None and len(os.fsencode(self.unix_socket)) > _LONGEST_SOCKET_PATH:
            raise ConfigError(f"unix_socket: the system takes at most {_LONGEST_SOCKET_PATH} bytes of path")
        if not self.model:
            raise ConfigError("model: must be a name or a folder")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("max_queue", "max_pinned", "memory_bytes", "disk_bytes", "drain_seconds", "engine_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")
        if not 0 < self.default_ttl <= self.max_ttl:
            raise ConfigError(f"default_ttl: must be above 0 and at most max_ttl ({self.max_ttl:g} s)")
        if self.key_file is not None and self.key_command:
            raise ConfigError("key_file: give either it or key_command")
        if self.store_dir is None and (self.key_file is not None or self.key_command):
            name = "key_file" if self.key_file is not None else "key_command"
            raise ConfigError(f"{name}: is of no use without store_dir")
        if self.checkpoints == "off" and self.store_dir is not None:
            raise ConfigError("checkpoints: off writes nothing, so store_dir would keep nothing; give one or the other")
        if self.state_spacing < 0 or self.state_spacing == 1:
            raise ConfigError("state_spacing: must be 0 (keep all) or at least 2")
        if self.snapshot_wait < 0:
            raise ConfigError("snapshot_wait: must not be negative")
        if self.daily_write_bytes is not None and self.daily_write_bytes < 0:
            raise ConfigError("daily_write_bytes: must not be negative")
        for name in ("write_stall_seconds", "watchdog_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")

    @property
    def disk_budget(self) -> int:
        """Bytes that the disk tier may take."""
        return 0 if self.checkpoints == "off" else self.disk_bytes

    @classmethod
    def from_args(cls, args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
        """Settings from flags parsed by a parser that went through `add_arguments`, then from `environ`."""
        refuse_unknown_variables(environ)
        values: dict[str, object] = {}
        for option in OPTIONS:
            given = getattr(args, option.name, None)
            if given is None and environ.get(option.variable):  # an empty variable is as good as none
                try:
                    given = option.parse(environ[option.variable])
                except ValueError as error:
                    raise ConfigError(f"{option.variable}: {error}") from None
            if given is not None:
                values[option.name] = given
        address = values.get("address")
        if isinstance(address, str) and address.startswith("unix:"):  # as clients write it
            values["address"] = ""
            values.setdefault("unix_socket", _parse_path(address.removeprefix("unix:")))
        values.setdefault("scratch_dir", default_scratch_dir())
        values.setdefault("active_bytes", default_memory_bytes())
        values.setdefault("memory_bytes", default_memory_bytes())
        values.setdefault("disk_bytes", default_disk_bytes(values.get("store_dir") or values["scratch_dir"]))
        return cls(**values)  # type: ignore[arg-type]  # the rows of OPTIONS parse into the fields' types


_AT_LEAST_ONE = (
    "max_batch",
    "max_request_bytes",
    "max_fork_branches",
    "max_snapshots",
    "max_watches",
    "default_max_tokens",
    "active_bytes",
    "prefill_budget",
)
_LONGEST_SOCKET_PATH = 103  # macOS; Linux takes four more


def split_address(address: str) -> tuple[str, int]:
    """("127.0.0.1", 50051) from "127.0.0.1:50051", "[::1]:50051" or "localhost:50051". Port 0 is any free one.

    Raises ConfigError for all that is not loopback: there is no authentication yet, so a wider listener would hand the
    prompts of everyone here to everyone there.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'address: must look like "127.0.0.1:50051", is "{address}"')
    if host == "localhost":
        host = "127.0.0.1"  # one socket: with two, another server could hold the second unnoticed
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f'address: must be a loopback address or localhost, is "{address}"') from None
    if not loopback:
        raise ConfigError(
            f'address: "{address}" is not loopback, and this version has no authentication. '
            "Listen on 127.0.0.1, [::1] or a unix socket, and forward the port if others must reach it"
        )
    return host, int(port)


def split_metrics_address(address: str) -> tuple[str, int]:
    """("127.0.0.1", 9464) from ":9464" or "127.0.0.1:9464"; another host has to be an address, and is as asked for."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'metrics: must look like ":9464" or "127.0.0.1:9464", is "{address}"')
    try:
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigError(f'metrics: must be an IP address or localhost, is "{address}"') from None
    return "127.0.0.1" if host == "localhost" else host, int(port)


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


def _parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f'must be a whole number, is "{text}"')
    return int(text)


def _parse_switch(text: str) -> bool:
    switch = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in switch:
        raise ValueError(f'must be 1 or 0, is "{text}"')
    return switch[text.lower()]


def _parse_address(text: str) -> str:
    return "" if text in ("", "none") else text


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("must be a path")
    return Path(text).expanduser()


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f'must be one of {", ".join(choices)}, is "{text}"')
        return text.lower()

    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: the field of Config, how its text is read, and what it means."""

    name: str
    parse: Callable[[str], object]
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        """As in `--max-batch`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in KVFORK_MAX_BATCH."""
        return PREFIX + self.name.upper()


OPTIONS = (
    Option(
        "address",
        _parse_address,
        "HOST:PORT",
        "where to listen: a loopback address, since there is no authentication yet; port 0 takes any free one; "
        '"none" or "unix:PATH" for a unix socket alone',
    ),
    Option(
        "unix_socket",
        _parse_path,
        "PATH",
        "also listen on this socket file, which only its owner may open (mode 0600)",
    ),
    Option("model", str, "NAME|FOLDER", "a name from `kvfork models list`, or a folder with an MLX model"),
    Option(
        "max_batch",
        _parse_count,
        "N",
        "most sequences decoded together: more gives more tokens per second in all, fewer to each, and takes memory",
    ),
    Option(
        "max_queue",
        _parse_count,
        "N",
        "most calls waiting for a row; beyond it a call fails at once with RESOURCE_EXHAUSTED and a time to retry",
    ),
    Option("max_request_bytes", parse_size, "SIZE", "largest request message"),
    Option("max_fork_branches", _parse_count, "N", "most children of one Fork"),
    Option("max_snapshots", _parse_count, "N", "most snapshots of one caller"),
    Option("max_pinned", _parse_count, "N", "most of them pinned, which neither time nor memory pressure removes"),
    Option("max_watches", _parse_count, "N", "most snapshot watches of one caller at a time"),
    Option(
        "default_ttl",
        parse_seconds,
        "TIME",
        "how long an unused snapshot is kept if its request does not say; every use starts the time anew",
    ),
    Option("max_ttl", parse_seconds, "TIME", "longest time a request may ask for"),
    Option("default_max_tokens", _parse_count, "N", "most new tokens of a generation that does not say"),
    Option(
        "active_bytes",
        parse_size,
        "SIZE",
        "working state of all running sequences at their longest; when it is reserved, kept state gives up memory, "
        "then calls wait (default: a quarter of the machine's memory)",
    ),
    Option(
        "memory_bytes",
        parse_size,
        "SIZE",
        "model state kept in memory beyond the running sequences (default: a quarter of the machine's memory)",
    ),
    Option(
        "disk_bytes",
        parse_size,
        "SIZE",
        "model state kept on disk, encrypted (default: a quarter of what is free there, at most 64 GiB)",
    ),
    Option(
        "scratch_dir",
        _parse_path,
        "FOLDER",
        "without --store-dir: where the disk tier keeps its files; they are unreadable without this process and gone "
        "with it (default: the system's folder for large temporary files)",
    ),
    Option(
        "store_dir",
        _parse_path,
        "FOLDER",
        "keep a durable store here, for one server at a time: snapshots asked for with DURABILITY_DISK outlive a "
        "restart, and a crash at any moment",
    ),
    Option(
        "key_file",
        _parse_path,
        "FILE",
        "the durable store's master key, 32 bytes or 64 hexadecimal digits in a file of mode 0600; without it and "
        "--key-command one is made inside the store, which does not protect who loses the whole folder",
    ),
    Option(
        "key_command",
        str,
        "COMMAND",
        "prints the durable store's master key, as a key file holds it; run without a shell",
    ),
    Option(
        "checkpoints",
        _one_of("through", "marks", "off"),
        "POLICY",
        "which model state is stored on the way: through (every 256 tokens), marks (only what snapshots and marks "
        "need), off (as marks, in memory alone: nothing is written to disk)",
    ),
    Option(
        "state_spacing",
        _parse_count,
        "N",
        "of recurrent models: how densely older checkpoints stay; N / 2 of them for each doubling of the distance, so "
        "that a branch N blocks back costs a few; 0 keeps all",
    ),
    Option(
        "daily_write_bytes",
        parse_size,
        "SIZE",
        "most bytes written to disk in a day (UTC) for what nobody asked for; snapshots and marks are written beyond "
        "it, and a restart counts anew (default: no limit)",
    ),
    Option(
        "snapshot_wait",
        parse_seconds,
        "TIME",
        "how long a snapshot or mark may wait for a disk that is behind before it fails with STORE_FULL",
    ),
    Option(
        "prefill_budget",
        _parse_count,
        "TOKENS",
        "most prompt tokens computed between two decode steps, but at least one call of up to 256: more shortens "
        "the wait of new calls, fewer keeps running ones smooth",
    ),
    Option(
        "share_decoded",
        _parse_switch,
        "0|1",
        "let calls without a parent reuse state that decoding made, which may differ from prefill-made state in the "
        "last bits; snapshots always keep the state they were made with",
    ),
    Option(
        "drain_seconds",
        parse_seconds,
        "TIME",
        "after SIGTERM or Ctrl-C: how long running generations may take to deliver their end; a second signal "
        "ends the process at once",
    ),
    Option(
        "write_stall_seconds",
        parse_seconds,
        "TIME",
        "a generation whose reader has stopped reading for this long is ended",
    ),
    Option(
        "watchdog_seconds",
        parse_seconds,
        "TIME",
        "how long one step of the model may take; after that its calls are ended and health says NOT_SERVING until it "
        "answers",
    ),
    Option(
        "engine_restarts",
        _parse_count,
        "N",
        "how often in ten minutes a model thread that died is started anew, with the model loaded again and every "
        "snapshot kept",
    ),
    Option(
        "metrics",
        _parse_address,
        "[HOST]:PORT",
        "serve Prometheus metrics at http://HOST:PORT/metrics; without a host on loopback alone",
    ),
    Option(
        "traces",
        _one_of("off", "otlp"),
        "WHERE",
        "off, or otlp: OpenTelemetry spans of calls go where OTEL_EXPORTER_OTLP_ENDPOINT says (needs the otel extra)",
    ),
    Option("log_level", _one_of("debug", "info", "warning", "error"), "LEVEL", "debug, info, warning or error"),
    Option("log_format", _one_of("text", "json"), "FORMAT", "text for people, json for machines"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per setting; what is not given stays None, so that the environment can speak."""
    plain = {field.name: field.default for field in fields(Config)}
    for option in OPTIONS:
        text = option.help if "(default:" in option.help else f"{option.help} (default: {_shown(plain[option.name])})"
        arguments = {"type": _argument(option.parse), "metavar": option.metavar, "default": None, "dest": option.name}
        if isinstance(plain[option.name], bool):
            arguments |= {"nargs": "?", "const": True}  # a bare flag switches on
        parser.add_argument(option.flag, help=f"{text} [{option.variable}]", **arguments)  # type: ignore[arg-type]


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError if a KVFORK_ variable is not one of ours."""
    known = {option.variable for option in OPTIONS} | FOREIGN_VARIABLES
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            raise ConfigError(f"{variable}: no such setting" + (f"; did you mean {close[0]}?" if close else ""))


def default_memory_bytes() -> int:
    """A quarter of the machine's memory: the rest is the model's, its working caches' and other people's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def default_disk_bytes(where: object) -> int:
    """A quarter of what is free at `where` or the nearest folder above it that exists, at most 64 GiB.

    A durable store's own segments count as free, or each restart would have less than the one before.
    """
    folder = Path(str(where)).absolute()
    own = sum(file.stat().st_size for file in folder.glob("segments/*.kv"))
    while not folder.exists():
        folder = folder.parent
    return min(64 * GIB, (shutil.disk_usage(folder).free + own) // 4)


def default_scratch_dir() -> Path:
    """/var/tmp where it can be written, since /tmp is memory on many systems; else the system's temporary folder."""
    large = Path("/var/tmp")
    return large if os.access(large, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _argument(parse: Callable[[str], object]) -> Callable[[str], object]:
    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:g}s"
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value // MIB}MiB"
    return "none" if value is None or value == "" else str(value)
