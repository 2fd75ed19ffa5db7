"""Whether another endpoint computes a request's prompt than the one that answers, in seconds.

The policy has chosen the endpoint that answers. Each form of the request has its terms there, and the one with the
smaller sum is taken:

    whole   first_token_s  the predicted time to the first token
            others_s       the prefill's cost to the requests after it (`score`)
            rows_s         the time that the requests which run there lose while the prompt is computed, weighted as
                           decode_s in `score`
    apart   first_token_s  until the prefill endpoint has computed it
            others_s       its cost to the requests after it there, and to what it evicts
            transfer_s     one more request, and the prompt's cache on its way; between our own runtimes only what comes
                           after the prompt's end
            wait_s         what is then left of the wait at the endpoint that answers

So short prompts, cached ones, and those for an endpoint with little else to do stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from treeline_epp.endpoints.spec import EndpointSpec, unfit
from treeline_epp.endpoints.transfer import Protocol, Role
from treeline_epp.picking.score import DECODE_WEIGHT, Scored

HANDOVER_S = 0.03
"""Seconds that a prompt computed apart takes more, however short: two requests in place of one, and a step more."""
TRANSFER_S = 20e-6
"""Seconds for a token's cache where they were not measured: 128 KiB (8 billion parameters) over 50 Gbit/s."""
STEP_TOKENS = 2048
"""Prompt tokens that an engine computes in one step, if it has so many."""
FREE_TOKENS = 256
"""Tokens of a prompt that delay no others: a decode step waits for memory, and computes so many more meanwhile."""

Terms = Mapping[str, float]


class Apart(Struct, frozen=True):
    """Both forms of one request, and the best endpoint for its prompt. `chosen`: that one computes it."""

    prefill: Scored
    whole: Terms
    apart: Terms
    chosen: bool

    @property
    def ttft_s(self) -> float:
        """The predicted seconds to the first token if it is computed apart."""
        return self.apart["first_token_s"] + self.apart["transfer_s"] + self.apart["wait_s"]

    @property
    def prompt_s(self) -> float:
        """The seconds of computing the prompt apart; 0 if it stays whole even where nothing else waits apart."""
        idle_s = self.prefill.prefill_s + self.apart["transfer_s"] + self.apart["wait_s"]
        better = idle_s < self.whole["first_token_s"] + self.whole["rows_s"]
        return self.prefill.prefill_s if self.chosen or better else 0.0


def whole(decode: Scored, now: float) -> Terms:
    """Return the terms of a request whose endpoint also computes the prompt."""
    load = decode.candidate.load
    running = load.report.running if load.report is not None and load.fresh(now) else 0
    return {
        "first_token_s": decode.ttft_s,
        "others_s": decode.others_s,
        "rows_s": DECODE_WEIGHT * running * max(0.0, decode.prefill_s - FREE_TOKENS / decode.candidate.rate),
    }


def compared(decode: Scored, prefill: Scored, now: float) -> Apart:
    """Compare both forms of a request that one endpoint answers and whose prompt the other one may compute."""
    candidate, here = decode.candidate, whole(decode, now)
    token_s, tokens = candidate.load.transfer_s or TRANSFER_S, candidate.uncached_tokens
    transfer_s = token_s * tokens
    if candidate.spec.protocol is Protocol.TREELINE:
        transfer_s = max(transfer_s - prefill.prefill_s, token_s * min(tokens, STEP_TOKENS))
    transfer_s += HANDOVER_S
    ready_s = prefill.ttft_s + transfer_s
    apart = {
        "first_token_s": prefill.ttft_s,
        "others_s": prefill.others_s + prefill.evict_s,
        "transfer_s": transfer_s,
        "wait_s": max(0.0, decode.queue_s - ready_s) + decode.slots_s + decode.full_s,
    }
    chosen = not candidate.spec.alone or sum(apart.values()) < sum(here.values())
    return Apart(prefill, here, apart, chosen)


def problem_of(spec: EndpointSpec, all_specs: Iterable[EndpointSpec]) -> tuple[str, bool]:
    """Return why an endpoint with a role has no partner among these, empty if it has one or needs none, and whether
    waiting is in vain. O(endpoints).
    """
    wanted = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(spec.role)
    others = [one for one in all_specs if one.role is wanted and one.pool == spec.pool]
    if wanted is None or (not others and spec.alone):
        return "", False
    why = f"its pool has no {wanted} endpoint yet"
    for other in others:
        prefill, decode = (spec, other) if spec.role is Role.PREFILL else (other, spec)
        if not (reason := unfit(prefill, decode)):
            return "", False
        why = f"it cannot be paired with {other.name}: {reason}"
    return why, bool(others)
