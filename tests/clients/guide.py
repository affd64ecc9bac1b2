"""A guide whose commands are run as they stand: reads a Markdown file's blocks, runs them, compares what they print.

A fenced `bash` block is a command; a fenced `text` block right after it is what it prints. A block of any other kind
is for readers alone, unless the words before it end with the name of a file and a colon: "in `main.go`:". All commands
of one reading share one bash, as they would in a terminal.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

ELLIPSIS = "…"

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\n", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(^|\bin )`(?P<name>[\w/-]+(\.[\w-]+)+)`:\s*\Z", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MEMBER = re.compile(r'^"(?P<key>[\w-]+)": (?P<value>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One command. `line` is where it begins in the guide; `shown` what the guide says it prints, "" for nothing."""

    line: int
    info: str
    code: str
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a block did. `output` is stdout and stderr as they came, but for colours; `exit_code` its last command's."""

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


def read_steps(guide: Path) -> list[Block]:
    """The guide's commands, and for each file that it shows a command that writes it, in order."""
    text = guide.read_text(encoding="utf-8")
    steps = read_blocks(guide)
    begin = 0
    for fence in _FENCE.finditer(text):
        named = _FILE.search(text[begin : fence.start()])
        begin = fence.end()
        if named is not None:
            name, end = shlex.quote(named["name"]), uuid.uuid4()
            code = f"mkdir -p $(dirname {name}) && cat > {name} <<'{end}'\n{fence['body']}{end}\n"
            line = text.count("\n", 0, fence.start()) + 2
            steps.append(Block(line=line, info=fence["info"], code=code, shown=""))
    return sorted(steps, key=lambda step: step.line)


def in_place(steps: Sequence[Block], places: Mapping[str, str]) -> list[Block]:
    """The steps with what a page can only give an example of, such as a folder, as it is here."""
    placed = []
    for step in steps:
        code = step.code
        for said, here in places.items():
            code = code.replace(said, here)
        placed.append(replace(step, code=code))
    return placed


def run(blocks: Sequence[Block], *, env: Mapping[str, str], folder: Path, patience: float) -> list[Outcome]:
    """Runs the blocks in one bash. Fewer outcomes than blocks mean that one of them ended the shell."""
    border = f"--{uuid.uuid4()}--"
    script = "exec 2>&1\n" + "".join(f"{block.code}printf '\\n%s %d\\n' {border} $?\n" for block in blocks)
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:  # stdin is the commands' own
        file.write(script)
        file.flush()
        session = subprocess.run(
            ["bash", file.name],
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=patience,
        )
    printed = _COLOUR.sub("", session.stdout)  # Maven sets it back even where it set none
    pieces = re.split(rf"\n{border} (\d+)\n", printed)
    return [
        Outcome(block=block, exit_code=int(code), output=output)
        for block, output, code in zip(blocks, pieces[0::2], pieces[1::2], strict=False)
    ]


def untrue_part(outcome: Outcome, *, volatile: Set[str]) -> str | None:
    """The lines that the guide shows and the command did not print there; None if all that it shows is true.

    A line "…" in the guide stands for any number of lines; without it there may be none between. Of the members in
    `volatile` only the names count. Key case never does.
    """
    printed = [_plain(line, volatile) for line in outcome.output.splitlines() if line.strip()]
    runs: list[list[str]] = [[]]
    for line in outcome.block.shown.splitlines():
        if line.strip() == ELLIPSIS:
            runs.append([])
        elif line.strip():
            runs[-1].append(_plain(line, volatile))
    head, *others = runs
    if printed[: len(head)] != head or (head and not others and len(printed) > len(head)):
        return "\n".join(head)
    at = len(head)
    for wanted in others[:-1]:  # the leftmost place will do: what follows has the more room
        while printed[at : at + len(wanted)] != wanted:
            at += 1
            if at > len(printed):
                return "\n".join(wanted)
        at += len(wanted)
    if others:
        tail = others[-1]
        if at + len(tail) > len(printed) or printed[len(printed) - len(tail) :] != tail:
            return "\n".join(tail)
    return None


def _plain(line: str, volatile: Set[str]) -> str:
    line = line.strip().rstrip(",")
    member = _MEMBER.match(line)
    if member is None:
        return line
    key = re.sub(r"[A-Z]", lambda capital: "_" + capital[0].lower(), member["key"])
    return f'"{key}": {ELLIPSIS if key in volatile else member["value"]}'
