"""`kvfork plan`: what a call would cost and whether it would be taken, without making it."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

from service.cli import flags, output
from service.cli.opening import appended, first_taken

if TYPE_CHECKING:
    from kvfork_client import Plan

EPILOG = """\
examples:
  kvfork plan "Why is the sky blue?"
  kvfork plan --parent plan-0001 --branches 8 --max-tokens 400    would eight branches be taken at once?
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help='the text; "-": read it from stdin; none with a --parent')
    parser.add_argument("--parent", metavar="NAME", help="go on from this snapshot")
    parser.add_argument(
        "--branches", type=flags.positive_count, default=1, metavar="N", help="calls at once, as after a fork"
    )
    parser.add_argument("--max-tokens", type=flags.positive_count, metavar="N", help="most new tokens of each")
    parser.add_argument("--model", default="", metavar="NAME", help="needed only if the server has several models")
    flags.form_flags(parser)


def run(args: argparse.Namespace) -> int:
    """0 if the calls would be taken, now or later; 1 if they would be refused."""
    from kvfork_client import Admission

    if args.prompt is None and args.parent is None:
        raise flags.UsageError("nothing to plan: give a prompt, a --parent, or both")
    text = flags.read_stdin() if args.prompt == "-" else args.prompt
    parent = None if args.parent is None else flags.full_name(args.parent)
    given = None if text is None else flags.as_turn(text, raw=args.raw)
    with flags.connect(args) as client:
        plan = functools.partial(
            client.plan, parent=parent, model=args.model, branches=args.branches, max_tokens=args.max_tokens
        )
        forms = appended(given) if given is not None and parent is not None else [given]
        _, found = first_taken([functools.partial(plan, form) for form in forms])
    if args.json:
        output.print_json(plan=found)
    else:
        output.say(shown(found, args.branches))
    return 1 if found.admission is Admission.REFUSED else 0


def shown(plan: Plan, branches: int) -> str:
    """A plan in words."""
    why = f" ({plan.miss_reason.name.lower().replace('_', ' ')})" if plan.recomputed_tokens else ""
    reading = f"{output.size(plan.memory_bytes)} from memory, {output.size(plan.disk_bytes)} from disk"
    admission = plan.admission.name.lower() + (f" ({plan.reason.lower().replace('_', ' ')})" if plan.reason else "")
    free = f", {output.size(plan.free_bytes)} free" if plan.free_bytes < plan.need_bytes or plan.reason else ""
    return output.facts(
        [
            ("tokens", f"{plan.total_tokens:,}"),
            ("restored", f"{plan.cached_tokens:,} (disk {plan.disk_tokens:,}, memory {plan.memory_tokens:,})"),
            ("recomputed", f"{plan.recomputed_tokens:,}{why}"),
            ("new", f"{plan.new_tokens:,}"),
            ("to read", f"{reading}: {_seconds(plan.load)}"),
            ("to compute", f"{plan.recomputed_tokens + plan.new_tokens:,} tokens: {_seconds(plan.prefill)}"),
            ("TTFT", f"{_seconds(plan.ttft)}, were nothing else running"),
            ("admission" if branches == 1 else f"{branches} branches", admission),
            ("memory", f"{output.size(plan.need_bytes)} of working state{free}"),
        ]
    )


def _seconds(value: float | None) -> str:
    return "not measured yet" if value is None else f"about {value:.2f} s"
