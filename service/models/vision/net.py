"""The model for training on a CPU: upstream's parameters, with a forward pass of our own that is quick there.

Owns the batched vision tower (upstream's goes picture by picture), the short convolution as shifted products, the gated
delta rule with a solver that has a cheap gradient, and an exponential of plain products: MLX's takes 13 ns a value on a
CPU, ten times what `mx.compile` makes of ours. All of it computes what upstream computes; a test compares logits.
"""

import math

import numpy as np

from service.engine import cpu

mx = cpu.mlx()

import mlx.nn as nn  # noqa: E402 - after the CPU is prepared
from mlx_vlm.models.qwen3_5 import Model, ModelConfig  # noqa: E402
from mlx_vlm.models.qwen3_5.language import apply_multimodal_rotary_pos_emb  # noqa: E402
from mlx_vlm.models.qwen3_vl.vision import apply_rotary_pos_emb_vision  # noqa: E402

from service.models.vision import folder  # noqa: E402

_CHUNK = 32
_BROUGHT = 0.3  # of what attention finds, at first


def new_model(seed: int) -> Model:
    """Initial weights of float32, from the seed."""
    mx.random.seed(seed)
    model = Model(ModelConfig.from_dict(folder.CONFIG))
    text, vision = folder.CONFIG["text_config"], folder.CONFIG["vision_config"]
    inner = model.language_model.model
    inner.embed_tokens.weight = 0.1 * mx.random.normal(inner.embed_tokens.weight.shape)
    tower = model.vision_tower
    tower.pos_embed.weight = 0.3 * mx.random.normal(tower.pos_embed.weight.shape)
    depth = 0.1  # little at first: a word begins as itself in every layer
    for layer in inner.layers:
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * depth
        if layer.is_linear:
            rule = layer.linear_attn
            rule.out_proj.weight = rule.out_proj.weight * depth
            # Memories from ten tokens to a few hundred.
            heads = np.linspace(math.log(0.003), math.log(0.1), rule.num_v_heads)
            rule.A_log = mx.array(heads.astype(np.float32))
        else:
            _begin_attention(layer.self_attn, text["hidden_size"])
    for block in tower.blocks:
        block.mlp.linear_fc2.weight = block.mlp.linear_fc2.weight / math.sqrt(2 * vision["depth"])
        block.attn.proj.weight = block.attn.proj.weight / math.sqrt(2 * vision["depth"])
    mx.eval(model.parameters())
    return model


