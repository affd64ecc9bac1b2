"""Images on the engine thread: encoded once, given again, waited for by the calls that touch them and by no others."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from kvcache.media import MediaKey, symbols
from kvcache.records import RecordKind
from service.media import Prepared
from service.scheduler import State
from service.work import WorkImage
from tests.service.loop_rig import MIB, Heard, LoopRig

Done = Callable[[Prepared | Exception], None]


@dataclass(eq=False)
class Picture:
    """An image whose inputs are made when the test says so, or at once."""

    seed: int
    count: int = 20
    at_once: bool = True
    asked: list[Done] = field(default_factory=list)
    made: int = 0

    @property
    def key(self) -> MediaKey:
        return MediaKey(hashlib.sha256(f"picture {self.seed}".encode()).digest())

    @property
    def run(self) -> list[int]:
        return list(symbols(self.key, self.count))

    def layout(self, inputs: dict[str, np.ndarray] | None = None) -> Prepared:
        return Prepared(key=self.key, ids=(7,) * self.count, grid=(1, 2, 2), inputs=inputs)

    def load(self, done: Done) -> None:
        self.asked.append(done)
        if self.at_once:
            self.make()

    def make(self, error: Exception | None = None) -> None:
        done = self.asked.pop(0)
        self.made += 1
        done(error if error is not None else self.layout({"pixels": np.zeros(3, np.float32)}))


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(400) for _ in range(count)]


def submit(rig: LoopRig, *given: list[int] | Picture, **more: object) -> Heard:
    tokens: list[int] = []
    images: list[WorkImage] = []
    for part in given:
        if isinstance(part, Picture):
            images.append(WorkImage(start=len(tokens), layout=part.layout(), load=part.load))
            tokens += part.run
        else:
            tokens += part
    return rig.submit(tokens, images=tuple(images), **more)  # type: ignore[arg-type]


@pytest.fixture
def rig() -> LoopRig:
    return LoopRig(rows=8)


def test_a_row_with_images_says_what_its_whole_context_says(rig: LoopRig) -> None:
    a, b = Picture(1), Picture(2, count=600)
    heard = submit(rig, words(30), a, b, words(5), a, generate=6)
    rig.run()
    assert heard.tokens == rig.engine.continuation(words(30) + a.run + b.run + words(5) + a.run, 6)
    assert heard.usage.image_tokens == 640
    assert (len(rig.engine.encoded), a.made, b.made) == (2, 1, 1)
    assert rig.loop.totals.images_encoded == 2
    rig.settle()


def test_rows_that_need_one_image_at_once_have_it_encoded_once(rig: LoopRig) -> None:
    picture = Picture(1)
    heard = [submit(rig, words(10, seed=n), picture, words(3, seed=n), generate=4) for n in range(8)]
    rig.run()
    assert [h.tokens for h in heard] == [
        rig.engine.continuation(words(10, seed=n) + picture.run + words(3, seed=n), 4) for n in range(8)
    ]
    assert (len(rig.engine.encoded), picture.made) == (1, 1)
    rig.settle()


def test_an_image_comes_back_from_the_store_and_is_not_encoded_again(rig: LoopRig) -> None:
    picture = Picture(1)
    submit(rig, picture, generate=1)
    rig.run()
    heard = submit(rig, words(300), picture, generate=1)
    rig.run()
    assert isinstance(heard.usage.new_tokens, int)
    assert (len(rig.engine.encoded), picture.made) == (1, 1)
    rig.store.trim(memory_bytes=0)
    rig.store.run_pending()
    again = submit(rig, words(300, seed=1), picture, generate=2)
    rig.run()
    assert again.tokens == rig.engine.continuation(words(300, seed=1) + picture.run, 2)
    assert len(rig.engine.encoded) == 1
    assert rig.store.stats().usage
    rig.settle()


def test_features_that_were_evicted_or_damaged_are_made_again(rig: LoopRig) -> None:
    picture = Picture(1)
    submit(rig, picture, generate=1)
    rig.run()
    rig.store.delete([record for record in rig.store.held() if record.kind is RecordKind.FEATURES])
    submit(rig, words(9), picture, generate=1)
    rig.run()
    assert len(rig.engine.encoded) == 2
    rig.store.trim(memory_bytes=0)
    rig.store.run_pending()
    rig.damage()
    heard = submit(rig, words(10), picture, generate=1)
    rig.run()
    assert heard.tokens == rig.engine.continuation(words(10) + picture.run, 1)
    assert len(rig.engine.encoded) == 3
    rig.settle()


def test_another_owner_s_features_are_not_used(rig: LoopRig) -> None:
    picture = Picture(1)
    for owner in ("a", "b"):
        submit(rig, picture, generate=1, owner=owner)
        rig.run()
    assert len(rig.engine.encoded) == len(set(rig.engine.encoded)) == 2
    rig.settle()


def test_an_image_whose_state_is_restored_is_never_looked_at(rig: LoopRig) -> None:
    picture = Picture(1)
    first = submit(rig, words(5), picture, words(5), keep=[30])
    rig.run()
    assert picture.made == 1
    rig.store.delete([record for record in rig.store.held() if record.kind is RecordKind.FEATURES])
    node = first.nodes[30]
    second = submit(rig, words(5), picture, words(5), words(7, seed=1), base=node, generate=3)
    rig.run()
    assert second.receipt == (30, 0, 7)
    assert (picture.made, len(rig.engine.encoded)) == (1, 1)
    assert second.usage.image_tokens == 20
    rig.settle()


def test_calls_before_an_image_do_not_wait_for_it(rig: LoopRig) -> None:
    slow = Picture(1, at_once=False)
    heard = submit(rig, words(600), slow, words(4), generate=2, progress=True)
    quick = submit(rig, words(40, seed=5), generate=3)
    while rig.turn():
        pass
    assert quick.tokens == rig.engine.continuation(words(40, seed=5), 3)
    row = rig.steps.rows[heard.row]
    assert (row.position, rig.state(heard)) == (512, State.PREFILL)  # the call that the image is in waits
    slow.make()
    rig.run()
    assert heard.tokens == rig.engine.continuation(words(600) + slow.run + words(4), 2)
    rig.settle()


def test_rows_that_decode_go_on_between_encodings(rig: LoopRig) -> None:
    talker = submit(rig, words(20), generate=60)
    rig.until(talker, State.DECODE)
    pictures = [Picture(n) for n in range(1, 7)]
    heard = [submit(rig, words(300, seed=p.seed), p, generate=1) for p in pictures]
    said = [len(talker.tokens)]
    while any(h.end is None for h in heard):
        assert rig.turn()
        said.append(len(talker.tokens))
        rig.store.run_pending()
    if talker.end is None:
        steps = [after - before for before, after in pairwise(said)]
        assert set(steps) == {1}  # every step of the engine carried the talker on
    assert len(rig.engine.encoded) == 6
    rig.settle()


def test_a_large_image_is_encoded_a_part_at_a_time_beside_rows_that_decode(rig: LoopRig) -> None:
    rig.engine.tower_parts = 5
    talker = submit(rig, words(20), generate=60)
    rig.until(talker, State.DECODE)
    large = Picture(1)
    heard = submit(rig, words(9, seed=1), large, generate=1)
    said: list[int] = []
    while heard.end is None:
        before = len(talker.tokens)
        assert rig.turn()
        rig.store.run_pending()
        said.append(len(talker.tokens) - before)
    assert set(said) == {1}  # whoever decodes says a word in every step
    assert len(said) > rig.engine.tower_parts
    assert heard.tokens == rig.engine.continuation(words(9, seed=1) + large.run, 1)
    assert rig.loop.totals.images_encoded == len(rig.engine.encoded) == 1
    rig.settle()
    alone = submit(rig, words(9, seed=2), Picture(2), generate=1)
    taken = 0
    while alone.end is None:
        assert rig.turn()
        rig.store.run_pending()
        taken += 1
    assert taken < len(said)  # nobody waits: all of it in one step


def test_an_image_that_nobody_needs_any_more_is_left_half_encoded(rig: LoopRig) -> None:
    rig.engine.tower_parts = 50
    talker = submit(rig, words(20), generate=60)
    rig.until(talker, State.DECODE)
    picture = Picture(1)
    heard = submit(rig, words(9, seed=1), picture, generate=1)
    while picture.made == 0 or not rig.engine.half_encoded:
        assert rig.turn()
        rig.store.run_pending()
    rig.loop.cancel(heard.row)
    rig.run()
    assert rig.engine.encoded == []
    assert talker.tokens == rig.engine.continuation(words(20), 60)
    again = submit(rig, words(9, seed=1), picture, generate=1)
    rig.run()
    assert again.tokens == rig.engine.continuation(words(9, seed=1) + picture.run, 1)
    rig.settle()


def test_inputs_are_made_for_a_few_images_at_a_time(rig: LoopRig) -> None:
    pictures = [Picture(n, at_once=False) for n in range(5)]
    heard = submit(rig, *pictures, generate=1)
    most = 0
    for _ in range(5):
        while rig.turn():
            pass
        waiting = [p for p in pictures if p.asked]
        most = max(most, len(waiting))
        waiting[0].make()
    rig.run()
    assert most == 2
    assert heard.tokens == rig.engine.continuation([t for p in pictures for t in p.run], 1)
    rig.settle()


def test_an_image_that_cannot_be_made_or_encoded_ends_its_rows_alone(rig: LoopRig) -> None:
    bad, broken, good = Picture(1, at_once=False), Picture(2), Picture(3)
    doomed = [submit(rig, words(4), bad, generate=1), submit(rig, words(5), good, bad, generate=1)]
    fine = submit(rig, words(6), good, generate=2)
    while rig.turn():
        pass
    bad.make(ValueError("the file is gone"))
    rig.run()
    assert all(type(h.error).__name__ == "RowFailed" for h in doomed)
    assert fine.tokens == rig.engine.continuation(words(6) + good.run, 2)
    rig.engine.blind = {rig.steps._sight.row_images(_work(broken))[0].key}
    last = submit(rig, words(7), broken, generate=1)
    rig.run()
    assert type(last.error).__name__ == "RowFailed"
    rig.engine.blind = set()
    again = submit(rig, words(7), broken, generate=1)
    rig.run()
    assert again.tokens == rig.engine.continuation(words(7) + broken.run, 1)
    rig.settle()


def _work(picture: Picture) -> object:
    from service.work import Work

    image = WorkImage(start=0, layout=picture.layout(), load=picture.load)
    return Work(owner="a", tokens=picture.run, base=None, keep=frozenset(), generation=None, images=(image,))


def test_a_cancelled_row_leaves_the_others_their_image(rig: LoopRig) -> None:
    slow = Picture(1, at_once=False)
    gone, stays = (submit(rig, words(4, seed=n), slow, generate=1) for n in range(2))
    while rig.turn():
        pass
    rig.loop.cancel(gone.row)
    while rig.turn():
        pass
    slow.make()
    rig.run()
    assert stays.tokens == rig.engine.continuation(words(4, seed=1) + slow.run, 1)
    alone = Picture(2, at_once=False)
    left = submit(rig, alone, generate=1)
    while rig.turn():
        pass
    rig.loop.cancel(left.row)
    while rig.turn():
        pass
    alone.make()  # nobody waits any more
    rig.run()
    assert alone.key not in rig.engine.encoded
    rig.settle()


def test_work_kept_when_stopped_inside_an_image_ends_before_it(rig: LoopRig) -> None:
    picture = Picture(1, count=600)
    later = Picture(2, at_once=False)
    heard = submit(rig, words(300), picture, words(100), later, generate=1, save=True, save_on_cancel=True)
    while rig.turn():
        pass
    assert rig.steps.rows[heard.row].position == 768  # inside the first image, whose end is at 900
    rig.loop.cancel(heard.row, save=True)
    rig.run()
    assert heard.final == [256]
    later.make()
    rig.settle()


def test_features_of_many_images_stay_within_the_budgets() -> None:
    rig = LoopRig(memory=4096, disk=64 * 1024, queue_bytes=4096)
    for n in range(100):
        submit(rig, Picture(n), generate=1)
        rig.run()
        stats = rig.store.stats()
        assert stats.memory_bytes <= 4096
        assert stats.file_bytes <= 64 * 1024
    assert len(rig.engine.encoded) == 100
    rig.settle()


def test_random_works_with_images_say_what_they_say_alone() -> None:
    rng = random.Random(11)
    for _ in range(20):
        rig = LoopRig(rows=rng.choice([1, 2, 4]), queue=100, memory=rng.choice([MIB, 20_000]))
        pictures = [Picture(n, count=rng.choice([4, 30, 300])) for n in range(4)]
        wanted: list[tuple[Heard, list[int]]] = []
        for _ in range(rng.randrange(3, 12)):
            given = [
                rng.choice([words(rng.randrange(1, 300), seed=rng.randrange(3)), rng.choice(pictures)]) for _ in "abc"
            ]
            heard = submit(rig, *given, generate=2, owner=rng.choice("ab"))
            wanted.append((heard, [t for part in given for t in (part.run if isinstance(part, Picture) else part)]))
            for _ in range(rng.randrange(4)):
                rig.turn()
        rig.run()
        for heard, tokens in wanted:
            assert heard.tokens == rig.engine.continuation(tokens, 2)
        rig.settle()
