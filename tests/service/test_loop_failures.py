"""The engine loop where something goes wrong: for one row, in time and memory, in the store, and all of it at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind
from service.engine.fake import FakeEngine
from service.errors import (
    ActiveMemory,
    DeadlineUnmet,
    QueueFull,
    RecomputeLimit,
    RowFailed,
)
from service.events import FinishReason
from service.footprint import Footprint
from service.opening import RESTORE_TRIES
from service.plan import Prefill, RowId, StepPlan, StepResult
from service.request import Sampling
from service.scheduler import State
from service.text.stream import Piece
from service.work import Ended, Failed, NodeAt
from tests.service.loop_rig import LAYOUT, MIB, WAYS, Heard, LoopRig, PlainText, prompt_of

# -- what goes wrong for one row


class Faulty(FakeEngine):
    """Raises for rows whose prompt has the number 999 at its start, at one place of a row's life."""

    def __init__(self, place: str, error: type[Exception] = ValueError) -> None:
        super().__init__(LAYOUT)
        self.place, self.error = place, error

    def _trip(self, row: RowId, place: str) -> None:
        if place == self.place and self._rows[row].order.context[0] == 999:
            raise self.error("as planned")

    def _open(self, order):  # type: ignore[no-untyped-def]
        super()._open(order)
        self._trip(order.row, "open")

    def _prefill(self, call: Prefill, result: StepResult) -> None:
        self._trip(call.row, "prefill" if len(call.tokens) > 1 or call.tokens[0] == 999 else "save")
        super()._prefill(call, result)

    def _decode(self, name, capture, result):  # type: ignore[no-untyped-def]
        self._trip(name, "decode")
        super()._decode(name, capture, result)

    def _pick(self, name: RowId, result: StepResult) -> None:
        self._trip(name, "sample" if self._rows[name].drawn == 0 else "sample later")
        super()._pick(name, result)


@pytest.mark.parametrize("place", ["open", "prefill", "sample", "decode", "sample later", "save"])
def test_a_row_that_fails_in_the_model_fails_alone(place: str) -> None:
    rig = LoopRig(engine=Faulty(place))
    well = [rig.submit(prompt_of(300, n), generate=6, save=True) for n in (1, 2)]
    ill = rig.submit([999, *prompt_of(30)], generate=6, save=True, keep=[20])
    rig.run()
    assert isinstance(ill.error, RowFailed)
    assert "ValueError" in str(ill.error)
    for number, heard in enumerate(well, start=1):
        assert heard.tokens == rig.engine.continuation(prompt_of(300, number), 6)
        assert heard.final == [306]
    rig.settle()


