"""Flags that several talking commands share, and how their values become client values. Owns no I/O but stdin."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfork_client import Client, Constraint, Image, InputLike, Sampling, SaveOptions, Stopping

DEFAULT_ADDRESS = "127.0.0.1:50051"  # where `kvfork serve` listens


class UsageError(Exception):
    """Flags that parse but make no sense together: exit code 2."""


def connection_flags(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The flags of every command that talks to a server."""
    flags = argparse.ArgumentParser(add_help=False)
    group = flags.add_argument_group("connection")
    group.add_argument(
        "--address",
        default=environ.get("KVFORK_ADDRESS") or DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="or unix:/path/to/socket (default: $KVFORK_ADDRESS, now %(default)s)",
    )
    for flag, metavar, text in (
        ("--token-file", "FILE", "a file with the token that says who calls"),
        ("--tls-ca", "FILE", "speak TLS and trust the certificates from this file (PEM)"),
        ("--client-cert", "FILE", "a certificate that says who calls (PEM)"),
        ("--client-key", "FILE", "its private key (PEM)"),
    ):
        variable = "KVFORK_" + flag.removeprefix("--").replace("-", "_").upper()
        found = environ.get(variable) or None
        group.add_argument(flag, type=Path, default=found and Path(found), metavar=metavar, help=f"{text} [{variable}]")
    group.add_argument(
        "--instance",
        default=environ.get("KVFORK_INSTANCE") or "",
        metavar="NAME",
        help="the server to ask, behind a proxy in front of several [KVFORK_INSTANCE]",
    )
    group.add_argument("--tls", action="store_true", help="speak TLS and trust the system's authorities")
    group.add_argument("--timeout", type=positive_seconds, metavar="S", help="give up after this many seconds")
    group.add_argument("--json", action="store_true", help="print one JSON object per line")
    return flags


def generation_flags() -> argparse.ArgumentParser:
    """How tokens are picked and when to stop."""
    flags = argparse.ArgumentParser(add_help=False)
    group = flags.add_argument_group("generation")
    group.add_argument("--model", default="", metavar="NAME", help="needed only if the server has several models")
    group.add_argument("--system", metavar="TEXT", help="instructions, put before everything else")
    group.add_argument("--max-tokens", type=count, metavar="N", help="most tokens to generate")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to this probability")
    group.add_argument("--seed", type=count, metavar="N", help="same seed, same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    return flags


def constraint_flags(parser: argparse.ArgumentParser) -> None:
    """What the new text must look like."""
    group = parser.add_argument_group("form of the text").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help='JSON of the schema in this file, or "{…}" itself')
    group.add_argument("--regex", metavar="PATTERN", help="text that the pattern matches as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="this text or another one; repeatable")
    parser.add_argument(
        "--after-reasoning", action="store_true", help="the form is that of the answer; the model may reason before it"
    )


def form_flags(parser: argparse.ArgumentParser) -> None:
    """Whether text is a chat turn or raw text."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="text is a user turn, put into the model's template (default)"
    )
    form.add_argument("--raw", action="store_true", help="text goes to the model as it is; for models without template")


def image_flag(parser: argparse.ArgumentParser) -> None:
    """Pictures before the text."""
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="PNG, JPEG or WebP, put before the text; repeatable",
    )


def images(args: argparse.Namespace) -> list[Image]:
    """Raises UsageError for a file that cannot be read."""
    from kvfork_client import Image

    try:
        return [Image.file(path) for path in args.image]
    except (OSError, ValueError) as error:
        raise UsageError(f"--image: {error}") from None


def keep_flags(parser: argparse.ArgumentParser) -> None:
    """How long new snapshots live."""
    parser.add_argument("--ttl", type=positive_seconds, metavar="S", help="forget it after this many idle seconds")
    parser.add_argument("--pin", action="store_true", help="never forget it")
    parser.add_argument(
        "--durable", action="store_true", help="keep it over a restart; the server needs a --store-dir for that"
    )
    parser.add_argument("--label", action="append", default=[], type=label, metavar="K=V", help="repeatable")


def count(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError("must be from 0 to 4294967295")
    return value


def positive_count(text: str) -> int:
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds above 0")
    return value


def label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f'"{text}" is not KEY=VALUE')
    return key, value


def full_name(text: str) -> str:
    """A snapshot's name; its bare id will do."""
    return text if text.startswith("snapshots/") else f"snapshots/{text}"


def connect(args: argparse.Namespace) -> Client:
    """Raises UsageError for an address that is none, and for files that cannot be read."""
    from kvfork_client import Client, Tls

    secure = args.tls or args.tls_ca is not None or args.client_cert is not None
    tls = Tls(ca=args.tls_ca, certificate=args.client_cert, key=args.client_key) if secure else None
    if (args.client_cert is None) != (args.client_key is None):
        raise UsageError("--client-cert and --client-key go together")
    try:
        return Client(
            args.address, token=_token(args.token_file), tls=tls, timeout=args.timeout, instance=args.instance
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = path.expanduser().read_text(encoding="utf-8").strip()
    if not token or len(token.split()) != 1:
        raise UsageError(f"--token-file: {path} must hold one token and nothing else")
    return token


def sampling(args: argparse.Namespace) -> Sampling:
    from kvfork_client import Sampling

    return Sampling(temperature=args.temperature, top_p=args.top_p, seed=args.seed)


def stopping(args: argparse.Namespace) -> Stopping:
    from kvfork_client import Stopping

    return Stopping(max_tokens=args.max_tokens, stop=args.stop)


def constraint(args: argparse.Namespace) -> Constraint | None:
    """Raises UsageError for a file that cannot be read, or a flag without a form that it is about."""
    from kvfork_client import Constraint

    schema = args.json_schema
    if schema is not None and not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json-schema: {error}") from None
    if schema is None and args.regex is None and args.choice is None:
        if args.after_reasoning:
            raise UsageError("--after-reasoning needs --json-schema, --regex or --choice")
        return None
    return Constraint(json_schema=schema, regex=args.regex, choice=args.choice, after_reasoning=args.after_reasoning)


def save_options(args: argparse.Namespace, snapshot_id: str = "") -> SaveOptions:
    from kvfork_client import Durability, SaveOptions

    return SaveOptions(
        snapshot_id=snapshot_id.removeprefix("snapshots/"),
        ttl=args.ttl,
        pinned=args.pin,
        labels=dict(args.label),
        durability=Durability.DISK if args.durable else None,
    )


def as_turn(text: str, *, raw: bool, system: str | None = None, images: Sequence[Image] = ()) -> InputLike:
    """Text in the form asked for, `images` before it.

    Raises UsageError for instructions without a template to put them into.
    """
    from kvfork_client import Message
    from kvfork_client import raw as raw_input

    if raw:
        if system:
            raise UsageError("--system needs a chat template: leave out --raw, or write the instructions into the text")
        return raw_input(*images, text)
    turn = Message.user(*images, text)
    return [Message.system(system), turn] if system else [turn]


def read_stdin() -> str:
    """The prompt on stdin. Raises UsageError if nothing is there: a model would go on from nothing."""
    text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise UsageError("no prompt: standard input is empty")
    return text
