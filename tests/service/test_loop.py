"""The engine loop: one terminal event for each work whatever happens, the right tokens, and nothing left over."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from service.errors import (
    ConstraintFailed,
    RowFailed,
)
from service.events import FinishReason
from service.plan import RowId
from service.request import Sampling
from service.scheduler import State
from service.text.stream import Piece
from service.work import Admitted, Ended, NodeAt
from tests.service.loop_rig import WAYS, Heard, LoopRig, PlainText, prompt_of

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
    """A form of `most` tokens out of `tokens`; asked for more, it has none left. Each answer is late `late` times."""

    def __init__(self, tokens: set[int], most: int, *, late: int = 0) -> None:
        self.tokens, self.left = tokens, most
        self._late = self._asked = late

    def _is_late(self) -> bool:
        self._asked = self._late if self._asked == 0 else self._asked - 1
        return self._asked != self._late and self._late > 0

    def allowed(self, wait: float) -> bytes | None:
        if self.left < 0:
            raise ConstraintFailed("nothing fits")
        if self._is_late():
            return None
        return bytes(sum(1 << bit for bit in range(8) if 8 * byte + bit in self.tokens) for byte in range(50))

    def took(self, token: int) -> None:
        self.left -= 1

    def ended(self, wait: float) -> bool | None:
        return None if self._is_late() else self.left == 0


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


@pytest.mark.parametrize("length", [40, 255, 256, 250])
def test_a_row_whose_form_answers_late_waits_alone_and_becomes_what_it_would_have_been(
    rig: LoopRig, length: int
) -> None:
    prompt = prompt_of(length)
    in_time = rig.submit(prompt, generate=50, constraint=Only({3, 77, 399}, 9), save=True)
    rig.run()
    late = rig.submit(prompt, generate=50, constraint=Only({3, 77, 399}, 9, late=4), save=True)
    free = rig.submit(prompt, generate=50)
    rig.run()
    assert late.tokens == in_time.tokens and late.final == in_time.final == [length + 9]
    assert free.tokens == rig.engine.continuation(prompt, 50)
    assert rig.loop.totals.late_rows == 9 * 2 * 4
    again = rig.submit([*late.nodes[length + 9].all_tokens(), 5], base=late.nodes[length + 9], generate=3)
    rig.run()
    assert again.receipt[0] == length + 9


@pytest.mark.parametrize("length", [40, 252])  # the second stands at a block's end by then
def test_a_row_that_is_stopped_while_it_waits_for_its_form_ends_with_its_next_token(rig: LoopRig, length: int) -> None:
    prompt = prompt_of(length)
    late = rig.submit(prompt, generate=50, constraint=Only({3, 77, 399}, 9, late=4), save=True)
    while len(late.tokens) < 4 or not rig.steps.rows[late.row].waits_for_pick:
        rig.turn()
    rig.loop.stop(late.row)
    rig.run()
    assert len(late.tokens) == 5
    assert isinstance(late.end, Ended) and late.end.reason is FinishReason.STOPPED
    (end,) = late.final
    assert end == length + len(late.tokens)
    assert list(late.nodes[end].all_tokens()) == prompt + late.tokens
    again = rig.submit([*late.nodes[end].all_tokens(), 5], base=late.nodes[end], generate=3)
    rig.run()
    assert again.receipt[0] == end


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
        assert isinstance(heard.error, RowFailed) and heard.error.reason == "CANCELLED"  # metrics count it as that
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
