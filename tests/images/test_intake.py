"""A call's images: whose they are, how long they are held, and what is said of those that are refused."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest

from kvcache.media import MediaKey, symbols, tag_for
from service.errors import ImageMemory, ImageNotHeld, InvalidField
from service.images.intake import CallImages, Intake
from service.images.limits import ImageLimits
from service.images.uploads import Uploads
from service.media import ImageRefused, Picture, Prepared
from service.request import ChatInput, ImagePart, Input, Message, RawInput, Role, TextPart
from tests.images.malformed import encoded, picture

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=48 * 32)
T = TypeVar("T")


@dataclass
class OneCell:
    """A model that sees a picture at eight positions."""

    placeholder_id: int = 3
    marker_id: int = 3
    marker: str = "<image>"
    written: str = "<image>"
    whole_images: bool = False
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    prepared: list[bytes] = field(default_factory=list)
    gate: threading.Event | None = None

    def prepare(self, picture: Picture) -> Prepared:
        if self.gate is not None:
            assert self.gate.wait(10)
        if min(picture.size) < 2:
            raise ImageRefused("IMAGE_SHAPE", "is too thin for this model")
        self.prepared.append(picture.digest)
        key = MediaKey(hashlib.sha256(picture.digest).digest())
        return Prepared(key=key, ids=(3,) * 8, grid=(), inputs={"pixels": np.zeros(4, np.float32)})


def file(seed: int, **options: object) -> bytes:
    return encoded(picture(seed=seed), **options)


def sent(*files: bytes) -> Input:
    return RawInput(parts=(TextPart("x"), *(ImagePart(data=data) for data in files)))


def named(data: bytes) -> Input:
    return RawInput(parts=(ImagePart(sha256=hashlib.sha256(data).digest()),))


def run(test: Callable[[Intake], Coroutine[None, None, T]]) -> T:
    intake = Intake(LIMITS)
    try:
        return asyncio.run(test(intake))
    finally:
        intake.close()


def call(intake: Intake, uploads: Uploads, held: ExitStack, model: OneCell | None, owner: str = "a") -> CallImages:
    return intake.call(owner, model, uploads, held)


async def refusal(work: Awaitable[object]) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        await work
    return caught.value


def test_a_file_is_decoded_once_for_all_who_send_or_name_it() -> None:
    uploads, model = Uploads(1 << 20), OneCell()

    async def test(intake: Intake) -> None:
        with ExitStack() as held:
            taken = [call(intake, uploads, held, model).take(sent(file(1)), "input") for _ in range(5)]
            layouts = await asyncio.gather(*taken)
            again = await call(intake, uploads, held, model).take(named(file(1)), "input")
            assert len({image.key for (image,) in (*layouts, again)}) == 1
            assert [image.inputs for image in again] == [None]
        assert len(model.prepared) == 1
        assert len(uploads) == 1  # held by nobody, and still there to be named
        with ExitStack() as held:
            await call(intake, uploads, held, model).take(named(file(1)), "input")

    run(test)


def test_the_same_pixels_in_two_files_are_one_image_with_two_digests() -> None:
    uploads, model = Uploads(1 << 20), OneCell()

    async def test(intake: Intake) -> None:
        with ExitStack() as held:
            images = call(intake, uploads, held, model)
            one, other = file(1), file(1, compress_level=0)
            taken = await images.take(sent(one, other), "input")
            assert taken[0].key == taken[1].key
            assert (len(uploads), uploads.total_bytes) == (1, len(one))
            assert await images.take(named(other), "input")

    run(test)


def test_an_owner_never_finds_another_owner_s_image() -> None:
    uploads, model = Uploads(1 << 20), OneCell()

    async def test(intake: Intake) -> None:
        with ExitStack() as held:
            await call(intake, uploads, held, model).take(sent(file(1)), "input")
            with pytest.raises(ImageNotHeld) as caught:
                await call(intake, uploads, held, model, owner="b").take(named(file(1)), "input")
            assert caught.value.metadata == {"sha256": hashlib.sha256(file(1)).hexdigest()}
            run_of = symbols((await call(intake, uploads, held, model).take(named(file(1)), "input"))[0].key, 8)
            with pytest.raises(ImageNotHeld):
                await call(intake, uploads, held, model, owner="b").placed(run_of)
            (found,) = await call(intake, uploads, held, model).placed([1, *run_of])
            assert found.start == 1

    run(test)


def test_every_refused_image_is_named_and_nothing_stays_held() -> None:
    uploads, model = Uploads(1 << 20), OneCell()
    parts = (ImagePart(data=file(1)), ImagePart(data=b"GIF89a"), TextPart("x"), ImagePart(data=encoded(picture(9, 1))))
    given = ChatInput(messages=(Message(Role.USER, (TextPart("a"),)), Message(Role.USER, parts)))

    async def test(intake: Intake) -> None:
        with ExitStack() as held:
            error = await refusal(call(intake, uploads, held, model).take(given, "branches[3].append"))
            at = "branches[3].append.chat.messages[1].parts"
            assert [violation.field for violation in error.fields] == [f"{at}[1].image", f"{at}[3].image"]
            assert error.reason == "IMAGE_UNSUPPORTED"
        with ExitStack() as held:
            error = await refusal(call(intake, uploads, held, None).take(given, "input"))
            assert (error.reason, error.fields[0].field) == (
                "IMAGE_UNSUPPORTED",
                "input.chat.messages[1].parts[0].image",
            )

    run(test)
    assert not [upload for upload in uploads._by_tag.values() if upload.holds]


def test_the_images_of_a_call_are_bounded_together() -> None:
    model = OneCell()

    async def test(intake: Intake) -> None:
        with ExitStack() as held:
            uploads = Uploads(1 << 20)
            assert len(await call(intake, uploads, held, model).take(sent(*[file(n) for n in range(4)]), "input")) == 4
            images = call(intake, uploads, held, model)
            await images.take(sent(file(10), file(11)), "branches[0].append")
            error = await refusal(images.take(sent(file(12), file(13), file(14)), "branches[1].append"))
            assert (error.reason, error.fields[0].field) == (
                "IMAGE_TOO_LARGE",
                "branches[1].append.raw.parts[3].image",
            )

    run(test)


def test_what_nobody_holds_makes_room_and_what_is_held_does_not() -> None:
    model = OneCell()
    size = max(len(file(n)) for n in range(3))

    async def test(intake: Intake) -> None:
        uploads = Uploads(2 * size)
        with ExitStack() as held:
            await call(intake, uploads, held, model).take(sent(file(0)), "input")
        with ExitStack() as held:
            await call(intake, uploads, held, model).take(sent(file(1), file(2)), "input")
            with pytest.raises(ImageNotHeld):
                await call(intake, uploads, held, model).take(named(file(0)), "input")
            with pytest.raises(ImageMemory):
                await call(intake, uploads, held, model).take(sent(file(3)), "input")
        with ExitStack() as held:
            await call(intake, uploads, held, model).take(sent(file(3)), "input")
        assert uploads.total_bytes <= 2 * size

    run(test)


def test_snapshots_hold_files_and_time_ends_what_nobody_holds() -> None:
    now = [0.0]
    uploads = Uploads(1 << 20, grace=60.0, clock=lambda: now[0])
    layout = Prepared(key=MediaKey(b"k" * 32), ids=(3,) * 8, grid=(), inputs=None)
    tag = tag_for(layout.key, 8)
    uploads.release([uploads.put("a", b"d" * 32, b"file", layout)])
    uploads.keep("a", {tag})
    now[0] = 1000.0
    assert uploads.find("a", b"d" * 32) is not None
    assert uploads.file_of("a", tag) == b"file"
    assert uploads.file_of("b", tag) is None
    for _ in range(2):
        uploads.let_go("a", {tag})
    now[0] = 1059.0
    found = uploads.find("a", b"d" * 32)
    assert found is not None
    uploads.release([found])
    now[0] = 1120.0
    assert uploads.find("a", b"d" * 32) is None
    assert uploads.hold("a", [tag]) is not None  # nothing has come to take its place


def test_a_cancelled_call_leaves_nothing_behind() -> None:
    uploads, model = Uploads(1 << 20), OneCell(gate=threading.Event())

    async def test(intake: Intake) -> None:
        with ExitStack() as held:
            task = asyncio.ensure_future(call(intake, uploads, held, model).take(sent(file(1), file(2)), "input"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert model.gate is not None
        model.gate.set()
        assert not intake._arriving

    run(test)
    assert not [upload for upload in uploads._by_tag.values() if upload.holds]


def test_after_a_restart_a_file_is_prepared_again_when_it_is_asked_for() -> None:
    uploads, model = Uploads(1 << 20), OneCell()

    async def test(intake: Intake) -> None:
        with ExitStack() as held:
            (layout,) = await call(intake, uploads, held, model).take(sent(file(1)), "input")
        tag = tag_for(layout.key, 8)
        fresh = Uploads(0)  # what a durable store has is held whatever the limit is
        fresh.found("a", tag, file(1))
        fresh.keep("a", {tag})
        with ExitStack() as held:
            (placed,) = await call(Intake(LIMITS), fresh, held, model).placed(symbols(layout.key, 8))
            assert (placed.layout.key, placed.layout.ids) == (layout.key, layout.ids)
            assert fresh.find("a", hashlib.sha256(file(1)).digest()) is not None
            made: asyncio.Future[Prepared | Exception] = asyncio.get_running_loop().create_future()
            loop = asyncio.get_running_loop()
            placed.load(lambda result: loop.call_soon_threadsafe(made.set_result, result))
            result = await made
            assert isinstance(result, Prepared) and result.inputs is not None

    run(test)
