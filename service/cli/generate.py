"""`kvfork generate`: one generation, streamed.

Answer and tool calls go to stdout; reasoning, receipt, names and progress to stderr.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from service.cli import flags, output
from service.cli.interrupt import stop_on_interrupt
from service.cli.opening import admitted, appended, first_taken

if TYPE_CHECKING:
    from kvfork_client import Client, Generation, InputLike
    from kvfork_client.blocking import Event

EPILOG = """\
examples:
  kvfork generate "Why is the sky blue?" --max-tokens 100
  kvfork generate --system "Answer in French." < question.txt
  kvfork generate "Plan the trip." --save plan-0001          keep the state under a name …
  kvfork generate "Make it cheaper." --parent plan-0001      … and go on from there
  kvfork generate --parent plan-0001 --seed 7                another try from the same place
  kvfork generate --raw "Once upon a time" --temperature 0   no chat template
  kvfork generate "Is water wet?" --choice yes --choice no   one of these texts
  kvfork generate "How many boats?" --image harbour.jpg      a picture before the text
  kvfork generate "Describe Ada." --json-schema ada.json     JSON of that schema

--save and --mark-prompt-end take a name of your choice or none, so put them behind the prompt.
Ctrl-C ends the generation cleanly: its text, snapshot and receipt are kept.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help='the text; "-" or nothing: read it from stdin')
    parser.add_argument("--parent", metavar="NAME", help="go on from this snapshot; needs no prompt then")
    flags.form_flags(parser)
    flags.constraint_flags(parser)
    flags.image_flag(parser)
    keep = parser.add_argument_group("keeping state")
    keep.add_argument("--save", nargs="?", const="", metavar="ID", help="keep the final state as a snapshot")
    keep.add_argument(
        "--mark-prompt-end", nargs="?", const="", metavar="ID", help="keep the state before the first new token"
    )
    flags.keep_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Streams; 0 well, 130 if Ctrl-C ended it."""
    with flags.connect(args) as client:
        generation, events = _start(client, args)
        with generation, stop_on_interrupt(generation) as interrupts:
            if args.json:
                _stream_json(generation, events)
            else:
                _stream_text(generation, events)
    return 130 if interrupts.asked else 0


def _start(client: Client, args: argparse.Namespace) -> tuple[Generation, Iterator[Event]]:
    from kvfork_client import Mark

    text = args.prompt
    if text == "-" or (text is None and args.parent is None):
        if text is None and sys.stdin.isatty():
            raise flags.UsageError("no prompt: give one as an argument, or on stdin")
        text = flags.read_stdin()
    marks = []
    if args.mark_prompt_end is not None:
        marks.append(Mark.prompt_end(flags.save_options(args, args.mark_prompt_end)))
    images = flags.images(args)
    if images and text is None:
        text = ""
    given = None if text is None else flags.as_turn(text, raw=args.raw, system=args.system, images=images)

    def start(append: InputLike | None) -> Generation:
        return client.generate(
            append,
            None if args.parent is None else flags.full_name(args.parent),
            model=args.model,
            sampling=flags.sampling(args),
            stopping=flags.stopping(args),
            save=False if args.save is None else flags.save_options(args, args.save),
            marks=marks,
            constraint=flags.constraint(args),
            progress=args.json or sys.stderr.isatty(),
        )

    forms = appended(given) if given is not None and args.parent is not None else [given]
    if len(forms) == 1:
        generation = start(forms[0])
        return generation, generation.events()  # not waited for, so that Ctrl-C finds it even in the queue

    def take(form: InputLike | None) -> tuple[Generation, Iterator[Event]]:
        return admitted(start(form))

    return first_taken([functools.partial(take, form) for form in forms])[1]


def _stream_text(generation: Generation, events: Iterator[Event]) -> None:
    from kvfork_client import Delta, Progress

    shows_progress = False
    for event in events:
        if isinstance(event, Progress) and sys.stderr.isatty():
            shows_progress = True
            print(
                f"\rreading {event.done_tokens:,} of {event.total_tokens:,} tokens", end="", file=sys.stderr, flush=True
            )
        elif isinstance(event, Delta):
            if shows_progress:
                print("\r\033[K", end="", file=sys.stderr, flush=True)  # the text takes the line over
                shows_progress = False
            output.print_delta(event)
    if not generation.text.endswith("\n"):
        print()
    print_end(generation)


def print_end(generation: Generation) -> None:
    """Receipt, snapshots, and why it ended where that is not the model's own wish; on stderr."""
    from kvfork_client import FinishReason

    finished = generation.finished
    if finished is None:
        return
    print(output.receipt(finished.usage, generation.ttft), file=sys.stderr)
    for mark in generation.marks.values():
        output.say(f"prompt's end: {mark.name} ({mark.token_count:,} tokens)", file=sys.stderr)
    if finished.snapshot is not None:
        output.say(f"saved: {finished.snapshot.name} ({finished.snapshot.token_count:,} tokens)", file=sys.stderr)
    elif finished.save_error_reason:
        output.say(f"not saved: {finished.save_error_reason}", file=sys.stderr)
    if finished.reason is not FinishReason.EOS:
        output.say(f"ended by: {finished.reason.name.lower().replace('_', ' ')}", file=sys.stderr)


def _stream_json(generation: Generation, events: Iterator[Event]) -> None:
    from kvfork_client import Finished

    for event in events:
        name = type(event).__name__.lower()
        if isinstance(event, Finished):
            output.print_json(event=name, text=generation.text, ttft=generation.ttft, **_fields(event))
        else:
            output.print_json(event=name, **_fields(event))


def _fields(event: object) -> dict[str, object]:
    fields = output.to_json(event)
    assert isinstance(fields, dict)
    return dict(fields)
