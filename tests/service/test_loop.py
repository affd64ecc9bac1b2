"""The engine loop: one terminal event for each work whatever happens, the right tokens, and nothing left over."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvcache.cache import Keep
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind
from service.engine.fake import FakeEngine
from service.errors import (
    ActiveMemory,
    ConstraintFailed,
    DeadlineUnmet,
    EngineDown,
    EngineFailed,
    QueueFull,
    RecomputeLimit,
    RowFailed,
)
from service.events import FinishReason
from service.footprint import Footprint
from service.loop import EngineLoop
from service.opening import RESTORE_TRIES
from service.plan import Prefill, RowId, StepPlan, StepResult
from service.request import Sampling
from service.scheduler import Scheduler, SchedulerConfig, State
from service.text.stream import Piece
from service.work import Admitted, Ended, Failed, NodeAt, Work
from tests.service.loop_rig import LAYOUT, SNAPSHOT_WAIT, Heard, LoopRig, PlainText


def prompt_of(length: int, seed: object = 1) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(400) for _ in range(length)]


@pytest.fixture
def rig() -> Iterator[LoopRig]:
    made = LoopRig()
    yield made
    made.settle()


# -- what goes well


def test_a_generation_says_when_it_began_what_it_picked_and_what_it_cost(rig: LoopRig) -> None:
    prompt = prompt_of(600)
    heard = rig.submit(prompt, generate=5, keep=[300, 600], progress=True, save=True)
    rig.run()
    assert heard.names() == [
        "Admitted", "Prefilled", "NodeAt", "Prefilled", "NodeAt", "Prefilled", "Tokens", "NodeAt", "Ended",
    ]  # fmt: skip
    assert heard.tokens == rig.engine.continuation(prompt, 5)
    assert heard.text == "".join(f"{token} " for token in heard.tokens)
    assert sorted(heard.nodes) == [300, 600, 605]
    assert list(heard.nodes[605].all_tokens()) == prompt + heard.tokens
    end = heard.end
    assert isinstance(end, Ended)
    assert (end.reason, end.usage.completion_tokens, heard.receipt) == (FinishReason.MAX_TOKENS, 5, (0, 0, 600))
    assert rig.loop.totals.tokens_prefilled == 600 + 1  # the last token is fed for the snapshot


class Only:
    """A form of `most` tokens out of `tokens`; asked for more, it has none left."""

    def __init__(self, tokens: set[int], most: int) -> None:
        self.tokens, self.left = tokens, most

    def allowed(self) -> bytes:
        if self.left < 0:
            raise ConstraintFailed("nothing fits")
        return bytes(sum(1 << bit for bit in range(8) if 8 * byte + bit in self.tokens) for byte in range(50))

    def took(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


class Thinks(PlainText):
    """Its reasoning ends with the `end`th token."""

    def __init__(self, most: int, end: int) -> None:
        super().__init__(most)
        self._end = end

    def push(self, token: int, *, last: bool = False) -> Piece:
        self._end -= 1
        return replace(super().push(token, last=last), reasoning_ended=self._end == 0)


def test_a_row_with_a_form_picks_only_what_fits_and_ends_when_nothing_may_follow(rig: LoopRig) -> None:
    prompt = prompt_of(40)
    held = rig.submit(prompt, generate=50, constraint=Only({3, 77, 399}, 6))
    free = rig.submit(prompt, generate=50)
    rig.run()
    assert (len(held.tokens), set(held.tokens) <= {3, 77, 399}) == (6, True)
    assert free.tokens == rig.engine.continuation(prompt, 50)


def test_a_form_that_leaves_nothing_ends_its_row_alone(rig: LoopRig) -> None:
    prompt = prompt_of(40)
    held = rig.submit(prompt, generate=50, constraint=Only({3}, -1))
    free = rig.submit(prompt, generate=9)
    rig.run()
    assert (type(held.error), held.tokens) == (ConstraintFailed, [])
    assert free.tokens == rig.engine.continuation(prompt, 9)


@pytest.mark.parametrize(("length", "end"), [(20, 3), (250, 30), (250, 6), (255, 1), (20, 12)])
@pytest.mark.parametrize("save", [True, False])
def test_the_state_at_the_reasonings_end_is_handed_out_once(rig: LoopRig, length: int, end: int, *, save: bool) -> None:
    prompt = prompt_of(length)
    most = 12 if end == 12 else end + 12  # once with its very last token
    heard = rig.submit(prompt, generate=most, text=Thinks(most, end), save=save, mark_reasoning=True)
    rig.run()
    marked = [event.node for event in heard.events if isinstance(event, NodeAt) and event.reasoning_end]
    assert [node.end for node in marked] == [length + end]
    assert list(marked[0].all_tokens()) == prompt + heard.tokens[:end]
    assert heard.final == ([length + len(heard.tokens)] if save else [])
    # What was handed out goes on from there without computing anything again.
    warm = rig.submit(prompt + heard.tokens[:end], base=marked[0], generate=4)
    rig.run()
    assert warm.receipt == (length + end, 0, 0)
    assert warm.tokens == rig.engine.continuation(prompt + heard.tokens[:end], 4)


def test_a_prefill_alone_ends_without_a_reason(rig: LoopRig) -> None:
    heard = rig.submit(prompt_of(300), keep=[300])
    rig.run()
    assert heard.names() == ["Admitted", "NodeAt", "Ended"]
    assert isinstance(heard.end, Ended) and heard.end.reason is None
    assert heard.final == []


@pytest.mark.parametrize("place", [1, 255, 256, 257, 300, 512, 600])
def test_what_was_kept_is_gone_on_from_without_compute(rig: LoopRig, place: int) -> None:
    prompt = prompt_of(600)
    first = rig.submit(prompt, keep=[place])
    rig.run()
    before = rig.loop.totals.tokens_prefilled
    another = 401  # as no other prompt says
    tokens = [*prompt[:place], another, *prompt_of(19, "more")]
    second = rig.submit(tokens, base=first.nodes[place], generate=4)
    rig.run()
    assert second.receipt == (place, 0, 20)
    assert rig.loop.totals.tokens_prefilled - before == 20
    assert second.tokens == rig.engine.continuation(tokens, 4)


def test_the_state_at_the_end_of_a_generation_goes_on_over_blocks_that_decode_made(rig: LoopRig) -> None:
    prompt = prompt_of(250)
    first = rig.submit(prompt, generate=280, save=True)
    rig.run()
    end = first.nodes[530]
    assert [node.end for node in end.path()] == [256, 512, 530]
    tokens = [*end.all_tokens(), 7]
    second = rig.submit(tokens, base=end, generate=3)
    rig.run()
    assert (second.receipt, second.tokens) == ((530, 0, 1), rig.engine.continuation(tokens, 3))
    cut = rig.cache.cut(end, 512)
    assert cut is not None
    third = rig.submit([*tokens[:512], 8], base=cut, generate=3)
    rig.run()
    assert third.tokens == rig.engine.continuation([*tokens[:512], 8], 3)
    rig.cache.let_go(cut)


def test_rows_of_every_age_give_the_tokens_they_give_alone(rig: LoopRig) -> None:
    rng = random.Random(3)
    waiting = []
    for number in range(30):
        sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=number)
        prompt = prompt_of(rng.choice([1, 20, 256, 300, 700]), number)
        count = rng.randrange(1, 30)
        waiting.append((prompt, count, sampling))
    heard = []
    for prompt, count, sampling in waiting:
        heard.append(rig.submit(prompt, generate=count, sampling=sampling))
        for _ in range(rng.randrange(12)):
            rig.turn()
        while rig.scheduler.count(State.QUEUED) > 5:
            rig.turn()
    rig.run()
    for (prompt, count, sampling), said in zip(waiting, heard, strict=True):
        assert said.tokens == rig.engine.continuation(prompt, count, sampling)


# -- stopped, cancelled, out of time


@pytest.fixture
def two() -> Iterator[LoopRig]:
    """One row at a time, and everything that can leave memory is on disk."""
    made = LoopRig(rows=1, memory=0)
    yield made
    made.settle()


def brought_to(rig: LoopRig, state: State, **how: object) -> Heard:
    """A work in `state`: 700 tokens of which 300 are stored, to generate 6."""
    prompt = prompt_of(700)
    kept = rig.submit(prompt[:300], keep=[300])
    rig.run()
    rig.store.flush(0.0)
    if state is State.QUEUED:
        rig.submit(prompt_of(900, "in front"), generate=3)
        rig.turn()
    heard = rig.submit(prompt, base=kept.nodes[300], generate=6, **how)  # type: ignore[arg-type]
    rig.turn()
    if state is State.PREFILL or state is State.DECODE or state is State.SAVING:
        rig.store.run_pending()
    rig.until(heard, state)  # PREFILL: after its first call, up to 512
    return heard


WAYS = {
    "stop": lambda rig, heard: rig.loop.stop(heard.row),
    "cancel": lambda rig, heard: rig.loop.cancel(heard.row),
    "cancel and save": lambda rig, heard: rig.loop.cancel(heard.row, save=True),
}


@pytest.mark.parametrize("keeps", ["nothing", "save", "save_on_cancel"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", [State.QUEUED, State.RESTORING, State.PREFILL, State.DECODE], ids=lambda s: s.value)
def test_a_work_can_be_ended_in_every_state(two: LoopRig, state: State, way: str, keeps: str) -> None:
    heard = brought_to(two, state, **({} if keeps == "nothing" else {keeps: True}))
    picked = len(heard.tokens)
    WAYS[way](two, heard)
    WAYS[way](two, heard)  # twice is harmless
    two.turn()
    two.turn()
    assert heard.end is not None, "not free within two steps"
    cleanly = way == "stop" or (way == "cancel and save" and state is State.DECODE and keeps != "nothing")
    if cleanly:
        assert isinstance(heard.end, Ended) and heard.end.reason is FinishReason.STOPPED
    else:
        assert str(heard.error) == "cancelled"
        assert isinstance(heard.error, RowFailed)
    assert heard.tokens == two.engine.continuation(prompt_of(700), 6)[: len(heard.tokens)]
    assert len(heard.tokens) == picked  # no step was made for it any more
    saves = keeps != "nothing" and way != "cancel"
    place = {State.QUEUED: [], State.RESTORING: [], State.PREFILL: [512], State.DECODE: [700 + picked]}[state]
    assert heard.final == (place if saves else [])
    if heard.final:
        tokens = [*heard.nodes[heard.final[0]].all_tokens(), 5]
        again = two.submit(tokens, base=heard.nodes[heard.final[0]], generate=2)
        two.run()
        assert again.receipt == (len(tokens) - 1, 0, 1)
        assert again.tokens == two.engine.continuation(tokens, 2)


@pytest.mark.parametrize("state", [State.PREFILL, State.DECODE], ids=lambda s: s.value)
def test_who_goes_on_from_what_a_cancelled_work_kept_computes_nothing_again(two: LoopRig, state: State) -> None:
    heard = brought_to(two, state, save=True, save_on_cancel=True)
    two.loop.cancel(heard.row, save=True)
    two.run()
    (end,) = heard.final
    kept = heard.nodes[end]
    prompt = prompt_of(700)
    before = two.loop.totals.tokens_prefilled
    again = two.submit(prompt if state is State.PREFILL else kept.all_tokens(), base=kept, generate=6)
    two.run()
    assert again.receipt == (end, 0, max(0, 700 - end))
    assert two.loop.totals.tokens_prefilled - before == max(0, 700 - end)
    whole = [*heard.tokens, *again.tokens]
    assert whole == two.engine.continuation(prompt, len(whole))


def test_the_same_call_again_finds_the_blocks_of_the_one_that_was_cancelled(two: LoopRig) -> None:
    prompt = prompt_of(700, "cancelled")
    first = two.submit(prompt, generate=6)
    two.until(first, State.PREFILL)
    two.turn()
    two.loop.cancel(first.row)
    two.run()
    done = two.loop.totals.tokens_prefilled
    assert 0 < done < 700
    again = two.submit(prompt, generate=6)
    two.run()
    assert again.receipt == (done, 0, 700 - done)
    assert two.loop.totals.tokens_prefilled == 700
    assert again.tokens == two.engine.continuation(prompt, 6)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_is_being_saved_ends_as_it_was_about_to(two: LoopRig, way: str) -> None:
    heard = brought_to(two, State.SAVING, save=True)
    WAYS[way](two, heard)
    two.turn()
    assert isinstance(heard.end, Ended) and heard.end.reason is FinishReason.MAX_TOKENS
    assert heard.final == [706]


def test_a_stop_shows_text_that_was_held_back(rig: LoopRig) -> None:
    heard = rig.submit(prompt_of(10), generate=100)
    rig.until(heard, State.DECODE)
    rig.loop.stop(heard.row)
    rig.run()
    assert heard.text.endswith("|")


def test_ending_what_has_ended_is_harmless(rig: LoopRig) -> None:
    heard = rig.submit(prompt_of(10), generate=1)
    rig.run()
    events = list(heard.events)
    for way in WAYS.values():
        way(rig, heard)
    rig.loop.cancel(RowId(99))
    rig.run()
    assert heard.events == events


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("state", [State.PREFILL, State.DECODE], ids=lambda s: s.value)
def test_a_row_whose_time_is_over_ends_with_what_it_has(two: LoopRig, state: State, save: bool) -> None:
    heard = brought_to(two, state, save=save, time_limit=5.0)
    two.now += 4.9
    two.turn()
    assert heard.end is None
    two.now += 0.2
    two.turn()
    two.turn()
    assert isinstance(heard.end, Ended) and heard.end.reason is FinishReason.TIME_LIMIT
    assert len(heard.final) == save
    two.run()


def test_waiting_in_the_queue_takes_nothing_from_the_time_limit() -> None:
    rig = LoopRig(rows=1)
    first = rig.submit(prompt_of(10), generate=20)
    second = rig.submit(prompt_of(10, 2), generate=3, time_limit=1.0)
    rig.until(first, State.DECODE)
    rig.now += 50
    rig.run()
    assert isinstance(second.end, Ended) and second.end.reason is FinishReason.MAX_TOKENS
    assert isinstance(second.events[0], Admitted) and second.events[0].queue_seconds == 50
    assert second.end.timing.queue == 50
    rig.settle()


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

    def __init__(self) -> None:
        super().__init__(LAYOUT)

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        result.prefill_seconds = 0.01 * result.prefill_tokens
        return result


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
    late = rig.submit(prompt_of(600, 2), generate=2, deadline=rig.now + 5.9)
    kept = rig.submit(prompt_of(600, 3), generate=2, deadline=rig.now + 5.9, save=True, save_on_cancel=True)
    warm = rig.submit([*prompt, 7], base=known.nodes[600], generate=2, deadline=rig.now + 5.9)
    ample = rig.submit(prompt_of(600, 4), generate=2, deadline=rig.now + 6.1)
    rig.run()
    assert isinstance(late.error, DeadlineUnmet)
    assert late.error.metadata == {"neededSeconds": "6.000", "leftSeconds": "5.900"}
    assert len(late.events) == 1
    assert [len(heard.tokens) for heard in (kept, warm, ample)] == [2, 2, 2]
    assert rig.loop.totals.tokens_prefilled - before == 600 + 1 + 1 + 600  # one to save, one behind the snapshot
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


# -- the thread


class Gate(FakeEngine):
    """Waits at its first step until told, then goes on or breaks."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__(LAYOUT)
        self.reached, self.go, self.breaks = threading.Event(), threading.Event(), breaks

    def step(self, plan: StepPlan) -> StepResult:
        self.reached.set()
        assert self.go.wait(60)
        if self.breaks:
            raise RuntimeError("as planned")
        return super().step(plan)


