"""The segment log: what is appended is read back, space is won by dropping and copying on, and the budget holds."""

from __future__ import annotations

import errno
from itertools import count

import pytest
from storage_doubles import FaultyStorage, payload, record

from kvcache.errors import CorruptRecord, DiskFull, UnreadableRecord
from kvcache.format import RECORD_OVERHEAD, SEGMENT_HEADER, decode_segment_header
from kvcache.seal import AesGcmSeal, ChecksumSeal
from kvcache.segments import MAX_SEGMENTS, Extent, SegmentLog, Step
from kvcache.storage import MemoryStorage

SIZE = 100
RECORD = SIZE + RECORD_OVERHEAD
HEADER = SEGMENT_HEADER.size


def log_over(
    storage: MemoryStorage | FaultyStorage, *, budget: int = 16_000, segment: int = 10**6, floor: int = 0
) -> SegmentLog:
    """A budget of 16,000 makes segments of 1,000 bytes: six records each, the last passing the size."""
    return SegmentLog(storage, ChecksumSeal(), budget_bytes=budget, segment_bytes=segment, min_free_bytes=floor)


def fill(log: SegmentLog, names: range) -> dict[int, Extent]:
    return {name: log.append(record(name), payload(name, SIZE)) for name in names}


def test_records_come_back_as_they_were_appended() -> None:
    log = SegmentLog(MemoryStorage(), AesGcmSeal(), budget_bytes=10**6, segment_bytes=1000, min_free_bytes=0)
    places = {size: log.append(record(size), payload(size, size)) for size in range(0, 3000, 97)}
    for size, place in places.items():
        assert bytes(log.read(record(size), place)) == payload(size, size)


def test_files_begin_with_their_number_and_are_rolled_once_they_reach_the_segment_size() -> None:
    storage = MemoryStorage()
    log = log_over(storage)
    places = fill(log, range(12))
    assert [place.segment for place in places.values()] == [0] * 6 + [1] * 6
    assert storage.sizes() == {0: HEADER + 6 * RECORD, 1: HEADER + 6 * RECORD}
    headers = [decode_segment_header(data[:HEADER]) for data in storage.segments.values()]
    assert [header.number for header in headers] == [0, 1]
    assert len({header.store_id for header in headers}) == 1
    assert log.file_bytes == sum(storage.sizes().values())


def test_a_file_goes_with_its_last_record_and_its_number_is_not_used_again() -> None:
    storage = MemoryStorage()
    log = log_over(storage)
    places = fill(log, range(12))
    for name in range(6):
        log.release(places[name])
    assert sorted(storage.segments) == [1]
    for name in range(6, 12):
        log.release(places[name])
    assert (storage.sizes(), log.file_bytes, log.live_bytes, log.segments) == ({}, 0, 0, 0)
    assert fill(log, range(1))[0].segment == 2


def test_an_append_beyond_the_budget_is_refused_and_changes_nothing() -> None:
    storage = MemoryStorage()
    log = log_over(storage, budget=500)
    fill(log, range(2))
    before = (storage.sizes(), log.file_bytes, log.live_bytes)
    with pytest.raises(DiskFull):
        log.append(record("more"), payload("more", SIZE))
    assert (storage.sizes(), log.file_bytes, log.live_bytes) == before


@pytest.mark.parametrize("torn", [0, 1, 63, 64, 100, 10_000])
def test_a_failed_write_leaves_no_trace(torn: int) -> None:
    storage = FaultyStorage()
    log = log_over(storage)
    kept = fill(log, range(2))
    before = (storage.sizes(), log.file_bytes, log.live_bytes)
    storage.torn, storage.broken = torn, True
    with pytest.raises(OSError, match="write fails"):
        log.append(record("lost"), payload("lost", SIZE))
    assert (storage.sizes(), log.file_bytes, log.live_bytes) == before
    storage.broken = False
    kept |= fill(log, range(2, 9))
    for name, place in kept.items():
        assert bytes(log.read(record(name), place)) == payload(name, SIZE)


