"""The OpenAI Agents SDK on kvfork's gateway (`pip install 'kvfork[agents]'`): see `SnapshotModel`."""

from .conversation import snapshots_of
from .model import SnapshotModel

__all__ = ["SnapshotModel", "snapshots_of"]
