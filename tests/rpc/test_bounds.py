"""What a message holds is counted in its bytes, whatever they are."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from kvfork.v1 import inference_service_pb2 as pb

from service.rpc import bounds
from service.rpc.bounds import holds_too_much, shape_of

GENERATE = shape_of("/kvfork.v1.InferenceService/Generate")


@pytest.fixture(autouse=True)
def small_ones_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SMALL", 0)


def fields_of(data: bytes) -> int:
    """The least limit that lets it pass."""
    return next(limit for limit in range(10**6) if not holds_too_much(data, GENERATE, fields=limit))


def test_every_field_counts_however_deep():
    message = pb.GenerateRequest(parent="snapshots/a", priority=-300)
    message.sampling.logit_bias[300] = 1.5  # an entry, its key and its value
    message.sampling.temperature = 0.5
    for text in ("one", "two", ""):
        message.input.chat.messages.add(role=2).parts.add(text=text)
    message.input.chat.messages[0].parts.add().tokens.ids.extend([1, 2, 300, 70_000])
    # parent, priority; sampling, temperature and three for the bias; input, chat; per message one for itself, its role,
    # a part and its text; a part, its tokens and their packed ids
    assert fields_of(message.SerializeToString()) == 2 + 2 + 3 + 2 + 3 * 4 + 3


def test_packed_numbers_count_by_themselves():
    message = pb.GenerateRequest()
    message.input.raw.parts.add().tokens.ids.extend([1, 300, 70_000] * 100)
    data = message.SerializeToString()
    assert holds_too_much(data, GENERATE, numbers=299)
    assert not holds_too_much(data, GENERATE, numbers=300)


def test_what_follows_something_unreadable_hides_nothing_that_came_before():
    message = pb.GenerateRequest()
    for _ in range(1000):
        message.input.raw.parts.add()
    broken = message.SerializeToString() + b"\x0f"  # a kind that there is not
    assert holds_too_much(broken, GENERATE, fields=500)


def test_a_method_that_nobody_knows_has_no_shape():
    assert shape_of("/kvfork.v1.InferenceService/Nothing") == {}
    assert holds_too_much(b"\x0a\x00" * 10, {}, fields=9)


@given(st.binary(max_size=200))
def test_any_bytes_are_counted(data: bytes):
    bounds.SMALL = 0
    count = fields_of(data)
    assert count <= len(data)
    try:
        message = pb.GenerateRequest.FromString(data)
    except DecodeError:
        return
    assert count >= len(message.ListFields())
