"""What operators decide of requests that wait."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from treeline_wire.headers import CREDENTIALS
from treeline_wire.settings import setting

from treeline_epp.picking.filters import POLICIES, Saturation, saturation_of

GROUP = "flow control"
LONGEST_WAIT_S = 3600.0
"""As long as the proxies of our gateways let a request wait."""


_ANY = frozenset({"wait", "requests"})
_NEEDED = {
    "flow_wait_seconds": frozenset({"wait"}),
    "flow_endpoint_requests": frozenset({"requests"}),
    "flow_ttl_seconds": _ANY,
    "flow_max_requests": _ANY,
    "flow_max_bytes": _ANY,
}
"""Settings that mean nothing without `--flow-control`, and with which values of it they do."""
_OF_EMPTY_POOLS = frozenset({"flow_max_requests", "flow_max_bytes"})
"""They bound what waits for an endpoint, too."""
DEPENDENT = frozenset(_NEEDED)


def _header_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a header")
    if text.lower() in CREDENTIALS:
        raise argparse.ArgumentTypeError(
            f"{text!r} carries a secret, and a client's name is told in messages and traces: choose another header"
        )
    return text.lower()


@dataclass(frozen=True)
class FlowSettings:
    """Each is a flag of the same name."""

    flow_control: str = setting(
        "off",
        group=GROUP,
        choices=("off", *POLICIES),
        help="what makes a request wait here and not in an engine. wait: every endpoint that may serve it has more "
        "work before it than --flow-wait-seconds; requests: every one has --flow-endpoint-requests. Those of higher "
        "priority go first; within a priority each client gets as many tokens as the others that wait; sheddable ones "
        "(priority below 0, or InferenceModel's Sheddable) are answered 429 instead. off: the engines' queues hold "
        "them, in the order in which they came (default %(default)s)",
    )
    flow_wait_seconds: float = setting(
        1.0,
        group=GROUP,
        metavar="SECONDS",
        above=0,
        help="with --flow-control wait: work that an endpoint may have before it, as the picker predicts; less keeps "
        "more of the order here, more keeps engines busy whose load is seldom read (default %(default)s)",
    )
    flow_endpoint_requests: int = setting(
        100,
        group=GROUP,
        metavar="N",
        at_least=1,
        help="with --flow-control requests: requests that an endpoint may have, running and waiting, by its report; at "
        "least those whose answer has not begun, which is all that is known of one that reports nothing (default "
        "%(default)s)",
    )
    flow_max_requests: int = setting(
        5000,
        group=GROUP,
        metavar="N",
        at_least=1,
        help="requests that may wait for one pool at one priority; more are answered 429 (default %(default)s)",
    )
    flow_max_bytes: int = setting(
        256 * 1024 * 1024,
        group=GROUP,
        metavar="BYTES",
        at_least=1,
        help="bytes of their bodies, counted alike; 512 MiB bound all of them together (default %(default)s)",
    )
    flow_ttl_seconds: float = setting(
        60.0,
        group=GROUP,
        metavar="SECONDS",
        above=0,
        at_most=LONGEST_WAIT_S,
        help="how long a request waits for room before it is answered 429 (default %(default)s)",
    )
    hold_empty_pool_seconds: float = setting(
        0.0,
        group=GROUP,
        metavar="SECONDS",
        at_least=0,
        at_most=LONGEST_WAIT_S,
        help="how long a request waits for a pool without a ready endpoint, such as one that was scaled to zero, "
        "before it is answered 503; needs no --flow-control. In body modes other than full duplex the proxy must allow "
        "it (max_message_timeout of Envoy's ext_proc filter; our own does) (default %(default)s: at once)",
    )

    fairness_header: str | None = setting(
        None,
        group=GROUP,
        metavar="NAME",
        parse=_header_name,
        help="request header that says whose a request is, believed as it is: whoever can send it chooses. It takes "
        "the place of those of --trust-request-headers; API keys (--trust-edge) go before it",
    )
    quotas_file: Path | None = setting(
        None,
        group=GROUP,
        metavar="FILE",
        help="YAML or JSON: `clients: {NAME: {tokens_per_minute?, tokens_per_day?, requests_per_minute?, "
        "requests_per_day?}}`, and `default:` with the same for each client that is not named; what comes beyond is "
        "answered 429, with Retry-After and OpenAI's x-ratelimit-* headers. A client is an API key's name "
        "(--trust-edge), or else what --fairness-header says, or the fairness id of --trust-request-headers; those of "
        "whom nothing is known are one, default-flow. Read again when it has changed",
    )

    @property
    def saturation(self) -> Saturation | None:
        """When an endpoint has no room; None where one always has."""
        return saturation_of(self.flow_control, self.flow_wait_seconds, self.flow_endpoint_requests)

    @property
    def may_hold(self) -> bool:
        """Is there anything that a request may wait for?"""
        return self.flow_control != "off" or self.hold_empty_pool_seconds > 0


def without_effect(said: Collection[str], flow_control: str, hold_empty_pool_seconds: float) -> Iterator[str]:
    """Of the settings that somebody `said`, by name: a sentence for each that would change nothing."""
    for name, needed in _NEEDED.items():
        used = flow_control in needed or (name in _OF_EMPTY_POOLS and hold_empty_pool_seconds > 0)
        if name in said and not used:
            modes = " or ".join(sorted(needed, reverse=True))
            or_else = ", or --hold-empty-pool-seconds" if name in _OF_EMPTY_POOLS else ""
            yield f"--{name.replace('_', '-')} needs --flow-control {modes}{or_else}"
