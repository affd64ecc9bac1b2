"""The server's settings. Owns every flag and variable of `kvfork serve`: nothing else of the server reads either.

Each setting is one row of `OPTIONS`: a flag, the variable KVFORK_<NAME>, a key of the settings file, a default. A flag
beats the variable, the variable the file, the file the default. Unknown variables and keys are refused, for a typo
there is silent otherwise. A `Config` that exists is valid.
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

from kvcache.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy, Checkpoints
from service.auth.callers import owner_names
from service.config_file import ConfigError, read_file

__all__ = ["Config", "ConfigError", "Given", "add_arguments", "split_address"]

PREFIX = "KVFORK_"
FILE_VARIABLE = "KVFORK_CONFIG"

# Their values are not for a screen: people put secrets into command lines.
SECRET = frozenset({"key_command", "token_command"})

# Read elsewhere: the first two by the model commands, the others by the commands that talk to a server (which read the
# address as well).
FOREIGN_VARIABLES = frozenset(
    {
        "KVFORK_CACHE_DIR",
        "KVFORK_ACCEPT_GEMMA_TERMS",
        "KVFORK_TOKEN_FILE",
        "KVFORK_TLS_CA",
        "KVFORK_CLIENT_CERT",
        "KVFORK_CLIENT_KEY",
    }
)

MIB = 2**20
GIB = 2**30

MOST_PIXELS = 89_000_000  # beyond it the image library warns, and a picture takes a gigabyte while it is decoded

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and where it was found: a flag, a variable, a file, or "default"."""

    value: object
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one server. Sizes are bytes, times seconds. Raises ConfigError if they contradict each other."""

    address: str = "127.0.0.1:50051"  # "" for no TCP listener
    unix_socket: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    token_command: str = ""
    token_refresh: float = 60.0
    admins: tuple[str, ...] = ()
    reflection: bool | None = None  # None: only where nobody but this machine can ask
    max_connections: int = 500
    max_owner_calls: int = 256
    max_owner_running: int | None = None  # None: see `owner_running`; 0: no limit
    request_seconds: float = 60.0
    model: str = "smollm2"
    max_batch: int = 8
    max_queue: int = 64
    max_request_bytes: int = 64 * MIB
    max_images: int = 32
    max_image_bytes: int = 32 * MIB
    max_image_pixels: int = 4096 * 4096
    image_bytes: int = 512 * MIB
    max_fork_branches: int = 64
    max_snapshots: int = 10_000
    max_pinned: int = 1_000
    max_pinned_bytes: int | None = None  # None: no limit
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
    checkpoints: CheckpointPolicy = DEFAULT_CHECKPOINTS.policy
    state_spacing: int = DEFAULT_CHECKPOINTS.state_spacing
    daily_write_bytes: int | None = None  # None: no limit
    snapshot_wait: float = 10.0
    prefill_budget: int = 320
    share_decoded: bool = False
    share_prefixes: bool = False
    drain_seconds: float = 30.0
    write_stall_seconds: float = 30.0
    watchdog_seconds: float = 60.0
    engine_restarts: int = 3
    metrics: str = ""  # "" for none
    inspector: str = ""  # "" for none
    traces: str = "off"
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not self.address and self.unix_socket is None:
            raise ConfigError("address: nowhere to listen: give an address or a unix socket")
        self._check_exposure()
        if self.metrics:
            split_page_address("metrics", self.metrics)
        if self.unix_socket is not None and len(os.fsencode(self.unix_socket)) > _LONGEST_SOCKET_PATH:
            raise ConfigError(f"unix_socket: the system takes at most {_LONGEST_SOCKET_PATH} bytes of path")
        if not self.model:
            raise ConfigError("model: must be a name or a folder")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in (
            "max_images",
            "image_bytes",
            "max_queue",
            "max_pinned",
            "memory_bytes",
            "disk_bytes",
            "drain_seconds",
            "engine_restarts",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")
        if self.max_image_pixels > MOST_PIXELS:
            raise ConfigError(f"max_image_pixels: must be at most {MOST_PIXELS}")
        if not 0 < self.default_ttl <= self.max_ttl:
            raise ConfigError(f"default_ttl: must be above 0 and at most max_ttl ({self.max_ttl:g} s)")
        if self.key_file is not None and self.key_command:
            raise ConfigError("key_file: give either it or key_command")
        if self.store_dir is None and (self.key_file is not None or self.key_command):
            name = "key_file" if self.key_file is not None else "key_command"
            raise ConfigError(f"{name}: is of no use without store_dir")
        if self.checkpoints is CheckpointPolicy.OFF and self.store_dir is not None:
            raise ConfigError("checkpoints: off writes nothing, so store_dir would keep nothing; give one or the other")
        try:
            self.kept_on_the_way()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.snapshot_wait < 0:
            raise ConfigError("snapshot_wait: must not be negative")
        for name in ("daily_write_bytes", "max_pinned_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")
        for name in ("write_stall_seconds", "watchdog_seconds", "token_refresh", "request_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")

    def _check_exposure(self) -> None:
        """What is said in the clear stays on this machine, and who is not on it must say who it is."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert: a certificate and its key go together: give tls_cert and tls_key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca: is of no use without tls_cert and tls_key")
        if self.tls_cert is not None and not self.address and not self.inspector:
            raise ConfigError("tls_cert: is of no use without an address; a unix socket needs no TLS")
        if self.tokens is not None and self.token_command:
            raise ConfigError("tokens: give either it or token_command")
        if self.admins and not self.authenticates:
            raise ConfigError("admins: without authentication everybody is one: give tokens or tls_client_ca too")
        if self.share_prefixes and not self.authenticates:
            raise ConfigError("share_prefixes: without authentication there is one owner, who shares with nobody")
        if self.unix_socket is not None and self.authenticates and not self.takes_tokens:
            raise ConfigError("unix_socket: callers there have no certificate: give tokens too")
        if self.inspector and self.authenticates and not self.takes_tokens:
            raise ConfigError("inspector: a page cannot show a certificate to the calls it makes: give tokens too")
        if self.address:
            self._check_listener("address", self.address, split_address(self.address)[0])
        if self.inspector:
            self._check_listener("inspector", self.inspector, split_page_address("inspector", self.inspector)[0])

    def _check_listener(self, name: str, address: str, host: str) -> None:
        if ipaddress.ip_address(host).is_loopback:
            return
        if self.tls_cert is None:
            raise ConfigError(
                f'{name}: "{address}" is not loopback: others could read and change what passes. Give tls_cert '
                "and tls_key, or listen on 127.0.0.1, [::1] or a unix socket and forward the port"
            )
        if not self.authenticates:
            raise ConfigError(
                f'{name}: "{address}" is not loopback: whoever reaches it could use every snapshot. Give tokens, '
                "token_command or tls_client_ca, which say who calls"
            )

    @property
    def takes_tokens(self) -> bool:
        """Whether callers may show a bearer token."""
        return self.tokens is not None or bool(self.token_command)

    @property
    def authenticates(self) -> bool:
        """Whether callers have to say who they are; if not, there is one owner."""
        return self.takes_tokens or self.tls_client_ca is not None

    @property
    def owner_running(self) -> int:
        """Most calls of one owner that the model has at a time; 0: no limit."""
        if self.max_owner_running is not None:
            return self.max_owner_running
        return max(1, self.max_batch * 3 // 4) if self.authenticates else 0

    @property
    def reflects(self) -> bool:
        """Whether the contract can be asked for over the wire."""
        if self.reflection is not None:
            return self.reflection
        return not self.address or ipaddress.ip_address(split_address(self.address)[0]).is_loopback

    @property
    def disk_budget(self) -> int:
        """Bytes that the disk tier may take."""
        return 0 if self.checkpoints is CheckpointPolicy.OFF else self.disk_bytes

    def kept_on_the_way(self) -> Checkpoints:
        """What store and cache keep of what a run passes. Raises ValueError if it makes no sense."""
        return Checkpoints(policy=self.checkpoints, state_spacing=self.state_spacing)

    @classmethod
    def from_args(cls, args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
        """Settings from flags parsed by a parser that went through `add_arguments`, then from `environ` and a file."""
        return cls.of(gather(args, environ))

    @classmethod
    def of(cls, given: Mapping[str, Given]) -> Config:
        """Settings from values by name. Raises ConfigError if they contradict each other."""
        return cls(**{name: each.value for name, each in given.items()})  # type: ignore[arg-type]  # OPTIONS' types


def gather(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Given]:
    """Every setting with its source. Raises ConfigError for what cannot be read and for names that are none."""
    refuse_unknown_variables(environ)
    found: dict[str, Given] = {}
    file = getattr(args, "config", None)
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE]).expanduser()
    in_file: dict[str, object] = {}
    if file is not None:
        in_file = read_file(file, {option.key: option.parse for option in OPTIONS})
    for option in OPTIONS:
        flag = getattr(args, option.name, None)
        if flag is not None:
            found[option.name] = Given(flag, option.flag)
        elif environ.get(option.variable):  # an empty variable is as good as none
            try:
                found[option.name] = Given(option.parse(environ[option.variable]), option.variable)
            except ValueError as error:
                raise ConfigError(f"{option.variable}: {error}") from None
        elif option.key in in_file:
            found[option.name] = Given(in_file[option.key], str(file))
    address = found.get("address")
    if address is not None and str(address.value).startswith("unix:"):  # as clients write it
        found["address"] = Given("", address.source)
        socket = Given(_parse_path(str(address.value).removeprefix("unix:")), address.source)
        found.setdefault("unix_socket", socket)
    return {**_defaults(found), **found}


