"""`kvfork health`: whether a server takes work, as an exit code. For containers, units and scripts."""

from __future__ import annotations

import argparse

from service.cli import flags, output

EPILOG = """\
examples:
  kvfork health                                 ready: would a call be taken up now? not while the model loads
  kvfork health --live                          the process: is it worth keeping?
  kvfork health SnapshotService                 one service
  kvfork health --address unix:/run/kvfork/socket --timeout 2
"""
READY = "InferenceService"
PATIENCE = 5.0  # seconds, if no --timeout is given: a probe must end


def add_flags(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "service",
        nargs="?",
        help=f"InferenceService, SnapshotService or ServerService (default: {READY})",
    )
    which.add_argument("--live", action="store_true", help="the process, also while the model loads")


def run(args: argparse.Namespace) -> int:
    """0 for SERVING, 1 for all else."""
    from kvfork_client import HealthStatus

    service = "" if args.live else args.service or READY
    with flags.connect(args) as client:
        status = client.health(service, timeout=args.timeout or PATIENCE)
    if args.json:
        output.print_json(service=service, status=status)
    else:
        print(status.name.lower().replace("_", " "))
    return 0 if status is HealthStatus.SERVING else 1
