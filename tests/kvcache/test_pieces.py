"""Records read from files a piece at a time: whole, in the sizes around a piece, and with damage anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_doubles import FaultyStorage, payload, record

from kvcache.errors import CorruptRecord, UnreadableRecord
from kvcache.records import Name
from kvcache.seal import PIECE_BYTES, AesGcmSeal, ChecksumSeal, Seal
from kvcache.segments import Extent, SegmentLog
from kvcache.storage import FileStorage

SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 100]


class Garbling(FaultyStorage):
    """Flips one bit of a segment's bytes as they are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FileStorage(folder))
        self.garbled: int | None = None

    def read_into(self, segment: int, offset: int, buffer: memoryview) -> int:
        count = super().read_into(segment, offset, buffer)
        if self.garbled is not None and offset <= self.garbled < offset + count:
            buffer[self.garbled - offset] ^= 1
        return count


@pytest.fixture(params=["sealed", "plain"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SegmentLog, Garbling]]:
    storage = Garbling(tmp_path)
    seal: Seal = AesGcmSeal() if request.param == "sealed" else ChecksumSeal()
    segments = SegmentLog(storage, seal, budget_bytes=1 << 26, segment_bytes=1 << 22, min_free_bytes=0)
    yield segments, storage
    segments.close()


def write(segments: SegmentLog) -> list[tuple[Name, Extent, bytes]]:
    """One record of each size."""
    made = [(record(size), payload(size, size)) for size in SIZES]
    return [(name, segments.append(name, data), data) for name, data in made]


def test_records_of_any_size_come_back_in_any_order(log: tuple[SegmentLog, Garbling]) -> None:
    segments, _ = log
    wanted = write(segments)
    for name, extent, data in (*wanted, *reversed(wanted)):
        assert bytes(segments.read(name, extent)) == data


def test_what_was_read_stays_while_others_are_read(log: tuple[SegmentLog, Garbling]) -> None:
    segments, _ = log
    wanted = write(segments)
    together = [segments.read(name, extent) for name, extent, _ in wanted]
    assert [bytes(read) for read in together] == [data for _, _, data in wanted]


def test_a_bit_flipped_at_the_edge_of_any_piece_is_noticed(log: tuple[SegmentLog, Garbling]) -> None:
    segments, storage = log
    for name, extent, data in write(segments):
        edges = {at + side for at in range(0, extent.length, PIECE_BYTES) for side in (-1, 0, 1, 63, 64, 65)}
        for at in sorted({*edges, extent.length - 16, extent.length - 17, extent.length - 1}):
            if 0 <= at < extent.length:
                storage.garbled = extent.offset + at
                with pytest.raises(CorruptRecord):
                    segments.read(name, extent)
        storage.garbled = None
        assert bytes(segments.read(name, extent)) == data


def test_a_disk_that_cannot_be_read_is_said_for_every_record(log: tuple[SegmentLog, Garbling]) -> None:
    segments, storage = log
    wanted = write(segments)
    storage.read_fails = True
    for name, extent, _ in wanted:
        with pytest.raises(UnreadableRecord):
            segments.read(name, extent)


def test_a_system_that_cannot_read_at_a_place_gives_the_same_bytes(
    log: tuple[SegmentLog, Garbling], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, _ = log
    wanted = write(segments)
    monkeypatch.delattr("os.preadv")
    assert [bytes(segments.read(name, extent)) for name, extent, _ in wanted] == [data for _, _, data in wanted]
