"""Where settings come from. Owns every flag and variable of `kvfork serve`: nothing else of the server reads either.

Each setting is one row of `OPTIONS`: a flag, the variable KVFORK_<NAME>, a key of the settings file, a default. A flag
beats the variable, the variable the file, the file the default. Unknown variables and keys are refused, for a typo
there is silent otherwise.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from kvcache.checkpoints import CheckpointPolicy
from service.auth.callers import owner_names
from service.config import Config, ConfigError
from service.config_file import read_file
from service.config_values import (
    GIB,
    MIB,
    one_of,
    parse_address,
    parse_count,
    parse_path,
    parse_policy,
    parse_seconds,
    parse_size,
    parse_switch,
)

PREFIX = "KVFORK_"
FILE_VARIABLE = "KVFORK_CONFIG"

# Their values are not for a screen: people put secrets into command lines.
SECRET = frozenset({"key_command", "token_command"})

# Read elsewhere: the first two by the model commands, the others by the commands that talk to a server (which read the
# address and the instance as well).
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


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and where it was found: a flag, a variable, a file, or "default"."""

    value: object
    source: str


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
        parse_address,
        "HOST:PORT",
        "where to listen: a loopback address, or with TLS and authentication any other; port 0 takes any free one; "
        '"none" or "unix:PATH" for a unix socket alone',
    ),
    Option(
        "unix_socket",
        parse_path,
        "PATH",
        "also listen on this socket file, which only its owner may open (mode 0600)",
    ),
    Option(
        "tls_cert",
        parse_path,
        "FILE",
        "serve TLS on the address with this certificate chain (PEM); a changed file is taken up by new connections",
    ),
    Option("tls_key", parse_path, "FILE", "the certificate's private key (PEM, not encrypted)"),
    Option(
        "tls_client_ca",
        parse_path,
        "FILE",
        "let in only who has a certificate from one of these authorities (PEM); its one subject alternative name, or "
        "its common name, is the owner",
    ),
    Option(
        "tokens",
        parse_path,
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
        parse_switch,
        "0|1",
        "whether tools may ask for the contract (default: only if no other machine can reach the server)",
    ),
    Option("max_connections", parse_count, "N", "most connections to the address; others are closed at once"),
    Option("max_owner_calls", parse_count, "N", "most calls of one owner under way, whatever they are"),
    Option(
        "max_owner_running",
        parse_count,
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
        "instance",
        str,
        "NAME",
        "what this server is called among replicas: its snapshots carry the name, a proxy routes by it, and calls for "
        "another instance are refused; no two may have the same, and a restart on the same store has to keep it "
        "(default: the durable store's own, else one of this process)",
    ),
    Option(
        "max_batch",
        parse_count,
        "N",
        "most sequences decoded together: more gives more tokens per second in all, fewer to each, and takes memory",
    ),
    Option(
        "max_queue",
        parse_count,
        "N",
        "most calls waiting for a row; beyond it a call fails at once with RESOURCE_EXHAUSTED and a time to retry",
    ),
    Option("max_request_bytes", parse_size, "SIZE", "largest request message"),
    Option(
        "max_text_bytes",
        parse_size,
        "SIZE",
        "most text of one input; a tokenizer takes seconds for a megabyte of it, and cannot be interrupted",
    ),
    Option("max_images", parse_count, "N", "most images of one request; 0 takes none"),
    Option("max_image_bytes", parse_size, "SIZE", "largest image file"),
    Option(
        "max_image_pixels",
        parse_count,
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
    Option(
        "form_seconds",
        parse_seconds,
        "TIME",
        "processor time that compiling a form (schema, expression, grammar) may take, in a process of its own",
    ),
    Option("form_bytes", parse_size, "SIZE", "memory that a compiled form, or a row that follows it, may take"),
    Option(
        "mask_seconds",
        parse_seconds,
        "TIME",
        "processor time that telling which tokens fit a form may take ahead of 20 ms for each token of the row; beyond "
        "it the row ends with CONSTRAINT_FAILED, and until then it waits by itself",
    ),
    Option("max_fork_branches", parse_count, "N", "most children of one Fork"),
    Option("max_snapshots", parse_count, "N", "most snapshots of one caller"),
    Option("max_pinned", parse_count, "N", "most of them pinned, which neither time nor memory pressure removes"),
    Option(
        "max_pinned_bytes",
        parse_size,
        "SIZE",
        "most model state that the pinned snapshots of one caller keep, in memory and on disk, shared prefixes once "
        "(default: no limit)",
    ),
    Option("max_watches", parse_count, "N", "most snapshot watches of one caller at a time"),
    Option(
        "default_ttl",
        parse_seconds,
        "TIME",
        "how long an unused snapshot is kept if its request does not say; every use starts the time anew",
    ),
    Option("max_ttl", parse_seconds, "TIME", "longest time a request may ask for"),
    Option("default_max_tokens", parse_count, "N", "most new tokens of a generation that does not say"),
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
        parse_path,
        "FOLDER",
        "without --store-dir: where the disk tier keeps its files; they are unreadable without this process and gone "
        "with it (default: the system's folder for large temporary files)",
    ),
    Option(
        "store_dir",
        parse_path,
        "FOLDER",
        "keep a durable store here, for one server at a time: snapshots asked for with DURABILITY_DISK outlive a "
        "restart, and a crash at any moment",
    ),
    Option(
        "key_file",
        parse_path,
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
        "carry_over",
        parse_switch,
        "0|1",
        "carry the durable store's snapshots of another fingerprint over to this one, where it is the same model with "
        "the same tokenizer and template (another MLX setting, processor or package): their names and tokens stay, "
        "their state is computed again when it is used, and that of the old fingerprint makes room",
    ),
    Option(
        "exchange_key",
        parse_path,
        "FILE",
        "lets snapshots be exported, and those of other instances be imported: the key that signs and checks them, the "
        "same for all that trust each other, 32 bytes or 64 hexadecimal digits in a file of mode 0600",
    ),
    Option(
        "checkpoints",
        parse_policy,
        "POLICY",
        "which model state is stored on the way: through (every 256 tokens), marks (only what snapshots and marks "
        "need), off (as marks, in memory alone: nothing is written to disk)",
    ),
    Option(
        "state_spacing",
        parse_count,
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
        parse_count,
        "TOKENS",
        "most prompt tokens computed between two decode steps, but at least one call of up to 256: more shortens "
        "the wait of new calls, fewer keeps running ones smooth",
    ),
    Option(
        "share_decoded",
        parse_switch,
        "0|1",
        "let calls without a parent reuse state that decoding made, which may differ from prefill-made state in the "
        "last bits; snapshots always keep the state they were made with",
    ),
    Option(
        "share_prefixes",
        parse_switch,
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
        parse_count,
        "N",
        "how often in ten minutes a model thread that died is started anew, with the model loaded again and every "
        "snapshot kept",
    ),
    Option(
        "metrics",
        parse_address,
        "[HOST]:PORT",
        "serve Prometheus metrics at http://HOST:PORT/metrics; without a host on loopback alone",
    ),
    Option(
        "inspector",
        parse_address,
        "[HOST]:PORT",
        "serve the inspector, a page to look at snapshots and use them, at http://HOST:PORT/, without a host on "
        "loopback alone; with the certificate and tokens of the address, if there are such (needs the inspector extra)",
    ),
    Option(
        "traces",
        one_of("off", "otlp"),
        "WHERE",
        "off, or otlp: OpenTelemetry spans of calls go where OTEL_EXPORTER_OTLP_ENDPOINT says (needs the otel extra)",
    ),
    Option("log_level", one_of("debug", "info", "warning", "error"), "LEVEL", "debug, info, warning or error"),
    Option("log_format", one_of("text", "json"), "FORMAT", "text for people, json for machines"),
)


