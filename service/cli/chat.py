"""`kvfork chat`: the loop at the terminal. What a conversation is and how it forks is in `conversation.py`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from service.cli import flags, output
from service.cli.conversation import Conversation, NothingSaid, Reply
from service.cli.interrupt import stop_on_interrupt

if TYPE_CHECKING:
    from kvfork_client import Generation, Image

EPILOG = """\
in the chat:
  /fork N      answer what you said last N more times, each answer in a branch of its own
  /use K       go on with the answer of branch K
  /back        roll back to before the last turn; /fork N then answers it N ways
  /snapshots   the states this chat keeps
  /image FILE  put a picture before what you say next
  /receipt     what the last answer cost
  /quit        leave (or Ctrl-D); the chat's snapshots are released, unless --keep

Ctrl-C ends an answer cleanly; what was said so far stays part of the chat.

examples:
  kvfork chat
  kvfork chat --system "You are a pirate." --temperature 0.7
  kvfork chat --parent plan-0001 --keep --label topic=trip
  printf 'Hi!\\n/back\\nHello!\\n' | kvfork chat --json
"""
HELP = EPILOG.partition("\n\n")[0].partition("\n")[2]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parent", metavar="NAME", help="go on from this snapshot")
    parser.add_argument("--keep", action="store_true", help="leave the chat's snapshots on the server at the end")
    flags.image_flag(parser)
    flags.form_flags(parser)
    flags.keep_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Talks until /quit or the end of stdin. Failed turns are told and the chat goes on."""
    if args.raw and args.system:
        raise flags.UsageError("--system needs a chat template: leave out --raw")
    with flags.connect(args) as client:
        conversation = Conversation(
            client,
            root=None if args.parent is None else client.get_snapshot(flags.full_name(args.parent)),
            system=args.system,
            raw=args.raw,
            model=args.model,
            sampling=flags.sampling(args),
            stopping=flags.stopping(args),
            save=flags.save_options(args),
        )
        loop = _Loop(conversation, flags.images(args), as_json=args.json)
        if not args.json and sys.stdin.isatty():
            output.say(f"{client.model(args.model).name.removeprefix('models/')} at {args.address}; /help for commands")
        try:
            return loop.run()
        finally:
            _leave(conversation, keep=args.keep, as_json=args.json)


def _leave(conversation: Conversation, *, keep: bool, as_json: bool) -> None:
    from kvfork_client import KVForkError

    if keep:
        for snapshot in conversation.made:
            if as_json:
                output.print_json(event="kept", snapshot=snapshot)
            else:
                output.say(f"kept {snapshot.name} ({snapshot.token_count:,} tokens)", file=sys.stderr)
        return
    with contextlib.suppress(KVForkError):  # they expire by themselves
        conversation.release()


