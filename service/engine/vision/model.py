"""A model that sees images, as `Calls`. Owns prefill calls that images touch, and the places of what is decoded.

Upstream's models keep places of the last prompt on themselves, for all rows; nothing here reads or relies on that:
places go into every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import mlx.core as mx
import numpy as np

from kvcache.media import IMAGE, MediaKey
from service.engine import cpu
from service.engine.calls import Features, Fed
from service.engine.heads import shortened
from service.engine.policies import is_window
from service.engine.vision import upstream
from service.engine.vision.attention import attend
from service.engine.vision.families import Opens
from service.engine.vision.pacing import Pace, Pass
from service.engine.vision.places import place_behind, places
from service.engine.vision.runs import Opened, Run, runs_of
from service.plan import RowImage, TowerImage

ROWS = "rows"  # embeddings of the span, (positions, width)
DEEP = "deep"  # what is added behind the first layers, (layers, image positions, width)


class NoFeatures(LookupError):
    """A prefill call touches an image whose features are not here."""


class VisionCalls:
    """See `service.engine.calls.Calls`."""

    copies_lone_rows = True

    def __init__(self, model, *, image_id: int, opens: Opens, merge: int = 0) -> None:
        """`merge`: patches a side that become one position, where places have three axes; 0: they have one."""
        self._model = model
        self._language = upstream.language_model(model)
        self._last = shortened(self._language) or self._language
        self._image_id = image_id
        self._opens = opens
        self._merge = merge
        self._pace = Pace(model)
        self._on_cpu = cpu.prepare().accelerator == "cpu"
        self.alone = upstream.why_alone(model)

    def caches(self) -> list:
        return upstream.prompt_caches(self._model)

    def place(self, position: int, images: Sequence[RowImage]) -> int:
        return place_behind(position, images, self._merge) if self._merge else position

    def encode(self, image: TowerImage) -> Features:
        """All of the features of one image at once."""
        made = self.encode_some(image, Pass(), math.inf)
        assert made is not None
        return made

    def new_pass(self) -> Pass:
        return Pass()

    def encode_some(self, image: TowerImage, under_way: Pass, seconds: float) -> Features | None:
        return self._pace.advance(under_way, seconds, lambda: self._encoded(image))

    def _encoded(self, image: TowerImage) -> Features:
        if image.inputs is None:
            raise NoFeatures("the image's own arrays are gone")
        inputs = {name: mx.array(array) for name, array in image.inputs.items()}
        with upstream.attention_by(partial(attend, self._pace.attention)) if self._on_cpu else nullcontext():
            made = upstream.embeddings(self._model, mx.array([image.ids], dtype=mx.int32), inputs)
        features = {ROWS: made.inputs_embeds[0]}
        if made.deepstack_visual_embeds is not None:
            features[DEEP] = mx.stack(list(made.deepstack_visual_embeds))
        return features

    def prefill(
        self, tokens: Sequence[int], start: int, images: Sequence[RowImage], features: dict[MediaKey, Features], caches
    ) -> mx.array:
        end = start + len(tokens)
        touched = [image for image in images if image.start < end and image.end > start]
        ids = _real_ids(tokens, start, touched)
        more = {}
        if self._merge:
            more["position_ids"] = mx.array(places(start, end, images, self._merge))[:, None, :]
        if touched:
            more |= self._embedded(ids, start, touched, features)
            caches = self._opened(self._runs(start, touched), caches)
        fed = mx.array([ids], dtype=mx.int32)
        return upstream.logits_of(self._last(fed, cache=caches, **more))[:, -1, :]

    def decode(self, fed: Sequence[Fed], caches) -> mx.array:
        more = {}
        if self._merge:
            more["position_ids"] = mx.broadcast_to(
                mx.array([row.place for row in fed])[None, :, None], (3, len(fed), 1)
            )
        tokens = mx.array([row.token for row in fed], dtype=mx.int32)[:, None]
        return upstream.logits_of(self._language(tokens, cache=caches, **more))[:, -1, :]

    def _embedded(
        self, ids: list[int], start: int, touched: Sequence[RowImage], features: dict[MediaKey, Features]
    ) -> dict[str, mx.array | list[mx.array]]:
        """The call's embeddings with the rows of its images in their places, and what a family wants besides."""
        end = start + len(ids)
        text = upstream.embeddings(self._model, mx.array([ids], dtype=mx.int32), {})
        parts, deep, at = [], [], start
        for image in touched:
            held = features.get(image.key)
            if held is None:
                raise NoFeatures(f"the image at {image.start} was not encoded before its positions")
            first, last = max(start, image.start), min(end, image.end)
            parts += [text.inputs_embeds[:, at - start : first - start]]
            parts += [held[ROWS][None, first - image.start : last - image.start].astype(text.inputs_embeds.dtype)]
            at = last
            if DEEP in held:
                seen = np.cumsum([0, *(token == self._image_id for token in image.ids)])
                deep.append(held[DEEP][:, int(seen[first - image.start]) : int(seen[last - image.start])])
        parts.append(text.inputs_embeds[:, at - start :])
        more: dict[str, mx.array | list[mx.array]] = {"inputs_embeds": mx.concatenate(parts, axis=1)}
        if text.per_layer_inputs is not None:
            more["per_layer_inputs"] = text.per_layer_inputs
        if deep:
            seen = np.zeros((1, len(ids)), dtype=np.bool_)
            for first, last in self._runs(start, touched):
                seen[:, max(first, 0) : max(last, 0)] = True
            more["visual_pos_masks"] = mx.array(seen)
            more["deepstack_visual_embeds"] = list(mx.concatenate(deep, axis=1))
        return more

    def _runs(self, start: int, touched: Sequence[RowImage]) -> list[Run]:
        """Where the images' own tokens are, counted from `start`; what callers write as such a token is no image."""
        return [
            (image.start - start + first, image.start - start + last)
            for image in touched
            for first, last in runs_of(image.ids, self._image_id)
        ]

    def _opened(self, runs: list[Run], caches: list) -> list:
        if self._opens is Opens.NO_LAYER:
            return caches
        return [
            Opened(cache, runs) if self._opens is Opens.EVERY_LAYER or is_window(cache) else cache for cache in caches
        ]


def _real_ids(tokens: Sequence[int], start: int, touched: Sequence[RowImage]) -> list[int]:
    """The tokens with the ids of images in place of their symbols."""
    ids = list(tokens)
    for image in touched:
        for position in range(max(start, image.start), min(start + len(ids), image.end)):
            ids[position - start] = image.ids[position - image.start]
    if any(token & IMAGE for token in ids):
        raise NoFeatures("the tokens have an image that the row was not opened with")
    return ids
