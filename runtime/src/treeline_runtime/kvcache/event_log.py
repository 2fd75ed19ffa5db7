"""The radix cache's changes, in order, for the publisher."""

from __future__ import annotations

from collections.abc import Sequence

from treeline_wire.events import hash_of

from treeline_runtime.published import CacheEvent, Cleared, Copied, Medium, Removed, Stored


class EventLog:
    """Collects what enters and leaves the tiers, in order. A run that continues the previous one is merged with it."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(self, run: Stored) -> None:
        last = self._events[-1] if self._events else None
        if (
            not isinstance(last, Stored)
            or last.namespace != run.namespace
            or last.block_hashes[-1] != run.parent_hash
            # one index must describe the joined run: prompt, then output
            or (run.output_from and last.output_from < len(last.token_ids))
        ):
            self._events.append(run)
            return
        output_from = last.output_from
        if output_from == len(last.token_ids):
            output_from += run.output_from
        hashes, tokens = last.block_hashes + run.block_hashes, last.token_ids + run.token_ids
        self._events[-1] = Stored(hashes, last.parent_hash, tokens, run.namespace, output_from)

    def copied(self, digests: Sequence[bytes], medium: Medium) -> None:
        if digests:
            self._events.append(Copied([hash_of(digest) for digest in digests], medium))

    def removed(self, digests: Sequence[bytes], medium: Medium = "GPU") -> None:
        """The last page of a sequence first."""
        last, hashes = self._events[-1] if self._events else None, [hash_of(digest) for digest in digests]
        if isinstance(last, Removed) and last.medium == medium:
            last.block_hashes.extend(hashes)
        elif hashes:
            self._events.append(Removed(hashes, medium))

    def cleared(self) -> None:
        self._events = [Cleared()]

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events
