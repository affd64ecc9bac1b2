"""`kvfork snapshots export`, `import` and `copy`: a snapshot into a file, out of one, and to another server."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from service.cli import flags, output

if TYPE_CHECKING:
    from kvfork_client import Imported, Snapshot

PIECE_BYTES = 1 << 20
PART = ".part"


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the snapshot to write out")
    parser.add_argument("file", help="where to; - is standard output. Whoever reads it can read the prompt in it")


def run_export(args: argparse.Namespace) -> int:
    with (
        flags.connect(args) as client,
        client.export_snapshot(flags.full_name(args.name)) as export,
        _written(args.file) as file,
    ):
        for piece in export:
            file.write(piece)
    summary = export.summary
    assert summary is not None, "an export has a first message"
    if args.file == "-":  # the export is what stands there
        return 0
    if args.json:
        output.print_json(export=summary)
    else:
        info = summary.snapshot
        print(
            f"{info.name}: {info.token_count:,} tokens, the state of {summary.state_tokens:,} of them; "
            f"{output.size(summary.bytes)} written to {args.file}"
        )
    return 0


def add_import_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="an export; - is standard input")
    _add_keep_flags(parser)


def run_import(args: argparse.Namespace) -> int:
    with _read(args.file) as file, flags.connect(args) as client:
        pieces = iter(lambda: file.read(PIECE_BYTES), b"")
        taken = client.import_snapshot(pieces, options=flags.save_options(args, args.save))
    return _show(args, taken)


def add_copy_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the snapshot to bring to another server")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="that server, reached as this one is")
    parser.add_argument("--to-instance", default="", metavar="NAME", help="the server to ask there, behind a proxy")
    parser.add_argument("--to-token-file", type=Path, metavar="FILE", help="a token for it (default: --token-file)")
    _add_keep_flags(parser)


def run_copy(args: argparse.Namespace) -> int:
    there = argparse.Namespace(**vars(args))
    there.address, there.instance = args.to, args.to_instance
    there.token_file = args.to_token_file or args.token_file
    with flags.connect(args) as here, flags.connect(there) as other:
        options = flags.save_options(args, args.save)
        taken = here.copy_snapshot(flags.full_name(args.name), to=other, options=options)
        return _show(args, taken)


def _add_keep_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", default="", metavar="ID", help="a name for it there (default: its own)")
    flags.keep_flags(parser)


def _show(args: argparse.Namespace, taken: Imported[Snapshot]) -> int:
    if args.json:
        output.print_json(
            snapshot=taken.snapshot,
            received_records=taken.received_records,
            received_bytes=taken.received_bytes,
            held_records=taken.held_records,
        )
        return 0
    output.say(output.snapshot_table([taken.snapshot.info]))
    print(
        f"{taken.received_records:,} records came, {output.size(taken.received_bytes)}; "
        f"{taken.held_records:,} were there already"
    )
    return 0


@contextlib.contextmanager
def _written(name: str) -> Iterator[BinaryIO]:
    """A file that appears once it is whole, readable by nobody else; or what takes bytes and is no such file."""
    if name == "-":
        if sys.stdout is None:
            raise flags.UsageError("standard output is closed")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name).expanduser()
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe: not to be replaced
        try:
            with path.open("wb") as taker:
                yield taker
        except OSError as error:
            raise flags.UsageError(f"{name} cannot be written: {error.strerror or error}") from None
        return
    path = path.resolve()  # or a link would be replaced, /dev/stdout for one
    beside = path.with_name(path.name + PART)
    try:
        beside.unlink(missing_ok=True)  # of a run that was killed: its mode, or what it links to, may be anybody's
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise flags.UsageError(f"{name} cannot be written: {error.strerror or error}") from None
    except BaseException:  # of whatever kind: what is not whole must not stay
        beside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _read(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        if sys.stdin is None:
            raise flags.UsageError("standard input is closed")
        yield sys.stdin.buffer
        return
    try:
        file = Path(name).expanduser().open("rb")
    except OSError as error:
        raise flags.UsageError(f"{name} cannot be read: {error.strerror or error}") from None
    with file:
        yield file
