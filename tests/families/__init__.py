"""Every model family that mlx-lm ships, built small and held to one conformance suite: `python -m tests.families`."""
