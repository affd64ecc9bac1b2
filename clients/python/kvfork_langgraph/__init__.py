"""LangGraph checkpoints that carry their model's state (the `langgraph` extra): see `SnapshotSaver`."""

from .saver import SnapshotSaver

__all__ = ["SnapshotSaver"]
