"""Snapshots between two servers: bit-equal there, nothing sent twice, and what is not whole refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from kvcache.export import SIGNATURE_BYTES
from tests.e2e.exports import key_file, manifest_of
from tests.e2e.live import PATIENCE, Answer, LiveServer, generate, greedy, prompt_of, raw, refused, until

pytestmark = [pytest.mark.mlx]

LAYERS = {
    "tiny-llama": "full",
    "tiny-gemma3-w64": "window of 64",
    "tiny-gpt-oss": "window of 128",
    "tiny-gemma3": "window of 512",
    "tiny-qwen3_5": "gated delta",
    "tiny-lfm2": "convolution",
}
PROMPT = prompt_of(700)
MORE = prompt_of(3, seed=1)
PIECE = 100_000
KEY = "5a" * 32
INDEX_BYTES = 4  # before each record


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return key_file(tmp_path_factory.mktemp("keys") / "exchange.key", KEY)


@dataclass(frozen=True)
class Pair:
    """Two servers of one model that know the same key; the second has computed nothing by itself."""

    here: LiveServer
    there: LiveServer


@pytest.fixture(scope="module", params=LAYERS, ids=LAYERS.get)
def pair(request: pytest.FixtureRequest, key: Path) -> Iterator[Pair]:
    flags = ("--exchange-key", str(key))
    with LiveServer(request.param, *flags) as here, LiveServer(request.param, *flags) as there:
        yield Pair(here, there)


@pytest.fixture(scope="module")
def llamas(key: Path) -> Iterator[Pair]:
    flags = ("--exchange-key", str(key))
    with LiveServer("tiny-llama", *flags) as here, LiveServer("tiny-llama", *flags) as there:
        yield Pair(here, there)


def create(server: LiveServer, tokens: Sequence[int], parent: str = "", **options: object) -> pb.Snapshot:
    request = inference_pb.CreateSnapshotRequest(
        parent=parent, input=raw(tokens), options=pb.SnapshotOptions(**options)
    )
    return server.inference.CreateSnapshot(request, timeout=PATIENCE).snapshot


def messages(server: LiveServer, name: str, **options: object) -> list[snapshot_pb.ExportSnapshotResponse]:
    request = snapshot_pb.ExportSnapshotRequest(name=name, **options)
    return list(server.snapshots.ExportSnapshot(request, timeout=PATIENCE))


def export(server: LiveServer, name: str, **options: object) -> bytes:
    parts = messages(server, name, **options)
    data = b"".join(part.data for part in parts)
    assert parts[0].summary.bytes == len(data)
    assert not any(part.HasField("summary") for part in parts[1:])
    assert all(len(part.data) <= 1 << 20 for part in parts)
    return data


def check(server: LiveServer, manifest: bytes) -> snapshot_pb.CheckImportResponse:
    return server.snapshots.CheckImport(snapshot_pb.CheckImportRequest(manifest=manifest), timeout=PATIENCE)


def in_pieces(data: bytes, **options: object) -> Iterator[snapshot_pb.ImportSnapshotRequest]:
    first = pb.SnapshotOptions(**options) if options else None
    for at in range(0, max(1, len(data)), PIECE):
        yield snapshot_pb.ImportSnapshotRequest(data=data[at : at + PIECE], options=None if at else first)


def take_in(server: LiveServer, data: bytes, **options: object) -> snapshot_pb.ImportSnapshotResponse:
    return server.snapshots.ImportSnapshot(in_pieces(data, **options), timeout=PATIENCE)


def copy(here: LiveServer, there: LiveServer, name: str, **options: object) -> snapshot_pb.ImportSnapshotResponse:
    """As a client would do it: nothing travels that is there already."""
    held = check(there, export(here, name, manifest_only=True)).held
    return take_in(there, export(here, name, held=held), **options)


def middles(data: bytes) -> dict[int, str]:
    """A position in the payload of each record of a whole export, and the record's name."""
    found: dict[int, str] = {}
    behind = len(data)
    for item in reversed(manifest_of(data, KEY).items):
        found[behind - SIGNATURE_BYTES - item.size // 2] = str(item)
        behind -= SIGNATURE_BYTES + item.size + INDEX_BYTES
    return found


def question(given: pb.Input, parent: str = "") -> inference_pb.GenerateRequest:
    """Whose answer `values` can look at."""
    output = inference_pb.OutputOptions(token_ids=True, top_logprobs=5)
    return greedy(given, parent=parent, tokens=12, output=output)


def answer(server: LiveServer, given: pb.Input, parent: str = "") -> Answer:
    return generate(server, question(given, parent))


def values(of: Answer) -> tuple[list[int], list[float]]:
    """What was generated, and every log-probability beside it to the last bit."""
    numbers = [value for entry in of.logprobs for value in (entry.logprob, *(top.logprob for top in entry.top))]
    assert len(numbers) == 12 * 6
    return of.ids, numbers


def forget(server: LiveServer) -> None:
    for snapshot in server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots:
        server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=snapshot.name))

    def empty() -> bool:  # a call that was just answered may hold its records a moment longer
        server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
        stats = server.stats()
        return stats.memory_bytes == stats.disk_bytes == 0

    until(empty, what="an empty store")


