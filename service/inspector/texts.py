"""What a snapshot adds to the one it was derived from, as text. Owns where its own part begins and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from google.protobuf.message import Message
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from service.inspector.gateway import Gateway, Metadata, Refused

MOST_TOKENS = 8_192  # of one text; half from each end

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnText:
    """`text` is that of tokens from `start` on, with a note in place of `omitted` tokens and of images."""

    start: int
    tokens: int
    omitted: int
    text: str


def own_start(tokens: Sequence[int], parents: Sequence[int]) -> int:
    """Where `tokens` leave those of the parent; at the latest at the end of either."""
    both = min(len(tokens), len(parents))
    if tokens[:both] == parents[:both]:
        return both
    return next(i for i in range(both) if tokens[i] != parents[i])


def pieces(start: int, end: int, images: Sequence[Span], most: int) -> list[Span | str]:
    """Stretches of text tokens between `start` and `end`, and notes between them; of the middle only its length."""
    cut = (start + most - most // 2, end - most // 2) if end - start > most else (end, end)
    found: list[Span | str] = []
    here = start
    holes = [(max(a, start), b, f"[image, {b - a} tokens]") for a, b in images if b > start]
    holes.append((*cut, f"[… {cut[1] - cut[0]:,} tokens …]"))
    for first, last, note in sorted(holes):
        if first >= end or last <= here:
            continue
        if first > here:
            found.append((here, first))
        found.append(note)
        here = max(here, last)
    if here < end:
        found.append((here, end))
    return found


async def own_text(gateway: Gateway, name: str, most: int, metadata: Metadata) -> dict[str, Any]:
    """`OwnText` of a snapshot as a dictionary. Raises Refused."""
    most = max(2, min(most, MOST_TOKENS))
    reply = await _get(gateway, name, metadata)
    tokens = list(reply.token_ids)
    parents: list[int] = []
    if reply.snapshot.parent:
        try:
            parents = list((await _get(gateway, reply.snapshot.parent, metadata)).token_ids)
        except Refused as refused:
            if refused.told["code"] != "NOT_FOUND":  # a parent that is gone leaves all of it to show
                raise
    start = own_start(tokens, parents)
    images = [(span.start, span.end) for span in reply.snapshot.image_spans]
    found = pieces(start, len(tokens), images, most)
    text = "".join([p if isinstance(p, str) else await _text(gateway, tokens[p[0] : p[1]], metadata) for p in found])
    omitted = max(0, len(tokens) - start - most)
    return asdict(OwnText(start=start, tokens=len(tokens) - start, omitted=omitted, text=text))


async def _get(gateway: Gateway, name: str, metadata: Metadata) -> snapshot_pb.GetSnapshotResponse:
    request = snapshot_pb.GetSnapshotRequest(name=name, include_tokens=True)
    return cast(snapshot_pb.GetSnapshotResponse, await gateway.unary("GetSnapshot", request, metadata))


async def _text(gateway: Gateway, tokens: Sequence[int], metadata: Metadata) -> str:
    part = pb.Part(tokens=pb.TokenRun(ids=tokens))
    request: Message = inference_pb.CountTokensRequest(
        input=pb.Input(raw=pb.RawInput(parts=[part])), include_rendered=True
    )
    return cast(inference_pb.CountTokensResponse, await gateway.unary("CountTokens", request, metadata)).text
