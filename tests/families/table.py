"""The table of families as a page of documentation. Owns the page's text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from tests.families.verdict import Outcome, Verdict

_HEAD = """# Cache classes and model families

Written by `python -m tests.families --all --markdown docs/layers.md` on mlx-lm {lm} and MLX {mlx} ({machine}).

## What is kept of each cache class

{classes}

`keep` is upstream's name for the first tokens that a ring never drops. Rows decode in one model call where every class
has a batched form and the family, asked at load, gives rows of unequal length what it gives each alone; otherwise one
call each, with a warning in the log. A class that is not in the table is refused at load with the layer's number, the
class and the reason.

## What every family is held to

Each family that mlx-lm ships is built small, with random weights. Then, bit for bit over all that a row's caches hold
once they are restored, every stored record and the next-token logits: a restored snapshot stands and goes on as a cold
run does, at one below, at and one above 256 tokens, 512 tokens and each window, and at marks at 300 and 556; children
forked beside a decoding parent are what they are alone, and the parent stays; state behind 8 decoded tokens is the same
in two runs and when it is restored; a rollback to a mark and to either block boundary goes on as a cold run. Besides,
greedy tokens are the same through a snapshot as in one go, from a boundary that decode passed beside another row, and
with three rows as alone.

## What the suite is held to

Each family that conforms is then restored wrongly on purpose, in each way below that its layers allow, and the suite
must see every one; a wrong restore that it does not see is a difference like any other.

{mutations}

| answer | families |
|---|---|
{counts}

*refused* and *not built* have their reason in the row; *not built* says nothing about the family, only that this
machine could not make one.

## Families

| family | caches | decode | answer |
|---|---|---|---|
"""

_CLASSES = """| class | kept as | where |
|---|---|---|
| `KVCache`, `ConcatenateKVCache` | keys and values of every token | each block's own record |
| `QuantizedKVCache` | packed keys and values, scales and biases of every token | each block's own record |
| `RotatingKVCache` | the window's tokens | each block's last min(256, W) tokens |
| `RotatingKVCache`, `keep` > 0 | the kept head, and the window behind it | the head in every record, else as above |
| `ChunkedKVCache` | the last chunk's tokens | each block's last min(256, chunk) tokens |
| `ArraysCache` | every slot that is set | the boundary's record |
| `deepseek_v41.LayerCache` | window, compressed groups, index keys, open group | the boundary's record, which grows |
| `CacheList` | its members, in order, at any depth | – |
| a cache that no call fills | nothing; filled later, the row fails | – |"""


def markdown(verdicts: Sequence[Verdict]) -> str:
    """The page."""
    import mlx.core as mx

    counts = Counter(v.outcome for v in verdicts)
    head = _HEAD.format(
        lm=version("mlx-lm"),
        mlx=version("mlx"),
        machine="Metal" if mx.metal.is_available() else "CPU, float32",
        classes=_CLASSES,
        mutations=_mutations(),
        counts="\n".join(f"| {o.value} | {counts[o]} |" for o in Outcome if counts[o]),
    )
    return head + "\n".join(_row(v) for v in verdicts) + "\n"


def _row(verdict: Verdict) -> str:
    caches = f"`{verdict.caches}`" if verdict.caches else "–"
    ran = verdict.outcome not in (Outcome.NOT_BUILT, Outcome.REFUSED)
    decode = "–" if not ran else f"one call each: {verdict.alone}" if verdict.alone else "one call"
    note = f": {verdict.note}" if verdict.note else ""
    cells = (verdict.name, caches, decode, verdict.outcome.value + note)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _mutations() -> str:
    """Each way to be wrong, with the kinds that it is tried on."""
    from tests.families.mutations import MUTATIONS

    kinds: dict[str, list[str]] = {}
    for mutation in MUTATIONS:
        kinds.setdefault(mutation.name, []).append(f"`{mutation.kind.name.lower()}`")
    return "\n".join(f"* {name}: {', '.join(on)}" for name, on in kinds.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