class Forgetful(FakeEngine):
    """Loses the state of all rows of a decode call now and then, as a call does that fails while it is computed."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        super().__init__(LAYOUT)
        self.rng, self.chance = rng, chance
        self.losses = 0

    def step(self, plan: StepPlan) -> StepResult:
        if plan.decode is None or self.rng.random() >= self.chance:
            return super().step(plan)
        result = super().step(replace(plan, decode=None))
        for row in plan.decode.rows:
            self._rows[row].lost = True
            result.lost[row] = RuntimeError("as planned")
        self.losses += 1
        return result


@pytest.mark.parametrize("keeps", [False, True])
def test_rows_whose_state_was_lost_go_on_as_if_nothing_had_been(keeps: bool) -> None:
    engine = Forgetful(random.Random(1), 0.05)
    rig = LoopRig(engine=engine, memory=0)
    trunk = rig.submit(prompt_of(300), keep=[300])
    rig.run()
    prompts = [prompt_of(700, 4), [*prompt_of(300), *prompt_of(50, 3)], prompt_of(20, 2)]
    heard = [
        rig.submit(prompt, generate=300, save=keeps, base=trunk.nodes[300] if number == 1 else None)
        for number, prompt in enumerate(prompts)
    ]
    rig.run()
    assert engine.losses > 5
    for said, prompt in zip(heard, prompts, strict=True):
        assert said.tokens == rig.engine.continuation(prompt, 300)
        cached = 300 if len(prompt) == 350 else 0
        assert said.receipt == (cached, 0, len(prompt) - cached)  # what was lost is not the caller's to pay
        assert said.final == ([len(prompt) + 300] if keeps else [])
        if keeps:
            tokens = [*said.nodes[len(prompt) + 300].all_tokens(), 7]
            more = rig.submit(tokens, base=said.nodes[len(prompt) + 300], generate=2)
            rig.run()
            assert (more.receipt, more.tokens) == ((len(prompt) + 300, 0, 1), rig.engine.continuation(tokens, 2))
    rig.settle()


@pytest.mark.parametrize("state", [State.RESTORING, State.PREFILL], ids=lambda s: s.value)
@pytest.mark.parametrize("way", ["stop", "cancel", "cancel and save", "time"])
def test_a_row_whose_state_was_lost_can_be_ended(state: State, way: str) -> None:
    engine = Forgetful(random.Random(1), 0.0)
    rig = LoopRig(engine=engine, memory=0)
    heard = rig.submit(prompt_of(700), generate=60, save_on_cancel=True, save=True, time_limit=9.0)
    rig.until(heard, State.DECODE)
    rig.turn()
    engine.chance = 1.0
    rig.turn()
    engine.chance = 0.0
    picked = len(heard.tokens)
    rig.until(heard, State.RESTORING)
    rig.store.flush(0.0)
    if state is State.PREFILL:
        rig.store.run_pending()
        rig.drain()
    assert (rig.state(heard), len(heard.tokens), heard.end) == (state, picked, None)
    if way == "time":
        rig.now += 10
    else:
        WAYS[way](rig, heard)
    rig.run()
    if way in ("stop", "time"):
        assert isinstance(heard.end, Ended) and heard.text.endswith("|")
    else:
        assert str(heard.error) == "cancelled"
    assert heard.final in ([512], [700 + len(heard.tokens)] if way != "cancel" else [])
    rig.settle()


class BadText(PlainText):
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__(4)
        self.where = where

    def push(self, token: int, *, last: bool = False) -> Piece:
        if self.where == "push":
            raise KeyError("as planned")
        return super().push(token, last=last)

    def end(self, reason: FinishReason) -> Piece:
        if self.where == "end":
            raise KeyError("as planned")
        return super().end(reason)


@pytest.mark.parametrize("how", ["push", "stop", "time limit"])
def test_a_row_whose_text_fails_fails_alone(rig: LoopRig, how: str) -> None:
    text = BadText("push" if how == "push" else "end")
    ill = rig.submit(prompt_of(10), generate=4, text=text, time_limit=1.0, save=True)
    well = rig.submit(prompt_of(10, 2), generate=9)
    if how != "push":
        rig.until(ill, State.DECODE)
    if how == "stop":
        rig.loop.stop(ill.row)
    if how == "time limit":
        rig.now += 2
    rig.run()
    assert isinstance(ill.error, RowFailed)
    assert well.tokens == rig.engine.continuation(prompt_of(10, 2), 9)


def test_one_work_too_many_is_refused_and_the_others_go_on() -> None:
    rig = LoopRig(rows=1, queue=2)
    heard = [rig.submit(prompt_of(10, n), generate=2) for n in range(5)]
    rig.run()
    refused = [said for said in heard if isinstance(said.end, Failed)]
    assert len(refused) == 2
    assert all(isinstance(said.error, QueueFull) and said.error.retry_after for said in refused)
    assert refused[0].error.metadata == {"queued": "2", "limit": "2"}  # type: ignore[attr-defined]
    rig.settle()


def test_more_recompute_than_allowed_is_refused_before_any_of_it(rig: LoopRig) -> None:
    prompt = prompt_of(600)
    kept = rig.submit(prompt, keep=[600])
    rig.run()
    node = kept.nodes[600]
    rig.store.delete([RecordId(node.key, RecordKind.STATE)])
    before = rig.loop.totals.tokens_prefilled
    heard = rig.submit([*prompt, 1], base=node, generate=2, max_recompute_tokens=87)
    rig.run()
    assert isinstance(heard.error, RecomputeLimit)
    assert heard.error.metadata == {"needed": "88", "allowed": "87", "nearestCheckpoint": "512"}
    assert (len(heard.events), rig.loop.totals.tokens_prefilled) == (1, before)
    allowed = rig.submit([*prompt, 1], base=node, generate=2, max_recompute_tokens=88)
    rig.run()
    assert allowed.receipt == (512, 88, 1)


# -- in time, and in memory


class Paced(FakeEngine):
    """Takes a hundredth of a second for each prompt token."""

    def __init__(self, layout: CacheLayout = LAYOUT) -> None:
        super().__init__(layout)
        self._spent = 0.0

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        result.prefill_seconds = 0.01 * result.prefill_tokens
        self._spent += result.prefill_seconds
        return result

    def spent(self) -> float:
        """Seconds since this was asked last."""
        spent, self._spent = self._spent, 0.0
        return spent


def test_a_call_whose_deadline_passes_in_the_queue_computes_nothing() -> None:
    rig = LoopRig(rows=1)
    first = rig.submit(prompt_of(10), generate=20)
    late = rig.submit(prompt_of(10, 2), generate=2, most_new_tokens=2, deadline=rig.now + 5.0)
    rig.until(first, State.DECODE)
    before = rig.loop.totals.tokens_prefilled
    rig.now += 5.0
    rig.turn()
    assert isinstance(late.error, DeadlineUnmet)
    rig.run()
    assert (len(late.events), rig.loop.totals.tokens_prefilled) == (1, before)
    rig.settle()


def test_a_prompt_that_cannot_be_computed_in_time_is_not_begun() -> None:
    rig = LoopRig(engine=Paced())
    prompt = prompt_of(600)
    known = rig.submit(prompt, keep=[600])  # nothing is known of the pace yet
    rig.run()
    before = rig.loop.totals.tokens_prefilled
    late = rig.submit(prompt_of(600, 2), generate=2, deadline=rig.now + 2.5)  # no block is whole by then
    kept = rig.submit(prompt_of(600, 3), generate=2, deadline=rig.now + 5.9, save=True, save_on_cancel=True)
    warm = rig.submit([*prompt, 7], base=known.nodes[600], generate=2, deadline=rig.now + 5.9)
    ample = rig.submit(prompt_of(600, 4), generate=2, deadline=rig.now + 6.1)
    rig.run()
    assert isinstance(late.error, DeadlineUnmet)
    assert late.error.metadata == {"neededSeconds": "6.000", "leftSeconds": "2.500"}
    assert len(late.events) == 1
    assert [len(heard.tokens) for heard in (kept, warm, ample)] == [2, 2, 2]
    assert rig.loop.totals.tokens_prefilled - before == 600 + 1 + 1 + 600  # one to save, one behind the snapshot
    rig.settle()


def try_until(
    rig: LoopRig, engine: Paced, seconds: float, prompt: list[int], **work: object
) -> tuple[list[Heard], int]:
    """Makes the same call with the same deadline until it ends otherwise than by it; what each try said.

    Besides: the prompt tokens that all of them computed.
    """
    before = rig.loop.totals.tokens_prefilled
    tries: list[Heard] = []
    while len(tries) < 20:
        deadline = rig.now + seconds
        heard = rig.submit(prompt, generate=2, deadline=deadline, **work)  # type: ignore[arg-type]
        tries.append(heard)
        while heard.end is None:
            if rig.now >= deadline:
                rig.loop.cancel(heard.row)  # as gRPC does
            if not rig.turn():
                rig.store.run_pending()
            rig.now += engine.spent()
        if isinstance(heard.end, Ended | Failed) and rig.now < deadline:
            break
    return tries, rig.loop.totals.tokens_prefilled - before


FULL_ONLY = CacheLayout((LayerSpec(LayerKind.FULL),))


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        (CheckpointPolicy.THROUGH, LAYOUT),
        (CheckpointPolicy.THROUGH, FULL_ONLY),
        (CheckpointPolicy.MARKS, FULL_ONLY),
        (CheckpointPolicy.OFF, FULL_ONLY),
    ],
)
def test_tries_with_a_deadline_that_is_too_short_for_the_prompt_come_to_its_end(
    policy: CheckpointPolicy, layout: CacheLayout
) -> None:
    engine = Paced(layout)
    rig = LoopRig(engine=engine, checkpoints=Checkpoints(policy=policy), memory=64 * MIB)
    rig.submit(prompt_of(600))
    rig.run()  # the pace is known: a hundredth of a second for a token
    engine.spent()
    prompt = prompt_of(2_900, 2)
    tries, computed = try_until(rig, engine, 9.0, prompt)
    assert tries[-1].tokens == engine.continuation(prompt, 2)
    # Each computes four blocks, the last of them while its deadline passes, and none is computed twice.
    assert (len(tries), computed) == (3, 2_900)
    assert [heard.names() for heard in tries[:-1]] == [["Admitted", "Failed"]] * 2
    rig.settle()


@pytest.mark.parametrize("policy", [CheckpointPolicy.MARKS, CheckpointPolicy.OFF])
def test_a_try_is_refused_where_nothing_that_it_does_would_be_kept(policy: CheckpointPolicy) -> None:
    engine = Paced()
    rig = LoopRig(engine=engine, checkpoints=Checkpoints(policy=policy))
    rig.submit(prompt_of(600))
    rig.run()
    engine.spent()
    before = rig.loop.totals.tokens_prefilled
    unmarked = rig.submit(prompt_of(3_000, 2), generate=2, deadline=rig.now + 9.0)
    too_far = rig.submit(prompt_of(3_000, 2), generate=2, keep=[1_000], deadline=rig.now + 9.0)
    rig.run()
    assert [type(heard.error) for heard in (unmarked, too_far)] == [DeadlineUnmet] * 2
    assert rig.loop.totals.tokens_prefilled == before
    marked = rig.submit(prompt_of(3_000, 2), generate=2, keep=[800], deadline=rig.now + 9.0)
    rig.run()
    assert marked.nodes.keys() == {800} and len(marked.tokens) == 2  # nobody ended it here
    rig.settle()


def test_behind_a_parent_whose_decoded_state_is_gone_a_try_is_begun_only_where_the_parents_own_comes_first() -> None:
    engine = Paced()
    rig = LoopRig(engine=engine)
    first = rig.submit(prompt_of(600), generate=1_500, most_new_tokens=1_500, save=True)
    rig.run()
    (node,) = first.nodes.values()
    rig.store.flush(0.0)
    rig.store.trim(memory_bytes=0)
    rig.store.trim(disk_bytes=0)
    engine.spent()
    tokens = [*prompt_of(600), *first.tokens, 7]
    tries, computed = try_until(rig, engine, 9.0, tokens, base=node)
    # The first keeps the two blocks of the prompt, which are what they were. Then 1,588 decoded tokens have no place
    # to stop at, and they take longer than a try has.
    assert [type(heard.end) for heard in tries] == [Failed, Failed]
    assert isinstance(tries[1].error, DeadlineUnmet) and computed == 1_024
    ample, computed = try_until(rig, engine, 16.0, tokens, base=node)
    assert (len(ample), len(ample[0].tokens), computed) == (1, 2, node.end + 1 - 512)
    rig.settle()


def sized() -> FakeEngine:
    engine = FakeEngine(LAYOUT)
    engine.footprint = Footprint(per_token=10, weights=10_000)
    return engine


def test_a_call_that_could_outgrow_all_memory_is_refused_and_others_wait_their_turn() -> None:
    rig = LoopRig(engine=sized(), active=10 * 1024, memory=0)
    huge = rig.submit(prompt_of(750), generate=19, most_new_tokens=19)
    large = [rig.submit(prompt_of(250, n), generate=6, most_new_tokens=6) for n in range(4)]
    rig.turn()
    assert isinstance(huge.error, ActiveMemory)
    assert huge.error.metadata == {"needBytes": "10250", "limitBytes": "10240"}
    assert huge.error.retry_after is None  # waiting would not help
    assert [rig.state(heard) for heard in large] == [State.PREFILL, State.PREFILL, State.QUEUED, State.QUEUED]
    rig.run()
    for n, heard in enumerate(large):
        assert heard.tokens == rig.engine.continuation(prompt_of(250, n), 6)
    rig.settle()


def test_rows_take_memory_from_kept_state_which_moves_to_disk_and_comes_back() -> None:
    rig = LoopRig(engine=sized(), active=10 * 1024, memory=10 * 512, rows=8)
    kept = rig.submit(prompt_of(900), keep=[900])
    rig.run()
    rig.store.flush(0.0)
    held = rig.store.stats().memory_bytes
    assert 0 < held <= 10 * 512
    rows = [rig.submit(prompt_of(250, n), generate=6, most_new_tokens=6) for n in range(7)]
    rig.turn()
    assert rig.scheduler.reserved_bytes == 3 * 10 * 512  # of three rows
    assert rig.store.stats().memory_bytes == 0
    rig.run()
    again = rig.submit([*prompt_of(900), 1], base=kept.nodes[900], generate=2)
    rig.run()
    assert again.receipt == (900, 0, 1)  # nothing was lost
    assert all(len(heard.tokens) == 6 for heard in rows)
    assert rig.store.put(RecordId(bytes(32), RecordKind.FULL), bytes(3000), explicit=True)
    assert rig.store.stats().memory_bytes >= 3000  # the budget is whole again
    rig.store.delete([RecordId(bytes(32), RecordKind.FULL)])
    rig.settle()


def test_a_short_row_never_shares_a_call_with_a_neighbour_that_would_pad_it_dearly() -> None:
    class Watched(FakeEngine):
        calls: list[tuple[int, ...]] = []  # noqa: RUF012 - of one engine

        def step(self, plan: StepPlan) -> StepResult:
            if plan.decode is not None:
                self.calls = [tuple(len(self._rows[row].tokens) for row in call) for call in plan.decode.shared]
            return super().step(plan)

    engine = Watched(LAYOUT)
    engine.footprint = Footprint(per_token=10, weights=10_000)  # another call is worth 500 tokens of padding
    rig = LoopRig(engine=engine, rows=3)
    rows = [rig.submit(prompt_of(n, n), generate=30, most_new_tokens=30) for n in (10, 200, 5000)]
    for heard in rows:
        rig.until(heard, State.DECODE)
    rig.turn()
    assert [len(call) for call in engine.calls] == [2, 1]
    assert min(engine.calls[1]) >= 5000
    rig.run()
    for n, heard in zip((10, 200, 5000), rows, strict=True):
        assert heard.tokens == engine.continuation(prompt_of(n, n), 30)
    rig.settle()


# -- what goes wrong in the store


def test_corrupt_records_are_computed_again_and_the_receipt_says_so(two: LoopRig) -> None:
    prompt = prompt_of(700)
    kept = two.submit(prompt, keep=[300, 700])
    two.run()
    two.damage()
    tokens = [*prompt, 1, 2]
    heard = two.submit(tokens, base=kept.nodes[700], generate=5)
    two.run()
    assert heard.tokens == two.engine.continuation(tokens, 5)
    assert heard.usage.miss_reason is MissReason.CORRUPT
    cached, recomputed, new = heard.receipt
    assert (cached + recomputed, new) == (700, 2) and recomputed > 0
    assert two.store.stats().corrupt > 0
    again = two.submit(tokens, base=kept.nodes[700], generate=5)  # the parent stands again
    two.run()
    assert again.tokens == heard.tokens


def test_a_restore_that_fails_again_and_again_is_given_up_for_a_cold_run() -> None:
    rig = LoopRig(engine=FakeEngine(CacheLayout((LayerSpec(LayerKind.STATE),))), memory=0, rows=1)
    prompt = prompt_of(256 * (RESTORE_TRIES + 3))
    kept = rig.submit(prompt, keep=[300, len(prompt)])
    rig.run()
    rig.damage()
    heard = rig.submit([*prompt, 1], base=kept.nodes[len(prompt)], generate=5)
    rig.run()
    assert heard.tokens == rig.engine.continuation([*prompt, 1], 5)
    assert heard.receipt == (0, len(prompt), 1)
    assert heard.usage.miss_reason is MissReason.CORRUPT
    assert rig.store.stats().corrupt == RESTORE_TRIES
    # It was computed as the parent had been, mark included: the block of that mark is the parent's own.
    (rehomed,) = [event.node for event in heard.events if isinstance(event, NodeAt) and event.rehome]
    assert rehomed is kept.nodes[len(prompt)]
    rig.settle()


def test_a_record_evicted_between_plan_and_read_is_planned_around(two: LoopRig) -> None:
    prompt = prompt_of(600)
    kept = two.submit(prompt, keep=[600])
    two.run()
    two.store.flush(0.0)
    node = kept.nodes[600]
    heard = two.submit([*prompt, 1], base=node, generate=3)
    two.until(heard, State.RESTORING)
    two.store.delete([RecordId(node.key, RecordKind.WINDOW)])
    two.run()
    assert (heard.receipt, heard.tokens) == ((512, 88, 1), two.engine.continuation([*prompt, 1], 3))


def test_state_that_does_not_add_up_fails_its_row_and_no_other(rig: LoopRig) -> None:
    prompt = prompt_of(300)
    kept = rig.submit(prompt, keep=[300])
    rig.run()
    record = RecordId(kept.nodes[300].key, RecordKind.STATE)
    rig.store.delete([record])
    rig.store.put(record, bytes(32), explicit=True)  # as if a key had named other state
    ill = rig.submit([*prompt, 1], base=kept.nodes[300], generate=3)
    well = rig.submit(prompt_of(20), generate=3)
    rig.run()
    assert isinstance(ill.error, RowFailed)
    assert well.tokens == rig.engine.continuation(prompt_of(20), 3)


def test_a_store_that_takes_nothing_slows_nothing_down_but_the_snapshot_says_so() -> None:
    rig = LoopRig(memory=0, disk=0, queue_bytes=0)
    heard = rig.submit(prompt_of(300), generate=3, save=True)
    rig.run()
    assert heard.tokens == rig.engine.continuation(prompt_of(300), 3)
    assert [event.lost for event in heard.events if isinstance(event, NodeAt)] == ["SKIPPED_TOO_LARGE"]
    rig.settle()


# -- many at once


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_end_every_work_once_with_the_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    rig = LoopRig(
        engine=Forgetful(random.Random(seed), rng.choice([0.0, 0.02])),
        memory=rng.choice([0, 5_000, 1 << 20]), disk=rng.choice([20_000, 1 << 22]), rows=rng.randrange(1, 5),
        share_decoded=rng.random() < 0.5,
    )  # fmt: skip
    asked: list[tuple[Heard, list[int], int, Sampling]] = []
    trunk = prompt_of(1200, seed)
    for _ in range(150):
        match rng.choice(["new", "new", "child", "end", "turn", "turn", "time", "disk", "trim", "damage"]):
            case "new":
                tokens = trunk[: rng.choice([5, 256, 300, 700, 1200])] + prompt_of(rng.randrange(40), rng.randrange(5))
                base = None
            case "child":
                nodes = [n for heard in rig.heard for n in heard.nodes.values()]
                if not nodes:
                    continue
                base = rng.choice(nodes)
                tokens = [*base.all_tokens(), *prompt_of(rng.randrange(30), rng.random())]
            case "end":
                if rig.heard:
                    rng.choice(list(WAYS.values()))(rig, rng.choice(rig.heard))
                continue
            case "time":
                rig.now += rng.choice([0.1, 5.0])
                continue
            case "disk":
                rig.store.run_pending(rng.randrange(1, 20))
                continue
            case "trim":
                rig.store.trim(memory_bytes=rng.randrange(3_000), disk_bytes=rng.randrange(20_000))
                continue
            case "damage":
                if rng.random() < 0.2:
                    rig.damage()
                continue
            case _:
                for _ in range(rng.randrange(1, 8)):
                    rig.turn()
                continue
        sampling = Sampling(temperature=rng.choice([0.0, 0.7]), seed=rng.randrange(3))
        count = rng.choice([0, 1, 5, 60, 300])
        heard = rig.submit(
            tokens, base=base, generate=count, sampling=sampling, save=rng.random() < 0.5,
            save_on_cancel=rng.random() < 0.5, keep=[p for p in (1, 256, 300) if p <= len(tokens)][: rng.randrange(4)],
            time_limit=rng.choice([None, 3.0]), progress=rng.random() < 0.3, priority=rng.randrange(3),
        )  # fmt: skip
        asked.append((heard, tokens, count, sampling))
    rig.run()
    good = 0
    for heard, tokens, count, sampling in asked:
        assert heard.tokens == rig.engine.continuation(tokens, count, sampling)[: len(heard.tokens)]
        if isinstance(heard.end, Ended):
            good += 1
            usage = heard.usage
            assert usage.memory_tokens + usage.disk_tokens == usage.cached_tokens
            assert usage.completion_tokens == len(heard.tokens)
            assert len(heard.tokens) == count or heard.end.reason in (FinishReason.STOPPED, FinishReason.TIME_LIMIT)
    assert good > 10
    rig.settle()
