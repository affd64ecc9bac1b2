"""Sealing: what was sealed opens as what it was, and as nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from storage_doubles import payload, record

from kvcache.buffers import MAPPED_BUFFER_BYTES
from kvcache.errors import FormatError
from kvcache.format import RECORD_HEADER, RECORD_OVERHEAD, TRAILER_BYTES, decode_record_header
from kvcache.records import Buffer, RecordId, RecordKind
from kvcache.seal import AesGcmSeal, ChecksumSeal, Scratch, Seal

GOLDEN = Path(__file__).parent / "golden"
KEY = bytes(range(32))
NAME = RecordId(bytes(range(32)), RecordKind.WINDOW)
PAYLOAD = b"the state after a prefix, as bytes"


def sealed(seal: Seal, name: RecordId, data: Buffer) -> bytes:
    return b"".join(seal.seal(name, data, Scratch()))


def opened(seal: Seal, name: RecordId, data: Buffer) -> Buffer:
    def fill(at: int, into: memoryview) -> None:
        into[:] = memoryview(data)[at : at + len(into)]

    return seal.open(name, len(data), fill, Scratch())


@pytest.fixture(params=[AesGcmSeal, ChecksumSeal])
def seal(request: pytest.FixtureRequest) -> Seal:
    return request.param()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4096, MAPPED_BUFFER_BYTES - 1, MAPPED_BUFFER_BYTES, 300_001])
def test_a_record_opens_as_what_was_sealed(seal: Seal, size: int) -> None:
    data = payload("x", size)
    record_bytes = sealed(seal, NAME, data)
    assert len(record_bytes) == size + RECORD_OVERHEAD
    clear = opened(seal, NAME, record_bytes)
    assert bytes(clear) == data
    assert memoryview(clear).readonly


def test_any_bit_flipped_in_header_payload_or_trailer_is_noticed(seal: Seal) -> None:
    good = sealed(seal, NAME, PAYLOAD)
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            opened(seal, NAME, bad)


def test_a_record_cut_or_extended_anywhere_is_noticed(seal: Seal) -> None:
    good = sealed(seal, NAME, PAYLOAD)
    for size in range(len(good)):
        with pytest.raises(FormatError):
            opened(seal, NAME, good[:size])
    with pytest.raises(FormatError):
        opened(seal, NAME, good + b"\x00")


def test_a_record_opens_only_under_its_own_key_and_kind(seal: Seal) -> None:
    good = sealed(seal, NAME, PAYLOAD)
    for other in (record("other"), RecordId(NAME.key, RecordKind.FULL)):
        with pytest.raises(FormatError, match="holds window 00010203"):
            opened(seal, other, good)


def test_the_payload_of_one_record_is_refused_under_the_header_of_another(seal: Seal) -> None:
    first, second = record(1), record(2)
    a, b = sealed(seal, first, payload(1, 100)), sealed(seal, second, payload(2, 100))
    for name, header, body in ((first, a, b), (second, b, a)):
        with pytest.raises(FormatError):
            opened(seal, name, header[: RECORD_HEADER.size] + body[RECORD_HEADER.size :])


def test_another_stores_record_is_refused() -> None:
    theirs = sealed(AesGcmSeal(), NAME, PAYLOAD)
    with pytest.raises(FormatError, match="tag"):
        opened(AesGcmSeal(), NAME, theirs)


def test_a_store_that_seals_accepts_no_clear_record_and_the_other_way_round() -> None:
    with pytest.raises(FormatError, match="flags"):
        opened(AesGcmSeal(), NAME, sealed(ChecksumSeal(), NAME, PAYLOAD))
    with pytest.raises(FormatError, match="flags"):
        opened(ChecksumSeal(), NAME, sealed(AesGcmSeal(), NAME, PAYLOAD))


def test_sealed_bytes_show_nothing_of_the_payload() -> None:
    secret = b"my bank code is 1234" * 50
    body = sealed(AesGcmSeal(), NAME, secret)[RECORD_HEADER.size :]
    assert secret[:8] not in body
    assert sealed(AesGcmSeal(), NAME, secret)[RECORD_HEADER.size :] != body


def test_no_nonce_is_used_twice_even_by_threads() -> None:
    seal = AesGcmSeal()

    def nonces(_: int) -> list[bytes]:
        return [decode_record_header(seal.seal(NAME, b"", Scratch())[0]).nonce for _ in range(2000)]

    with ThreadPoolExecutor(4) as pool:
        seen = [nonce for some in pool.map(nonces, range(4)) for nonce in some]
    assert len(set(seen)) == len(seen) == 8000
    assert len({nonce[:4] for nonce in seen}) == 1


def test_records_of_version_1_stay_readable() -> None:
    encrypted = (GOLDEN / "record_v1_encrypted.bin").read_bytes()
    assert bytes(opened(AesGcmSeal(KEY), NAME, encrypted)) == PAYLOAD
    clear = (GOLDEN / "record_v1_clear.bin").read_bytes()
    assert bytes(opened(ChecksumSeal(), NAME, clear)) == PAYLOAD


def test_records_are_written_as_they_always_were() -> None:
    encrypted = sealed(AesGcmSeal(KEY, nonce_prefix=b"kvfk"), NAME, PAYLOAD)
    assert encrypted == (GOLDEN / "record_v1_encrypted.bin").read_bytes()
    assert sealed(ChecksumSeal(), NAME, PAYLOAD) == (GOLDEN / "record_v1_clear.bin").read_bytes()


def test_scratch_memory_is_reused_and_grows() -> None:
    scratch = Scratch()
    small = scratch.take(10)
    small[:] = b"0123456789"
    assert bytes(scratch.take(4)) == b"0123"
    assert len(scratch.take(MAPPED_BUFFER_BYTES)) == MAPPED_BUFFER_BYTES
    assert len(scratch.take(TRAILER_BYTES)) == TRAILER_BYTES
