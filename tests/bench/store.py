"""The record store: what its disk tier costs beside plain files, what encryption costs, how long planning and
committing take, what a thousand snapshots hold in memory, and what checkpoints cost a decoding chat.

Records have the size of one 256-token boundary of Gemma 3 270M's window layers. The plain file has the same bytes on
the same file system and does with them what the store does: written without a sync, since an ephemeral store promises
nothing across a power cut, and read back from the page cache, as many records at a time as a restore reads. It reads
into the same buffers each time, and the store has read and written as much before, so that neither pays for fresh
memory. Nothing waits to be written when a side's turn comes, or it would pay for what the other left behind; each
reads back a few times, and its median counts. A ratio of 1 would mean that format, checksum, encryption, index and
thread cost nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from kvfork.v1.server_service_pb2 import CacheStats

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import Keep, PrefixCache
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import RecordId, RecordKind, Tier
from kvcache.restore import plan_restore
from kvcache.schedule import prefill_schedule
from kvcache.seal import AesGcmSeal, Scratch
from kvcache.storage import FileStorage, MemoryStorage
from kvcache.store import StoreConfig, TieredStore
from kvcache.tree import Node
from service.options import default_scratch_dir
from tests.bench.ours import Server, raw
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import some_tokens

MIB = 1 << 20
GEMMA3 = CacheLayout((*[LayerSpec(LayerKind.WINDOW, 512)] * 15, *[LayerSpec(LayerKind.FULL)] * 3))
READS = 5
RESTORE_RECORDS = 2  # a window of 512 reaches into two blocks
AWAKE_SECONDS = 0.1  # of work after a wait; until then two threads may share a core while the other one sleeps
RESTORE_BLOCKS = 32  # of a conversation of 8,192 tokens
GEMMA3_WINDOW_RECORD = 15 * 2 * BLOCK_TOKENS * 256 * 4  # layers × (K, V) × tokens × head_dim × float32
GEMMA3_FULL_RECORD = 3 * 2 * BLOCK_TOKENS * 256 * 4


def run(options: Options) -> None:
    records, rounds = (4, options.runs or 1) if options.quick else (16, options.runs or 15)
    size = MIB if options.quick else GEMMA3_WINDOW_RECORD
    others = Bystanders([])
    quiet = Quiet([], patience=2 if options.quick else 40)
    payloads = [os.urandom(size) for _ in range(records)]
    total = records * size
    with tempfile.TemporaryDirectory(prefix="kvfork-bench-", dir=default_scratch_dir()) as folder:
        plain: list[tuple[float, float]] = []
        sealed: list[tuple[float, float]] = []
        files: list[tuple[float, float]] = []
        ceilings: list[float] = []
        for number in range(rounds):
            order = [
                lambda: files.append(_raw(Path(folder), payloads)),
                lambda: sealed.append(_stored(Path(folder), payloads, encrypt=True)),
                lambda: plain.append(_stored(Path(folder), payloads, encrypt=False)),
            ]
            for turn in order[number % 3 :] + order[: number % 3]:
                os.sync()
                quiet.wait()
                turn()
            ceilings.append(files[-1][1] / len(payloads) * RESTORE_RECORDS / _opened_alone(Path(folder), payloads[0]))
            note(
                f"  {total / MIB:.0f} MiB in {records} records, write and read back: files {_both(files[-1], total)}, "
                f"store {_both(sealed[-1], total)}, unencrypted {_both(plain[-1], total)} MiB/s"
            )
    busy = others.cores()
    for metric, ours, against, peer in (
        ("store.write_over_raw_write", [s[0] for s in sealed], [f[0] for f in files], "plain file"),
        (
            "store.restore_over_raw_read",
            [s[1] for s in sealed],
            [f[1] for f in files],
            "plain file, cached by the system",
        ),
        (
            "store.encrypted_over_plain",
            [sum(s) for s in sealed],
            [sum(p) for p in plain],
            "the store without encryption",
        ),
    ):
        ratios = [b / a for a, b in zip(ours, against, strict=True)]  # of throughput, so of time the other way round
        work = total * (2 if "encrypted" in metric else 1)
        ceiling = {"ceiling": median(ceilings)} if "restore" in metric else {}
        emit(
            Figure(
                metric=metric,
                value=median(ratios),
                unit="ratio",
                ours=work / MIB / median(ours),
                against=work / MIB / median(against),
                peer=peer,
                model="records of gemma3",
                n=rounds,
                extra={"spread": spread(ratios), "sides_unit": "MiB/s", **ceiling},
            ),
            others=busy,
        )
    _conversation(options, quiet)
    _planning(options)
    _snapshots(100 if options.quick else 1000)
    _decoding(options, quiet)


def _both(seconds: tuple[float, float], total: int) -> str:
    return f"{total / MIB / seconds[0]:.0f} and {total / MIB / seconds[1]:.0f}"


def _raw(folder: Path, payloads: Sequence[bytes]) -> tuple[float, float]:
    """Seconds to write and to read back."""
    path = folder / "plain"
    buffers = [bytearray(payloads[0]) for _ in range(RESTORE_RECORDS)]
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for payload in payloads:
            file.write(payload)
    written = time.perf_counter() - began
    read: list[float] = []
    with path.open("rb", buffering=0) as file:
        for _ in range(READS):
            file.seek(0)
            began = time.perf_counter()
            for number in range(len(payloads)):
                file.readinto(buffers[number % RESTORE_RECORDS])
            read.append(time.perf_counter() - began)
    path.unlink()
    return written, median(read)


def _stored(folder: Path, payloads: Sequence[bytes], *, encrypt: bool) -> tuple[float, float]:
    total = sum(map(len, payloads))
    store = TieredStore(
        StoreConfig(
            directory=folder,
            memory_bytes=0,
            disk_bytes=4 * total + 512 * MIB,
            queue_bytes=2 * total,
            min_free_bytes=0,
            encrypt=encrypt,
        )
    )
    store.start()
    names = [RecordId(i.to_bytes(32, "big"), RecordKind.WINDOW) for i in range(len(payloads))]
    before = [RecordId(bytes([255]) + name.key[1:], name.kind) for name in names[:RESTORE_RECORDS]]
    assert all(store.put(name, payloads[0], explicit=True).held for name in before)
    assert store.flush(300) and store.fetch_now(before).ok
    began = time.perf_counter()
    for name, payload in zip(names, payloads, strict=True):
        assert store.put(name, payload, explicit=True).held
    assert store.flush(300)
    written = time.perf_counter() - began
    read: list[float] = []
    for _ in range(READS):
        began = time.perf_counter()
        for begin in range(0, len(names), RESTORE_RECORDS):
            result = store.fetch_now(names[begin : begin + RESTORE_RECORDS])
            assert result.ok and set(result.tiers) == {Tier.DISK}
            del result
        read.append(time.perf_counter() - began)
    store.close()
    return written, median(read)


def _opened_alone(folder: Path, payload: bytes) -> float:
    """Seconds in which one thread reads one sealed record and opens it, with no store around it.

    Two threads would do so with `RESTORE_RECORDS` in the same time.
    """
    seal, scratch, path = AesGcmSeal(), Scratch(), folder / "sealed"
    name = RecordId(bytes(32), RecordKind.WINDOW)
    with path.open("wb", buffering=0) as file:
        length = sum(file.write(part) for part in seal.seal(name, payload, scratch))
    seconds: list[float] = []
    with path.open("rb", buffering=0) as file:
        for _ in range(READS + 2):
            began = time.perf_counter()
            opened = seal.open(name, length, lambda at, into: _read_at(file, at, into), scratch)
            seconds.append(time.perf_counter() - began)
            del opened
    path.unlink()
    return median(seconds)


def _read_at(file: FileIO, at: int, into: memoryview) -> None:
    file.seek(at)
    file.readinto(into)


class _Forgetful(FileStorage):
    """Segments that the system can be asked to read from the disk again."""

    def forget(self) -> None:
        for file in self._files.values():
            _forget(file)


def _forget(file: int) -> None:
    """Has the system drop a file's pages from its cache."""
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _awake(turn: Callable[[], float], before: Callable[[], None]) -> float:
    """Median seconds of `turn`, each behind `before`, once cores that slept are awake."""
    turns: list[float] = []
    until = time.perf_counter() + AWAKE_SECONDS
    while len(turns) < READS:
        before()
        seconds = turn()
        if time.perf_counter() > until:
            turns.append(seconds)
    return median(turns)