def test_torn_bytes_that_cannot_be_cut_off_are_counted_and_left_behind() -> None:
    storage = FaultyStorage()
    log = log_over(storage)
    kept = fill(log, range(2))
    storage.torn, storage.broken, storage.truncate_fails = 50, True, True
    with pytest.raises(OSError, match="write fails"):
        log.append(record("lost"), payload("lost", SIZE))
    assert log.file_bytes >= sum(storage.sizes().values())
    storage.broken = False
    kept |= fill(log, range(2, 4))
    assert [place.segment for place in kept.values()] == [0, 0, 1, 1]
    for name, place in kept.items():
        assert bytes(log.read(record(name), place)) == payload(name, SIZE)
        log.release(place)
    assert (storage.sizes(), log.file_bytes) == ({}, 0)


@pytest.mark.parametrize("truncate_fails", [False, True])
@pytest.mark.parametrize("write", [1, 2], ids=["segment header", "first record"])
def test_a_segment_that_fails_at_its_beginning_does_not_linger(write: int, *, truncate_fails: bool) -> None:
    storage = FaultyStorage()
    log = log_over(storage)
    storage.fail_writes, storage.torn, storage.truncate_fails = {write}, 10, truncate_fails
    with pytest.raises(OSError, match="write fails"):
        log.append(record("lost"), payload("lost", SIZE))
    place = log.append(record("kept"), payload("kept", SIZE))
    assert bytes(log.read(record("kept"), place)) == payload("kept", SIZE)
    assert log.segments == 1
    assert sum(storage.sizes().values()) == log.file_bytes == HEADER + RECORD


def test_a_segment_that_cannot_be_made_fails_the_append_alone() -> None:
    storage = FaultyStorage()
    log = log_over(storage)
    storage.create_fails, storage.error = True, errno.EMFILE
    with pytest.raises(OSError, match="create fails"):
        log.append(record(0), payload(0, SIZE))
    storage.create_fails = False
    assert fill(log, range(1))[0] == Extent(1, HEADER, RECORD)


def test_reading_what_does_not_verify_names_the_record() -> None:
    storage = FaultyStorage()
    log = log_over(storage)
    places = fill(log, range(3))
    with pytest.raises(CorruptRecord, match="holds window") as wrong:
        log.read(record(0), places[1])
    assert wrong.value.record == record(0)
    storage.truncate(0, places[2].offset + RECORD - 1)
    with pytest.raises(CorruptRecord, match="the file ends 1 bytes early"):
        log.read(record(2), places[2])
    storage.read_fails = True
    with pytest.raises(UnreadableRecord, match="read fails"):
        log.read(record(0), places[0])


def test_copying_on_moves_the_same_bytes_to_the_end() -> None:
    storage = MemoryStorage()
    log = SegmentLog(storage, AesGcmSeal(), budget_bytes=16_000, segment_bytes=1000, min_free_bytes=0)
    place = log.append(record(0), payload(0, SIZE))
    log.append(record(1), payload(1, SIZE))
    copy = log.copy_on(record(0), place)
    data = storage.segments[0]
    assert copy.offset == HEADER + 2 * RECORD
    assert data[place.offset : place.offset + RECORD] == data[copy.offset : copy.offset + RECORD]
    log.release(place)
    assert bytes(log.read(record(0), copy)) == payload(0, SIZE)


def test_a_damaged_record_is_not_copied_on() -> None:
    storage = MemoryStorage()
    log = log_over(storage)
    place = fill(log, range(1))[0]
    storage.segments[0][place.offset + 20] ^= 1
    with pytest.raises(CorruptRecord):
        log.copy_on(record(0), place)
    assert log.live_bytes == RECORD


def test_room_is_there_until_only_the_reserve_is_left() -> None:
    log = log_over(MemoryStorage())
    for name in count():
        if log.plan_room(RECORD, can_evict=False) is not Step.READY:
            break
        log.append(record(name), payload(name, SIZE))
    assert 15_000 - RECORD - HEADER < log.file_bytes <= 15_000
    assert log.plan_room(RECORD, can_evict=False) is Step.FULL
    assert log.plan_room(RECORD, can_evict=True) is Step.EVICT


def test_a_full_log_evicts_first_and_cleans_once_enough_is_dead() -> None:
    log = log_over(MemoryStorage())
    places = fill(log, range(78))
    steps = []
    for name in range(0, 78, 3):
        steps.append(log.plan_room(RECORD, can_evict=True))
        log.release(places.pop(name))
    cleaning = steps.index(Step.CLEAN)
    assert set(steps[:cleaning]) == {Step.EVICT}
    assert set(steps[cleaning:]) == {Step.CLEAN}
    before = log.file_bytes
    victims = log.cleaning_victim()
    for name, place in victims:
        log.copy_on(name, place)
        log.release(place)
    assert len(victims) == 4
    assert before - log.file_bytes == 2 * RECORD  # one header less, one more


