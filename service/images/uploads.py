"""Image files that callers sent, for as long as somebody needs them. Owns which digest means which image, and whose.

Calls hold the images of their context, snapshots those of their prefix; what nobody holds stays a while, so that the
next call can name it by digest, and goes first when room is short. Each owner has images of their own: a digest that
another owner sent means nothing. Two files of the same pixels are one image, and one of them is kept.

Thread-safe; its lock is never held while anything else is called.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvcache.media import MediaTag, tag_for
from service.errors import ImageMemory
from service.media import Prepared

GRACE_SECONDS = 600.0  # that an image which nobody holds may be named by its digest


@dataclass(slots=True, eq=False)
class Upload:
    """One image of one owner. `layout` is None until it is asked for after a restart."""

    owner: str
    tag: MediaTag
    file: bytes = field(repr=False)
    layout: Prepared | None  # without inputs
    digests: set[bytes] = field(default_factory=set)  # SHA-256 of the files that were this image
    holds: int = 0
    last_use: float = 0.0


class Uploads:
    """All images of all owners. Implements `kvcache.names.MediaKeeper`."""

    def __init__(
        self, limit_bytes: int, *, grace: float = GRACE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit_bytes`: of files in memory. Those of durable snapshots from before a restart may go beyond it."""
        self._limit = limit_bytes
        self._grace = grace
        self._clock = clock
        self._by_tag: dict[tuple[str, MediaTag], Upload] = {}
        self._by_digest: dict[tuple[str, bytes], Upload] = {}
        self._idle: OrderedDict[tuple[str, MediaTag], Upload] = OrderedDict()  # held by nobody, longest first
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._by_tag)

    def put(self, owner: str, digest: bytes, file: bytes, layout: Prepared) -> Upload:
        """Takes an image in, held once for the caller. ImageMemory if what is held leaves no room for it."""
        tag = tag_for(layout.key, len(layout.ids))
        with self._lock:
            if (owner, tag) not in self._by_tag:
                self._make_room(len(file))
            upload = self._known(owner, tag, digest, file)
            upload.layout = upload.layout or layout
            return self._held(upload)

    def find(self, owner: str, digest: bytes) -> Upload | None:
        """The image that a file of this SHA-256 was, held once for the caller."""
        with self._lock:
            upload = self._by_digest.get((owner, digest))
            if upload is None or (not upload.holds and self._clock() - upload.last_use > self._grace):
                return None
            return self._held(upload)

    def hold(self, owner: str, tags: Iterable[MediaTag]) -> list[Upload] | None:
        """The images of a context, each held once for the caller; None, and nothing held, if one is not there."""
        with self._lock:
            found = [self._by_tag.get((owner, tag)) for tag in tags]
            held = [upload for upload in found if upload is not None]
            if len(held) < len(found):
                return None
            return [self._held(upload) for upload in held]

    def receive(self, owner: str, tag: MediaTag, digest: bytes, file: bytes) -> Upload:
        """An image that another instance had the file of, held once for the caller. ImageMemory as `put` has it."""
        with self._lock:
            if (owner, tag) not in self._by_tag:
                self._make_room(len(file))
            return self._held(self._known(owner, tag, digest, file))

    def release(self, uploads: Sequence[Upload], *, forget: bool = False) -> None:
        """Gives back one hold on each. `forget`: those that nobody else holds go at once."""
        with self._lock:
            for upload in uploads:
                self._let_go(upload)
                if forget and (upload.owner, upload.tag) in self._idle:
                    self._drop(upload)

    # What snapshots need

    def keep(self, owner: str, tags: Collection[MediaTag]) -> None:
        with self._lock:
            for tag in tags:
                upload = self._by_tag.get((owner, tag))
                if upload is not None:  # whoever makes a snapshot holds its images, so that they are all there
                    self._held(upload)

    def let_go(self, owner: str, tags: Collection[MediaTag]) -> None:
        with self._lock:
            for tag in tags:
                upload = self._by_tag.get((owner, tag))
                if upload is not None:
                    self._let_go(upload)

    def file_of(self, owner: str, tag: MediaTag) -> bytes | None:
        with self._lock:
            upload = self._by_tag.get((owner, tag))
            return upload.file if upload is not None else None

    def found(self, owner: str, tag: MediaTag, file: bytes) -> None:
        digest = digest_of(file)
        with self._lock:
            if (owner, tag) not in self._by_tag:
                upload = self._idle[owner, tag] = self._known(owner, tag, digest, file)
                upload.last_use = self._clock()

    # REQUIRES: lock is held

    def _known(self, owner: str, tag: MediaTag, digest: bytes, file: bytes) -> Upload:
        """The image, which a file of this digest was; a new one is held by nobody and not idle either."""
        upload = self._by_tag.get((owner, tag))
        if upload is None:
            upload = self._by_tag[owner, tag] = Upload(owner, tag, file, None)
            self._bytes += len(file)
        upload.digests.add(digest)
        self._by_digest[owner, digest] = upload
        return upload

    def _held(self, upload: Upload) -> Upload:
        self._idle.pop((upload.owner, upload.tag), None)
        upload.holds += 1
        upload.last_use = self._clock()
        return upload

    def _let_go(self, upload: Upload) -> None:
        assert upload.holds > 0, upload
        upload.holds -= 1
        upload.last_use = self._clock()
        if not upload.holds:
            self._idle[upload.owner, upload.tag] = upload
            self._drop_idle(0)

    def _make_room(self, size: int) -> None:
        self._drop_idle(size)
        if self._bytes + size > self._limit:
            raise ImageMemory(
                f"an image of {size:,} bytes finds no room: {self._bytes:,} of {self._limit:,} are needed",
                hint="delete snapshots with images, or try again when fewer calls run",
                metadata={"needBytes": str(size), "limitBytes": str(self._limit)},
                retry_after=1.0,
            )

    def _drop_idle(self, needed: int) -> None:
        """What nobody holds and nobody may name any more, or what stands in the way of `needed` bytes."""
        now = self._clock()
        while self._idle:
            oldest = next(iter(self._idle.values()))
            if now - oldest.last_use <= self._grace and self._bytes + needed <= self._limit:
                return
            self._drop(oldest)

    def _drop(self, upload: Upload) -> None:
        self._idle.pop((upload.owner, upload.tag))
        del self._by_tag[upload.owner, upload.tag]
        for digest in upload.digests:
            self._by_digest.pop((upload.owner, digest), None)
        self._bytes -= len(upload.file)


def digest_of(file: bytes) -> bytes:
    """The SHA-256 that names a file."""
    return hashlib.sha256(file).digest()
