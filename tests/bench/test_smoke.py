"""Every benchmark runs to its end at small sizes and prints the figures that it promises. No figure is judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROMISED = {
    "rollback": {
        "rollback.cold_over_warm_ttft",
        "rollback.computed_over_new_tokens",
        "rollback.warm_ttft_over_peer",
    },
    "reasoning": {
        "reasoning.computed_over_new_tokens",
        "reasoning.computed_over_peer",
        "reasoning.computed_over_no_handles",
    },
    "chat": {
        "chat.aggregate_over_peer_1",
        "chat.aggregate_over_peer_1_other",
        "chat.aggregate_over_peer_2",
        "chat.aggregate_over_peer_2_other",
        "chat.decode_2_over_1",
        "chat.host_share_of_step",
    },
    "constraint": {"chat.unconstrained_beside_constrained"},
    "fair": {
        "fair.longest_gap_in_chunks",
        "fair.longest_gap_over_peer",
        "fair.long_ttft_over_alone",
        "fair.short_ttft_in_chunks",
    },
    "image": {
        "image.first_ttft_over_peer",
        "image.warm_ttft_over_peer",
        "image.mixed_over_apart",
        "image.tokens_as_alone",
        "image.longest_gap_in_chunks",
        "image.longest_gap_over_peer",
    },
    "memory": {
        "memory.extra_over_budget",
        "memory.restored_exactly",
        "memory.fork8_over_ideal",
        "memory.fork8_active_over_ideal",
        "memory.extra_over_uncheckpointed",
    },
    "step": {"step.over_floor_1", "step.over_floor_2"},
    "batch": {"batch.max_logprob_difference_4_vs_1", "batch.token_agreement_4_vs_1"},
    "store": {
        "store.write_over_raw_write",
        "store.restore_over_raw_read",
        "store.conversation_restore_over_raw_page_cache",
        *(["store.conversation_restore_over_raw_disk"] if hasattr(os, "posix_fadvise") else []),
        "store.encrypted_over_plain",
        "store.plan_1k_ms",
        "store.commit_1k_ms",
        "store.memory_per_1000_snapshots_mib",
        "store.decode_on_over_off",
    },
    "health": {"health.check_p99_ms"},
    "guarded": {"guarded.tokens_over_open"},
    "rpc": {"rpc.overhead_per_token_us", "rpc.ttft_overhead_ms"},
}

pytestmark = [pytest.mark.slow, pytest.mark.mlx]


def _run(name: str) -> dict[str, dict[str, object]]:
    """The figures of one quick run, by metric."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", name, "--quick"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({figure["metric"] for figure in figures}) == len(figures)
    return {str(figure["metric"]): figure for figure in figures}


@pytest.mark.parametrize("name", PROMISED)
def test_a_quick_run_prints_every_promised_figure(name: str) -> None:
    figures = _run(name)
    assert figures.keys() == PROMISED[name]
    for figure in figures.values():
        assert {"metric", "value", "unit", "model", "n", "load"} <= figure.keys()
        assert math.isfinite(float(str(figure["value"])))
    # What does not depend on how fast the machine is must hold at any size.
    if name == "rollback":
        assert figures["rollback.computed_over_new_tokens"]["value"] == 1.0
    if name == "image":
        assert figures["image.tokens_as_alone"]["value"] == 1.0
    if name == "memory":
        assert figures["memory.restored_exactly"]["value"] == 1.0