def _begin_attention(attention: nn.Module, width: int) -> None:
    """Queries begin as the keys are, so a word looks for its like; what is found is brought as it is, if weaker.

    Chance weights take long to find either: words and the features of pictures are made alike for it.
    """
    heads, groups = attention.num_attention_heads, attention.num_key_value_heads
    rng = np.random.default_rng(width)  # the same in every layer, so that what one brings the next can bring on
    keys, values = (np.linalg.qr(rng.standard_normal((width, width)))[0].astype(np.float32) for _ in range(2))
    rows = attention.k_proj.weight.shape[0]
    keys, values = keys[:rows].reshape(groups, -1, width), values[:rows].reshape(groups, -1, width)
    attention.k_proj.weight = mx.array(keys.reshape(rows, width))
    attention.v_proj.weight = mx.array(values.reshape(rows, width))
    attention.o_proj.weight = mx.array(_BROUGHT * np.repeat(values, heads // groups, axis=0).reshape(-1, width).T)
    queries = np.array(attention.q_proj.weight).reshape(heads, -1, width)
    queries[:, : keys.shape[1]] = np.repeat(keys, heads // groups, axis=0)  # behind them are the gates
    attention.q_proj.weight = mx.array(queries.reshape(-1, width))


def see(model: Model, pixels: mx.array, grid: tuple[int, int]) -> mx.array:
    """Features of pictures of one size: pixels (pictures × patches × values) to (pictures × tokens × width)."""
    tower = model.vision_tower
    count, patches, _ = pixels.shape
    grid_thw = mx.array([[1, *grid]])
    kernel = tower.patch_embed.proj.weight
    h = pixels @ kernel.transpose(0, 4, 1, 2, 3).reshape(kernel.shape[0], -1).T + tower.patch_embed.proj.bias
    h = h + tower.fast_pos_embed_interpolate(grid_thw)
    angles = tower.rot_pos_emb(grid_thw)
    for block in tower.blocks:
        x = block.norm1(h)
        heads = block.attn.num_heads
        q, k, v = mx.split(block.attn.qkv(x).reshape(count, patches, 3, heads, -1), 3, axis=2)
        q, k = (apply_rotary_pos_emb_vision(part.squeeze(2), angles) for part in (q, k))
        q, k, v = (part.transpose(0, 2, 1, 3) for part in (q, k, v.squeeze(2)))
        x, _ = _attend(q, k, v, block.attn.scale, None)
        h = h + block.attn.proj(x.transpose(0, 2, 1, 3).reshape(count, patches, -1))
        wide = block.mlp.linear_fc1(block.norm2(h))
        # GELU's tanh form is a sigmoid.
        h = h + block.mlp.linear_fc2(wide * _sigmoid(1.5957691 * (wide + 0.044715 * wide * wide * wide)))
    return tower.merger(h).reshape(count, patches // folder.MERGE**2, -1)


def read(
    model: Model, ids: mx.array, features: mx.array, slots: mx.array, positions: mx.array
) -> tuple[mx.array, list[mx.array]]:
    """Last hidden states, and of each layer that has attention, that of a head of each group.

    `features`: pictures × tokens × width, at least one picture; `slots` names for each token the feature that stands in
    its place, or -1. Attention: rows × groups × length × length.
    """
    inner = model.language_model.model
    h = inner.embed_tokens(ids)
    flat = features.reshape(-1, features.shape[-1])
    h = mx.where((slots >= 0)[..., None], flat[mx.maximum(slots, 0)], h)
    length = ids.shape[1]
    mask = mx.tril(mx.ones((length, length))) > 0
    angles = inner.layers[-1].self_attn.rotary_emb(h, positions)
    looks: list[mx.array] = []
    for layer in inner.layers:
        x = layer.input_layernorm(h)
        if layer.is_linear:
            h = h + _linear(layer.linear_attn, x)
        else:
            found, weights = _full(layer.self_attn, x, angles, mask)
            h = h + found
            looks.append(weights[:, :: layer.self_attn.num_attention_heads // layer.self_attn.num_key_value_heads])
        x = layer.post_attention_layernorm(h)
        h = h + layer.mlp.down_proj(_silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
    return inner.norm(h), looks


def text_losses(model: Model, hidden: mx.array, targets: mx.array) -> mx.array:
    """Cross entropies of `targets` (rows × length) at the hidden states before them."""
    logits = model.language_model.model.embed_tokens.as_linear(hidden)
    # Not MLX's own: its exponential is slow on a CPU, and a tiny model's logits need no care.
    top = mx.stop_gradient(logits.max(axis=-1, keepdims=True))
    whole = top.squeeze(-1) + mx.log(_exp(logits - top).sum(axis=-1))
    return whole - mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)


def point_losses(looks: mx.array, points: mx.array) -> mx.array:
    """Cross entropy of the attention of the words that should look somewhere, less what no attention is below; mean."""
    points = mx.broadcast_to(points[:, None], looks.shape)
    spread = mx.where(points > 0, points * mx.log(mx.maximum(points, 1e-9) / mx.maximum(looks, 1e-6)), 0.0)
    return spread.sum() / mx.maximum(points.sum(), 1.0)


def _full(
    attention: nn.Module, x: mx.array, angles: tuple[mx.array, mx.array], mask: mx.array
) -> tuple[mx.array, mx.array]:
    rows, length, _ = x.shape
    q, gate = mx.split(attention.q_proj(x).reshape(rows, length, attention.num_attention_heads, -1), 2, axis=-1)
    k = attention.k_proj(x).reshape(rows, length, attention.num_key_value_heads, -1)
    v = attention.v_proj(x).reshape(rows, length, attention.num_key_value_heads, -1)
    q, k = attention.q_norm(q).transpose(0, 2, 1, 3), attention.k_norm(k).transpose(0, 2, 1, 3)
    q, k = apply_multimodal_rotary_pos_emb(q, k, *angles)
    repeats = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v.transpose(0, 2, 1, 3), repeats, axis=1)
    found, weights = _attend(q, k, v, attention.scale, mask)
    found = found.transpose(0, 2, 1, 3).reshape(rows, length, -1)
    return attention.o_proj(found * _sigmoid(gate.reshape(rows, length, -1))), weights


def _linear(rule: nn.Module, x: mx.array) -> mx.array:
    rows, length, _ = x.shape
    taps = rule.conv_kernel_size
    padded = mx.pad(rule.in_proj_qkv(x), [(0, 0), (taps - 1, 0), (0, 0)])
    mixed = _silu(sum(padded[:, tap : tap + length] * rule.conv1d.weight[:, tap, 0] for tap in range(taps)))
    q, k, v = (
        part.reshape(rows, length, rule.num_v_heads, -1)
        for part in mx.split(mixed, [rule.key_dim, 2 * rule.key_dim], axis=-1)
    )
    # The keys get length 1, the queries the usual scale of attention on top of it.
    width = rule.head_k_dim
    q, k = (mx.fast.rms_norm(part, None, 1e-6 / width) * width**power for part, power in ((q, -1.0), (k, -0.5)))
    decay = -mx.exp(rule.A_log) * nn.softplus(rule.in_proj_a(x) + rule.dt_bias)
    found = _chunked(q, k, v, decay, _sigmoid(rule.in_proj_b(x)))
    found = mx.fast.rms_norm(found, rule.norm.weight, rule.norm.eps)
    gate = _silu(rule.in_proj_z(x)).reshape(found.shape)
    return rule.out_proj((found * gate).reshape(rows, length, -1))


def _attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    scores = (q * scale) @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, -1e9)
    scores = _exp(scores - mx.stop_gradient(scores.max(axis=-1, keepdims=True)))
    if mask is not None:
        scores = mx.where(mask, scores, 0.0)
    weights = scores / scores.sum(axis=-1, keepdims=True)
    return weights @ v, weights


@mx.custom_function
def _exp(x: mx.array) -> mx.array:
    """To 2e-5 of the value, from -32 to 32 and flat beyond: (1 + y + y²/2 + …)^64 for y = x / 64."""
    y = mx.clip(x, -32, 32) * (1 / 64)
    power = 1 + y * (1 + y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120)))))
    for _ in range(6):
        power = power * power
    return power


