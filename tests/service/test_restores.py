"""Rows that want the same state share the read, whenever they come, and each is told what it cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache.errors import CorruptRecord, MissingRecord
from kvcache.records import FetchResult, RecordId, RecordKind, Tier
from kvcache.restore import RestorePlan
from service.plan import RowId
from service.restores import Read, Restores
from service.scheduler import State
from tests.service.loop_rig import Heard, LoopRig, prompt_of


class Asked:
    """`Restores` over a store that answers when told."""

    def __init__(self) -> None:
        self.orders: list[tuple[RecordId, ...]] = []
        self.answers: list[tuple[Read, FetchResult]] = []
        self.restores = Restores(self._fetch, lambda read, result: self.answers.append((read, result)))
        self._done: list[object] = []

    def _fetch(self, records, done) -> None:  # type: ignore[no-untyped-def]
        self.orders.append(tuple(records))
        self._done.append(done)

    def want(self, row: int, *numbers: int) -> None:
        plan = RestorePlan(position=1, nodes=(), records=records(*numbers), starts=(), logits=False)
        self.restores.want(RowId(row), _Lookup(plan))  # type: ignore[arg-type]

    def answer(self, order: int, error: Exception | None = None) -> dict[int, FetchResult]:
        """The store answers an order; what comes of it, by row."""
        names = self.orders[order]
        result = FetchResult(
            payloads=[record.key for record in names],
            tiers=[Tier.DISK] * len(names),
            sizes=[10] * len(names),
        )
        self._done[order](result if error is None else FetchResult.refused(error))  # type: ignore[operator, arg-type]
        (answer,) = self.answers
        self.answers.clear()
        return {restore.row: restore.result for restore in self.restores.arrived(*answer)}


class _Lookup:
    def __init__(self, plan: RestorePlan) -> None:
        self.plan = plan


def records(*numbers: int) -> tuple[RecordId, ...]:
    return tuple(RecordId(bytes([n]) * 32, RecordKind.FULL) for n in numbers)


def test_rows_that_come_together_and_rows_that_come_meanwhile_share_reads() -> None:
    asked = Asked()
    asked.want(1, 1, 2, 3)
    asked.want(2, 1, 2, 4)
    asked.restores.start()
    asked.want(3, 2, 1)
    asked.restores.start()
    assert asked.orders == [records(1, 2, 3), records(4)]
    first = asked.answer(0)
    assert first.keys() == {1, 3}
    assert [payload[0] for payload in first[3].payloads] == [2, 1]
    assert (first[1].bytes_from(Tier.DISK), first[3].bytes_from(Tier.DISK)) == (30, 0)  # who read counts the bytes
    assert first[3].tiers == [Tier.MEMORY] * 2, "no tokens from the disk without a byte from it"
    second = asked.answer(1)
    assert [payload[0] for payload in second[2].payloads] == [1, 2, 4]
    assert second[2].tiers == [Tier.MEMORY, Tier.MEMORY, Tier.DISK]
    assert second[2].bytes_from(Tier.DISK) == 10
    asked.want(4, 1)  # nothing is kept here: it is read anew
    asked.restores.start()
    assert asked.orders[2:] == [records(1)]


def test_a_bad_record_is_told_to_those_who_wanted_it_and_others_read_again() -> None:
    asked = Asked()
    asked.want(1, 1, 2, 3)
    asked.want(2, 1, 2)
    asked.restores.start()
    bad = CorruptRecord(records(3)[0], "as planned")
    answered = asked.answer(0, bad)
    assert answered.keys() == {1} and answered[1].failed == records(3)[0]
    assert asked.orders[1:] == [records(1, 2)]
    assert asked.answer(1)[2].ok


# -- through the loop


@pytest.fixture
def rig() -> Iterator[LoopRig]:
    """Everything that can leave memory is on disk."""
    made = LoopRig(memory=0, rows=4)
    yield made
    made.settle()


def family(rig: LoopRig, count: int) -> tuple[list[int], list[list[int]], list[Heard]]:
    """A parent of 700 tokens and children that each add a few, as one fork makes them."""
    prompt = prompt_of(700)
    parent = rig.submit(prompt, keep=[700])
    rig.run()
    texts = [[*prompt, *prompt_of(3 + n, n)] for n in range(count)]
    children = [rig.submit(t, base=parent.nodes[700], keep=[len(t)], group="fork") for t in texts]
    rig.run()
    rig.store.flush(0.0)
    return prompt, texts, children


def records_read(rig: LoopRig) -> int:
    return sum(usage.records for usage in rig.store.stats().read.values())


def distinct(rig: LoopRig, heard: list[Heard], texts: list[list[int]]) -> int:
    """Records that a restore of all these takes, each counted once."""
    wanted: set[RecordId] = set()
    for said, text in zip(heard, texts, strict=True):
        lookup = rig.cache.lookup("a", [*text, 1], base=said.nodes[len(text)], keep=())
        assert lookup.plan is not None
        wanted |= set(lookup.plan.records)
        rig.cache.release(lookup)
    return len(wanted)


def test_children_of_one_fork_are_admitted_together_and_read_each_record_once(rig: LoopRig) -> None:
    _, texts, children = family(rig, 4)
    busy = [rig.submit(prompt_of(20, ("busy", n)), generate=n + 2) for n in range(4)]
    rig.until(busy[3], State.DECODE)
    expected, before = distinct(rig, children, texts), records_read(rig)
    tokens = [[*text, 9] for text in texts]
    heard = [
        rig.submit(t, base=child.nodes[len(t) - 1], generate=3, group="fork")
        for t, child in zip(tokens, children, strict=True)
    ]
    rig.run()
    assert records_read(rig) - before == expected
    for said, text in zip(heard, tokens, strict=True):
        assert (said.receipt, said.tokens) == ((len(text) - 1, 0, 1), rig.engine.continuation(text, 3))
    assert sum(said.usage.disk_bytes_read for said in heard) > 0


def test_a_row_that_comes_while_its_state_is_being_read_waits_for_that_read(rig: LoopRig) -> None:
    prompt, _, _ = family(rig, 0)
    kept = rig.submit(prompt, keep=[700])
    rig.run()
    node = kept.nodes[700]
    before = records_read(rig)
    heard = []
    for n in range(3):
        heard.append(rig.submit([*prompt, n], base=node, generate=2))
        rig.turn()
        assert rig.state(heard[n]) is State.RESTORING
    once = distinct(rig, [kept], [prompt])
    rig.run()
    assert records_read(rig) - before == once
    for n, said in enumerate(heard):
        assert (said.receipt, said.tokens) == ((700, 0, 1), rig.engine.continuation([*prompt, n], 2))


def test_a_damaged_record_is_planned_around_by_every_row_that_shared_it(rig: LoopRig) -> None:
    prompt, texts, children = family(rig, 3)
    rig.store.flush(0.0)
    rig.damage()
    tokens = [[*text, 9] for text in texts]
    heard = [
        rig.submit(t, base=child.nodes[len(t) - 1], generate=3, group="fork")
        for t, child in zip(tokens, children, strict=True)
    ]
    rig.run()
    assert [said.tokens for said in heard] == [rig.engine.continuation(text, 3) for text in tokens]
    del prompt


def test_a_row_that_is_cancelled_while_it_shares_a_read_leaves_the_others_theirs(rig: LoopRig) -> None:
    prompt, _, _ = family(rig, 0)
    kept = rig.submit(prompt, keep=[700])
    rig.run()
    heard = [rig.submit([*prompt, n], base=kept.nodes[700], generate=2) for n in range(3)]
    rig.turn()
    rig.loop.cancel(heard[0].row)  # the one that the read was ordered for
    rig.run()
    assert str(heard[0].error) == "cancelled"
    for n in (1, 2):
        assert heard[n].tokens == rig.engine.continuation([*prompt, n], 2)


def test_a_record_that_is_gone_is_an_error_of_its_own() -> None:
    asked = Asked()
    asked.want(1, 1)
    asked.restores.start()
    gone = MissingRecord(records(1)[0], "as planned")
    assert asked.answer(0, gone)[1].error is gone