def _conversation(options: Options, quiet: Quiet) -> None:
    """A conversation of 8,192 tokens restored in one order, beside reading as many bytes into as many buffers."""
    shrink = 8 if options.quick else 1
    sizes = [GEMMA3_FULL_RECORD // shrink] * RESTORE_BLOCKS + [GEMMA3_WINDOW_RECORD // shrink] * RESTORE_RECORDS
    total, rounds = sum(sizes), 2 if options.quick else options.runs or 15
    names = [RecordId(i.to_bytes(32, "big"), RecordKind.WINDOW) for i in range(len(sizes))]
    places = ["page_cache", "disk"] if hasattr(os, "posix_fadvise") else ["page_cache"]
    others = Bystanders([])
    ours: dict[str, list[float]] = {place: [] for place in places}
    raws: dict[str, list[float]] = {place: [] for place in places}
    with tempfile.TemporaryDirectory(prefix="kvfork-bench-", dir=default_scratch_dir()) as folder:
        storage = _Forgetful(Path(folder))
        limits = StoreConfig(memory_bytes=0, disk_bytes=4 * total + 512 * MIB, queue_bytes=2 * total, min_free_bytes=0)
        store = TieredStore(limits, storage)
        store.start()
        with (Path(folder) / "plain").open("w+b", buffering=0) as plain:
            for name, size in zip(names, sizes, strict=True):
                payload = os.urandom(size)
                assert store.put(name, payload, explicit=True).held
                plain.write(payload)
            assert store.flush(300)
            buffers = [bytearray(size) for size in sizes]

            def raw() -> float:
                plain.seek(0)
                began = time.perf_counter()
                for buffer in buffers:
                    plain.readinto(buffer)
                return time.perf_counter() - began

            def restored() -> float:
                began = time.perf_counter()
                result = store.fetch_now(names)
                seconds = time.perf_counter() - began
                assert result.ok and set(result.tiers) == {Tier.DISK}
                return seconds

            def forget() -> None:
                _forget(plain.fileno())
                storage.forget()

            raw(), restored()  # their memory is there from now on
            for place in places:  # one after the other: what comes back from the disk lies in other pages than before
                for number in range(rounds):
                    for turn, seconds in [(raw, raws[place]), (restored, ours[place])][:: 1 if number % 2 else -1]:
                        quiet.wait()
                        seconds.append(_awake(turn, forget if place == "disk" else lambda: None))
        store.close()
    busy = others.cores()
    for place in places:
        ratios = [b / a for a, b in zip(ours[place], raws[place], strict=True)]
        emit(
            Figure(
                metric=f"store.conversation_restore_over_raw_{place}",
                value=median(ratios),
                unit="ratio",
                ours=total / MIB / median(ours[place]),
                against=total / MIB / median(raws[place]),
                peer="plain file, from the same place",
                model="records of gemma3, 8,192 tokens",
                n=rounds,
                extra={"spread": spread(ratios), "sides_unit": "MiB/s"},
            ),
            others=busy,
        )


def _planning(options: Options) -> None:
    """Lookups in a cache that knows the whole prompt, with records of one byte in a store without a disk."""
    for tokens in (1024,) if options.quick else (1024, 128 * 1024):
        cache = _filled(tokens)
        prompt = array("I", (i * 7 % 5003 for i in range(tokens + 20)))
        base = _last_node(cache, prompt)
        followed: list[float] = []
        handled: list[float] = []
        planned: list[float] = []
        for _ in range(5 if options.quick else 15):
            began = time.perf_counter()
            found = cache.lookup("bench", prompt, base=None, keep=())
            followed.append(time.perf_counter() - began)
            assert found.position == tokens, found.position
            cache.release(found)
            began = time.perf_counter()
            found = cache.lookup("bench", prompt, base=base, keep=())
            handled.append(time.perf_counter() - began)
            assert found.position == tokens, found.position
            cache.release(found)
            path, store = base.path(), cache.store
            began = time.perf_counter()
            plan = plan_restore(
                path, GEMMA3, lambda r, s=store: s.locate(r) is not None, target=tokens, more_follows=True
            )
            planned.append(time.perf_counter() - began)
            assert plan is not None and plan.position == tokens
        committed = _commit(cache, base, 5 if options.quick else 25)
        cache.store.close()
        emit(
            Figure(
                metric=f"store.commit_{tokens // 1024}k_ms",
                value=1000 * median(committed),
                unit="ms",
                model="layout of gemma3",
                n=len(committed),
                extra={"spread": spread([1000 * seconds for seconds in committed]), "blocks": tokens // BLOCK_TOKENS},
            )
        )
        emit(
            Figure(
                metric=f"store.plan_{tokens // 1024}k_ms",
                value=1000 * median(followed),
                unit="ms",
                model="layout of gemma3",
                n=len(followed),
                extra={
                    "from_a_snapshot_ms": 1000 * median(handled),
                    "plan_restore_alone_ms": 1000 * median(planned),
                    "blocks": tokens // BLOCK_TOKENS,
                },
            )
        )


def _commit(cache: PrefixCache, base: Node, rounds: int) -> list[float]:
    """Seconds to publish one more block behind `base` and a snapshot of it, copying of state and writing apart."""
    seconds: list[float] = []
    for number in range(rounds):
        block = array("I", [number] * BLOCK_TOKENS)
        payloads = {RecordKind.FULL: b"f", RecordKind.WINDOW: b"w", RecordKind.LOGITS: b"l"}
        began = time.perf_counter()
        schedule = prefill_schedule(base.end, base.end + BLOCK_TOKENS, ())
        done = cache.commit(base, block, schedule, payloads, explicit=True)
        cache.thin(done.node)
        cache.add_snapshot("bench", done.node, Keep(snapshot_id=f"committed-{number}"), parent=None)
        cache.let_go(done.node)
        seconds.append(time.perf_counter() - began)
        assert done.lost is None
        cache.store.run_pending()
    return seconds


def _snapshots(count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.snapshots_alone", str(count)], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    emit(
        Figure(
            metric="store.memory_per_1000_snapshots_mib",
            value=found["grown"] / MIB * 1000 / count,
            unit="MiB",
            model="names, tree and index of one conversation",
            n=1,
            extra={"snapshots": count, "records": found["records"], "disk_mib": found["disk"] / MIB},
        )
    )


def _decoding(options: Options, quiet: Quiet) -> None:
    """One chat that will be saved, long enough to pass boundaries, with checkpoints written and with none.

    A chat that will not be saved stores none of the blocks that it decodes.
    """
    model = options.model or ("tiny-gemma3" if options.quick else "gemma3")
    rounds = 1 if options.quick else options.runs or 5
    prompt, answer = (200, 80) if options.quick else (500, 280)
    speeds: dict[str, list[float]] = {"through": [], "off": []}
    with ExitStack() as stack:
        servers = {how: stack.enter_context(Server(model, "--checkpoints", how)) for how in speeds}
        others = Bystanders([server.pid for server in servers.values()])
        vocab = servers["off"].get_model().vocab_size
        for number in range(rounds):
            order = list(speeds)[:: 1 if number % 2 else -1]
            for how in order:
                quiet.wait()
                reply = servers[how].generate(raw(tokens=some_tokens(prompt, number, vocab)), answer, save=True)
                servers[how].delete(reply.snapshot)
                speeds[how].append((len(reply.times) - 1) / (reply.times[-1] - reply.times[0]))
            note(f"  decode with checkpoints {speeds['through'][-1]:.2f}, without {speeds['off'][-1]:.2f} tokens/s")
        written = _when_written(servers["through"]).checkpoints_written
        assert written and not servers["off"].stats().checkpoints_written
    ratios = [on / off for on, off in zip(speeds["through"], speeds["off"], strict=True)]
    emit(
        Figure(
            metric="store.decode_on_over_off",
            value=median(ratios),
            unit="ratio",
            ours=median(speeds["through"]),
            against=median(speeds["off"]),
            peer="the same server with --checkpoints off",
            model=model,
            n=rounds,
            extra={"spread": spread(ratios), "sides_unit": "tokens/s", "checkpoints_written": written},
        ),
        others=others.cores(),
    )


def _when_written(server: Server) -> CacheStats:
    """What the store counts once nothing waits for the disk any more."""
    until = time.monotonic() + 60
    while (stats := server.stats()).pending_bytes and time.monotonic() < until:
        time.sleep(0.05)
    return stats


def _filled(tokens: int) -> PrefixCache:
    """A cache that holds every block of the prompt."""
    config = StoreConfig(memory_bytes=64 * MIB, disk_bytes=1024 * MIB, queue_bytes=64 * MIB, min_free_bytes=0)
    store = TieredStore(config, MemoryStorage())
    cache = PrefixCache(store, GEMMA3, "bench")
    prompt = array("I", (i * 7 % 5003 for i in range(tokens)))
    parent = cache.root("bench")
    for start in range(0, tokens, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        payloads = {RecordKind.FULL: b"f", RecordKind.WINDOW: b"w"}
        done = cache.commit(parent, prompt[start:end], prefill_schedule(start, end, ()), payloads, explicit=True)
        assert done.lost is None
        parent = done.node
    cache.add_snapshot("bench", parent, Keep(snapshot_id="the-end-of-it"), parent=None)
    store.flush(60)
    return cache


def _last_node(cache: PrefixCache, prompt: Sequence[int]) -> Node:
    return cache.snapshot("bench", "the-end-of-it").node
