"""A call's images: from what the request holds to what the model's processor makes of it. Owns the threads for that.

Runs on the event loop; files are looked through, decoded and prepared on threads of its own, within a bound on the
pixels that are decoded at the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvcache.media import MIN_POSITIONS, MediaTag, spans_of
from service.errors import FieldViolation, ImageNotHeld, InvalidField
from service.images.decode import decode, judge
from service.images.header import Header
from service.images.limits import INVALID, TOO_LARGE, UNSUPPORTED, ImageLimits
from service.images.uploads import Upload, Uploads, digest_of
from service.media import ImageRefused, Prepared, Preparer
from service.request import ImagePart, Input, images_of
from service.work import WorkImage

THREADS = 2
READY_BYTES = 256 << 20  # of arrays for the vision tower that wait for it; those beyond are made again from the file

T = TypeVar("T")


class Intake:
    """One per process."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="image")
        self._gate = _PixelGate(limits.max_pixels)
        self._ready = _Ready(READY_BYTES)
        self._arriving: dict[tuple[str, bytes], tuple[asyncio.Lock, int]] = {}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def call(self, owner: str, preparer: Preparer | None, uploads: Uploads, held: ExitStack) -> CallImages:
        """For one call: its images are held in `uploads` until `held` is closed."""
        return CallImages(self, owner, preparer, uploads, held)

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def load(self, upload: Upload, preparer: Preparer, done: Callable[[Prepared | Exception], None]) -> None:
        """`prepared` on a thread; see `WorkImage.load`."""

        def work() -> None:
            try:
                done(self.prepared(upload, preparer))
            except Exception as error:  # whatever it is, a row waits for an answer
                done(error)

        try:
            self._threads.submit(work)
        except RuntimeError as error:  # the service is closing
            done(error)

    def prepared(self, upload: Upload, preparer: Preparer) -> Prepared:
        """With inputs, made again from the file if need be; on a thread of whoever asks. Raises ImageRefused."""
        ready = self._ready.get(upload.owner, upload.tag)
        if ready is not None:
            return ready
        file_limits = ImageLimits(max_bytes=len(upload.file), max_pixels=self.limits.max_pixels)
        return self.prepare(judge(upload.file, "", file_limits), preparer)

    def prepare(self, header: Header, preparer: Preparer) -> Prepared:
        """Decodes and prepares, once there is room for the pixels. Raises ImageRefused."""
        with self._gate.room(header.pixels):
            prepared = preparer.prepare(decode(header))
        if len(prepared.ids) < MIN_POSITIONS:
            raise ImageRefused(UNSUPPORTED, f"is too small: the model sees it at {len(prepared.ids)} positions")
        return prepared

    def make_ready(self, upload: Upload, prepared: Prepared) -> None:
        """Keeps the inputs for whoever asks next, as far as there is room."""
        self._ready.put(upload.owner, upload.tag, prepared)

    @contextmanager
    def one_at_a_time(self, owner: str, digest: bytes) -> Iterator[asyncio.Lock]:
        """Callers who send the same file at once: the first decodes it."""
        key = (owner, digest)
        lock, users = self._arriving.get(key, (asyncio.Lock(), 0))
        self._arriving[key] = (lock, users + 1)
        try:
            yield lock
        finally:
            lock, users = self._arriving.pop(key)
            if users > 1:
                self._arriving[key] = (lock, users - 1)


