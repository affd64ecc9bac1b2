"""`kvfork gateway`: flags of the OpenAI-compatible gateway, and its start. What it does is in `kvfork_gateway`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from service.cli import flags
from service.extras import install

_EPILOG = """\
examples:
  kvfork serve &                                  a server on 127.0.0.1:50051
  kvfork gateway                                  http://127.0.0.1:8080/v1 in front of it
  kvfork gateway --alias gpt-4o=smollm2           for programs that ask for a model by another name
  kvfork gateway --alias '*=smollm2'              whatever they ask for
  kvfork gateway --server unix:/run/kvfork/socket --address 127.0.0.1:9000
  kvfork gateway --address 0.0.0.0:8443 --tls-cert cert.pem --tls-key key.pem

A caller's bearer token is passed on: who is who, and who may do what, is the server's to say.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `gateway`."""
    parser = subparsers.add_parser(
        "gateway",
        help="an OpenAI-compatible HTTP interface to a server",
        description="Serve OpenAI-compatible chat completions over HTTP, from a running kvfork server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = os.environ.get("KVFORK_ADDRESS") or flags.DEFAULT_ADDRESS
    add = parser.add_argument
    add("--server", default=server, metavar="ADDRESS", help="the kvfork server: HOST:PORT or unix:/path (%(default)s)")
    add("--server-tls", action="store_true", help="speak TLS to it and trust the system's authorities")
    add(
        "--server-ca", type=Path, metavar="FILE", help="speak TLS to it and trust the certificates from this file (PEM)"
    )
    add("--address", default="127.0.0.1:8080", metavar="HOST:PORT", help="where to listen (%(default)s)")
    add("--tls-cert", type=Path, metavar="FILE", help="listen with TLS: the certificate chain (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    add("--alias", action="append", default=[], type=flags.label, metavar="NAME=MODEL", help="another name; * is any")
    add("--max-body-bytes", type=flags.positive_count, default=64 * 2**20, metavar="N", help="largest request")
    add(
        "--reuse-ttl",
        type=flags.positive_seconds,
        default=1800.0,
        metavar="S",
        help="keep what a conversation can go on from for so long without use (%(default)s)",
    )
    add(
        "--reuse-entries",
        type=flags.positive_count,
        default=64,
        metavar="N",
        help="answers of one caller that can be gone on from (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C. Returns 0 well, 1 if it could not start, 2 for wrong usage."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import uvicorn  # noqa: F401 - asked for here to say which extra brings it
    except ModuleNotFoundError as error:
        if error.name != "uvicorn":
            raise
        print(f"error: uvicorn is not installed: {install('gateway')}", file=sys.stderr)
        return 1
    from kvfork_client import Tls
    from kvfork_gateway.conversations import Bounds
    from kvfork_gateway.serving import CannotStart, Settings
    from kvfork_gateway.serving import run as serve

    from service.config import ConfigError
    from service.config_values import split_address

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        host, port = split_address(args.address)
    except ConfigError as error:
        print(f"error: --{error}", file=sys.stderr)
        return 2
    settings = Settings(
        server=args.server,
        host=host,
        port=port,
        server_tls=Tls(ca=args.server_ca) if args.server_ca is not None else args.server_tls,
        certificate=args.tls_cert,
        key=args.tls_key,
        aliases=dict(args.alias),
        most_body_bytes=args.max_body_bytes,
        bounds=Bounds(ttl=args.reuse_ttl, entries_per_caller=args.reuse_entries),
    )
    try:
        serve(settings, lambda url: print(f"listening on {url}", flush=True))
    except CannotStart as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
