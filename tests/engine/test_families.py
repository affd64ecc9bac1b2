"""Model families of mlx-lm, built small: one for each structure of caches here, all of them on request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.families import families
from tests.families.mutations import MUTATIONS
from tests.families.runner import ROOT, run_all
from tests.families.verdict import Outcome, Verdict, judge

pytestmark = pytest.mark.mlx

# A family for each structure: its caches, and whether its rows decode in one call.
SPREAD = {
    "ministral3": ("RotatingKVCache, KVCache", True),  # and a scale that depends on the position
    "gemma3n": ("RotatingKVCache, KVCache", True),  # the last layers read the caches of others
    "afm7": ("KVCache", False),  # shared too, and wrong for padded rows
    "gear": ("ArraysCache, RotatingKVCache, KVCache", True),
    "rwkv7": ("ArraysCache", True),
    "baichuan_m1": ("CacheList(ArraysCache, KVCache), CacheList(ArraysCache, RotatingKVCache)", True),
    "minimax_m3_vl": ("CacheList(KVCache), CacheList(KVCache, KVCache)", False),  # index keys, values of no width
    "longcat_flash_ngram": ("ArraysCache, CacheList(KVCache, KVCache)", False),  # the state is token ids
    "llama4": ("ChunkedKVCache, KVCache", False),
    "deepseek_v41": ("mlx_lm.models.deepseek_v41.LayerCache", False),
    "nemotron-nas": ("KVCache", True),  # a cache that no layer fills
    "llama (RotatingKVCache, keep 4)": ("RotatingKVCache", False),
    "llama (QuantizedKVCache)": ("QuantizedKVCache", False),
}

# What this machine cannot make, with how its reason begins.
NOT_BUILT_ON_CPU = {
    "bitnet": "RuntimeError: [metal_kernel]",
    "muse_spark": "RuntimeError: [metal_kernel]",
    "olmo": "its module exits on import",
}


@pytest.mark.parametrize("name", SPREAD)
def test_a_family_of_each_structure_conforms(name: str) -> None:
    verdict = judge(name, mutations=False)
    caches, one_call = SPREAD[name]
    expected = Verdict(name=name, outcome=Outcome.OK, note="", caches=caches, alone=verdict.alone, seconds=0.0)
    assert replace(verdict, seconds=0.0) == expected
    assert bool(verdict.alone) is not one_call


def test_the_suite_sees_every_wrong_restore() -> None:
    """Every kind of layer, on two families that have them all; `make families` tries them on every family."""
    verdicts = [judge(name) for name in ("gear", "ministral3")]
    assert [(verdict.outcome, verdict.note) for verdict in verdicts] == [(Outcome.OK, "")] * 2
    assert {wrong for verdict in verdicts for wrong in verdict.wrongs} == {str(mutation) for mutation in MUTATIONS}
    assert len(MUTATIONS) == 20


class _StateElsewhere:
    """Logits that depend on the call before: state that no cache holds."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.last: mx.array | float = 0.0

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        logits = self.model(tokens, cache=cache)
        last, self.last = self.last, logits.mean()
        return logits + last


def test_the_suite_finds_state_that_no_cache_holds() -> None:
    verdict = judge("olmoe", lambda name: _StateElsewhere(families.build(name)))
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.note.startswith("restored at 255: logits off by ")


def test_the_suite_tells_a_refusal_with_its_reason() -> None:
    def strange(name: str) -> Any:
        model = families.build(name)
        model.make_cache = lambda: [KVCache(), object()]
        return model

    verdict = judge("olmoe", strange)
    assert verdict.outcome is Outcome.REFUSED
    assert verdict.note == "layer 1: no snapshot policy for cache class builtins.object"


def test_every_family_has_a_row_in_the_table() -> None:
    rows = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8").split("## Families")[1].splitlines()
    listed = [line.split(" | ")[0].removeprefix("| ") for line in rows if line.startswith("| ")][1:]
    assert listed == families.names()


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_every_family_conforms_or_has_a_reason() -> None:
    verdicts = run_all(families.names(), limit=240.0, jobs=2, within=2300.0, tell=lambda *_: None)
    others = {v.name: v for v in verdicts if v.outcome is not Outcome.OK}
    known = {
        name
        for name, v in others.items()
        if v.outcome is Outcome.NOT_BUILT and v.note.startswith(NOT_BUILT_ON_CPU.get(name, "\0"))
    }
    assert not {name: v for name, v in others.items() if name not in known}
