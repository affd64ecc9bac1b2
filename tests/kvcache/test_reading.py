"""Records read from files: a piece at a time, several on one thread or two, each answer or error in its place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_doubles import FaultyStorage, payload, record

from kvcache.errors import CorruptRecord, UnreadableRecord
from kvcache.reading import WORTH_SHARING_BYTES, Reader
from kvcache.records import Name
from kvcache.seal import PIECE_BYTES, AesGcmSeal, ChecksumSeal, Seal
from kvcache.segments import Extent, SegmentLog
from kvcache.storage import FileStorage

LARGE = WORTH_SHARING_BYTES // 2
SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 100]


class Watched(FaultyStorage):
    """Notes which threads read, and flips a bit of what they get."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FileStorage(folder))
        self.threads: set[int] = set()
        self.garbled: set[int] = set()  # offsets in any segment

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        self.threads.add(threading.get_ident())
        count = super().read_into(segment, offset, buffer)
        for at in self.garbled:
            if offset <= at < offset + count:
                buffer[at - offset] ^= 1
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
    assert len({extent.segment for _, extent in wanted}) == 1
    storage.garbled = {extent.offset + 100 for _, extent in (wanted[1], wanted[4])}
    reader = Reader(segments)
    answers = reader.read(wanted)
    reader.close()
    bad = [n for n, answer in enumerate(answers) if isinstance(answer, CorruptRecord)]
    assert bad == [1, 4]
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


def write_sizes(segments: SegmentLog) -> list[tuple[Name, Extent, bytes]]:
    """One record of each size."""
    made = [(record(size), payload(size, size)) for size in SIZES]
    return [(name, segments.append(name, data), data) for name, data in made]


def test_records_of_any_size_come_back_in_any_order(log: tuple[SegmentLog, Watched]) -> None:
    segments, _ = log
    wanted = write_sizes(segments)
    for name, extent, data in (*wanted, *reversed(wanted)):
        assert bytes(segments.read(name, extent)) == data


def test_what_was_read_stays_while_others_are_read(log: tuple[SegmentLog, Watched]) -> None:
    segments, _ = log
    wanted = write_sizes(segments)
    together = [segments.read(name, extent) for name, extent, _ in wanted]
    assert [bytes(read) for read in together] == [data for _, _, data in wanted]


def test_a_bit_flipped_at_the_edge_of_any_piece_is_noticed(log: tuple[SegmentLog, Watched]) -> None:
    segments, storage = log
    for name, extent, data in write_sizes(segments):
        edges = {at + side for at in range(0, extent.length, PIECE_BYTES) for side in (-1, 0, 1, 63, 64, 65)}
        for at in sorted({*edges, extent.length - 16, extent.length - 17, extent.length - 1}):
            if 0 <= at < extent.length:
                storage.garbled = {extent.offset + at}
                with pytest.raises(CorruptRecord):
                    segments.read(name, extent)
        storage.garbled = set()
        assert bytes(segments.read(name, extent)) == data
