"""State that waits for a slow disk: asked-for places wait within a bound, others go on, and the answer says what came.

The queue takes one block's window of implicit records and two of explicit ones; the disk gets on when `disk` is called.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.records import PutResult, RecordId, RecordKind, Tier
from service.events import FinishReason
from service.runtime import store_full
from service.scheduler import State
from service.work import Ended, NodeAt
from tests.service.loop_rig import Heard, LoopRig

QUEUE = 1500
WAIT = 10.0


def prompt_of(length: int, seed: object = 1) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(400) for _ in range(length)]


def slow_rig(**how: object) -> LoopRig:
    return LoopRig(queue_bytes=QUEUE, snapshot_wait=WAIT, **how)  # type: ignore[arg-type]


@pytest.fixture
def rig() -> Iterator[LoopRig]:
    made = slow_rig()
    yield made
    made.settle()
    assert not made.steps.parking


def turn_all(rig: LoopRig) -> None:
    """Steps until only the disk could change anything."""
    while rig.turn():
        pass


def lost(heard: Heard) -> dict[int, str]:
    return {event.node.end: event.lost for event in heard.events if isinstance(event, NodeAt)}


def test_a_snapshot_waits_for_the_disk_and_is_whole(rig: LoopRig) -> None:
    prompt = prompt_of(1800)
    heard = rig.submit(prompt, keep=[1800])
    turn_all(rig)
    assert heard.end is None and rig.state(heard) is State.PREFILL, "it goes no further than the store can follow"
    assert rig.store.stats().pending_bytes <= 2 * QUEUE
    rig.run()
    assert lost(heard) == {1800: ""} and isinstance(heard.end, Ended)
    assert rig.cache.stands(heard.nodes[1800])
    again = rig.submit([*prompt, 5], base=heard.nodes[1800], generate=2)
    rig.run()
    assert again.receipt == (1800, 0, 1)
    assert again.tokens == rig.engine.continuation([*prompt, 5], 2)


def test_others_decode_while_a_snapshot_waits(rig: LoopRig) -> None:
    waiting = rig.submit(prompt_of(1800), keep=[1800])
    turn_all(rig)
    other = rig.submit(prompt_of(20, "other"), generate=30)
    late = rig.submit(prompt_of(700, "late"), generate=3)
    turn_all(rig)
    assert waiting.end is None
    assert other.tokens == rig.engine.continuation(prompt_of(20, "other"), 30)
    assert late.tokens == rig.engine.continuation(prompt_of(700, "late"), 3)


def test_a_snapshot_that_waited_long_enough_fails_with_the_reason_and_leaves_nothing(rig: LoopRig) -> None:
    heard = rig.submit(prompt_of(1800), keep=[1800])
    for _ in range(20):
        turn_all(rig)
        assert rig.store.stats().pending_bytes <= 2 * QUEUE
        if heard.end is not None:
            break
        rig.now += WAIT
    assert lost(heard) == {1800: "SKIPPED_QUEUE_FULL"} and isinstance(heard.end, Ended)
    assert rig.store.stats().skipped[PutResult.SKIPPED_QUEUE_FULL] > 0


def test_what_waits_is_not_counted_as_skipped_and_what_is_skipped_counts_once() -> None:
    rig = slow_rig(checkpoints=Checkpoints(state_spacing=0))
    heard = rig.submit(prompt_of(1800), keep=[1800])
    rig.run()
    records = [RecordId(node.key, kind) for node in heard.nodes[1800].path() for kind in rig.cache.layout.kinds]
    missing = [record for record in records if rig.store.locate(record) is None]
    assert missing and rig.cache.stands(heard.nodes[1800])
    assert rig.store.stats().skipped == {PutResult.SKIPPED_QUEUE_FULL: len(missing)}
    rig.settle()


def test_a_saved_generation_goes_on_and_only_its_end_waits(rig: LoopRig) -> None:
    blocker = rig.submit(prompt_of(1800, "blocker"), keep=[1800])
    turn_all(rig)
    prompt = prompt_of(200)
    heard = rig.submit(prompt, generate=300, save=True)
    turn_all(rig)
    assert heard.tokens == rig.engine.continuation(prompt, 300)
    assert heard.end is None and rig.engine.rows == {blocker.row}, "its row is free for others"
    rig.run()
    assert isinstance(heard.end, Ended) and heard.end.reason is FinishReason.MAX_TOKENS
    assert heard.final == [500] and lost(heard)[500] == ""
    assert rig.cache.stands(heard.nodes[500])


def test_a_lost_boundary_is_told_with_every_place_that_needs_it() -> None:
    rig = slow_rig()
    heard = rig.submit(prompt_of(1800), keep=[1100, 1800])
    turn_all(rig)
    rig.now += WAIT  # what was parked is lost; from here on the disk keeps up
    rig.run()
    said = lost(heard)
    assert sorted(said) == [1100, 1800]
    for end, node in heard.nodes.items():
        assert (said[end] == "") == rig.cache.stands(node)
    assert said == {1100: "", 1800: "SKIPPED_QUEUE_FULL"}
    assert rig.store.locate(RecordId(heard.nodes[1800].key, RecordKind.WINDOW)) is not None  # its own was taken
    rig.settle()


@pytest.mark.parametrize("way", ["stop", "cancel", "cancel and save"])
@pytest.mark.parametrize("generate", [0, 4])
def test_what_waits_can_be_ended(rig: LoopRig, way: str, generate: int) -> None:
    heard = rig.submit(prompt_of(1800), keep=[1100, 1800], generate=generate, save=bool(generate))
    turn_all(rig)
    assert rig.state(heard) is State.PREFILL
    if way == "stop":
        rig.loop.stop(heard.row)
    else:
        rig.loop.cancel(heard.row, save=way != "cancel")
    turn_all(rig)
    rig.run()
    assert heard.end is not None


def test_a_generation_at_its_end_can_be_cancelled_while_its_state_waits(rig: LoopRig) -> None:
    rig.submit(prompt_of(1800, "blocker"), keep=[1800])
    turn_all(rig)
    heard = rig.submit(prompt_of(200), generate=3, save=True)
    turn_all(rig)
    assert heard.end is None
    rig.loop.cancel(heard.row)
    turn_all(rig)
    assert heard.end is not None and heard.final == []


def test_without_patience_a_full_queue_fails_at_once() -> None:
    rig = LoopRig(queue_bytes=QUEUE, snapshot_wait=0.0)
    heard = rig.submit(prompt_of(1800), keep=[1800])
    turn_all(rig)
    assert lost(heard) == {1800: "SKIPPED_QUEUE_FULL"}
    rig.settle()


def test_with_the_disk_standing_still_a_rollback_right_after_a_generation_recomputes_nothing() -> None:
    rig = LoopRig(queue_bytes=1 << 20)
    prompt = prompt_of(600)
    heard = rig.submit(prompt, keep=[600], generate=300, save=True)
    turn_all(rig)
    assert rig.store.stats().disk_bytes == 0 and rig.store.stats().pending_bytes > 0
    for place in (512, 600, 768, 900):
        node = rig.cache.cut(heard.nodes[900], place)
        assert node is not None
        tokens = [*heard.nodes[900].all_tokens()[:place], 3, 4]
        back = rig.submit(tokens, base=node, generate=2)
        turn_all(rig)
        assert back.receipt == (place, 0, 2) and back.usage.disk_tokens == 0
        assert back.tokens == rig.engine.continuation(tokens, 2)
        rig.cache.let_go(node)
    assert all(rig.store.locate(record) is not Tier.DISK for record in rig.store.held())
    rig.settle()


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_on_a_slow_disk_end_every_work_once_and_tell_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    policy = list(CheckpointPolicy)[seed % 3]
    checkpoints = Checkpoints(policy=policy, state_spacing=rng.choice([0, 2, 4]))
    disk = 0 if policy is CheckpointPolicy.OFF else 1 << 26
    rig = slow_rig(rows=rng.randrange(1, 5), queue=100, checkpoints=checkpoints, disk=disk)
    heard = []
    for _ in range(40):
        length = rng.choice([5, 256, 300, 700, 1300])
        places = rng.sample(range(1, length + 1), rng.randrange(3) if length > 5 else 0)
        heard.append(
            rig.submit(
                prompt_of(length, rng.randrange(6)),
                keep=places,
                generate=rng.choice([0, 3, 280]),
                save=rng.random() < 0.5,
            )
        )
        for _turn in range(rng.randrange(6)):
            rig.turn()
        if rng.random() < 0.3:
            rig.store.run_pending(rng.randrange(1, 6))
        if rng.random() < 0.2:
            rig.now += rng.choice([1.0, WAIT])
        if rng.random() < 0.15:
            target = rng.choice(heard)
            rng.choice([rig.loop.stop, rig.loop.cancel])(target.row)
        assert rig.store.stats().pending_bytes <= 2 * QUEUE
    rig.run()
    for each in heard:
        each.check()
        for end, why in lost(each).items():
            if not why:
                assert rig.cache.stands(each.nodes[end])
    rig.settle()


def test_what_could_not_be_kept_is_told_with_its_cause_and_a_time_to_retry() -> None:
    error = store_full(PutResult.SKIPPED_QUEUE_FULL.name)
    assert (error.reason, error.metadata, error.retry_after) == ("STORE_FULL", {"cause": "QUEUE_FULL"}, 1.0)
    assert "did not get on in time" in error.text
    told = store_full("no room for 5 bytes")  # a text of the store's
    assert told.metadata == {} and told.text.endswith("no room for 5 bytes")


def test_what_no_budget_can_hold_is_not_to_be_tried_again() -> None:
    error = store_full(PutResult.SKIPPED_TOO_LARGE.name)
    assert (error.metadata, error.retry_after) == ({"cause": "TOO_LARGE"}, None)
    assert "larger than either budget" in error.text and "--disk-bytes" in error.hint


def test_on_a_stalled_disk_all_rows_together_park_a_bounded_number_of_bytes() -> None:
    """Rows that wait for their end to be stored leave their slots, so no count of rows bounds what they hold."""
    rig = slow_rig(rows=4, queue=60)
    calls = [rig.submit(prompt_of(30, i), generate=3, save=True) for i in range(60)]
    turn_all(rig)
    parked = [place for places in rig.steps.parking._rows.values() for place in places]
    assert 0 < sum(place.bytes for place in parked) == rig.steps.parking._bytes <= 4 * 2 * QUEUE
    refused = [heard for heard in calls if heard.end is not None and "SKIPPED_QUEUE_FULL" in lost(heard).values()]
    assert refused, "at once, as after the wait"
    rig.settle()
    assert rig.steps.parking._bytes == 0


def test_a_wait_that_is_over_gives_no_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = slow_rig()
    rests: list[float] = []
    monkeypatch.setattr(rig.engine, "relax", lambda: rests.append(rig.now))
    heard = rig.submit(prompt_of(1800), keep=[1800])
    turn_all(rig)
    rig.now += WAIT
    turn_all(rig)
    assert "SKIPPED_QUEUE_FULL" in lost(heard).values()
    assert rests == []
    rig.settle()


def test_a_cancelled_work_that_is_to_be_saved_waits_for_its_state(rig: LoopRig) -> None:
    heard = rig.submit(prompt_of(1800), keep=[1100, 1800], generate=4, save_on_cancel=True)
    turn_all(rig)
    assert rig.steps.parking.holds(heard.row)
    passed = rig.steps.rows[heard.row].recorder.last_block
    rig.loop.cancel(heard.row, save=True)
    turn_all(rig)
    assert heard.end is None and rig.engine.rows == frozenset()
    rig.run()
    assert str(heard.error) == "cancelled"
    (event,) = [event for event in heard.events if isinstance(event, NodeAt) and event.final]
    assert event.lost == "" and rig.cache.stands(event.node)
    assert event.node.end == rig.cache.checkpoints_before(event.node, passed.end) > 0


def test_state_that_was_evicted_has_a_hint_of_its_own() -> None:
    error = store_full("EVICTED")
    assert error.metadata == {"cause": "EVICTED"}
    assert "evicted" in error.text and "--memory-bytes" in error.hint


def test_places_larger_than_the_queue_are_stored_one_after_another() -> None:
    """A small memory budget makes a small queue, but state is as large as the model makes it."""
    rig = LoopRig(queue_bytes=50, snapshot_wait=WAIT, rows=3)
    calls = [rig.submit(prompt_of(700, i), keep=[700], generate=3, save=True) for i in range(3)]
    turn_all(rig)
    assert rig.steps.parking._bytes > 4 * 2 * 50
    rig.run()
    for heard in calls:
        assert lost(heard) == {700: "", 703: ""}
        assert rig.cache.stands(heard.nodes[700]) and rig.cache.stands(heard.nodes[703])
    assert PutResult.SKIPPED_TOO_LARGE not in rig.store.stats().skipped
    rig.settle()


def test_state_that_was_asked_for_waits_for_the_disk_rather_than_push_other_such_state_out() -> None:
    """Memory holds one of three conversations, and the disk gets on by one record a step."""
    rig = LoopRig(memory=6_000, queue_bytes=QUEUE, snapshot_wait=WAIT, rows=3)
    calls = [rig.submit(prompt_of(700, i), keep=[700], generate=3, save=True) for i in range(3)]
    while any(heard.end is None for heard in calls):
        turn_all(rig)
        rig.store.run_pending(1)
    for heard in calls:
        assert lost(heard) == {700: "", 703: ""}
        assert rig.cache.stands(heard.nodes[700]) and rig.cache.stands(heard.nodes[703])
    evicted = rig.store.stats().evicted
    assert sum(usage.records for usage in evicted.values()) == 0
    rig.settle()