def from_args(args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Settings from flags parsed by a parser that went through `add_arguments`, then from `environ` and a file."""
    return configured(gather(args, environ))


def configured(given: Mapping[str, Given]) -> Config:
    """Settings from values by name. Raises ConfigError if they contradict each other."""
    return Config(**{name: each.value for name, each in given.items()})  # type: ignore[arg-type]  # OPTIONS' types


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
        socket = Given(parse_path(str(address.value).removeprefix("unix:")), address.source)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per setting; what is not given stays None, so that the environment can speak."""
    plain = {field.name: field.default for field in fields(Config)}
    parser.add_argument(
        "--config", type=_argument(parse_path), metavar="FILE", help=f"settings, a TOML file [{FILE_VARIABLE}]"
    )
    for option in OPTIONS:
        text = (
            option.help
            if "(default:" in option.help
            else f"{option.help} (default: {shown(option.name, plain[option.name])})"
        )
        arguments = {"type": _argument(option.parse), "metavar": option.metavar, "default": None, "dest": option.name}
        if option.parse is parse_switch:
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
    """A quarter of the machine's memory, whole MiB: the rest is the model's, its working caches' and other people's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // MIB * MIB


def default_disk_bytes(where: object) -> int:
    """A quarter of what is free at `where` or the nearest folder above it that exists, at most 64 GiB.

    A durable store's own segments count as free, or each restart would have less than the one before.
    """
    folder = Path(str(where)).absolute()
    own = sum(file.stat().st_size for file in folder.glob("segments/*.kv"))
    while not folder.exists():
        folder = folder.parent
    return min(64 * GIB, (shutil.disk_usage(folder).free + own) // 4 // MIB * MIB)


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
    if name in _SIZES and isinstance(value, int):
        return f"{value / MIB:.20f}".rstrip("0").rstrip(".") + "MiB"  # twenty places tell every byte
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value) or "none"
    return "none" if value is None or value == "" else str(value)