def test_what_cannot_be_evicted_is_cleaned_before_the_log_calls_itself_full() -> None:
    log = log_over(MemoryStorage())
    places = fill(log, range(78))
    log.release(places[0])
    log.release(places[1])
    assert log.plan_room(RECORD, can_evict=False) is Step.CLEAN
    assert {place.segment for _, place in log.cleaning_victim()} == {0}


def test_the_segment_being_written_may_be_cleaned_too() -> None:
    log = log_over(MemoryStorage(), budget=40_000)  # segments of 2,500 bytes
    places = fill(log, range(10))
    for name in range(8):
        log.release(places[name])
    victims = log.cleaning_victim()
    assert [name for name, _ in victims] == [record(8), record(9)]
    assert {log.copy_on(name, place).segment for name, place in victims} == {1}


def test_a_limit_below_the_files_asks_for_eviction_then_cleaning_until_it_is_met() -> None:
    log = log_over(MemoryStorage())
    places = fill(log, range(30))
    live = sorted(places)
    for _ in range(1000):
        match log.plan_room(0, limit=3000, can_evict=bool(live)):
            case Step.READY:
                break
            case Step.EVICT:
                log.release(places.pop(live.pop(0)))
            case Step.CLEAN:
                for name, place in log.cleaning_victim():
                    (moved,) = [number for number in live if record(number) == name]
                    places[moved] = log.copy_on(name, place)
                    log.release(place)
            case Step.FULL:
                pytest.fail("the limit can be met")
    assert log.file_bytes <= 3000
    assert live


def test_the_free_space_floor_bounds_the_files_before_the_budget_does() -> None:
    storage = MemoryStorage(size_bytes=9000)
    log = log_over(storage, floor=5000)
    written = 0
    while log.plan_room(RECORD, can_evict=False) is Step.READY:
        log.append(record(written), payload(written, SIZE))
        written += 1
    assert storage.free_bytes() >= 5000
    assert written >= 10
    storage.size_bytes = 6000  # somebody else fills the disk: room is won back, never taken
    assert log.plan_room(RECORD, can_evict=True) is Step.EVICT
    assert log.plan_room(RECORD, can_evict=False) is Step.FULL


def test_a_segment_is_not_cleaned_where_its_records_would_not_fit_beside_it() -> None:
    storage = MemoryStorage(size_bytes=100_000)
    log = log_over(storage)
    places = fill(log, range(78))
    for name in range(0, 78, 2):
        log.release(places[name])
    assert log.plan_room(RECORD, can_evict=True) is Step.CLEAN
    storage.size_bytes = sum(storage.sizes().values()) + 2 * RECORD  # a segment's live records are three
    assert log.plan_room(RECORD, can_evict=True) is Step.EVICT
    assert log.plan_room(RECORD, can_evict=False) is Step.FULL


@pytest.mark.parametrize("budget", [0, 1, 143, 144, 1000, 16_000, 10**6])
def test_the_largest_payload_is_just_what_an_empty_log_takes(budget: int) -> None:
    log = log_over(MemoryStorage(), budget=budget)
    size = log.max_payload_bytes
    if size >= 0:
        assert log.plan_room(size + RECORD_OVERHEAD, can_evict=False) is Step.READY
        assert log.read(record(0), log.append(record(0), bytes(size))) == bytes(size)
        log = log_over(MemoryStorage(), budget=budget)
    assert log.plan_room(max(size, -1) + 1 + RECORD_OVERHEAD, can_evict=False) is Step.FULL


def test_the_number_of_open_files_is_bounded_however_small_segments_are_asked_for() -> None:
    log = log_over(MemoryStorage(), budget=100_000, segment=1)
    for name in count():
        if log.plan_room(RECORD, can_evict=False) is not Step.READY:
            break
        log.append(record(name), payload(name, SIZE))
    assert log.file_bytes > 98_000
    assert log.segments <= MAX_SEGMENTS


def test_closing_removes_every_file() -> None:
    storage = MemoryStorage()
    log = log_over(storage)
    fill(log, range(20))
    log.close()
    assert (storage.sizes(), log.file_bytes, log.live_bytes, log.segments) == ({}, 0, 0, 0)