class _Loop:
    def __init__(self, conversation: Conversation, images: list[Image], *, as_json: bool) -> None:
        self._conversation = conversation
        self._images = images  # before what is said next
        self._json = as_json
        self._interactive = sys.stdin.isatty() and not as_json
        self._last: Generation | None = None

    def run(self) -> int:
        """0, or 1 if a turn failed and nobody sat there to see it."""
        from kvfork_client import KVForkError

        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() history and editing
        failed = 0
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    if not self._command(line):
                        break
                elif line:
                    self._turn(line)
            except KVForkError as error:
                failed = 1
                output.print_error(error, as_json=self._json)
            except KeyboardInterrupt:  # in the queue, or a second time: the turn is given up, the chat is not
                failed = 1
                print("(given up)", file=sys.stderr)
        return 0 if self._interactive else failed

    def _read(self) -> str | None:
        """The next line without its ends; None at the end of input or at the second Ctrl-C in a row."""
        several = len(self._conversation.branches) > 1
        prompt = (f"{self._conversation.current + 1}> " if several else "> ") if self._interactive else ""
        for left in (1, 0):
            try:
                return input(prompt).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if left:
                    print("\n(/quit or Ctrl-C again to leave)", file=sys.stderr)
        return None

    def _turn(self, text: str) -> None:
        reply = self._conversation.say(text, self._images)
        self._images = []
        self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        """Shows an answer as it comes, and keeps it."""
        from kvfork_client import Delta, FinishReason

        self._last = reply.generation
        with reply.generation, stop_on_interrupt(reply.generation):
            for event in reply.events:
                if isinstance(event, Delta) and not self._json:
                    output.print_delta(event)
        kept = self._conversation.finish(reply)
        finished = reply.generation.finished
        assert finished is not None  # else the events would have ended with an error
        if self._json:
            output.print_json(
                event="turn",
                branch=self._conversation.number(reply.branch),
                text=reply.generation.text,
                reason=finished.reason,
                snapshot=finished.snapshot,
                usage=finished.usage,
                ttft=reply.generation.ttft,
            )
            return
        print()
        if finished.reason is not FinishReason.EOS:
            output.say(f"(ended by: {finished.reason.name.lower().replace('_', ' ')})", file=sys.stderr)
        if kept is None:
            output.say(f"(not kept: {finished.save_error_reason}; the next turn will not know it)", file=sys.stderr)

    def _command(self, line: str) -> bool:
        """Carries out a /command; False to leave."""
        word, _, rest = line.partition(" ")
        match word:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._say(HELP)
            case "/back":
                self._back()
            case "/fork":
                self._fork(rest.strip())
            case "/use":
                self._use(rest.strip())
            case "/snapshots":
                self._snapshots()
            case "/image":
                self._image(rest.strip())
            case "/receipt":
                self._receipt()
            case _:
                self._say(f"no such command: {word}; /help lists them", event="error")
        return True

    def _back(self) -> None:
        try:
            result = self._conversation.back()
        except NothingSaid:
            self._say("nothing to roll back", event="error")
            return
        if self._json:
            usage = result.usage if result else None
            output.print_json(event="back", snapshot=result, usage=usage)
        elif result is None:
            print("back at the start")
        else:
            output.say(f"back at {result.token_count:,} tokens: {result.name}")
            if result.usage is not None:
                print(output.receipt(result.usage))

    def _fork(self, text: str) -> None:
        if not text.isdigit() or int(text) < 1:
            self._say("/fork takes a number: /fork 3", event="error")
            return
        count = int(text)
        try:
            replies = self._conversation.again(count)
        except NothingSaid:
            self._say("nothing to answer yet: say something first", event="error")
            return
        with contextlib.ExitStack() as running:  # one that is not shown to its end is not computed to its end
            for reply in replies:
                running.enter_context(reply.generation)
            for number, reply in enumerate(replies, start=1):
                if not self._json:
                    print(f"── answer {number} of {count}: branch {self._conversation.number(reply.branch)} ──")
                self._answer(reply)
        if not self._json:
            print(f"you are on branch {self._conversation.current + 1}; /use K goes on with another")

    def _use(self, text: str) -> None:
        try:
            branch = self._conversation.use(int(text))
        except (ValueError, IndexError):
            self._say(f"/use takes a branch from 1 to {len(self._conversation.branches)}", event="error")
            return
        tokens = branch.here.token_count if branch.here else 0
        self._say(f"branch {text} at {tokens:,} tokens", event="use", branch=int(text))

    def _snapshots(self) -> None:
        made = [snapshot.refresh() for snapshot in self._conversation.made]
        if self._json:
            for snapshot in made:
                output.print_json(event="snapshot", snapshot=snapshot)
            return
        here = self._conversation.branch.here
        output.say(output.snapshot_table(snapshot.info for snapshot in made) if made else "no snapshots yet")
        if here is not None:
            output.say(f"here: {here.name}")

    def _image(self, path: str) -> None:
        from kvfork_client import Image

        try:
            self._images.append(Image.file(path))
        except OSError as error:
            self._say(f"{path}: {error.strerror}", event="error")
        except ValueError as error:
            self._say(str(error), event="error")

    def _receipt(self) -> None:
        finished = self._last.finished if self._last else None
        if finished is None or self._last is None:
            self._say("no receipt yet", event="error")
        elif self._json:
            output.print_json(event="receipt", usage=finished.usage, timing=finished.timing, ttft=self._last.ttft)
        else:
            print(output.receipt(finished.usage, self._last.ttft))

    def _say(self, text: str, *, event: str = "text", **fields: object) -> None:
        if self._json:
            output.print_json(event=event, text=text, **fields)
        else:
            output.say(text)
