"""Snapshots with images between two servers: the state behind them travels, and so do their files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.exports import key_file, manifest_of
from tests.e2e.live import PATIENCE, LiveServer, prompt_of, raw, refused
from tests.e2e.test_exchange import Pair, answer, check, copy, export, forget, take_in, values
from tests.images.pictures import png

pytest.importorskip("mlx_vlm", reason="the vision extra is not installed")
pytestmark = [pytest.mark.mlx, pytest.mark.slow]

MORE = prompt_of(5, seed=1)
KEY = "7d" * 32
# Recurrent layers and rotary places of an image's own; windows, and attention both ways inside an image.
MODELS = ["tiny-qwen3_5-vl", "tiny-gemma3-vl"]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    key = key_file(tmp_path_factory.mktemp("keys") / "exchange.key", KEY)
    flags = ("--exchange-key", str(key))
    with LiveServer(request.param, *flags) as here, LiveServer(request.param, *flags) as there:
        yield Pair(here, there)


def seen(server: LiveServer, picture: bytes) -> pb.Snapshot:
    """A snapshot behind text, a picture, and more text."""
    parts = [
        pb.Part(tokens=pb.TokenRun(ids=prompt_of(300))),
        pb.Part(image=pb.Image(data=picture)),
        pb.Part(tokens=pb.TokenRun(ids=prompt_of(60, seed=2))),
    ]
    request = inference_pb.CreateSnapshotRequest(input=pb.Input(raw=pb.RawInput(parts=parts)))
    return server.inference.CreateSnapshot(request, timeout=PATIENCE).snapshot


def test_what_is_behind_an_image_goes_on_bit_equal_and_its_file_comes_along(pair: Pair) -> None:
    made = seen(pair.here, png(3))
    taken = copy(pair.here, pair.there, made.name)
    assert list(taken.snapshot.image_spans) == list(made.image_spans) and len(made.image_spans) == 1
    ours, theirs = (answer(server, raw(MORE), made.name) for server in (pair.here, pair.there))
    assert values(ours) == values(theirs) and theirs.usage.recomputed_tokens == 0
    assert theirs.usage.image_tokens == ours.usage.image_tokens > 0
    assert pair.there.stats().images_encoded == 0  # nobody has looked at it here
    # Without its state the file is needed, and is there.
    pair.there.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
    again = answer(pair.there, raw(MORE), made.name)
    assert again.usage.recomputed_tokens == made.token_count and values(again) == values(ours)
    assert pair.there.stats().images_encoded == 1
    forget(pair.here)
    forget(pair.there)


def test_an_image_that_is_there_already_does_not_travel_and_a_damaged_one_is_refused(pair: Pair) -> None:
    picture = png(4)
    made = seen(pair.here, picture)
    data = export(pair.here, made.name)
    before = pair.there.stats().image_bytes
    at = data.index(picture)
    broken = bytearray(data)
    broken[at + 50] ^= 1
    failed = refused(lambda: take_in(pair.there, bytes(broken)))
    assert (failed.code, failed.reason) == ("DATA_LOSS", "EXPORT_DAMAGED")
    assert failed.metadata["record"].startswith("image ") and check(pair.there, data).held == []
    assert pair.there.stats().image_bytes == before
    whole = copy(pair.here, pair.there, made.name)
    assert whole.held_records == 0 and pair.there.stats().image_bytes == before + len(picture)
    assert picture not in export(pair.here, made.name, held=check(pair.there, data).held)
    assert copy(pair.here, pair.there, made.name).received_bytes == 0
    forget(pair.there)
    forget(pair.here)


def test_an_export_that_leaves_an_image_out_which_is_not_there_is_incomplete(pair: Pair) -> None:
    made = seen(pair.here, png(5))
    copy(pair.here, pair.there, made.name)
    held = check(pair.there, export(pair.here, made.name, manifest_only=True)).held
    image = next(record for record in held if record[-1] == 131)
    other = seen(pair.here, png(6))
    theirs = check(pair.there, export(pair.here, other.name, manifest_only=True))
    assert image not in theirs.held
    everything = [bytes(item.id) for item in manifest_of(export(pair.here, other.name), KEY).items]
    names = [record for record in everything if record[-1] == 131]
    failed = refused(lambda: take_in(pair.there, export(pair.here, other.name, held=names)))
    assert (failed.code, failed.reason) == ("ABORTED", "EXPORT_INCOMPLETE")
    assert failed.metadata["record"].startswith("image ")
    listed = pair.there.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots
    assert [snapshot.name for snapshot in listed] == [made.name]
    forget(pair.here)
    forget(pair.there)
