"""Which checkpoints of a chain may go. Pure: positions in, decisions out.

A `state` record holds the whole recurrent state, up to 150 MB on a real model, so a chain cannot keep one for every
block. Kept are the newest, those that a handle or a running sequence stands on, those where chains part, and of the
others a ruler: block `p` stays while the newest is at most `spacing * 2**k` blocks ahead, `2**k` being the largest
power of two that divides `p`. So

* what may go once is never wanted again, whatever is appended: thinning as a chain grows and thinning it at the end
  leave the same;
* about `spacing / 2` stay for each doubling of the distance: their number grows with the logarithm of the length;
* a branch `d` blocks behind the newest computes fewer than `2 * d / (spacing - 1)` blocks again, and one at the newest
  none.

Whatever was given up is computed again from the checkpoint before it, by the calls that a cold run makes, so the bits
are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Boundary:
    """A block boundary on a chain. `block`: its number, the first block's end being 1.

    `held`: a handle or a running sequence stands there. `parts`: more than one block follows it. `tails`: a place
    inside the next block is kept.
    """

    block: int
    held: bool = False
    parts: bool = False
    tails: bool = False


def is_on_ruler(block: int, newest: int, spacing: int) -> bool:
    """Whether distance alone keeps the checkpoint at `block`; spacing 0 keeps all."""
    return not spacing or newest - block <= spacing * (block & -block)


def surplus_states(chain: Sequence[Boundary], spacing: int | None) -> list[int]:
    """The blocks of `chain`, oldest first, whose `state` may go. `spacing` None: none stays for its distance."""
    if not chain or spacing == 0:
        return []
    newest = chain[-1].block
    return [
        here.block
        for here in chain[:-1]
        if not here.held and not here.parts and (spacing is None or not is_on_ruler(here.block, newest, spacing))
    ]


def surplus_windows(chain: Sequence[Boundary], window: int) -> list[int]:
    """The blocks of `chain` whose `window` records no place on it reaches into: not the newest, nor one in use.

    `window` is in tokens. Where chains part, what branches off may reach back too.
    """
    surplus: list[int] = []
    reach: int | None = None  # the lowest token that a place further on has in its window
    for here in reversed(chain):
        end = here.block * BLOCK_TOKENS
        if reach is None or here.held or here.parts or here.tails:
            reach = min(end - window, reach) if reach is not None else end - window
        if end <= reach:
            surplus.append(here.block)
    surplus.reverse()
    return surplus