@_exp.vjp
def _exp_vjp(_primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return output * cotangent


def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + _exp(-x))


def _silu(x: mx.array) -> mx.array:
    return x * _sigmoid(x)


def _chunked(q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array) -> mx.array:
    """The rule over whole rows from an empty state; the length is a multiple of the chunk."""
    batch, length, heads, _ = q.shape
    chunks = length // _CHUNK

    def cut(x: mx.array) -> mx.array:
        return x.reshape(batch, chunks, _CHUNK, heads, -1).transpose(0, 3, 1, 2, 4)

    q, k, v = cut(q), cut(k), cut(v)
    log_decay, beta = cut(log_decay)[..., 0], cut(beta)
    since = mx.cumsum(log_decay, axis=-1)
    lower = mx.tril(mx.ones((_CHUNK, _CHUNK)))
    ratio = lower * _exp(mx.minimum(since[..., :, None] - since[..., None, :], 0))
    turned = k.swapaxes(-1, -2)
    solved = unit_lower_inverse(beta * ratio * (k @ turned) * mx.tril(lower, -1))
    level = _exp(since)[..., None]
    values = solved @ (beta * v)
    keys = solved @ (beta * level * k)
    mixed = ratio * (q @ turned)
    queries = level * q - mixed @ keys
    inside = mixed @ values
    remaining = k * _exp(since[..., -1:] - since)[..., None]
    state = None
    found = []
    for chunk in range(chunks):
        if state is None:
            found.append(inside[:, :, chunk])
            new = values[:, :, chunk]
        else:
            found.append(inside[:, :, chunk] + queries[:, :, chunk] @ state)
            new = values[:, :, chunk] - keys[:, :, chunk] @ state
            state = level[:, :, chunk, -1:] * state
        grown = remaining[:, :, chunk].swapaxes(-1, -2) @ new
        state = grown if state is None else state + grown
    return mx.stack(found, axis=2).transpose(0, 2, 3, 1, 4).reshape(batch, length, heads, -1)


@mx.custom_function
def unit_lower_inverse(strict: mx.array) -> mx.array:
    """Inverse of (1 + `strict`), where `strict` is lower triangular with a zero diagonal; batched."""
    size = strict.shape[-1]
    # Blocks of one, then of two, four, …: each pair of inverses gives the next by two products.
    found = mx.broadcast_to(mx.eye(size), strict.shape)
    side = 1
    while side < size:
        index = np.arange(size) // side
        below = mx.array(((index[:, None] == index[None, :] + 1) & (index[:, None] % 2 == 1)).astype(np.float32))
        found = found - found @ (strict * below) @ found
        side *= 2
    return found


@unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(_primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    turned = output.swapaxes(-1, -2)
    return -(turned @ cotangent @ turned)
