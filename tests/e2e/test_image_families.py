"""Every vision family over a real channel: an answer is the same cold, behind a snapshot, a fork and a rollback."""

from __future__ import annotations

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb

from tests.e2e.live import PATIENCE, LiveServer, adds_up, generate, greedy
from tests.e2e.test_images import cold_answer, create, encoded, image, plain
from tests.images.pictures import png

pytest.importorskip("mlx_vlm", reason="the vision extra is not installed")
pytestmark = [pytest.mark.mlx]

QUICK = ("tiny-gemma3-vl",)  # an image is prefilled whole; `test_images` has the other kind
SLOW = (
    "tiny-qwen3_5-vl",
    "tiny-qwen3-vl",
    "tiny-gemma4-vl",
    "tiny-smolvlm",
    "tiny-mistral3",
    "tiny-lfm2-vl",
    "tiny-llava",
)
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]

A, B = image(png(1, 150, 130)), image(png(2, 96, 64))
TOKENS = 10


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_about_images_is_the_same_cold_and_behind_all_that_is_kept(name: str) -> None:
    head, body = ("Look: ", A), (" Well. ",)
    appends = {"text": (" Why?",), "image": (" And then ", B, " so?"), "instead": (" Or ", B)}
    with LiveServer(name) as live:
        assert live.model().vision
        want = {
            what: cold_answer(live, plain(*head, *(() if what == "instead" else body), *appended), TOKENS)
            for what, appended in appends.items()
        }
        assert len({tuple(ids) for ids in want.values()}) == 3
        kept = create(live, plain(*head, *body)).snapshot
        before = encoded(live)

        def answered(parent: str, what: str, *, computed: bool) -> None:
            given = plain(*appends[what]) if computed else None
            answer = generate(live, greedy(given, parent=parent, tokens=TOKENS))
            assert answer.ids == want[what]
            assert answer.usage.recomputed_tokens == 0
            assert (answer.usage.new_tokens > 0) == computed

        answered(kept.name, "text", computed=True)
        answered(kept.name, "image", computed=True)
        branches = [inference_pb.ForkBranch(append=plain(*appends[what])) for what in ("text", "image")]
        forked = live.inference.Fork(inference_pb.ForkRequest(parent=kept.name, branches=branches), timeout=PATIENCE)
        adds_up(forked.usage)
        for child, what in zip(forked.snapshots, ("text", "image"), strict=True):
            answered(child.name, what, computed=False)
        counted = live.inference.CountTokens(inference_pb.CountTokensRequest(input=plain(*head)), timeout=PATIENCE)
        for source in (kept.name, forked.snapshots[1].name):  # and once from behind the other image
            back = inference_pb.RollbackRequest(source=source, token_count=counted.total_tokens)
            made = live.inference.Rollback(back, timeout=PATIENCE)
            assert len(made.snapshot.image_spans) == 1
            answered(made.snapshot.name, "instead", computed=True)
        answered(kept.name, "text", computed=True)  # the parent of all is as it was
        assert encoded(live) - before <= 1  # the second image: what is restored is never encoded
