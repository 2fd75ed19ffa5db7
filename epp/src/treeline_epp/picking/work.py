"""What a request asks of an endpoint, in tokens, given what the endpoint has cached of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

import numpy as np
from msgspec import Struct

from treeline_epp.index.index import Index
from treeline_epp.index.pods import NO_HIT, Hit, Match, level_hit
from treeline_epp.picking.request import PickRequest
from treeline_epp.picking.score import ASSUMED_OUTPUT_TOKENS
from treeline_epp.picking.table import Floats, Rows, Table


class Work(Struct, frozen=True, gc=False):
    """What a request asks of an endpoint: see `PickRequest`. `per_byte` is tokens per byte of its key.

    As far as any endpoint holds the key, its tokens are known; the rest is estimated by its bytes.
    """

    prompt_tokens: int
    per_byte: float
    output_tokens: int
    fork: int = 0

    @classmethod
    def of(cls, request: PickRequest, matches: Iterable[Match] = ()) -> Self:
        """Of this request, with what the index says of its key."""
        prompt_tokens = max(1, request.prompt_tokens_estimate)
        key_tokens = request.key_tokens_estimate
        key_tokens = prompt_tokens if key_tokens is None else max(1, key_tokens)
        per_byte = key_tokens / len(request.key) if request.key else 0.0
        known = NO_HIT
        for match in matches:
            longest = match.longest
            if longest.tokens > known.tokens:
                known = longest
        most = request.max_output_tokens if not request.fork else None  # it is its children's outputs that count
        return cls(
            max(known.tokens + 1, prompt_tokens + known.tokens - int(known.end * per_byte)),
            per_byte,
            ASSUMED_OUTPUT_TOKENS if most is None else min(most, ASSUMED_OUTPUT_TOKENS),
            request.fork,
        )

    def cached(self, hit: Hit) -> int:
        """Tokens of the prompt that need not be computed where an endpoint has this hit."""
        return min(hit.tokens + int((hit.reach - hit.end) * self.per_byte), self.prompt_tokens - 1)

    def cached_at(self, index: Index, matches: Mapping[str, Match], rows: Rows, table: Table) -> Floats:
        """The same of each of the endpoints in these rows of the table."""
        cached: Floats = np.zeros(table.size)
        for match in matches.values():
            hits = [(level_hit(level), level.pods) for level in match.levels if level.tokens or level.reach]
            for hit, pods in sorted(hits, key=_how_far):  # the longest last: it counts where a row has several pods
                cached[index.holders(pods)] = self.cached(hit)
            for pod in match.special:
                _, hit = table.at_row(pod.row).best_hit(match)
                cached[pod.row] = self.cached(hit)
        return cached if len(rows) == table.size else cached[rows]


def _how_far(held: tuple[Hit, int]) -> tuple[int, int]:
    return held[0].reach, held[0].tokens
