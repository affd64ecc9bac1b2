"""Cache classes of mlx-vlm by name: which of them a policy of ours serves, and why the others are refused.

mlx-vlm has copies of mlx-lm's general classes with the same fields, and classes of its own. It is not imported here: a
class goes by its qualified name, so that a model that brings one is served, or refused at load with the reason, whether
or not this table's author had seen its version. `tests/engine/test_foreign.py` holds the copies to their fields where
mlx-vlm is installed.
"""

from __future__ import annotations

_CACHES = "mlx_vlm.models.cache"
_TURBO = "mlx_vlm.turboquant"

CACHE_LIST = f"{_CACHES}.CacheList"

SAME_AS = {
    f"{_CACHES}.KVCache": "KVCache",
    f"{_CACHES}.ConcatenateKVCache": "ConcatenateKVCache",
    f"{_CACHES}.QuantizedKVCache": "QuantizedKVCache",
    f"{_CACHES}.RotatingKVCache": "RotatingKVCache",
    f"{_CACHES}.ChunkedKVCache": "ChunkedKVCache",
    f"{_CACHES}.ArraysCache": "ArraysCache",
    "mlx_vlm.models.hy_v4.cache.HyV4KVCache": "KVCache",  # grows by doubling; the fields and their meaning are the same
}
"""Qualified name: the class of mlx-lm whose fields it has and whose policy it gets."""

JOINED = {f"{_CACHES}.{name}" for name in ("KVCache", "RotatingKVCache", "ArraysCache")}
"""Those whose batched form is a copy as well, so that rows share a call; rows of the others decode in one call each."""

BATCHED = {f"{_CACHES}.BatchKVCache": "KVCache", f"{_CACHES}.BatchRotatingKVCache": "RotatingKVCache"}
"""Batched forms: the class whose policy reads a row out of them."""

ONE_BY_ONE = "mlx-vlm's batched form of it is not joined here"

_PACKED = "it holds keys and values in a packed form of its own, for which there is no record"
_BATCHED = "it is the batched form of a cache, and a row of its own is what a model is asked for"
_INDEX = "it keeps an index beside keys and values, of which no record holds anything"
_ENCODER = "it holds what an encoder made of the whole input, which belongs to no position of the prompt"

REFUSED = {
    f"{_CACHES}.PoolingCache": "its open group of tokens has no place in a record of whole blocks",
    f"{_CACHES}.BatchPoolingCache": _BATCHED,
    f"{_CACHES}.BatchKVCache": _BATCHED,
    f"{_CACHES}.BatchRotatingKVCache": _BATCHED,
    f"{_CACHES}.BatchQuantizedKVCache": _BATCHED,
    f"{_CACHES}.BufferedRotatingKVCache": "it keeps slack before its window, for speculative decoding",
    f"{_CACHES}.SlidingWindowCache": "it does not say how many tokens were seen, and so cannot be put back",
    f"{_CACHES}.StaticKVCache": "it is allocated to a fixed length, so that no row could grow beyond it",
    f"{_CACHES}.StaticPrefixKVCache": "it is allocated to a fixed length, and may be read-only",
    f"{_CACHES}.SimpleKVCache": _ENCODER,
    f"{_TURBO}.TurboQuantKVCache": _PACKED,
    f"{_TURBO}.BatchTurboQuantKVCache": _BATCHED,
    f"{_TURBO}.HybridQuantKVCache": _PACKED,
    "mlx_vlm.models.unlimited_ocr.language.RingSlidingKVCache": (
        "it lets decoded tokens overwrite each other where prefilled ones stay, so that the two give different state"
    ),
    "mlx_vlm.models.qwen4_exp.language.QSAKVCache": _INDEX,
    "mlx_vlm.models.qwen4_exp.language.BatchQSAKVCache": _BATCHED,
    "mlx_vlm.models.qwen4_exp.language.QSAQuantizedKVCache": (_INDEX),
    "mlx_vlm.models.minimax_m3_vl.language.MiniMaxM3KVCache": _INDEX,
    "mlx_vlm.models.minimax_m3_vl.language.MiniMaxM3BatchKVCache": _BATCHED,
    "mlx_vlm.models.deepseek_v41.language.DeepseekV41Cache": "it holds all layers' state in one object",
    "mlx_vlm.models.deepseek_v41.language.BatchDeepseekV41Cache": _BATCHED,
    "mlx_vlm.models.z1t.language.Z1TCache": "it sums over the whole prefix in arrays of its own",
}
"""Qualified name: why there is no policy. A name that is not here is refused as well, without a reason of its own."""


def why_refused(name: str) -> str:
    """What to say of a class without a policy; its bare name is looked for too, since classes move between modules."""
    bare = name.rpartition(".")[2]
    found = REFUSED.get(name) or next((why for known, why in REFUSED.items() if known.endswith(f".{bare}")), "")
    return f"no snapshot policy for cache class {name}" + (f": {found}" if found else "")
