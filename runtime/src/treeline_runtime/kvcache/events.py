"""The log of what happened to the cache, merged: one CacheUpdate per step."""

from __future__ import annotations

from treeline_runtime.messages import CacheEvent, Cleared, Removed, Stored


class EventLog:
    """Collects Stored, Removed and Cleared in order. A run that continues the one before is joined to it."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(
        self,
        *,
        block_hashes: list[int],
        parent_hash: int | None,
        token_ids: list[int],
        namespace: str | None,
        output_from: int,
    ) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, Stored)
            and last.namespace == namespace
            and last.block_hashes[-1] == parent_hash
            # one index must describe the joined run: prompt, then output
            and (last.output_from == len(last.token_ids) or output_from == 0)
        ):
            joined_from = last.output_from
            if joined_from == len(last.token_ids):
                joined_from += output_from
            self._events[-1] = Stored(
                last.block_hashes + block_hashes,
                last.parent_hash,
                last.token_ids + token_ids,
                namespace,
                joined_from,
            )
        else:
            self._events.append(Stored(block_hashes, parent_hash, token_ids, namespace, output_from))

    def removed(self, block_hashes: list[int]) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.block_hashes.extend(block_hashes)
        else:
            self._events.append(Removed(block_hashes))

    def cleared(self) -> None:
        self._events = [Cleared()]

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events
