"""Images change nothing about exactness: restored, forked and batched runs give the bits, or tokens, of a run alone.

Every family, on its tiny model. One to three images are all there is, first, last, in the middle, adjacent, in a forked
suffix, two sizes of one picture.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvcache.blocks import BLOCK_TOKENS
from kvcache.media import symbols
from kvcache.mlx_arrays import from_payload
from kvcache.records import RecordKind
from service.plan import Capture, Decode, Encode, GivenFeatures, OpenRow, Prefill, RowId, RowImage, StepPlan
from tests.engine.vision_rig import GREEDY, Context, Node, VisionBench

pytest.importorskip("mlx_vlm")

pytestmark = pytest.mark.mlx

FAMILIES = (
    "tiny-qwen3_5-vl",
    "tiny-qwen3-vl",
    "tiny-gemma3-vl",
    "tiny-gemma4-vl",
    "tiny-smolvlm",
    "tiny-mistral3",
    "tiny-lfm2-vl",
    "tiny-llava",
)


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request: pytest.FixtureRequest) -> Iterator[VisionBench]:
    made = VisionBench(request.param)
    yield made
    assert made.engine.active_bytes() == 0


def contexts(bench: VisionBench) -> list[Context]:
    a, larger, b = bench.prepare(64, 64, 1), bench.prepare(150, 130, 1), bench.prepare(160, 96, 2)
    return [
        bench.context(a, b, 40),  # first, adjacent
        bench.context(30, a, 200, b),  # in the middle, last
        bench.context(210, b, 12, a, 3, larger, 20),  # across a block's boundary, two sizes of one picture
        bench.context(larger),
        bench.context(a, larger, b),
    ]


def places(bench: VisionBench, context: Context) -> list[int]:
    """Right before, after and, where allowed, inside every image; as it leaves the window; and block boundaries."""
    found = set(range(BLOCK_TOKENS, len(context.tokens), BLOCK_TOKENS))
    for image in context.images:
        found |= {image.start - 1, image.start, image.start + 1, (image.start + image.end) // 2}
        found |= {image.end - 1, image.end, image.end + 1}
        if bench.layout.window:
            found |= {image.end + bench.layout.window + step for step in (-1, 0, 1)}
    inside = {p for p in found for i in context.images if i.start < p < i.end} if bench.whole else set()
    return sorted(p for p in found - inside if 0 < p < len(context.tokens))


def logits(nodes: Sequence[Node]):
    return np.array(from_payload(nodes[-1].payloads[RecordKind.LOGITS])["logits"][0])


@pytest.mark.parametrize("which", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 3, 4))])
def test_a_restore_beside_and_inside_images_is_bit_equal_to_a_cold_run(bench: VisionBench, which: int) -> None:
    context = contexts(bench)[which]
    for place in places(bench, context):
        cold = bench.run(context, [place])
        warm = bench.run(context, [place], before=bench.path_to(context, place))
        assert bench.end(warm) == bench.end(cold), place


def test_what_is_decoded_behind_a_restore_is_bit_equal(bench: VisionBench) -> None:
    context = contexts(bench)[2]
    stop = context.images[1].end

    def decoded(before: Sequence[Node]) -> tuple[list[int], dict[RecordKind, bytes]]:
        row = bench.open(context, before)
        bench.prefill(row, context, before, [stop])
        tokens = bench.decode([row], 4)[row]
        end = len(context.tokens) + 5
        what = Capture(start=(end - 1) // 256 * 256, end=end, kinds=(*bench.layout.kinds, RecordKind.LOGITS))
        result = bench.step(StepPlan(decode=Decode(rows=(row,), captures={row: what})))
        bench.step(StepPlan(close=(row,)))
        payloads = {kind: bytes(payload) for kind, payload in result.captured[row].items()}
        return [*tokens, result.picked[row].token], payloads

    assert decoded(bench.path_to(context, stop)) == decoded(())


def test_forks_and_rollbacks_with_another_image_behind_them_are_bit_equal(bench: VisionBench) -> None:
    trunk = (25, bench.prepare(64, 64, 1), 7)
    other = bench.prepare(96, 64, 5)
    parent = bench.run(bench.context(*trunk))
    children = [bench.context(*trunk, 30), bench.context(*trunk, other, 9), bench.context(*trunk, 4, other)]
    place = len(bench.context(*trunk).tokens)
    rows = [bench.open(child, parent) for child in children]  # all under way at once
    warm = [bench.prefill(row, child, parent, [place]) for row, child in zip(rows, children, strict=True)]
    bench.decode(rows, 3)
    bench.step(StepPlan(close=tuple(rows)))
    again = bench.run(children[1], [place], parent)  # back to the parent, whose children went on
    for child, nodes in zip(children, warm, strict=True):
        assert bench.end(nodes) == bench.end(bench.run(child, [place]))
    assert bench.end(again) == bench.end(warm[1])


def test_a_forked_suffix_with_an_image_across_a_blocks_end_restores_in_it_and_decodes_beside_others(
    bench: VisionBench,
) -> None:
    a, b = bench.prepare(64, 64, 1), bench.prepare(160, 96, 2)
    trunk = ((-len(a.ids) - 20) % BLOCK_TOKENS, a, 8)
    fork = len(bench.context(*trunk).tokens)
    parent = bench.run(bench.context(*trunk))
    child = bench.context(*trunk, b, 30)
    (_, image) = child.images
    edge = fork + 12
    assert edge % BLOCK_TOKENS == 0
    assert image.start < edge < image.end
    cold: dict[int, tuple[object, list[int]]] = {}
    warm: dict[RowId, int] = {}
    for place in (fork, *(() if bench.whole else (edge, image.start + 20)), image.end + 9):
        row = bench.open(child)
        end = bench.end(bench.prefill(row, child, (), [fork, place]))
        cold[place] = end, bench.decode([row], 4)[row]
        behind = bench.run(child.upto(place), [fork], parent) if place > fork else parent
        again = bench.open(child, behind)
        assert bench.end(bench.prefill(again, child, behind, [fork, place])) == end, place
        warm[again] = place
        bench.step(StepPlan(close=(row,)))
    text = bench.context(9, seed=3)
    other = bench.open(text)
    bench.prefill(other, text, (), ())
    tokens = bench.decode([other, *warm], 4)
    bench.step(StepPlan(close=(other, *warm)))
    assert {place: tokens[row] for row, place in warm.items()} == {place: told for place, (_, told) in cold.items()}


def test_a_rollback_of_a_rollback_goes_on_with_other_images_bit_equally(bench: VisionBench) -> None:
    a, b, c = (bench.prepare(64, 64, 1), bench.prepare(160, 96, 2), bench.prepare(96, 64, 3))
    first, second, third = bench.context(25, a, 9, b, 6), bench.context(25, a, 9, c, 11), bench.context(25, a, 9, b, b)
    back = len(bench.context(25, a, 9).tokens)
    further = first.images[0].end
    bench.run(first, [further, back])
    rolled = bench.path_to(first, back, [further])  # from behind the second image to before it
    assert bench.end(bench.run(second, [further, back], rolled)) == bench.end(bench.run(second, [further, back]))
    again = bench.path_to(second, further)  # and once more to before the text behind the first
    for context in (first, second, third):
        assert bench.end(bench.run(context, [further], again)) == bench.end(bench.run(context, [further]))


def test_rows_with_and_without_images_join_and_leave_and_pick_what_they_pick_alone(bench: VisionBench) -> None:
    a, b = bench.prepare(64, 64, 1), bench.prepare(160, 96, 2)
    mixed = [
        bench.context(9, a, 20),
        bench.context(31, seed=4),
        bench.context(5, b, 3, a),
        bench.context(77, seed=5),
        bench.context(a, 70),
    ]
    alone = [bench.answer(context, 9) for context in mixed]
    rng = random.Random(bench.name)
    for _ in range(2):
        waiting = list(range(len(mixed)))
        rng.shuffle(waiting)
        running: dict[RowId, int] = {}
        tokens: dict[RowId, list[int]] = {}
        while waiting or running:
            if waiting and (len(running) < 2 or rng.random() < 0.4):
                which = waiting.pop()
                row = bench.open(mixed[which])
                bench.prefill(row, mixed[which], (), ())
                tokens[row] = [bench.step(StepPlan(sample=(row,))).picked[row].token]
                running[row] = which
            picked = bench.step(StepPlan(decode=Decode(rows=tuple(running)))).picked
            for row, pick in picked.items():
                tokens[row].append(pick.token)
            for row in [row for row in running if len(tokens[row]) == 10]:
                assert tokens[row] == alone[running.pop(row)]
                bench.step(StepPlan(close=(row,)))


def test_other_pixels_another_order_and_another_size_give_other_logits(bench: VisionBench) -> None:
    a, b = bench.prepare(64, 64, 1), bench.prepare(64, 64, 2)
    seen = [logits(bench.run(bench.context(*parts, 4))) for parts in ((a, b), (b, a), (a, a), (a,))]
    if bench.name != "tiny-llava":  # to which all sizes are one
        seen.append(logits(bench.run(bench.context(bench.prepare(150, 130, 1), 4))))
    for i, one in enumerate(seen):
        assert all(np.abs(one - other).max() > 1e-4 for other in seen[:i])


def test_features_go_out_and_come_back(bench: VisionBench) -> None:
    context = bench.context(6, bench.prepare(64, 64, 3), 5)
    (image,) = context.prepared
    row = bench.open(context)
    encoded = bench.step(StepPlan(encode=(Encode(image=image),))).encoded[image.key]
    first = bench.end(bench.prefill(row, context, (), ()))
    bench.step(StepPlan(close=(row,)))
    bench.engine._features.clear()  # as if a while had gone by
    row = RowId(10_000)
    order = OpenRow(
        row=row, restored=None, sampling=None, top_logprobs=None, context=context.tokens, images=context.images
    )
    bench.step(StepPlan(open=(order,), give=(GivenFeatures(key=image.key, payload=encoded),)))
    assert bench.end(bench.prefill(row, context, (), ())) == first
    bench.step(StepPlan(close=(row,)))


def test_features_of_many_images_stay_within_the_engines_bytes() -> None:
    from service.engine.mlx_engine import MlxEngine

    bench = VisionBench("tiny-qwen3_5-vl")
    limit = 40_000  # nine images of 4 KiB
    bench.engine = MlxEngine(bench.model, bench.layout, bench.facts.footprint, feature_bytes=limit)
    held = set()
    for seed in range(30):
        context = bench.context(2, bench.prepare(64, 64, seed), 3)
        row = bench.open(context)
        bench.prefill(row, context, (), ())
        bench.step(StepPlan(close=(row,)))
        held.add(bench.engine.feature_bytes)
    assert held == {4096 * count for count in range(1, 10)}


def test_a_row_whose_image_cannot_be_encoded_ends_alone(bench: VisionBench) -> None:
    good, bad = bench.context(6, bench.prepare(64, 64, 3), 5), bench.context(6, bench.prepare(64, 64, 4), 5)
    (image,) = bad.prepared
    broken = type(image)(key=image.key, ids=image.ids, grid=image.grid, inputs={"pixel_values": np.zeros((1, 2))})
    well = bench.open(good)
    ill, missing = RowId(20_000), RowId(20_001)
    orders = [
        OpenRow(row=row, restored=None, sampling=GREEDY, top_logprobs=None, context=bad.tokens, images=bad.images)
        for row in (ill, missing)
    ]
    result = bench.engine.step(StepPlan(open=(orders[0],), encode=(Encode(image=broken),)))
    assert (result.failed.keys(), result.unencoded.keys(), result.encoded) == ({ill}, {image.key}, {})
    fed = Prefill(row=missing, tokens=bad.tokens, logits=True, capture=None)
    result = bench.engine.step(StepPlan(open=(orders[1],), prefill=(fed,)))
    assert list(result.failed) == [missing]
    assert "was not encoded" in str(result.failed[missing])
    bench.prefill(well, good, (), ())
    bench.step(StepPlan(close=(well,)))


def test_symbols_of_an_image_that_the_row_does_not_have_are_its_end(bench: VisionBench) -> None:
    image = bench.prepare(64, 64, 3)
    row = bench.open(bench.context(5))
    fed = Prefill(row=row, tokens=symbols(image.key, len(image.ids)), logits=True, capture=None)
    assert list(bench.engine.step(StepPlan(prefill=(fed,))).failed) == [row]


def test_one_call_gives_what_upstream_gives(bench: VisionBench) -> None:
    """Attention both ways apart, which upstream leaves to other paths: `test_vision_runs` has that."""
    import mlx.core as mx

    from service.engine.vision.families import Opens
    from service.engine.vision.model import VisionCalls

    if bench.whole:
        ours = VisionCalls(bench.model._model, image_id=bench.preparer.placeholder_id, opens=Opens.NO_LAYER)
    else:
        ours = bench.model
    a, b = bench.prepare(64, 64, 1), bench.prepare(64, 64, 2)
    model = bench.model._model
    tokens: list[int] = []
    images: list[RowImage] = []
    for image in (a, b):  # upstream finds an image by the token before it
        tokens += [30, 41, *bench.preparer.opening]
        images.append(RowImage(start=len(tokens), key=image.key, ids=image.ids, grid=image.grid))
        tokens += [*image.ids, *bench.preparer.closing, 52]
    caches = ours.caches()
    features = {image.key: ours.encode(image) for image in (a, b)}
    got = ours.prefill(tokens, 0, images, features, caches)
    ids = mx.array([tokens])
    axis = 1 if bench.name == "tiny-smolvlm" else 0
    inputs = {
        name: mx.array(np.concatenate([image.inputs[name] for image in (a, b)], axis=axis)) for name in a.inputs or ()
    }
    pixels = inputs.pop("pixel_values")
    made = model.get_input_embeddings(ids, pixels, mask=mx.ones(ids.shape, dtype=mx.int32), **inputs).to_dict()
    more = {name: value for name, value in made.items() if value is not None and name != "attention_mask_4d"}
    theirs = model.language_model(ids, cache=ours.caches(), **more).logits[:, -1]
    assert mx.abs(got - theirs).max().item() <= 1e-4 * mx.std(theirs).item()