class Listener:
    """Events of one work, from another thread."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.ended = threading.Event()

    def __call__(self, event: object) -> None:
        self.events.append(event)
        if isinstance(event, Ended | Failed):
            self.ended.set()

    def end(self) -> Ended | Failed:
        assert self.ended.wait(60)
        ends = [event for event in self.events if isinstance(event, Ended | Failed)]
        assert len(ends) == 1 and self.events[-1] is ends[0]
        return ends[0]


def threaded(load: Callable[[], object], rows: int = 1) -> EngineLoop:
    scheduler = Scheduler(SchedulerConfig(max_rows=rows))
    return EngineLoop(load, scheduler, lambda: None, snapshot_wait=SNAPSHOT_WAIT)  # type: ignore[arg-type]


def short_work() -> Work:
    return Work(owner="a", tokens=prompt_of(20), base=None, keep=frozenset(), generation=None)


def test_a_broken_engine_ends_every_work_and_the_thread_and_shows() -> None:
    rig = LoopRig(engine=Gate(breaks=True))
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    works = [Listener() for _ in range(3)]
    for listener in works:
        loop.submit(short_work(), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    assert loop.is_alive(1e9)
    late = Listener()
    loop.submit(short_work(), late)  # in the mailbox when it happens
    rig.engine.go.set()  # type: ignore[attr-defined]
    ends = [listener.end() for listener in [*works, late]]
    # What ran may be what it died of; what waited is told to try again.
    assert [type(end.error) for end in ends if isinstance(end, Failed)] == [EngineFailed] + 3 * [EngineDown]
    assert loop.has_failed
    loop.close()
    assert not loop.is_alive(1e9)
    assert rig.store.stats().pinned == 0
    assert [node for node in rig.cache._tree if node.holds] == []


def test_what_comes_after_the_end_is_answered_too() -> None:
    rig = LoopRig()
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    loop.close()
    late = Listener()
    loop.submit(short_work(), late)
    end = late.end()
    assert isinstance(end, Failed) and isinstance(end.error, EngineDown)
    loop.cancel(RowId(1))
    loop.close()


def test_a_model_that_cannot_be_loaded_ends_the_thread_and_shows() -> None:
    def load() -> object:
        raise OSError("no such model")

    loop = threaded(load)
    waiting = Listener()
    loop.submit(short_work(), waiting)
    loop.start()
    end = waiting.end()
    assert isinstance(end, Failed) and isinstance(end.error, EngineDown)
    loop.close()
    assert not loop.is_alive(1e9)


def test_closing_ends_what_runs_and_what_waits() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    works = [Listener() for _ in range(3)]
    for listener in works:
        loop.submit(short_work(), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    closing = threading.Thread(target=loop.close)
    closing.start()
    rig.engine.go.set()  # type: ignore[attr-defined]
    closing.join(60)
    ends = [listener.end() for listener in works]
    assert all(isinstance(end, Ended) or isinstance(end.error, EngineDown) for end in ends)
    assert any(isinstance(end, Failed) for end in ends)
    assert not loop.is_alive(1e9)
    assert [node for node in rig.cache._tree if node.holds] == []


def test_a_step_that_takes_too_long_shows() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    now = itertools.count()
    clock = {"now": 0.0}
    loop = EngineLoop(
        lambda: (rig.engine, rig.cache),
        Scheduler(SchedulerConfig()),
        lambda: None,
        lambda: clock["now"],
        snapshot_wait=SNAPSHOT_WAIT,
    )
    loop.start()
    listener = Listener()
    loop.submit(short_work(), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    clock["now"] = 31.0
    assert (loop.is_alive(30.0), loop.is_alive(32.0)) == (False, True)
    rig.engine.go.set()  # type: ignore[attr-defined]
    listener.end()
    loop.close()
    assert next(now) == 0


def test_a_thread_that_died_is_followed_by_another_with_the_same_cache() -> None:
    rig = LoopRig(engine=Gate(breaks=True))
    loop = threaded(lambda: (rig.engine, rig.cache))
    kept = rig.submit(prompt_of(300), keep=[300])
    rig.engine.go.set()  # type: ignore[attr-defined]
    rig.engine.breaks = False  # type: ignore[attr-defined]
    rig.run()
    rig.engine.breaks = True  # type: ignore[attr-defined]
    loop.start()
    first = Listener()
    row = loop.submit(short_work(), first)
    assert isinstance(first.end(), Failed)
    fresh = FakeEngine(LAYOUT)
    loop.restart(lambda: (fresh, rig.cache), Scheduler(SchedulerConfig(max_rows=1)))
    again = Listener()
    node = kept.nodes[300]
    tokens = [*node.all_tokens(), 7]
    assert loop.submit(replace(short_work(), owner="a", tokens=tokens, base=node), again) > row
    while not again.ended.wait(0.01):
        rig.store.run_pending()
    end = again.end()
    assert isinstance(end, Ended) and end.usage.cached_tokens == 300
    assert loop.is_alive(1e9) and not loop.has_failed
    loop.cancel(row)  # one of the dead thread's: nobody's now
    assert loop.close()
    rig.settle()


def test_works_of_a_step_that_hangs_are_given_up_and_the_thread_goes_on_without_them() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    clock = {"now": 0.0}
    loop = EngineLoop(
        lambda: (rig.engine, rig.cache),
        Scheduler(SchedulerConfig(max_rows=2)),
        lambda: None,
        lambda: clock["now"],
        snapshot_wait=SNAPSHOT_WAIT,
    )
    loop.start()
    works = [Listener() for _ in range(3)]
    for listener in works:
        loop.submit(replace(short_work(), keep=frozenset({20})), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    late = Listener()
    loop.submit(short_work(), late)  # in the mailbox
    assert loop.give_up(30.0) == 0
    clock["now"] = 31.0
    assert loop.give_up(30.0) == 4
    assert {type(listener.end().error) for listener in works[:1]} == {EngineFailed}  # type: ignore[union-attr]
    assert isinstance(late.end(), Failed)
    assert loop.give_up(30.0) == 0  # nothing is left
    later = Listener()
    loop.submit(short_work(), later)
    assert loop.give_up(30.0) == 1 and isinstance(later.end(), Failed)
    assert not loop.is_alive(30.0)
    rig.engine.go.set()  # type: ignore[attr-defined]
    served = Listener()
    loop.submit(short_work(), served)
    assert isinstance(served.end(), Ended)
    assert loop.is_alive(30.0)
    loop.close()
    for listener in [*works, late, later]:
        listener.end()  # still the only end that each has
    assert rig.engine.rows == frozenset()
    assert rig.store.stats().pinned == 0
    assert [node for node in rig.cache._tree if node.holds] == []


def test_a_thread_that_hangs_does_not_hold_up_the_end() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    loop.submit(short_work(), Listener())
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    assert not loop.close(0.01)
    rig.engine.go.set()  # type: ignore[attr-defined]
    assert loop.close()


def test_a_work_that_cannot_begin_is_nobody_elses_end(rig: LoopRig) -> None:
    ill = rig.submit([-1, 2], generate=3)  # no token id
    well = rig.submit(prompt_of(20), generate=3)
    rig.run()
    assert isinstance(ill.error, RowFailed)
    assert well.tokens == rig.engine.continuation(prompt_of(20), 3)


class Restful(FakeEngine):
    """Counts how often it was told to give memory back."""

    def __init__(self) -> None:
        super().__init__(LAYOUT)
        self.rests, self.rested = 0, threading.Event()

    def relax(self) -> None:
        self.rests += 1
        self.rested.set()


def test_memory_is_given_back_once_each_time_that_work_has_ceased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.loop.RELAX_AFTER", 0.01)
    engine = Restful()
    rig = LoopRig(engine=engine)
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    for times in (1, 2, 3):
        assert engine.rested.wait(60)
        assert engine.rests == times  # and not once more while it goes on waiting
        engine.rested.clear()
        listener = Listener()
        loop.submit(short_work(), listener)
        assert isinstance(listener.end(), Ended)
    loop.close()


def test_asking_again_for_a_loan_gives_no_memory_back_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.loop.RELAX_AFTER", 0.01)
    engine, asked = Restful(), threading.Semaphore(0)
    engine.footprint = Footprint(per_token=10, fixed=500, weights=1000)
    rig = LoopRig(engine=engine)

    def refuse(size: int) -> int:
        asked.release()
        return size

    monkeypatch.setattr(rig.cache.store, "lend", refuse)
    loop = EngineLoop(
        lambda: (rig.engine, rig.cache),
        Scheduler(SchedulerConfig(active_bytes=1, idle_bytes=1 << 20)),
        lambda: None,
        lambda: 0.0,
        snapshot_wait=SNAPSHOT_WAIT,
    )
    loop.start()
    listener = Listener()
    row = loop.submit(short_work(), listener)
    for _ in range(20):
        assert asked.acquire(timeout=60)
    assert engine.rests <= 1
    loop.cancel(row)
    assert isinstance(listener.end(), Failed)
    loop.close()


def test_a_row_that_fails_last_leaves_no_loan_behind() -> None:
    rig = LoopRig(active=1)
    rig.engine.footprint = rig.scheduler.footprint = Footprint(per_token=10, fixed=500, weights=1000)
    heard = rig.submit([1, 2, 3], generate=50)
    rig.until(heard, State.DECODE)
    rig.turn()
    assert rig.store._placement.lent > 0
    rig.steps.rows.fail(heard.row, ValueError("the model refused it"), closed=True)
    assert rig.scheduler.count(*State) == 0
    assert rig.store._placement.lent == 0


@pytest.mark.parametrize("way", ["stop", "cancel and save"])
def test_an_early_end_hands_out_the_deepest_place_that_stands(two: LoopRig, way: str) -> None:
    prompt = prompt_of(2_000)
    heard = two.submit(prompt, keep=[700], generate=5, save=True)
    two.until(heard, State.PREFILL)
    while two.steps.rows[heard.row].position < 1_024:
        assert two.turn()
    last = two.steps.rows[heard.row].recorder.last_block
    for node in last.path():
        if node.end > 512:
            two.store.delete([RecordId(node.key, RecordKind.STATE)])
    WAYS[way](two, heard)
    two.run()
    (event,) = [event for event in heard.events if isinstance(event, NodeAt) and event.final]
    assert (event.node.end, event.lost) == (700, "")
    assert two.cache.stands(event.node)


@pytest.mark.parametrize("evicts", [False, True])
def test_a_stored_mark_stays_until_it_is_handed_out_though_its_snapshot_is_deleted(two: LoopRig, evicts: bool) -> None:
    prompt = prompt_of(700)
    first = two.submit(prompt, keep=[300])
    two.run()
    two.store.flush(0.0)
    snapshot = two.cache.add_snapshot("a", first.nodes[300], Keep(), parent=None)
    second = two.submit(prompt, keep=[300], generate=2)
    two.until(second, State.RESTORING)
    two.cache.delete(snapshot)
    two.cache.let_go(first.nodes[300])
    first.events = [event for event in first.events if not isinstance(event, NodeAt)]
    if evicts:
        two.store.trim(disk_bytes=1)
    two.run()
    assert second.receipt[0] == 512
    (event,) = [event for event in second.events if isinstance(event, NodeAt)]
    assert (event.node.end, event.lost) == (300, "")
