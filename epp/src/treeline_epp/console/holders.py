"""Which endpoints hold a prefix, told without asking thousands of them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from treeline_epp.index.index import Index
from treeline_epp.index.matching import GUARD_BYTES

MOST_HOLDERS = 5


@dataclass(frozen=True, slots=True)
class Holders:
    """Of the keys of one model and namespace; `names` of endpoints are by their rows."""

    index: Index
    scope: str
    namespace: str | None
    names: Mapping[int, str]
    now: float

    def of(self, key: bytes) -> tuple[int, list[tuple[str, int]]]:
        """How many hold some of it, and those that hold most, each with how many bytes of it."""
        match = self.index.match(self.scope, self.namespace, key, self.now)
        # What is predicted ends a few bytes before the end of what is asked for.
        reach = {pod.row: min(len(key), hit.reach + GUARD_BYTES) for pod, hit in match.special.items() if hit.reach}
        known = [np.fromiter(reach, np.int32, len(reach))]
        ends = [(min(len(key), one.reach + GUARD_BYTES) if one.reach else one.end, one.pods) for one in match.levels]
        for end, pods in sorted(ends, reverse=True):
            if end:
                rows = self.index.holders(pods)
                known.append(rows)
                for row in rows[: MOST_HOLDERS + len(match.special)].tolist():
                    reach.setdefault(row, end)
        best = sorted(((end, self.names[row]) for row, end in reach.items() if row in self.names), reverse=True)
        return len(np.unique(np.concatenate(known))), [(name, end) for end, name in best[:MOST_HOLDERS]]
