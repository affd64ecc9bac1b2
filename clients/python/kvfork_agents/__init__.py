"""The OpenAI Agents SDK on kvfork's gateway (the `agents` extra): see `SnapshotModel`."""

from .conversation import snapshots_of
from .model import SnapshotModel

__all__ = ["SnapshotModel", "snapshots_of"]