@dataclass(slots=True, eq=False)
class CallImages:
    """One call's images, all of its inputs together."""

    intake: Intake
    owner: str
    preparer: Preparer | None
    uploads: Uploads
    held: ExitStack
    pixels: int = 0  # decoded for this call

    async def take(self, given: Input | None, at: str) -> tuple[Prepared, ...]:
        """The layout of each image of an input, in reading order.

        InvalidField with every image that is refused; ImageNotHeld, ImageMemory.
        """
        images = images_of(given, at)
        if not images:
            return ()
        if self.preparer is None:
            path = images[0][0]
            raise InvalidField.at(path, "the model takes no images: text and tokens only", reason=UNSUPPORTED)
        layouts: list[Prepared] = []
        wrong: list[tuple[FieldViolation, str]] = []
        for path, image in images:
            try:
                upload = await self._take(image, path, self.preparer)
            except ImageRefused as refused:
                reason = refused.reason if refused.reason in (INVALID, TOO_LARGE) else UNSUPPORTED  # a model's own word
                wrong.append((FieldViolation(path, str(refused)), reason))
                continue
            self.held.callback(self.uploads.release, (upload,))
            assert upload.layout is not None
            layouts.append(upload.layout)
        if wrong:
            reasons = {reason for _, reason in wrong}
            text = "; ".join(f"{violation.field}: {violation.text}" for violation, _ in wrong)
            fields = tuple(violation for violation, _ in wrong)
            raise InvalidField(text, fields=fields, reason=reasons.pop() if len(reasons) == 1 else INVALID)
        return tuple(layouts)

    async def placed(self, tokens: Sequence[int]) -> tuple[WorkImage, ...]:
        """Every image of a context, the parent's included, ready to be computed again."""
        spans = spans_of(tokens)
        if not spans:
            return ()
        uploads = self.uploads.hold(self.owner, dict.fromkeys(span.tag for span in spans))
        if uploads is None or self.preparer is None:
            raise ImageNotHeld(
                "an image of the context is not held any more", hint="send the whole context with the image's bytes"
            )
        self.held.callback(self.uploads.release, uploads)
        by_tag: dict[MediaTag, Upload] = {upload.tag: upload for upload in uploads}
        for upload in uploads:
            if upload.layout is None:  # from before a restart
                upload.layout = await self._layout_again(upload, self.preparer)
        return tuple(self._work_image(span.start, by_tag[span.tag], self.preparer) for span in spans)

    def hold_on(self, tokens: Sequence[int]) -> None:
        """Holds the images of a context for longer than the call that has them now."""
        uploads = self.uploads.hold(self.owner, dict.fromkeys(span.tag for span in spans_of(tokens)))
        self.held.callback(self.uploads.release, uploads or ())

    async def _take(self, image: ImagePart, path: str, preparer: Preparer) -> Upload:
        uploads = self.uploads
        if image.data is None:
            assert image.sha256 is not None
            upload = uploads.find(self.owner, image.sha256)
            if upload is None:
                facts = {"sha256": image.sha256.hex()}
                raise ImageNotHeld(f"{path}: no image with this SHA-256 is held", hint="send its bytes", metadata=facts)
            return await self._with_layout(upload, preparer)
        data = image.data
        digest = await self.intake.on_thread(lambda: digest_of(data))
        with self.intake.one_at_a_time(self.owner, digest) as turn:
            async with turn:
                header = await self.intake.on_thread(lambda: judge(data, image.mime_type, self.intake.limits))
                known = uploads.find(self.owner, digest)
                if known is not None:
                    return await self._with_layout(known, preparer)
                self.pixels += header.pixels
                if self.pixels > self.intake.limits.call_pixels:
                    most = self.intake.limits.call_pixels
                    raise ImageRefused(TOO_LARGE, f"is too much: the images of a call have at most {most:,} pixels")
                prepared = await self.intake.on_thread(lambda: self.intake.prepare(header, preparer))
                upload = uploads.put(self.owner, digest, data, replace(prepared, inputs=None))
                self.intake.make_ready(upload, prepared)
                return upload

    async def _with_layout(self, upload: Upload, preparer: Preparer) -> Upload:
        if upload.layout is None:
            try:
                upload.layout = await self._layout_again(upload, preparer)
            except BaseException:  # a cancelled caller too must leave no hold behind; it is raised on
                self.uploads.release((upload,))
                raise
        return upload

    async def _layout_again(self, upload: Upload, preparer: Preparer) -> Prepared:
        prepared = await self.intake.on_thread(lambda: self.intake.prepared(upload, preparer))
        self.intake.make_ready(upload, prepared)
        return replace(prepared, inputs=None)

    def _work_image(self, start: int, upload: Upload, preparer: Preparer) -> WorkImage:
        assert upload.layout is not None
        return WorkImage(start=start, layout=upload.layout, load=partial(self.intake.load, upload, preparer))


class _PixelGate:
    """Bounds the pixels that are decoded at the same time; one picture alone always passes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside = 0
        self._changed = threading.Condition()

    @contextmanager
    def room(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._inside or self._inside + pixels <= self._most)
            self._inside += pixels
        try:
            yield
        finally:
            with self._changed:
                self._inside -= pixels
                self._changed.notify_all()


class _Ready:
    """Inputs by image, the latest within a bound in bytes. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._images: OrderedDict[tuple[str, MediaTag], Prepared] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, owner: str, tag: MediaTag) -> Prepared | None:
        with self._lock:
            return self._images.get((owner, tag))

    def put(self, owner: str, tag: MediaTag, image: Prepared) -> None:
        with self._lock:
            before = self._images.pop((owner, tag), None)
            self._bytes += _size(image) - (_size(before) if before is not None else 0)
            self._images[owner, tag] = image
            while self._bytes > self._limit:
                _, oldest = self._images.popitem(last=False)
                self._bytes -= _size(oldest)


def _size(image: Prepared) -> int:
    return sum(array.nbytes for array in (image.inputs or {}).values())