@pytest.mark.parametrize("length", [700, 512, 90])
def test_what_was_prefilled_goes_on_bit_equal_elsewhere(pair: Pair, length: int) -> None:
    made = create(pair.here, PROMPT[:length], labels={"made": "here"})
    taken = copy(pair.here, pair.there, made.name)
    assert taken.snapshot.token_count == length and taken.snapshot.labels == {"made": "here"}
    assert taken.snapshot.prefix_hash == made.prefix_hash and taken.snapshot.name == made.name
    assert taken.snapshot.instance != made.instance
    ours, theirs = (answer(server, raw(MORE), made.name) for server in (pair.here, pair.there))
    assert values(ours) == values(theirs)
    assert theirs.usage.recomputed_tokens == 0 and theirs.usage.cached_tokens == length
    forget(pair.there)
    again = create(pair.there, PROMPT[:length])
    assert values(answer(pair.there, raw(MORE), again.name)) == values(theirs)  # computed there from its tokens
    forget(pair.here)


def test_what_was_generated_goes_on_bit_equal_elsewhere(pair: Pair) -> None:
    """Decoded state exists once: a run from the same tokens could give other last bits."""
    save = pb.SnapshotOptions(snapshot_id="after-generation")
    first = generate(pair.here, greedy(raw(PROMPT), tokens=80, save=save))
    name = first.finished.snapshot.name
    taken = copy(pair.here, pair.there, name)
    assert taken.snapshot.token_count == 780
    ours, theirs = (answer(server, raw(MORE), name) for server in (pair.here, pair.there))
    assert values(ours) == values(theirs) and theirs.usage.recomputed_tokens == 0
    forget(pair.here)
    forget(pair.there)


def test_a_flipped_byte_is_refused_and_the_next_try_goes_through(pair: Pair) -> None:
    made = create(pair.here, PROMPT)
    data = export(pair.here, made.name)
    bytes_before = pair.there.stats().memory_bytes, pair.there.stats().disk_snapshots
    records = middles(data)
    assert len(records) >= 3
    for at in (0, 5, 12, 40, *records):
        broken = bytearray(data)
        broken[at] ^= 4
        failed = refused(lambda broken=bytes(broken): take_in(pair.there, broken))
        if at in records:
            assert (failed.code, failed.reason) == ("DATA_LOSS", "EXPORT_DAMAGED")
            assert failed.metadata["record"] == records[at]
        else:
            assert failed.reason in ("EXPORT_DAMAGED", "EXPORT_UNREADABLE", "EXCHANGE_KEY_DIFFERS")
        assert (pair.there.stats().memory_bytes, pair.there.stats().disk_snapshots) == bytes_before
        assert check(pair.there, data).held == []
    assert take_in(pair.there, data).held_records == 0
    forget(pair.here)
    forget(pair.there)


def test_only_what_is_missing_travels(pair: Pair) -> None:
    first = create(pair.here, PROMPT)
    longer = create(pair.here, prompt_of(600, seed=2), parent=first.name)
    whole = copy(pair.here, pair.there, first.name)
    assert whole.held_records == 0 and whole.received_bytes > 0
    planned = check(pair.there, export(pair.here, longer.name, manifest_only=True))
    rest = copy(pair.here, pair.there, longer.name)
    # Two whole blocks of the first; its tail is another node than the block that went on from it.
    assert rest.held_records == len(planned.held) >= 2
    assert (rest.received_records, rest.received_bytes) == (planned.missing_records, planned.missing_bytes)
    saved = len(export(pair.here, longer.name)) - len(export(pair.here, longer.name, held=planned.held))
    assert saved > 2 * 256 * 64  # bytes of two blocks, at least
    again = copy(pair.here, pair.there, longer.name)
    assert (again.received_records, again.received_bytes) == (0, 0) and again.snapshot.name == longer.name
    elsewhere = copy(pair.here, pair.there, longer.name, snapshot_id="another-name")
    assert elsewhere.received_bytes == 0 and elsewhere.snapshot.name == "snapshots/another-name"
    assert elsewhere.snapshot.parent == first.name
    assert values(answer(pair.there, raw(MORE), "snapshots/another-name")) == values(
        answer(pair.here, raw(MORE), longer.name)
    )
    forget(pair.here)
    forget(pair.there)


def test_another_fingerprint_is_refused_by_name(server_for: Callable[[str], LiveServer], key: Path) -> None:
    flags = ("--exchange-key", str(key))
    with LiveServer("tiny-llama", *flags) as here, LiveServer("tiny-gemma3", *flags) as there:
        made = create(here, PROMPT)
        data = export(here, made.name)
        for failed in (refused(lambda: take_in(there, data)), refused(lambda: check(there, data))):
            assert (failed.code, failed.reason) == ("FAILED_PRECONDITION", "FINGERPRINT_DIFFERS")
            facts = {"want": made.model_fingerprint, "have": there.model().fingerprint, "model": "models/tiny-gemma3"}
            assert failed.metadata == facts and "PreconditionFailure" in failed.kinds


def test_another_key_is_refused_and_no_key_says_what_to_set(
    llamas: Pair, server_for: Callable[[str], LiveServer], tmp_path: Path
) -> None:
    made = create(llamas.here, PROMPT)
    data = export(llamas.here, made.name)
    with LiveServer("tiny-llama", "--exchange-key", str(key_file(tmp_path / "other", "5b" * 32))) as other:
        failed = refused(lambda: take_in(other, data))
        assert (failed.code, failed.reason) == ("FAILED_PRECONDITION", "EXCHANGE_KEY_DIFFERS")
    plain = server_for("tiny-llama")
    calls: Iterable[Callable[[], object]] = (
        lambda: take_in(plain, data),
        lambda: check(plain, data),
        lambda: plain.snapshots.ExportSnapshot(snapshot_pb.ExportSnapshotRequest(name="snapshots/none")),
    )
    for call in calls:
        failed = refused(call)
        assert (failed.code, failed.reason) == ("UNIMPLEMENTED", "EXCHANGE_UNSUPPORTED")
        assert "--exchange-key" in failed.text
    forget(llamas.here)