def _defaults(found: Mapping[str, Given]) -> dict[str, Given]:
    """What nobody gave; some of it depends on the machine."""
    here = {field.name: Given(field.default, "default") for field in fields(Config)}
    machine = "default for this machine"
    if "scratch_dir" not in found:
        here["scratch_dir"] = Given(default_scratch_dir(), machine)
    for name in ("active_bytes", "memory_bytes"):
        here[name] = Given(default_memory_bytes(), machine)
    if "disk_bytes" not in found:
        store = found.get("store_dir")
        where = store.value if store is not None else found.get("scratch_dir", here["scratch_dir"]).value
        here["disk_bytes"] = Given(default_disk_bytes(where), machine)
    return here


_AT_LEAST_ONE = (
    "max_batch",
    "max_request_bytes",
    "max_image_bytes",
    "max_image_pixels",
    "max_fork_branches",
    "max_snapshots",
    "max_watches",
    "default_max_tokens",
    "active_bytes",
    "prefill_budget",
    "max_connections",
    "max_owner_calls",
)
_LONGEST_SOCKET_PATH = 103  # macOS; Linux takes four more


def split_address(address: str) -> tuple[str, int]:
    """("127.0.0.1", 50051) from "127.0.0.1:50051", "[::1]:50051" or "localhost:50051". Port 0 is any free one.

    Raises ConfigError for what is no address. A host name is none: it may come to mean another interface.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'address: must look like "127.0.0.1:50051", is "{address}"')
    if host == "localhost":
        host = "127.0.0.1"  # one socket: with two, another server could hold the second unnoticed
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f'address: must be a loopback address, localhost or another IP address, is "{address}"'
        ) from None
    return host, int(port)


def split_page_address(name: str, address: str) -> tuple[str, int]:
    """("127.0.0.1", 9464) from ":9464" or "127.0.0.1:9464"; another host has to be an address, and is as asked for.

    `name` is the setting's, for ConfigError.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'{name}: must look like ":9464" or "127.0.0.1:9464", is "{address}"')
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f'{name}: must be an IP address or localhost, is "{address}"') from None
    return host, int(port)


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


