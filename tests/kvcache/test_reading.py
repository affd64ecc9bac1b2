"""Several records read at once, on one thread or two: the same answers, in order, and each its own error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_doubles import FaultyStorage, payload, record

from kvcache.errors import CorruptRecord, UnreadableRecord
from kvcache.reading import WORTH_SHARING_BYTES, Reader
from kvcache.records import Name
from kvcache.seal import AesGcmSeal, ChecksumSeal, Seal
from kvcache.segments import Extent, SegmentLog
from kvcache.storage import FileStorage

LARGE = WORTH_SHARING_BYTES // 2


class Watched(FaultyStorage):
    """Notes which threads read, and the most that were in there at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FileStorage(folder))
        self.threads: set[int] = set()
        self.garbled: set[int] = set()  # offsets

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        self.threads.add(threading.get_ident())
        count = super().read_into(segment, offset, buffer)
        for at in self.garbled:
            if offset <= at + 100 < offset + count:
                buffer[at + 100 - offset] ^= 1
        return count


@pytest.fixture(params=["sealed", "plain"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SegmentLog, Watched]]:
    storage = Watched(tmp_path)
    seal: Seal = AesGcmSeal() if request.param == "sealed" else ChecksumSeal()
    segments = SegmentLog(storage, seal, budget_bytes=1 << 26, segment_bytes=1 << 22, min_free_bytes=0)
    yield segments, storage
    segments.close()


def write(segments: SegmentLog, count: int, size: int) -> list[tuple[Name, Extent]]:
    return [(record(n), segments.append(record(n), payload(n, size))) for n in range(count)]


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 4 * LARGE), (2, 100), (2, LARGE), (7, LARGE), (5, LARGE + 3)])
def test_every_record_comes_back_in_its_place(log: tuple[SegmentLog, Watched], count: int, size: int) -> None:
    segments, storage = log
    wanted = write(segments, count, size)
    reader = Reader(segments)
    for _ in range(3):
        assert [bytes(answer) for answer in reader.read(wanted)] == [payload(n, size) for n in range(count)]  # type: ignore[arg-type]
    reader.close()
    reader.close()
    assert len(storage.threads) == (2 if count > 1 and size >= LARGE else min(count, 1))


def test_what_is_damaged_is_an_error_in_its_own_place(log: tuple[SegmentLog, Watched]) -> None:
    segments, storage = log
    wanted = write(segments, 6, LARGE)
    storage.garbled = {extent.offset for _, extent in (wanted[1], wanted[4])}
    storage.garbled -= {extent.offset for n, (_, extent) in enumerate(wanted) if n not in (1, 4)}
    reader = Reader(segments)
    answers = reader.read(wanted)
    reader.close()
    bad = [n for n, answer in enumerate(answers) if isinstance(answer, CorruptRecord)]
    same_place = [n for n, (_, extent) in enumerate(wanted) if extent.offset in storage.garbled]
    assert bad == same_place and bad
    good = {n: bytes(answer) for n, answer in enumerate(answers) if n not in bad}  # type: ignore[arg-type]
    assert good == {n: payload(n, LARGE) for n in good}


def test_a_disk_that_cannot_be_read_is_said_for_every_record(log: tuple[SegmentLog, Watched]) -> None:
    segments, storage = log
    wanted = write(segments, 3, LARGE)
    storage.read_fails = True
    reader = Reader(segments)
    answers = reader.read(wanted)
    reader.close()
    assert [type(answer) for answer in answers] == [UnreadableRecord] * 3


def test_a_system_that_cannot_read_at_a_place_gives_the_same_bytes(
    log: tuple[SegmentLog, Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, _ = log
    wanted = write(segments, 6, LARGE)
    monkeypatch.delattr("os.preadv")
    reader = Reader(segments)
    assert [bytes(answer) for answer in reader.read(wanted)] == [payload(n, LARGE) for n in range(6)]  # type: ignore[arg-type]
    reader.close()
