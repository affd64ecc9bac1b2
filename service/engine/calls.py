"""Model calls as the engine makes them. Owns how tokens, places and images become one call of upstream's model.

`TextCalls` serves mlx-lm's models; `service.engine.vision` has the form for models that see images.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import mlx.core as mx

from kvcache.media import MediaKey
from service.engine.heads import last_position
from service.engine.upstream import PADDING_MATTERS, make_prompt_cache
from service.plan import RowImage, TowerImage

Features = dict[str, mx.array]
"""What a vision tower made of one image, by names that its model's calls know."""


class Pass(Protocol):
    """One image on its way through the tower."""


class NoImages(TypeError):
    """The model sees no images."""


class Fed(NamedTuple):
    """A row's next token and the place that it takes among the positions of its row."""

    token: int
    place: int


class Calls(Protocol):
    """One model. `caches` are a row's own in `prefill`, those of the batch, row by row, in `decode`."""

    alone: str  # why rows must not share a decode call, where no short call would show it; empty: they may
    copies_lone_rows: bool  # a batched cache of one row is copied at each call: better one of its own

    def caches(self) -> list:
        """Fresh caches for a row."""
        ...

    def place(self, position: int, images: Sequence[RowImage]) -> int:
        """The place of the token at `position`, behind all of `images`."""
        ...

    def prefill(
        self, tokens: Sequence[int], start: int, images: Sequence[RowImage], features: dict[MediaKey, Features], caches
    ) -> mx.array:
        """Feeds tokens [start, start + len(tokens)) of a row; logits (1, vocab) of the last of them.

        `features` has those of every image that the tokens touch.
        """
        ...

    def decode(self, fed: Sequence[Fed], caches) -> mx.array:
        """Feeds one token a row; next-token logits (rows, vocab)."""
        ...

    def new_pass(self) -> Pass:
        """For an image that is to be encoded."""
        ...

    def encode_some(self, image: TowerImage, under_way: Pass, seconds: float) -> Features | None:
        """Takes an image further through the tower for so long: its features, evaluated; None: there is more to do.

        `under_way` is the image's own, and of no use after an error.
        """
        ...


class TextCalls:
    """See `Calls`. Positions are counted by the caches themselves."""

    copies_lone_rows = False

    def __init__(self, model) -> None:
        self._model = model
        self.alone = PADDING_MATTERS.get(type(model).__module__, "")

    @cached_property
    def _last_position(self):
        # Found out by calling the model: not before its caches are known to have policies.
        return last_position(self._model)

    def caches(self) -> list:
        return make_prompt_cache(self._model)

    def place(self, position: int, images: Sequence[RowImage]) -> int:
        return position

    def prefill(
        self, tokens: Sequence[int], start: int, images: Sequence[RowImage], features: dict[MediaKey, Features], caches
    ) -> mx.array:
        if images:
            raise NoImages("this model sees no images")
        return self._last_position(mx.array(list(tokens), dtype=mx.uint32)[None], cache=caches)[:, -1, :]

    def decode(self, fed: Sequence[Fed], caches) -> mx.array:
        return self._model(mx.array([row.token for row in fed], dtype=mx.uint32)[:, None], cache=caches)[:, -1, :]

    def new_pass(self) -> Pass:
        raise NoImages("this model sees no images")

    def encode_some(self, image: TowerImage, under_way: Pass, seconds: float) -> Features | None:
        raise NoImages("this model sees no images")


def calls_of(model) -> Calls:
    """`model` itself where it is `Calls`; an upstream text model as `TextCalls`."""
    return model if hasattr(model, "prefill") and hasattr(model, "decode") else TextCalls(model)
