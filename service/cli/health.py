"""`kvfork health`: whether a server takes work, as an exit code. For containers, units and scripts."""

from __future__ import annotations

import argparse

from service.cli import flags, output

EPILOG = """\
examples:
  kvfork health                                 the process: is it worth keeping?
  kvfork health InferenceService                would a call be taken up now?
  kvfork health --address unix:/run/kvfork/socket --timeout 2
"""
PATIENCE = 5.0  # seconds, if no --timeout is given: a probe must end


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "service", nargs="?", default="", help="InferenceService, SnapshotService or ServerService; none: the process"
    )


def run(args: argparse.Namespace) -> int:
    """0 for SERVING, 1 for all else."""
    from kvfork_client import HealthStatus

    with flags.connect(args) as client:
        status = client.health(args.service, timeout=args.timeout or PATIENCE)
    if args.json:
        output.print_json(service=args.service, status=status)
    else:
        print(status.name.lower().replace("_", " "))
    return 0 if status is HealthStatus.SERVING else 1
