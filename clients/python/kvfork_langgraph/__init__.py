"""LangGraph checkpoints that carry their model's state (`pip install 'kvfork[langgraph]'`): see `SnapshotSaver`."""

from .saver import SnapshotSaver

__all__ = ["SnapshotSaver"]
