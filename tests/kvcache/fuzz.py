"""A fuzzer of everything that reads bytes which a disk gave back: `make fuzz`, or `python tests/kvcache/fuzz.py`.

Random mutations of what the store writes: bits, bytes, cuts, pieces repeated, dropped and swapped, header fields with
their checksum made right again, tokens that upset JSON. Every reader must either refuse by the error that it documents
or give what was written. Each case has a number of its own and is made from the seed and it alone, so that a failure is
played again with `--seed SEED --case NUMBER`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from durable_worlds import LISTED, CrashStorage, DurableWorld, ring_at
from tiny_worlds import LAYOUTS, prompt_of

from kvcache.blocks import BlockKey
from kvcache.codec import ITEM_BYTES, ArrayBytes, PayloadError, decode, encode
from kvcache.errors import FormatError, StoreUnusable
from kvcache.format import (
    RECORD_HEADER,
    RECORD_MAGIC,
    SEGMENT_HEADER,
    RecordHeader,
    SegmentHeader,
    decode_record_header,
    decode_segment_header,
    encode_record_header,
    encode_segment_header,
)
from kvcache.keys import OwnerKey, decode_owners, encode_owners, parse_master_key
from kvcache.note_codec import decode_node, decode_snapshot, encode_node, encode_snapshot
from kvcache.records import NoteId, NoteKind, RecordId, RecordKind
from kvcache.scan import scan_records
from kvcache.store_dir import StoreDirectory, decode_store_file

JSON_TOKENS = (
    b"null", b"true", b"-1", b"1e999", b"-1e999", b"NaN", b"1" * 400, b'""', b"{}", b"[]", b"[" * 2_000, b'"\xff"',
    b'"\\ud800"', b'"id"', b",", b":", b"18446744073709551616",
)  # fmt: skip
LAYOUT = LAYOUTS["all"]
PROMPTS = {"first-one": prompt_of(600), "second-one": prompt_of(400, seed=2), "third-one": prompt_of(90, seed=3)}
LABELS: list[dict[str, str]] = [{}, {"v": "1"}, {"v": "2"}]


class Fuzzer:
    """Makes, runs and counts cases."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.ring = ring_at(folder / "keys")
        self.image = self._image()
        self.targets: dict[str, Callable[[random.Random], None]] = {
            "headers": self.headers,
            "scan": self.scan,
            "notes": self.notes,
            "keys": self.keys,
            "payload": self.payload,
            "reopen": self.reopen,
            "directory": self.directory,
        }

    def case(self, number: int) -> None:
        """Runs one case. Raises whatever it finds."""
        rng = random.Random(f"{self.seed} {number}")
        name = rng.choice(list(self.targets))
        self.done[name] += 1
        self.targets[name](rng)

    def run(self, seconds: float) -> int:
        """Runs cases for so long; the number of failures, each printed."""
        until = time.monotonic() + seconds
        failures = 0
        for number in itertools.count():
            if time.monotonic() >= until or failures >= 10:
                break
            try:
                self.case(number)
            except BaseException as error:  # any: what a reader raises beyond its contract is what is looked for
                if isinstance(error, KeyboardInterrupt):
                    raise
                failures += 1
                print(f"FAILED --seed {self.seed} --case {number}", file=sys.stderr)
                traceback.print_exc()
        return failures

    # -- targets

    def headers(self, rng: random.Random) -> None:
        key = rng.randbytes(32)
        name = RecordId(key, rng.choice(list(RecordKind))) if rng.random() < 0.7 else NoteId(key, NoteKind.NODE)
        header = RecordHeader(record=name, payload_bytes=rng.randrange(1 << 20), flags=rng.randrange(2))
        segment = SegmentHeader(number=rng.randrange(1 << 32), store_id=rng.randbytes(16), namespace=rng.randbytes(32))
        for encoded, decode_header, encode_header in (
            (encode_record_header(header), decode_record_header, encode_record_header),
            (encode_segment_header(segment), decode_segment_header, encode_segment_header),
        ):
            data = mutated(encoded, rng)
            if rng.random() < 0.7 and len(data) >= 64:
                data = data[:60] + struct.pack("<I", zlib.crc32(data[:60])) + data[64:]
            try:
                found = decode_header(data)
            except FormatError:
                self.refused["headers"] += 1
            else:
                assert encode_header(found) == data[:64]  # type: ignore[operator]

    def scan(self, rng: random.Random) -> None:
        data = self._damaged(rng.choice(list(self.image.values())), rng)

        def read(offset: int, buffer: memoryview) -> int:
            part = data[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            return len(part)

        found = scan_records(read, len(data))
        at = SEGMENT_HEADER.size
        for record in found.found:
            assert record.offset >= at
            at = record.offset + record.header.record_bytes
            assert at <= len(data)
        assert found.end <= max(len(data), SEGMENT_HEADER.size)

    def notes(self, rng: random.Random) -> None:
        snapshot = rng.choice(self.snapshots)
        node = rng.choice(snapshot.node.path())
        data = mutated(encode_node(node), rng)
        try:
            note = decode_node(data, BlockKey(node.key))
        except FormatError:
            self.refused["notes"] += 1
        else:
            assert node.parent is not None
            assert (note.parent, note.tokens, note.schedule) == (node.parent.key, node.tokens, node.schedule)
        try:
            handle = decode_snapshot(mutated(encode_snapshot(snapshot, "model"), rng, JSON_TOKENS))
        except FormatError:
            self.refused["notes"] += 1
        else:
            assert all(isinstance(text, str) for text in (handle.id, handle.owner, handle.model, *handle.lineage))
            assert len(handle.node) == 32 and isinstance(handle.expires, float)

    def keys(self, rng: random.Random) -> None:
        master, store_id = rng.randbytes(32), rng.randbytes(16)
        owners = [OwnerKey(id=n + 1, owner=f"owner {n}", key=rng.randbytes(32)) for n in range(rng.randrange(4))]
        try:
            found = decode_owners(mutated(encode_owners(owners, store_id, master), rng, JSON_TOKENS), store_id, master)
        except StoreUnusable:
            self.refused["keys"] += 1
        else:
            assert all(key in owners for key in found)
        about = b'{"format": 2, "instance": "00112233445566778899aabbccddeeff", "openings": 7, "listed": 6}'
        try:
            said = decode_store_file(mutated(about, rng, JSON_TOKENS), Path("somewhere"))
        except StoreUnusable:
            self.refused["keys"] += 1
        else:
            assert len(said.instance) == 32 and said.openings >= said.listed >= 0
        try:
            assert len(parse_master_key(mutated(master.hex().encode(), rng), "it")) == 32
        except StoreUnusable:
            self.refused["keys"] += 1

    def payload(self, rng: random.Random) -> None:
        arrays = {}
        for n in range(rng.randrange(4)):
            dtype = rng.choice(list(ITEM_BYTES))
            shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(4)))
            size = ITEM_BYTES[dtype]
            for length in shape:
                size *= length
            arrays[f"a{n}"] = ArrayBytes(dtype, shape, memoryview(rng.randbytes(size)))
        data = mutated(bytes(encode(arrays)), rng, JSON_TOKENS)
        try:
            found = decode(data)
        except PayloadError:
            self.refused["payload"] += 1
            return
        for array in found.values():
            size = ITEM_BYTES[array.dtype]
            for length in array.shape:
                size *= length
            assert array.data.nbytes == size <= len(data)

    def reopen(self, rng: random.Random) -> None:
        image = dict(self.image)
        for _ in range(rng.choice([1, 1, 2, 3])):
            files = [number for number in image if number != LISTED]  # that one is sealed in a small file: `directory`
            number = rng.choice(files)
            match rng.randrange(8):
                case 0 if len(files) > 1:
                    del image[number]
                case 1:
                    other = rng.choice(files)
                    image[number], image[other] = image[other], image[number]
                case 2:
                    image[max(image) + rng.choice([1, 5])] = image[number]  # an old segment put back
                case _:
                    image[number] = self._damaged(image[number], rng)
        try:
            world = DurableWorld(LAYOUT, CrashStorage(image), self.ring, opening=2)
        except StoreUnusable:
            self.refused["reopen"] += 1
            return
        self._check(world)
        if rng.random() < 0.2:
            world.keep(world.run(prompt_of(300, seed=9)).nodes[300], "made-after")
            assert world.restored("made-after") == 300
        assert world.store.stats().failed_jobs == 0

    def directory(self, rng: random.Random) -> None:
        """A store's directory with its small files damaged and strange names among its segments."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            path = Path(folder) / "store"
            StoreDirectory(path).close()
            about = path / "store.json"
            about.write_bytes(mutated(about.read_bytes(), rng, JSON_TOKENS))
            (path / "segments").mkdir()
            for _ in range(rng.randrange(3)):
                name = rng.choice(["segment-00000001.kv", "segment-0000000a.kv", "segment-99999999999.kv", "x", ".new"])
                (path / "segments" / name).write_bytes(rng.randbytes(rng.randrange(100)))
            try:
                with StoreDirectory(path) as opened:
                    assert 0 < opened.openings < 1 << 32
                    storage = opened.storage()
                    assert all(size >= 0 for size in storage.sizes().values())
                    storage.close()
            except StoreUnusable:
                self.refused["directory"] += 1

    # -- material

    def _image(self) -> dict[int, bytes]:
        storage = CrashStorage()
        world = DurableWorld(LAYOUT, storage, self.ring)
        first = world.keep(world.run(PROMPTS["first-one"]).nodes[600], "first-one", labels=(("v", "1"),))
        second = world.keep(world.run(PROMPTS["second-one"]).nodes[400], "second-one", parent=first)
        third = world.keep(world.run(PROMPTS["third-one"]).nodes[90], "third-one")
        gone = world.keep(world.run(prompt_of(70, seed=4)).nodes[70], "gone-one")
        world.cache.update(first, labels={"v": "2"})
        world.cache.delete(gone)
        world.settle()
        self.snapshots = [first, second, third]
        return storage.images(0)["killed"]

    def _check(self, world: DurableWorld) -> None:
        """Names that are there are those that were made, on their tokens; what is read is what was written."""
        for name, (tokens, labels, _) in world.handles.items():
            if name != "gone-one":  # an old segment put back may bring it again
                assert tokens == PROMPTS[name] and labels in LABELS, name
            assert world.restored(name) <= len(tokens)

    def _damaged(self, data: bytes, rng: random.Random) -> bytes:
        """A segment with mutations anywhere, or in the fields of one header whose checksum is made right again."""
        at = [i for i in range(SEGMENT_HEADER.size, len(data)) if data.startswith(RECORD_MAGIC, i)]
        if not at or rng.random() < 0.5:
            return mutated(data, rng)
        changed = bytearray(data)
        for start in rng.sample(at, min(len(at), rng.choice([1, 1, 2]))):
            if start + RECORD_HEADER.size > len(changed):
                continue
            field, size = rng.choice([(4, 1), (5, 1), (6, 2), (8, 4), (12, 4), (16, 32), (48, 12)])
            changed[start + field : start + field + size] = rng.randbytes(size)
            if field == 12 and rng.random() < 0.7:
                changed[start + 12 : start + 16] = struct.pack("<I", rng.randrange(2 * len(data)))
            crc = zlib.crc32(changed[start : start + 60])
            changed[start + 60 : start + 64] = struct.pack("<I", crc)
        return bytes(changed)


def mutated(data: bytes, rng: random.Random, tokens: tuple[bytes, ...] = ()) -> bytes:
    """`data` with one to four changes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        size = len(changed)
        at = rng.randrange(size + 1)
        length = min(size - at, rng.choice([1, 4, 16, 64, 1 << 12]))
        match rng.randrange(9 if tokens else 7):
            case 0 if size:
                changed[at % size] ^= 1 << rng.randrange(8)
            case 1 if size:
                changed[at % size] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                changed[at : at + length] = rng.randbytes(length)
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = changed[at : at + length]
            case 5:
                del changed[at:]
            case 6:
                to = rng.randrange(size + 1)
                piece = bytes(changed[at : at + length])
                changed[to : to + len(piece)] = piece
            case _ if tokens:
                changed[at : at + rng.choice([0, 1, 4])] = rng.choice(tokens)
    return bytes(changed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random damage to all that the store reads.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="where cases begin; the time of day if not given")
    parser.add_argument("--case", type=int, default=None, help="play one case again")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else int(time.time())
    with tempfile.TemporaryDirectory(prefix="kvfork-fuzz-") as folder:
        fuzzer = Fuzzer(seed, Path(folder))
        if args.case is not None:
            fuzzer.case(args.case)
            return 0
        failures = fuzzer.run(60 * args.minutes)
    cases = ", ".join(f"{name} {count:,}" for name, count in sorted(fuzzer.done.items()))
    refused = ", ".join(f"{name} {count:,}" for name, count in sorted(fuzzer.refused.items()))
    print(f"seed {seed}: {failures} failures in {sum(fuzzer.done.values()):,} cases ({cases}); refused: {refused}")
    return 1 if failures else 0


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # damage is logged, and there is much of it
    sys.exit(main())
