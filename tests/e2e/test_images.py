"""Images over a real channel: what is seen, kept, forked, rolled back, restarted, evicted, and never mixed up."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, Answer, LiveServer, adds_up, generate, greedy, prompt_of, raw, refused
from tests.images.malformed import cases
from tests.images.pictures import png

pytest.importorskip("mlx_vlm", reason="the vision extra is not installed")
pytestmark = [pytest.mark.mlx]

MODEL = "tiny-qwen3_5-vl"


def image(data: bytes) -> pb.Part:
    return pb.Part(image=pb.Image(data=data))


def known(data: bytes) -> pb.Part:
    """The same by its digest alone."""
    return pb.Part(image=pb.Image(sha256=hashlib.sha256(data).digest()))


def parts(*given: str | pb.Part) -> list[pb.Part]:
    return [pb.Part(text=each) if isinstance(each, str) else each for each in given]


def turn(*given: str | pb.Part, role: str = "user") -> pb.Input:
    message = pb.Message(role=pb.Role.Value(f"ROLE_{role.upper()}"), parts=parts(*given))
    return pb.Input(chat=pb.ChatInput(messages=[message]))


def plain(*given: str | pb.Part) -> pb.Input:
    return pb.Input(raw=pb.RawInput(parts=parts(*given)))


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(MODEL) as live:
        yield live


@pytest.fixture(scope="module")
def cold() -> Iterator[LiveServer]:
    """Where nothing but the call at hand was ever computed: its store is emptied before each answer."""
    with LiveServer(MODEL) as live:
        yield live


def cold_answer(cold: LiveServer, given: pb.Input, tokens: int = 12) -> list[int]:
    cold.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
    answer = generate(cold, greedy(given, tokens=tokens))
    assert answer.usage.cached_tokens == 0
    return answer.ids


def create(
    server: LiveServer, given: pb.Input, parent: str = "", **options: object
) -> inference_pb.CreateSnapshotResponse:
    request = inference_pb.CreateSnapshotRequest(parent=parent, input=given, options=pb.SnapshotOptions(**options))
    made = server.inference.CreateSnapshot(request, timeout=PATIENCE)
    adds_up(made.usage)
    return made


def encoded(server: LiveServer) -> int:
    return server.stats().images_encoded


def tokens_of(server: LiveServer, name: str) -> list[int]:
    request = snapshot_pb.GetSnapshotRequest(name=name, include_tokens=True)
    return list(server.snapshots.GetSnapshot(request).token_ids)


def test_a_picture_is_seen_and_another_picture_gives_another_answer(server: LiveServer) -> None:
    assert server.model().vision
    answers = [generate(server, greedy(turn(image(png(seed)), "What is this?"))) for seed in (1, 2)]
    one, other = answers
    assert one.ids != other.ids
    for answer in answers:
        assert answer.usage.image_tokens == 80  # 160 × 128 pixels in patches of 8, four to a position
        assert answer.usage.prompt_tokens > 80
    # The same pixels in another file are the same picture, and their state is there.
    again = generate(server, greedy(turn(image(png(1, kind="WEBP")), "What is this?")))
    assert again.ids == one.ids


def test_questions_behind_a_snapshot_compute_the_question_alone(server: LiveServer, cold: LiveServer) -> None:
    picture = image(png(3, 320, 320))
    kept = create(server, plain("Look: ", picture, " Well. "))
    spans = [(span.start, span.end) for span in kept.snapshot.image_spans]
    assert len(spans) == 1 and spans[0][1] - spans[0][0] == 400
    assert kept.usage.image_tokens == 400
    before = encoded(server)
    fork = inference_pb.ForkRequest(
        parent=kept.snapshot.name,
        branches=[inference_pb.ForkBranch(append=raw(f"Question {n}?")) for n in range(3)],
    )
    children = server.inference.Fork(fork, timeout=PATIENCE)
    adds_up(children.usage)
    assert children.usage.image_tokens == 400
    for n, child in enumerate(children.snapshots):
        answer = generate(server, greedy(None, parent=child.name, tokens=12))
        assert answer.usage.recomputed_tokens == answer.usage.new_tokens == 0
        assert answer.ids == cold_answer(cold, plain("Look: ", picture, " Well. ", f"Question {n}?"))
        assert [(span.start, span.end) for span in child.image_spans] == spans
    assert encoded(server) == before


def test_callers_see_the_placeholder_where_an_image_is(server: LiveServer) -> None:
    given = turn("Before ", image(png(4)), " between ", image(png(5)), " behind")
    kept = create(server, given)
    spans = [(span.start, span.end) for span in kept.snapshot.image_spans]
    assert [end - start for start, end in spans] == [80, 80]
    ids = tokens_of(server, kept.snapshot.name)
    inside = {token for start, end in spans for token in ids[start:end]}
    assert len(inside) == 1
    assert max(ids) < server.model().vocab_size
    (placeholder,) = inside
    assert ids.count(placeholder) == 160
    request = inference_pb.CountTokensRequest(input=given, include_rendered=True)
    counted = server.inference.CountTokens(request, timeout=PATIENCE)
    assert list(counted.token_ids) == ids
    assert (counted.total_tokens, counted.image_tokens) == (len(ids), 160)
    assert counted.text.count("<|vision_start|><|image_pad|><|vision_end|>") == 2
    assert "Before <|vision_start|>" in counted.text


def test_an_image_may_come_first_last_next_to_another_and_in_the_forked_part(
    server: LiveServer, cold: LiveServer
) -> None:
    a, b, c = (image(png(seed, 96, 64)) for seed in (6, 7, 8))
    for given in (
        plain(a, " first"),
        plain("last ", a),
        plain(a, b, c),
        plain("x ", a, a, " y"),
        plain("x", b, "y", a),
    ):
        kept = create(server, given)
        appended = plain(" then ", c, " and?")
        answer = generate(server, greedy(appended, parent=kept.snapshot.name, tokens=10))
        assert answer.usage.cached_tokens == kept.snapshot.token_count
        whole = pb.Input(raw=pb.RawInput(parts=[*given.raw.parts, *appended.raw.parts]))
        assert answer.ids == cold_answer(cold, whole, 10)


def test_turns_with_images_are_appended_to_a_chat(server: LiveServer) -> None:
    first = generate(server, greedy(turn(image(png(9)), "What?"), tokens=8, save=pb.SnapshotOptions()))
    saved = first.finished.snapshot
    closing = pb.Message(role=pb.ROLE_ASSISTANT, parts=parts(" so be it."))
    asking = pb.Message(role=pb.ROLE_USER, parts=parts("And ", image(png(10)), "?"))
    second = generate(
        server,
        greedy(pb.Input(chat=pb.ChatInput(messages=[closing, asking])), parent=saved.name, tokens=8),
    )
    assert second.usage.image_tokens == 160
    assert second.usage.cached_tokens == saved.token_count
    into_open_turn = pb.Message(role=pb.ROLE_ASSISTANT, parts=parts(image(png(10))))
    refusal = refused(
        lambda: server.inference.Generate(
            greedy(pb.Input(chat=pb.ChatInput(messages=[into_open_turn])), parent=saved.name), timeout=PATIENCE
        )
    )
    assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", ("input.chat.messages[0]",))


def test_a_cut_inside_an_image_is_refused_or_rounded_down_to_its_start(server: LiveServer) -> None:
    kept = create(server, plain("Some words before it: ", image(png(11)), " and some behind it."))
    (span,) = kept.snapshot.image_spans
    inside = span.start + 7

    def back(rounding: int) -> inference_pb.RollbackRequest:
        return inference_pb.RollbackRequest(source=kept.snapshot.name, token_count=inside, rounding=rounding)

    refusal = refused(lambda: server.inference.Rollback(back(inference_pb.ROUNDING_EXACT), timeout=PATIENCE))
    assert (refusal.code, refusal.reason, refusal.fields) == ("INVALID_ARGUMENT", "CUT_INSIDE_IMAGE", ("token_count",))
    assert refusal.metadata == {"start": str(span.start), "end": str(span.end)}
    mark = pb.Mark(token_count=inside)
    request = greedy(plain("Some words before it: ", image(png(11)), "?"), marks=[mark])
    refusal = refused(lambda: server.inference.Generate(request, timeout=PATIENCE))
    assert (refusal.reason, refusal.fields) == ("CUT_INSIDE_IMAGE", ("marks[0].token_count",))
    # At the image's two ends a cut is as good as anywhere, and computed again where nothing is kept.
    for position in (span.start, span.end):
        exact = inference_pb.RollbackRequest(source=kept.snapshot.name, token_count=position)
        made = server.inference.Rollback(exact, timeout=PATIENCE)
        assert made.snapshot.token_count == position
        adds_up(made.usage)
    down = server.inference.Rollback(back(inference_pb.ROUNDING_DOWN), timeout=PATIENCE)
    assert down.snapshot.token_count == span.start
    assert not down.snapshot.image_spans


def test_a_digest_stands_for_a_file_of_the_same_caller(server: LiveServer) -> None:
    data = png(12)
    refusal = refused(lambda: server.inference.Generate(greedy(turn(known(data), "What?")), timeout=PATIENCE))
    digest = hashlib.sha256(data).hexdigest()
    assert (refusal.code, refusal.reason, refusal.metadata) == (
        "FAILED_PRECONDITION",
        "IMAGE_NOT_HELD",
        {"sha256": digest},
    )
    sent = generate(server, greedy(turn(image(data), "What?")))
    again = generate(server, greedy(turn(known(data), "What?")))
    assert again.ids == sent.ids


def test_eight_callers_of_one_image_have_it_encoded_once(server: LiveServer) -> None:
    given = [turn(image(png(13, 256, 256)), f"Question {n}") for n in range(8)]
    before = encoded(server)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda g: generate(server, greedy(g)), given))
    assert encoded(server) == before + 1
    assert {answer.usage.image_tokens for answer in answers} == {256}


@pytest.mark.slow
def test_features_of_a_hundred_images_stay_within_the_budgets() -> None:
    """16 KiB of features an image, ten of which fit into both tiers, beside what else is stored."""
    memory, disk = 128 << 10, 256 << 10
    flags = ("--memory-bytes", str(memory), "--disk-bytes", str(disk))
    with LiveServer(MODEL, *flags) as live:
        first = generate(live, greedy(plain(image(png(1000, 128, 128)), "?"), tokens=4))
        for seed in range(1001, 1100):
            generate(live, greedy(plain(image(png(seed, 128, 128)), "?"), tokens=1))
            stats = live.stats()
            assert stats.memory_bytes <= stats.memory_limit_bytes == memory
            assert stats.disk_bytes <= stats.disk_limit_bytes == disk
        assert encoded(live) == 100
        assert stats.evictions > 0
        again = generate(live, greedy(plain(image(png(1000, 128, 128)), "?"), tokens=4))
        assert (again.ids, encoded(live)) == (first.ids, 101)  # long gone, and made once more


def test_images_and_text_in_one_batch_say_what_they_say_alone(server: LiveServer, cold: LiveServer) -> None:
    seen = [turn(image(png(20 + n, 96 + 32 * n, 96)), f"Question {n}") for n in range(4)]
    read = [raw(prompt_of(60 + 90 * n, seed=n)) for n in range(4)]
    given = [each for pair in zip(seen, read, strict=True) for each in pair]
    alone = [cold_answer(cold, each, 24) for each in given]
    with ThreadPoolExecutor(8) as pool:
        together: list[Answer] = list(pool.map(lambda g: generate(server, greedy(g, tokens=24)), given))
    assert [answer.ids for answer in together] == alone


def test_state_that_was_evicted_is_computed_again_from_the_held_file(server: LiveServer) -> None:
    kept = create(server, plain("Once: ", image(png(14, 320, 320)), " so."))
    first = generate(server, greedy(raw("Why?"), parent=kept.snapshot.name))
    server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
    second = generate(server, greedy(raw("Why?"), parent=kept.snapshot.name))
    assert second.ids == first.ids
    assert second.usage.recomputed_tokens == kept.snapshot.token_count
    assert second.usage.image_tokens == 400


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_durable_snapshot_with_an_image_goes_on_after_a_restart(tmp_path: Path, how: signal.Signals) -> None:
    with LiveServer(MODEL, "--store-dir", str(tmp_path)) as live:
        made = create(live, plain("Kept ", image(png(15, 320, 320)), "!"), durability=pb.DURABILITY_DISK)
        kept = made.snapshot
        before = generate(live, greedy(raw(" Now?"), parent=kept.name)).ids
        ids = tokens_of(live, kept.name)
        if how is signal.SIGKILL:
            live.kill()
        else:
            assert live.terminate() == 0
    with LiveServer(MODEL, "--store-dir", str(tmp_path)) as live:
        assert tokens_of(live, kept.name) == ids
        found = live.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=kept.name)).snapshot
        assert list(found.image_spans) == list(kept.image_spans)
        warm = generate(live, greedy(raw(" Now?"), parent=kept.name))
        assert (warm.ids, warm.usage.recomputed_tokens, encoded(live)) == (before, 0, 0)
        live.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
        again = generate(live, greedy(raw(" Now?"), parent=kept.name))
        assert (again.ids, encoded(live)) == (before, 1)
        assert generate(live, greedy(turn(known(png(15, 320, 320)), "You?"))).usage.image_tokens == 400
        live.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=kept.name), timeout=PATIENCE)


def test_files_are_let_go_of_with_the_last_snapshot_that_needs_them() -> None:
    data, more = png(16), png(17)
    with LiveServer(MODEL, "--image-bytes", str(len(data) + len(more) // 2)) as live:
        kept = create(live, plain(image(data), "x")).snapshot
        child = create(live, raw("more"), parent=kept.name).snapshot
        live.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=kept.name), timeout=PATIENCE)
        refusal = refused(lambda: live.inference.Generate(greedy(plain(image(more), "y")), timeout=PATIENCE))
        assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "IMAGE_MEMORY")
        assert refusal.retry_seconds
        live.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=child.name), timeout=PATIENCE)
        assert generate(live, greedy(plain(image(more), "y"))).usage.image_tokens == 80
        assert live.stats().image_bytes == len(more)


def test_every_wrong_image_is_named_by_its_place(server: LiveServer) -> None:
    message = pb.Message(role=pb.ROLE_USER, parts=parts("a", image(png(1)), image(b"GIF89a"), "b", image(png(1)[:-40])))
    chat = pb.ChatInput(messages=[pb.Message(role=pb.ROLE_SYSTEM, parts=parts("s")), message])
    refusal = refused(lambda: server.inference.Generate(greedy(pb.Input(chat=chat)), timeout=PATIENCE))
    assert refusal.code == "INVALID_ARGUMENT"
    assert refusal.fields == ("input.chat.messages[1].parts[2].image", "input.chat.messages[1].parts[4].image")
    append = inference_pb.ForkBranch(append=plain("x", image(b"<svg/>")))
    kept = create(server, raw("x")).snapshot
    fork = inference_pb.ForkRequest(parent=kept.name, branches=[inference_pb.ForkBranch(), append])
    refusal = refused(lambda: server.inference.Fork(fork, timeout=PATIENCE))
    assert (refusal.reason, refusal.fields) == ("IMAGE_UNSUPPORTED", ("branches[1].append.raw.parts[1].image",))


def test_a_text_model_refuses_images_and_their_digests(server_for: Callable[[str], LiveServer]) -> None:
    text = server_for("tiny-llama")
    assert not text.model().vision
    for part in (image(png(1)), known(png(1))):
        refusal = refused(lambda part=part: text.inference.Generate(greedy(plain("a", part)), timeout=PATIENCE))
        assert (refusal.code, refusal.reason, refusal.fields) == (
            "INVALID_ARGUMENT",
            "IMAGE_UNSUPPORTED",
            ("input.raw.parts[1].image",),
        )


def test_text_that_spells_an_image_is_refused(server: LiveServer) -> None:
    for given, field in (
        (raw("see <|image_pad|>"), "input.raw.parts[0]"),
        (turn(image(png(1)), "<|image_pad|>"), "input.chat.messages[0].parts[1]"),
    ):
        refusal = refused(lambda given=given: server.inference.Generate(greedy(given), timeout=PATIENCE))
        assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", (field,))


def test_malformed_files_get_their_answers_and_the_server_stays_small(server: LiveServer) -> None:
    before = server.resident_bytes
    for case in cases():
        part = pb.Part(image=pb.Image(data=case.build(), mime_type=case.mime_type))
        request = inference_pb.CountTokensRequest(input=plain(part))
        if case.answer is None:
            assert server.inference.CountTokens(request, timeout=PATIENCE).image_tokens > 0, case.name
        else:
            refusal = refused(lambda request=request: server.inference.CountTokens(request, timeout=PATIENCE))
            assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", case.answer), case.name
            assert refusal.fields == ("input.raw.parts[0].image",), case.name
    assert server.resident_bytes - before < 300 << 20
    assert generate(server, greedy(turn(image(png(1)), "What is this?"))).usage.image_tokens == 80
