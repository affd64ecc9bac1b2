"""The plots under docs/plots. Owns how they look; the figures come from the benches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_chat(
    path: Path, widths: Sequence[int], *, ours: Sequence[float], peers: Mapping[str, Sequence[float]], model: str
) -> None:
    """Tokens per second of all chats by how many there are."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), dpi=100)
    axes.plot(widths, ours, marker="o", label="kvfork")
    for (name, speeds), marker in zip(peers.items(), "s^v", strict=False):
        axes.plot(widths, speeds, marker=marker, linestyle="--", label=name)
    axes.set_xticks(list(widths))
    axes.set_xlabel("chats at once")
    axes.set_ylabel("new tokens per second, all chats")
    axes.set_title(f"{model}: 100 words in, prefill included", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date or version inside the file: the same figures make the same bytes.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def draw_reasoning(
    path: Path, *, ours: Sequence[int], others: Mapping[str, Sequence[int]], prompts: Sequence[int], model: str
) -> None:
    """Prompt tokens computed by turn, with the whole prompt as the most that it can be."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    turns = range(1, len(ours) + 1)
    figure, axes = plt.subplots(figsize=(5.6, 3.4), dpi=100)
    axes.fill_between(turns, prompts, color="0.9", label="the whole prompt")
    for (name, computed), marker in zip(others.items(), "s^", strict=False):
        axes.plot(turns, computed, marker=marker, markersize=4, linestyle="--", label=name)
    axes.plot(turns, ours, marker="o", markersize=4, label="kvfork, Rollback")
    axes.set_xticks(list(turns)[:: max(1, len(turns) // 10)])
    axes.set_xlabel("turn")
    axes.set_ylabel("prompt tokens computed")
    axes.set_title(f"{model}: each turn without the reasoning before it", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.set_xlim(1, len(turns))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