def _parse_policy(text: str) -> CheckpointPolicy:
    return CheckpointPolicy(_one_of(*(policy.value for policy in CheckpointPolicy))(text))


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
        return "--" + self.key

    @property
    def key(self) -> str:
        """As in `max-batch = 4` of a settings file."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in KVFORK_MAX_BATCH."""
        return PREFIX + self.name.upper()


OPTIONS = (
    Option(
        "address",
        _parse_address,
        "HOST:PORT",
        "where to listen: a loopback address, or with TLS and authentication any other; port 0 takes any free one; "
        '"none" or "unix:PATH" for a unix socket alone',
    ),
    Option(
        "unix_socket",
        _parse_path,
        "PATH",
        "also listen on this socket file, which only its owner may open (mode 0600)",
    ),
    Option(
        "tls_cert",
        _parse_path,
        "FILE",
        "serve TLS on the address with this certificate chain (PEM); a changed file is taken up by new connections",
    ),
    Option("tls_key", _parse_path, "FILE", "the certificate's private key (PEM, not encrypted)"),
    Option(
        "tls_client_ca",
        _parse_path,
        "FILE",
        "let in only who has a certificate from one of these authorities (PEM); its one subject alternative name, or "
        "its common name, is the owner",
    ),
    Option(
        "tokens",
        _parse_path,
        "FILE",
        "callers show a bearer token; the file has an owner and the token's SHA-256 a line, as `kvfork token new` "
        "prints them, and is read again when it changes",
    ),
    Option("token_command", str, "COMMAND", "prints what a tokens file holds; run without a shell, now and again"),
    Option("token_refresh", parse_seconds, "TIME", "how often the token command is run"),
    Option(
        "admins",
        owner_names,
        "NAMES",
        "owners that may see and trim the whole store, with commas between them; a tokens file can name more",
    ),
    Option(
        "reflection",
        _parse_switch,
        "0|1",
        "whether tools may ask for the contract (default: only if no other machine can reach the server)",
    ),
    Option("max_connections", _parse_count, "N", "most connections to the address; others are closed at once"),
    Option("max_owner_calls", _parse_count, "N", "most calls of one owner under way, whatever they are"),
    Option(
        "max_owner_running",
        _parse_count,
        "N",
        "most calls of one owner that the model works on or that wait for it; its others wait in a line of their own, "
        "so below --max-batch nobody can keep everybody else out; 0: no limit (default: three quarters of --max-batch "
        "with authentication, no limit without)",
    ),
    Option(
        "request_seconds",
        parse_seconds,
        "TIME",
        "how long a request message may take to arrive",
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
    Option("max_images", _parse_count, "N", "most images of one request; 0 takes none"),
    Option("max_image_bytes", parse_size, "SIZE", "largest image file"),
    Option(
        "max_image_pixels",
        _parse_count,
        "N",
        "most pixels of one image, looked at before anything is decompressed; those of one request together may be "
        "four times as many",
    ),
    Option(
        "image_bytes",
        parse_size,
        "SIZE",
        "image files held in memory: those that running calls and snapshots need, and recent ones, so that they can be "
        "named by their digest; beyond it a call with another image fails with IMAGE_MEMORY",
    ),
    Option("max_fork_branches", _parse_count, "N", "most children of one Fork"),
    Option("max_snapshots", _parse_count, "N", "most snapshots of one caller"),
    Option("max_pinned", _parse_count, "N", "most of them pinned, which neither time nor memory pressure removes"),
    Option(
        "max_pinned_bytes",
        parse_size,
        "SIZE",
        "most model state that the pinned snapshots of one caller keep, in memory and on disk, shared prefixes once "
        "(default: no limit)",
    ),
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
        _parse_policy,
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
        "share_prefixes",
        _parse_switch,
        "0|1",
        "let owners reuse state of each other's equal prefixes: the time that a call takes then tells what others have "
        "sent, and shredding an owner's key leaves what was shared",
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
        "inspector",
        _parse_address,
        "[HOST]:PORT",
        "serve the inspector, a page to look at snapshots and use them, at http://HOST:PORT/, without a host on "
        "loopback alone; with the certificate and tokens of the address, if there are such (needs the inspector extra)",
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
    parser.add_argument(
        "--config", type=_argument(_parse_path), metavar="FILE", help=f"settings, a TOML file [{FILE_VARIABLE}]"
    )
    for option in OPTIONS:
        text = (
            option.help
            if "(default:" in option.help
            else f"{option.help} (default: {shown(option.name, plain[option.name])})"
        )
        arguments = {"type": _argument(option.parse), "metavar": option.metavar, "default": None, "dest": option.name}
        if option.parse is _parse_switch:
            arguments |= {"nargs": "?", "const": True}  # a bare flag switches on
        parser.add_argument(option.flag, help=f"{text} [{option.variable}]", **arguments)  # type: ignore[arg-type]


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError if a KVFORK_ variable is not one of ours."""
    known = {option.variable for option in OPTIONS} | FOREIGN_VARIABLES | {FILE_VARIABLE}
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


_SIZES = frozenset(option.name for option in OPTIONS if option.parse is parse_size)


def shown(name: str, value: object) -> str:
    """The value of a setting as its flag takes it."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, CheckpointPolicy):
        return value.value
    if isinstance(value, float):
        return f"{value:g}s"
    if name in _SIZES and isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value // MIB}MiB"
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value) or "none"
    return "none" if value is None or value == "" else str(value)
