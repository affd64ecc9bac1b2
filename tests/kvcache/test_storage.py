"""Segments of bytes: files and their double behave alike; files leave nothing behind, whatever ends the process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.storage import FileStorage, MemoryStorage, Storage


@pytest.fixture(params=["files", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    made: Storage = FileStorage(tmp_path) if request.param == "files" else MemoryStorage()
    yield made
    made.close()


def read(storage: Storage, segment: int, offset: int, size: int) -> bytes:
    buffer = memoryview(bytearray(size))
    return bytes(buffer[: storage.read_into(segment, offset, buffer)])


def everything_under(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def test_parts_are_written_one_after_the_other_and_read_back(storage: Storage) -> None:
    storage.create(0)
    storage.create(1)
    storage.write(0, 0, [b"head", b"", memoryview(b"body"), bytearray(b"tail")])
    storage.write(1, 0, [b"other"])
    storage.write(0, 12, [b"more"])
    storage.write(0, 4, [b"BODY"])
    storage.sync(0)
    assert read(storage, 0, 0, 16) == b"headBODYtailmore"
    assert read(storage, 0, 4, 4) == b"BODY"
    assert storage.sizes() == {0: 16, 1: 5}


def test_reading_past_the_end_gives_what_there_is(storage: Storage) -> None:
    storage.create(0)
    storage.write(0, 0, [b"abc"])
    assert read(storage, 0, 1, 10) == b"bc"
    assert read(storage, 0, 3, 10) == b""
    assert read(storage, 0, 9, 10) == b""


def test_truncating_cuts_and_extends(storage: Storage) -> None:
    storage.create(0)
    storage.write(0, 0, [b"abcdef"])
    storage.truncate(0, 3)
    storage.truncate(0, 5)
    assert read(storage, 0, 0, 9) == b"abc\0\0"


def test_a_segment_is_made_once_and_gone_when_removed(storage: Storage) -> None:
    storage.create(0)
    with pytest.raises(FileExistsError):
        storage.create(0)
    storage.remove(0)
    assert storage.sizes() == {}
    storage.create(0)
    assert storage.sizes() == {0: 0}


def test_more_parts_than_one_system_call_takes(storage: Storage) -> None:
    storage.create(0)
    parts = [bytes([index % 251]) * 3 for index in range(1000)]
    storage.write(0, 0, parts)
    assert read(storage, 0, 0, 3000) == b"".join(parts)


def test_free_bytes_shrink_by_what_is_written() -> None:
    storage = MemoryStorage(size_bytes=100)
    storage.create(0)
    storage.write(0, 0, [bytes(60)])
    assert storage.free_bytes() == 40
    with pytest.raises(OSError, match="no space left"):
        storage.write(0, 60, [bytes(41)])
    storage.write(0, 0, [bytes(100)])
    assert storage.free_bytes() == 0


def test_free_bytes_of_files_are_those_of_the_file_system(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    total = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert 0 < storage.free_bytes() < total
    storage.create(0)
    assert 0 < storage.free_bytes() < total
    storage.close()


def test_a_segment_file_has_no_name_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.create(0)
    storage.write(0, 0, [b"secret"])
    assert everything_under(tmp_path) == []
    state = os.fstat(storage._files[0])
    assert (stat.S_IMODE(state.st_mode), state.st_nlink, state.st_size) == (0o600, 0, 6)
    storage.close()
    assert everything_under(tmp_path) == []


def test_a_directory_that_did_not_exist_is_private_and_goes_with_the_storage(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "cache"
    storage = FileStorage(directory)
    storage.create(0)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    storage.close()
    storage.close()
    assert not directory.exists()


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    storage = FileStorage(directory)
    (directory / "notes").write_text("mine")
    storage.close()
    assert everything_under(tmp_path) == [directory, directory / "notes"]


def test_a_removed_directory_is_an_error_for_new_segments_and_none_for_old_ones(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    storage = FileStorage(directory)
    storage.create(0)
    directory.rmdir()
    with pytest.raises(FileNotFoundError):
        storage.create(1)
    storage.write(0, 0, [b"still here"])
    assert read(storage, 0, 0, 10) == b"still here"
    assert storage.free_bytes() > 0
    storage.close()


def test_a_write_that_the_system_cuts_short_is_an_error(tmp_path: Path) -> None:
    # The file-size limit makes the kernel accept a part of the write, and refuse the rest.
    script = """
        import resource, signal, sys
        from pathlib import Path
        from kvcache.storage import FileStorage
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        storage = FileStorage(Path(sys.argv[1]))
        storage.create(0)
        storage.write(0, 0, [bytes(600)])
        try:
            storage.write(0, 600, [b"x" * 300, b"y" * 300])
        except OSError as error:
            print(error.errno, storage.sizes())
        storage.close()
    """
    assert run_python(script, tmp_path) == "27 {0: 1000}"


def test_a_store_on_a_file_system_that_refuses_to_grow_its_files_lives_on(tmp_path: Path) -> None:
    script = """
        import resource, signal, sys, time
        from pathlib import Path
        from kvcache.records import RecordId, RecordKind
        from kvcache.store import StoreConfig, TieredStore
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        store = TieredStore(StoreConfig(directory=Path(sys.argv[1]), memory_bytes=0, disk_bytes=10**7,
                                        queue_bytes=10**6, segment_bytes=10**6, min_free_bytes=0, retry_pause_s=3600))
        store.start()
        names = [RecordId(bytes([number]) * 32, RecordKind.STATE) for number in range(8)]
        for name in names:
            store.put(name, name.key * 300, explicit=True)
        while not store.stats().paused:
            time.sleep(0.01)
        right = [result.ok and bytes(result.payloads[0]) == name.key * 300
                 for name in names for result in [store.fetch_now([name])]]
        stats = store.stats()
        print(right.count(True), stats.disk_bytes, stats.write_errors, stats.failed_jobs, stats.paused)
        store.close()
    """
    # Five records fit into 50,000 bytes. Each later one fails, and after the third failure the store waits.
    assert run_python(script, tmp_path) == "5 48000 3 0 True"
    assert everything_under(tmp_path) == []


def run_python(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


STORE_UNTIL_KILLED = """
    import sys, time
    from pathlib import Path
    from kvcache.records import RecordId, RecordKind
    from kvcache.store import StoreConfig, TieredStore
    directory = Path(sys.argv[1]) if sys.argv[1] else None
    store = TieredStore(StoreConfig(directory=directory, memory_bytes=0, disk_bytes=10**7, queue_bytes=10**6,
                                    segment_bytes=100_000, min_free_bytes=0))
    store.start()
    for index in range(50):
        store.put(RecordId(index.to_bytes(32, "little"), RecordKind.WINDOW), b"a secret prompt " * 1000, explicit=True)
        store.flush(10)
    print(store.stats().segments, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("named", [True, False], ids=["directory given", "temporary directory"])
def test_nothing_is_left_after_kill_9(tmp_path: Path, *, named: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STORE_UNTIL_KILLED), str(tmp_path) if named else ""],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        segments = int(process.stdout.readline())
        assert everything_under(tmp_path) == []
        if Path("/proc").is_dir():
            held = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert sum(str(tmp_path) in target and target.endswith("(deleted)") for target in held) == segments
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert segments > 1
    assert everything_under(tmp_path) == []
