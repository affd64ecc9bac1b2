"""Every vision family over a real channel: an answer is the same cold, behind a snapshot, a fork and a rollback."""

from __future__ import annotations

from itertools import combinations

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, Answer, LiveServer, adds_up, generate, greedy
from tests.e2e.test_images import create, encoded, image, plain
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


def trim(live: LiveServer) -> None:
    live.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))


def told(live: LiveServer, given: pb.Input | None, parent: str = "") -> Answer:
    output = inference_pb.OutputOptions(token_ids=True, top_logprobs=5)
    return generate(live, greedy(given, parent=parent, tokens=TOKENS, output=output))


def distance(one: Answer, other: Answer) -> float:
    """The largest difference of the five largest log-probabilities: tiny models like to say the same."""
    mine, theirs = ([top.logprob for entry in answer.logprobs for top in entry.top] for answer in (one, other))
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_about_images_is_the_same_cold_and_behind_all_that_is_kept(name: str) -> None:
    head, body = ("Look: ", A), (" Well. ",)
    appends = {"text": (" Why?",), "image": (" And then ", B, " so?"), "instead": (" Or ", B)}
    with LiveServer(name) as live:
        assert live.model().vision
        want: dict[str, Answer] = {}
        for what, appended in appends.items():
            trim(live)
            want[what] = told(live, plain(*head, *(() if what == "instead" else body), *appended))
            assert want[what].usage.cached_tokens == 0
        assert all(distance(want[one], want[other]) > 0.01 for one, other in combinations(appends, 2))
        kept = create(live, plain(*head, *body)).snapshot
        before = encoded(live)

        def answered(parent: str, what: str, *, computed: bool) -> None:
            given = plain(*appends[what]) if computed else None
            answer = told(live, given, parent)
            assert answer.ids == want[what].ids
            assert distance(answer, want[what]) < 0.001  # a snapshot cuts the prompt's calls, and that moves last bits
            assert answer.usage.recomputed_tokens == 0
            assert computed or answer.usage.new_tokens == 0

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
