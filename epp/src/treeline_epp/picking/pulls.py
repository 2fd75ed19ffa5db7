"""Whether the endpoint that answers pulls a part of the prompt's cache from another one of ours, in seconds.

The policy has chosen the endpoint, for its load as well. If another one holds more of the prefix, on its device or its
host, both forms of the request are compared:

    whole   first_token_s  the predicted time to the first token
    pull    first_token_s  the same without computing these tokens
            transfer_s     their cache on its way, and the question where it is
            source_s       the other endpoint's engine answers twice between two of its steps
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from treeline_epp.endpoints.load import EndpointLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.pairs import STEP_TOKENS, TRANSFER_S
from treeline_epp.picking.score import Scored

ASK_S = 0.01
"""Seconds that a pull takes, however short: two connections, and two turns of both engines' loops."""
FEWEST_TOKENS = 256
"""The index may be wrong about a few pages, and an answer with fewer is soon computed."""


class Pull(Struct, frozen=True):
    """Both forms of one request, and the endpoint that holds most of its prefix. `chosen`: that one is asked."""

    source: EndpointSpec
    whole: Mapping[str, float]
    pull: Mapping[str, float]

    @property
    def chosen(self) -> bool:
        return self.ttft_s < sum(self.whole.values())

    @property
    def ttft_s(self) -> float:
        """The predicted seconds to the first token if it pulls."""
        return sum(self.pull.values())


def pulled(best: Scored, source: EndpointSpec, load: EndpointLoad, tokens: int, now: float) -> Pull:
    """Compare both forms of a request, of which `source` with this load holds so many tokens more than its endpoint."""
    candidate = best.candidate
    step_s = min(load.queue(now)[0], STEP_TOKENS) / (load.own_rate() or candidate.rate)
    step_s += 0.0 if load.report is None else load.report.decode_step_s
    pull = {
        "first_token_s": best.ttft_s - tokens / candidate.rate,
        "transfer_s": ASK_S + tokens * (candidate.load.transfer_s or TRANSFER_S),
        "source_s": 2 * step_s,
    }
    return Pull(source, {"first_token_s": best.ttft_s}, pull)
