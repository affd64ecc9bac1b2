"""mlx-vlm's cache classes: copies of general ones are served, its own are refused by name and reason.

The classes are made here under mlx-vlm's names, so that it need not be installed; where it is, the last tests hold its
real ones to the fields that the policies use.
"""

from __future__ import annotations

import importlib

import mlx.core as mx
import pytest
from mlx_lm.models import cache as ours

from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from service.engine import layers
from service.engine.foreign import CACHE_LIST, JOINED, ONE_BY_ONE, REFUSED, SAME_AS
from service.engine.layers import UnsupportedLayer, layout_of
from service.plan import Capture, Restored

pytestmark = pytest.mark.mlx

ARGUMENTS: dict[str, tuple[int, ...]] = {"RotatingKVCache": (64,), "ChunkedKVCache": (64,), "ArraysCache": (2,)}
KINDS = {"RotatingKVCache": LayerKind.WINDOW, "ChunkedKVCache": LayerKind.WINDOW, "ArraysCache": LayerKind.STATE}


def named(name: str, base: type = object) -> type:
    module, _, bare = name.rpartition(".")
    return type(bare, (base,), {"__module__": module})


def filled(cache: object, tokens: int) -> None:
    if hasattr(cache, "update_and_fetch"):
        keys = mx.arange(tokens * 64, dtype=mx.float32).reshape(1, 1, tokens, 64)
        cache.update_and_fetch(keys, keys + 0.5)
    else:
        cache.cache = [mx.arange(6, dtype=mx.float32)[None], None]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SAME_AS)
def test_a_copy_of_a_general_class_is_captured_and_restored_as_that_class_is(name: str) -> None:
    same = SAME_AS[name]
    kind = named(name, getattr(ours, same))
    cache, fresh = kind(*ARGUMENTS.get(same, ())), kind(*ARGUMENTS.get(same, ()))
    layout = layout_of([cache])
    assert layout.layers[0].kind is KINDS.get(same, LayerKind.FULL)
    if name in JOINED:
        assert layout.alone == ""
    else:
        assert layout.alone.endswith(ONE_BY_ONE) or "no batched form" in layout.alone
    filled(cache, 40)
    layers.normalise([cache])
    record = layers.capture([cache], layout, Capture(start=0, end=40, kinds=layout.kinds), None)
    layers.restore(
        [fresh], layout, Restored(position=40, kinds=tuple(record), starts=(0,), payloads=tuple(record.values()))
    )
    held, back = layers.live_arrays([cache]), layers.live_arrays([fresh])
    cut = [a[..., :40, :] if a.ndim == 4 else a for a in held]
    assert [a.tolist() for a in cut] == [a.tolist() for a in back]


def test_a_list_of_copies_is_looked_into() -> None:
    kind, pair = named(f"{CACHE_LIST.rpartition('.')[0]}.KVCache", ours.KVCache), named(CACHE_LIST)
    both = pair()
    both.caches = (kind(), kind())
    assert layout_of([both]).layers == (LayerSpec(LayerKind.FULL),) * 2


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_without_a_policy_is_refused_with_its_layer_its_name_and_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedLayer) as caught:
        layout_of([ours.KVCache(), named(name)()])
    assert str(caught.value) == f"layer 1: no snapshot policy for cache class {name}: {REFUSED[name]}"


def test_a_class_that_has_moved_is_refused_for_the_same_reason() -> None:
    with pytest.raises(UnsupportedLayer, match=r"layer 0: .*elsewhere\.PoolingCache: its open group"):
        layout_of([named("elsewhere.PoolingCache")()])


def test_a_class_that_nobody_knows_is_refused_without_a_made_up_reason() -> None:
    with pytest.raises(UnsupportedLayer, match=r"layer 0: no snapshot policy for cache class strange\.Cache$"):
        layout_of([named("strange.Cache")()])


def test_a_subclass_of_a_general_class_is_another_class() -> None:
    with pytest.raises(UnsupportedLayer, match="BufferedRotatingKVCache: it keeps slack"):
        layout_of([named("mlx_vlm.models.cache.BufferedRotatingKVCache", ours.RotatingKVCache)(64)])


# -- the real classes, where they are installed


@pytest.mark.parametrize("name", SAME_AS)
def test_the_copies_have_the_fields_that_the_policies_use(name: str) -> None:
    module, _, bare = name.rpartition(".")
    kind = getattr(pytest.importorskip(module), bare)
    cache, general = (
        kind(*ARGUMENTS.get(SAME_AS[name], ())),
        getattr(ours, SAME_AS[name])(*ARGUMENTS.get(SAME_AS[name], ())),
    )
    assert vars(general).keys() - {"_lengths", "_left_padding"} <= vars(cache).keys() | set(dir(cache))
    filled(cache, 40)
    filled(general, 40)
    layout = CacheLayout(layout_of([cache]).layers)
    what = Capture(start=0, end=40, kinds=layout.kinds)
    assert layout.layers == layout_of([general]).layers
    assert layers.capture([cache], layout, what, None) == layers.capture([general], layout, what, None)


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if not name.endswith(("SlidingWindowCache", "StaticKVCache"))]
)
def test_the_refused_classes_exist_under_these_names(name: str) -> None:
    """Those of earlier versions excepted."""
    module, _, bare = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    assert hasattr(importlib.import_module(module), bare)
