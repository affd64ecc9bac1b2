"""The receipt of a fork: what its branches tell, added up so that the parent counts once."""

from __future__ import annotations

import random

from kvcache.receipt import Usage
from service.receipts import fork_usage

PARENT = 1024


def branch(*, appended: int = 16, recomputed: int = 0, beyond: int = 0, disk: int = 0) -> Usage:
    """A branch of `appended` tokens, of which the first `beyond` stood already."""
    cached = PARENT - recomputed + beyond
    return Usage(
        prompt_tokens=PARENT + appended,
        cached_tokens=cached,
        recomputed_tokens=recomputed,
        new_tokens=appended - beyond,
        memory_tokens=cached - disk,
        disk_tokens=disk,
        diverged_at=PARENT,
    )


def total(*branches: Usage) -> tuple[int, int, int, int, int]:
    usage = fork_usage(list(branches), parent_tokens=PARENT, parent_images=0)
    assert usage.memory_tokens + usage.disk_tokens == usage.cached_tokens
    return usage.prompt_tokens, usage.cached_tokens, usage.recomputed_tokens, usage.new_tokens, usage.disk_tokens


def test_the_parent_counts_once_wherever_it_lay() -> None:
    assert total(branch(), branch()) == (PARENT + 32, PARENT, 0, 32, 0)
    assert total(branch(disk=PARENT), branch(disk=PARENT)) == (PARENT + 32, PARENT, 0, 32, PARENT)


def test_a_parent_that_went_to_disk_between_two_branches_counts_once() -> None:
    assert total(branch(), branch(disk=PARENT), branch(disk=PARENT)) == (PARENT + 48, PARENT, 0, 48, PARENT)


def test_what_a_branch_read_beyond_the_parent_is_its_own() -> None:
    both = branch(appended=300, beyond=256, disk=PARENT + 256)
    assert total(both, both, branch()) == (PARENT + 616, PARENT + 512, 0, 104, PARENT + 512)


def test_what_was_computed_again_for_the_first_is_not_from_disk_as_well() -> None:
    assert total(branch(recomputed=500), branch(disk=PARENT)) == (PARENT + 32, 524, 500, 32, 524)


def test_no_mix_of_branches_gives_a_receipt_that_does_not_add_up() -> None:
    rng = random.Random(1)
    for _ in range(2_000):
        branches = []
        for _ in range(rng.randrange(1, 6)):
            recomputed = rng.choice([0, 0, rng.randrange(PARENT + 1)])
            appended = rng.randrange(1, 700)
            beyond = rng.randrange(appended) if not recomputed else 0
            disk = rng.choice([0, rng.randrange(PARENT - recomputed + beyond + 1)])
            branches.append(branch(appended=appended, recomputed=recomputed, beyond=beyond, disk=disk))
        total(*branches)
