"""A guide whose commands are run as they stand: reads the blocks of a Markdown file, runs them, compares what they print.

A fenced `bash` block is a command; a fenced `text` block right after it is what it prints. Blocks of any other kind
are for readers alone. All commands of one reading share one bash, as they would in a terminal.
"""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

ELLIPSIS = "…"

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\n", re.MULTILINE | re.DOTALL)
_MEMBER = re.compile(r'^"(?P<key>\w+)": (?P<value>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One command. `line` is where it begins in the guide; `shown` what the guide says it prints, "" for nothing."""

    line: int
    info: str
    code: str
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a block did. `output` is stdout and stderr as they came; `exit_code` that of the block's last command."""

    block: Block
    exit_code: int
    output: str


def read_blocks(guide: Path, info: str = "bash") -> list[Block]:
    """The guide's blocks of one kind, in order."""
    text = guide.read_text()
    fences = list(_FENCE.finditer(text))
    blocks = []
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence["info"].strip() != info:
            continue
        adjacent = following is not None and not text[fence.end() : following.start()].strip()
        shown = following["body"] if adjacent and following is not None and following["info"] == "text" else ""
        blocks.append(Block(line=text.count("\n", 0, fence.start()) + 2, info=info, code=fence["body"], shown=shown))
    return blocks


def run(blocks: Sequence[Block], *, env: Mapping[str, str], folder: Path, patience: float) -> list[Outcome]:
    """Runs the blocks in one bash. Fewer outcomes than blocks mean that one of them ended the shell."""
    border = f"--{uuid.uuid4()}--"
    script = "exec 2>&1\n" + "".join(f"{block.code}printf '\\n%s %d\\n' {border} $?\n" for block in blocks)
    session = subprocess.run(
        ["bash"], input=script, env=dict(env), cwd=folder, stdout=subprocess.PIPE, text=True, timeout=patience
    )
    pieces = re.split(rf"\n{border} (\d+)\n", session.stdout)
    return [
        Outcome(block=block, exit_code=int(code), output=output)
        for block, output, code in zip(blocks, pieces[0::2], pieces[1::2], strict=False)
    ]


def first_untrue_line(outcome: Outcome, *, volatile: Set[str]) -> str | None:
    """The first line that the guide shows and the command did not print there; None if all is true.

    Lines are looked for in order; "…" in the guide stands for any number of left-out lines, and only where it stands
    may there be any. Of the members in `volatile` only the names count. Key case never does.
    """
    shown = [_plain(line, volatile) for line in outcome.block.shown.splitlines() if line.strip()]
    printed = [_plain(line, volatile) for line in outcome.output.splitlines() if line.strip()]
    at = 0
    skipping = False
    for line in shown:
        if line == ELLIPSIS:
            skipping = True
            continue
        try:
            found = printed.index(line, at)
        except ValueError:
            return line
        if found > at and not skipping:
            return f"{line}   (after: {printed[at]})"
        at, skipping = found + 1, False
    if at < len(printed) and not skipping and shown:
        return f"(the end, before: {printed[at]})"
    return None


def _plain(line: str, volatile: Set[str]) -> str:
    line = line.strip().rstrip(",")
    member = _MEMBER.match(line)
    if member is None:
        return line
    key = re.sub(r"[A-Z]", lambda capital: "_" + capital[0].lower(), member["key"])
    return f'"{key}": {ELLIPSIS if key in volatile else member["value"]}'
