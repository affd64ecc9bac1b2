"""The reader of guides: what it runs, and that it notices every kind of untruth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from guide import Block, Outcome, in_place, read_blocks, read_steps, run, untrue_part

GUIDE = """\
Words.

```bash
name=world
```

```bash
echo "hello $name" >&2; echo bye
```

```text
hello world
…
```

```sh
exit 9   # for readers alone
```

```bash other
false
```

```bash
(exit 3)
```

More words.

```text
of another thing
```
"""


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    file = tmp_path / "README.md"
    file.write_text(GUIDE)
    return file


def test_blocks_of_one_kind_with_what_is_shown_right_after_them(guide: Path) -> None:
    assert read_blocks(guide) == [
        Block(line=4, info="bash", code="name=world\n", shown=""),
        Block(line=8, info="bash", code='echo "hello $name" >&2; echo bye\n', shown="hello world\n…\n"),
        Block(line=25, info="bash", code="(exit 3)\n", shown=""),
    ]
    assert read_blocks(guide, "bash other") == [Block(line=21, info="bash other", code="false\n", shown="")]


def test_blocks_share_one_shell(guide: Path) -> None:
    outcomes = run(read_blocks(guide), env=os.environ, folder=guide.parent, patience=60)
    assert [(o.block.line, o.exit_code, o.output) for o in outcomes] == [
        (4, 0, ""),
        (8, 0, "hello world\nbye\n"),
        (25, 3, ""),
    ]


PAGE = """\
Go there:

```bash
mkdir first && cd first
```

A file, in `src/main.txt`:

```rust
it's $here, at 127.0.0.1:1
```

What is shown of `other.txt` is no file:
a block without a name before it.

```rust
nothing
```

```bash
cat src/main.txt; printf '\\033[0m'; read -r line || echo "nobody types"
```

```text
it's $here, at 127.0.0.1:1
nobody types
```
"""


def test_a_page_is_followed_in_its_order_files_included(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    steps = in_place(read_steps(page), {"127.0.0.1:1": "127.0.0.1:2"})
    assert [step.line for step in steps] == [4, 10, 21]
    folder = tmp_path / "empty"
    folder.mkdir()
    outcomes = run(steps, env=os.environ, folder=folder, patience=60)
    assert [(o.exit_code, o.output) for o in outcomes] == [
        (0, ""),
        (0, ""),
        (0, "it's $here, at 127.0.0.1:2\nnobody types\n"),
    ]
    assert (folder / "first" / "src" / "main.txt").read_text() == "it's $here, at 127.0.0.1:2\n"


def test_a_block_that_ends_the_shell_has_no_outcome(tmp_path: Path) -> None:
    blocks = [
        Block(line=n, info="bash", code=code, shown="") for n, code in enumerate(["true\n", "exit 0\n", "true\n"])
    ]
    assert [o.block.line for o in run(blocks, env=os.environ, folder=tmp_path, patience=60)] == [0]


PRINTED = """\
{
  "name": "one",
  "tokenCount": 5,
  "seed": 77
}
{
  "name": "two"
}
"""


@pytest.mark.parametrize(
    "shown",
    [
        PRINTED,
        "",
        "…",
        '{\n  "name": "one",\n  …\n  "seed": 1\n}\n…\n',
        '…\n  "token_count": 5,\n…',
        '…\n{\n"name": "two"\n}',
        '…\n"seed": 0\n…\n}\n…',
        "{\n…\n}",
    ],
)
def test_a_true_guide(shown: str) -> None:
    assert untrue(shown) is None


@pytest.mark.parametrize(
    ("shown", "untruth"),
    [
        ('…\n"token_count": 6\n…', '"token_count": 6'),
        ('{\n"seed": 1\n…', '{\n"seed": …'),
        ('{\n"name": "one"', '{\n"name": "one"'),
        ('…\n"name": "two"', '"name": "two"'),
        ('…\n"name": "two"\n…\n"name": "one"\n…', '"name": "one"'),
        ("{\n…\n{\n…\n{\n…", "{"),
        ('…\n"seed": 1\n…\n"seed": 1\n}\n', '"seed": …\n}'),
        ('…\n"name": "one"\n"seed": 77\n…', '"name": "one"\n"seed": …'),
        (PRINTED + "more", None),
    ],
)
def test_an_untrue_guide(shown: str, untruth: str | None) -> None:
    part = untrue(shown)
    assert part == untruth if untruth else part is not None


def untrue(shown: str) -> str | None:
    block = Block(line=1, info="bash", code="", shown=shown)
    return untrue_part(Outcome(block=block, exit_code=0, output=PRINTED), volatile={"seed"})
