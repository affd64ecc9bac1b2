"""The form of a product follows its shape; what comes out is the product."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from service.engine import few_rows
from service.engine.few_rows import SLICE, product


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize("outputs", [1, 5, SLICE, 8 * SLICE, 9 * SLICE + 3])
def test_a_product_is_what_a_plain_one_is(rows: int, outputs: int) -> None:
    x = mx.random.normal((rows, 24), key=mx.random.key(rows))
    weight = mx.random.normal((outputs, 24), key=mx.random.key(outputs))
    want = np.array(x, dtype=np.float64) @ np.array(weight, dtype=np.float64).T
    got = product(x, weight)
    assert got.shape == (rows, outputs)
    np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (2, 4), (1, 1, 1)])
def test_leading_dimensions_stay(shape: tuple[int, ...]) -> None:
    weight = mx.random.normal((8 * SLICE, 16))
    x = mx.random.normal((*shape, 16))
    got = product(x, weight)
    assert got.shape == (*shape, 8 * SLICE)
    np.testing.assert_allclose(np.array(got), np.array(x @ weight.T), rtol=1e-4, atol=1e-4)


def test_a_model_adopts_it_in_its_plain_layers_and_keeps_its_weights() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.blocks = [nn.Linear(16, 16, bias=True), nn.Linear(16, 32, bias=False)]
            self.packed = nn.QuantizedLinear(64, 32)
            self.half = nn.Linear(16, 16, bias=False)
            self.half.weight = self.half.weight.astype(mx.bfloat16)

        def __call__(self, tokens: mx.array) -> mx.array:
            return self.embed.as_linear(self.blocks[0](self.embed(tokens)))

    model = Tiny()
    before = model(mx.array([[3]]))
    names = [name for name, _ in nn.utils.tree_flatten(model.parameters())]
    few_rows.adopt(model)
    assert [type(module) for module in (model.packed, model.half)] == [nn.QuantizedLinear, nn.Linear]
    assert all(type(module) not in (nn.Linear, nn.Embedding) for module in (model.embed, *model.blocks))
    assert [name for name, _ in nn.utils.tree_flatten(model.parameters())] == names
    np.testing.assert_allclose(np.array(model(mx.array([[3]]))), np.array(before), rtol=1e-5, atol=1e-5)
