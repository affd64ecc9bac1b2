"""LangGraph's saver in memory, with the three methods that its base class describes and it does not have.

What they do is what the base class says of them; everything else, the storage included, is the installed saver's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver


class WholeSaver(InMemorySaver):
    """Checkpoints in memory that can be deleted by run, pruned and copied."""

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        self._keep(list(self.storage), lambda _latest, metadata: metadata.get("run_id") not in run_ids)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self._keep(thread_ids, lambda latest, _metadata: latest and strategy == "keep_latest")

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.storage[target_thread_id] = copy.deepcopy(self.storage[source_thread_id])
        for stored in (self.writes, self.blobs):  # the thread's id is the first part of either's keys
            for key in [key for key in stored if key[0] == source_thread_id]:
                stored[target_thread_id, *key[1:]] = copy.deepcopy(stored[key])

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.copy_thread(source_thread_id, target_thread_id)

    def _keep(self, thread_ids: Sequence[str], wanted: Callable[[bool, dict[str, Any]], bool]) -> None:
        """Drops every checkpoint of the threads of which `wanted(is it its namespace's latest, metadata)` is false."""
        for thread_id in thread_ids:
            for space, held in self.storage[thread_id].items():
                latest = max(held, default="")
                for name, (_, metadata, _) in list(held.items()):
                    if not wanted(name == latest, self.serde.loads_typed(metadata)):
                        del held[name]
                        self.writes.pop((thread_id, space, name), None)
