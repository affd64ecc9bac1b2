"""Attention of towers in tiles is what MLX's own attention is; what it is not made for goes to that."""

from __future__ import annotations

import numpy as np
import pytest

from service.engine import cpu

mx = cpu.mlx()

from service.engine.vision import attention  # noqa: E402
from service.engine.vision.attention import FROM, TILE, attend  # noqa: E402

pytestmark = pytest.mark.mlx

NOW = lambda compute: compute()  # noqa: E731 - what computes at once
FUSED = mx.fast.scaled_dot_product_attention


def arrays(heads: int, kv_heads: int, rows: int, keys: int, batch: int = 1, width: int = 16) -> list:
    shapes = [(batch, heads, rows, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, width)]
    return [3 * mx.random.normal(shape, key=mx.random.key(seed)) for seed, shape in enumerate(shapes)]


def masks(rows: int, keys: int) -> list:
    seen = np.random.default_rng(1).random((1, 1, rows, keys)) < 0.5
    seen[..., 0] = True
    block = np.kron(np.eye(2), np.ones((rows // 2 + 1, keys // 2 + 1)))[None, None, :rows, :keys]
    return [None, mx.array(seen), mx.array(np.where(block, 0.0, -1e9).astype(np.float32))]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "rows", "batch"), [(2, 2, FROM + 3, 1), (4, 2, TILE, 2), (3, 1, 5, 1)])
def test_tiles_give_what_one_call_gives(which: int, heads: int, kv_heads: int, rows: int, batch: int) -> None:
    q, k, v = arrays(heads, kv_heads, rows, FROM + 90, batch)
    mask = masks(rows, FROM + 90)[which]
    want = FUSED(q, k, v, scale=0.3, mask=mask)
    got = attend(NOW, FUSED, q, k, v, scale=0.3, mask=mask)
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-4, atol=1e-5)
    again = attend(NOW, FUSED, q, k, v, scale=0.3, mask=mask)
    assert np.array_equal(np.array(got), np.array(again))


def test_a_row_that_sees_nothing_is_zero_and_no_nan() -> None:
    q, k, v = arrays(1, 1, 4, FROM)
    seen = np.ones((4, FROM), dtype=np.bool_)
    seen[2] = False
    got = np.array(attend(NOW, FUSED, q, k, v, scale=0.3, mask=mx.array(seen)))
    assert np.isfinite(got).all()
    assert not got[0, 0, 2].any()


@pytest.mark.parametrize(
    ("keys", "dtype", "more"),
    [(FROM - 1, mx.float32, {}), (FROM, mx.bfloat16, {}), (FROM, mx.float32, {"mask": "causal"})],
)
def test_short_half_precision_and_causal_calls_are_mlx_s_own(keys: int, dtype: object, more: dict) -> None:
    asked = []

    def fused(*arrays: object, **given: object) -> object:
        asked.append(given)
        return FUSED(*arrays, **given)

    q, k, v = (array.astype(dtype) for array in arrays(1, 1, keys, keys))
    attend(NOW, fused, q, k, v, scale=0.3, **more)
    assert asked == [{"scale": 0.3, "mask": None, **more}]


@pytest.mark.parametrize("name", ["tiny-qwen3_5-vl", "tiny-gemma4-vl", "tiny-mistral3"])
def test_a_tower_attends_in_tiles_and_sees_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_vlm")
    from tests.engine.vision_rig import VisionBench

    bench = VisionBench(name)
    image = bench.prepare(150, 130, 1)
    bench.model._on_cpu = False
    want = bench.model.encode(image)
    shapes = []
    tiled = attention._tiled

    def watched(q: np.ndarray, *rest: object) -> np.ndarray:
        shapes.append(q.shape)
        return tiled(q, *rest)

    monkeypatch.setattr(attention, "FROM", 16)
    monkeypatch.setattr(attention, "_tiled", watched)
    bench.model._on_cpu = True
    got = bench.model.encode(image)
    assert mx.fast.scaled_dot_product_attention is FUSED
    assert len(shapes) == 2  # layers of the tower
    for part in want:
        np.testing.assert_allclose(np.array(got[part]), np.array(want[part]), rtol=1e-3, atol=1e-4)
