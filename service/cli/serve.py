"""`kvfork serve`: from flags and environment to a running server."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from service.limits import take_all_files

_EPILOG = """\
examples:
  kvfork serve                                    the default model on 127.0.0.1:50051
  kvfork serve --model gemma3                     the sliding-window model
  kvfork serve --model ~/models/my-mlx-model --address none --unix-socket ~/.kvfork.sock
  kvfork serve --memory-bytes 2GiB --disk-bytes 20GiB
  kvfork serve --store-dir ~/.kvfork --key-file ~/keys/kvfork    snapshots that outlive the server
  kvfork serve --address 0.0.0.0:50051 --tls-cert cert.pem --tls-key key.pem --tokens tokens    for a team

Every flag can be set as a variable instead: KVFORK_MODEL=gemma3 kvfork serve
or in a file: kvfork serve --config kvfork.toml; `kvfork config show --default` prints one to begin from
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `serve`."""
    from service.options import add_arguments

    parser = subparsers.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Serve one model over gRPC until SIGTERM or Ctrl-C.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves; returns the exit code."""
    from service.config import ConfigError
    from service.options import from_args

    try:
        config = from_args(args, os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # gRPC's own lines hold what strangers sent, raw, and as often as they like; what matters is in ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    take_all_files()
    _set_up_logging(config.log_level, config.log_format)
    from service import app
    from service.models import ModelError, resolve
    from service.rpc.listen import CannotListen, look
    from service.rpc.server import EXIT_CANNOT_LISTEN

    try:
        look(config)  # the model may have to be fetched first, for minutes
        folder = resolve(config.model)
    except CannotListen as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT_LISTEN
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from kvcache.errors import StoreUnusable
    from service.rpc.access import AccessUnusable
    from service.tracing import TracesUnavailable

    try:
        return app.main(config, folder, _model_id(config.model, folder), _ready)
    except (StoreUnusable, AccessUnusable, app.CannotStart, TracesUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _ready(addresses: Sequence[str]) -> None:
    for address in addresses:
        print(f"listening on {address}", flush=True)


def _model_id(model: str, folder: Path) -> str:
    """A name for the model in the contract: the known name, else the folder's."""
    from service.models import KNOWN

    name = model if model in KNOWN else folder.name
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name.lower())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(getattr(record, "fields", None) or _call()),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {}
        told = [f"{name}={value}" for name, value in fields.items() if name not in ("method", "code")]
        return " ".join([super().format(record), *told])


def _call() -> dict[str, object]:
    """Which call a line was written in, if in one."""
    from service.facts import known

    call = known().get("call")
    return {"call": call} if call else {}


def _set_up_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # At debug, libraries (gRPC's event loop above all) say more than we do, and none of it about a call.
    libraries = max(logging.INFO, logging.getLevelNamesMapping()[level.upper()])
    logging.basicConfig(level=libraries, handlers=[handler], force=True)
    for ours in ("kvfork", "service", "kvcache"):
        logging.getLogger(ours).setLevel(level.upper())
