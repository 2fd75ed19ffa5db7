"""The settings of flow control."""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from treeline_epp.picking.filters import Saturation
from treeline_epp.picking.policies.base import Choice, Count, PolicyError

LONGEST_WAIT_S = 3600.0
"""Longest that the proxies of our gateways let a request wait."""

Seconds = Annotated[float, Meta(gt=0, le=LONGEST_WAIT_S)]


class FlowSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of `--flow-control`. `mode` is the condition for a request to wait here and not in an engine.
    `wait`: every endpoint that may serve it has more than `wait_seconds` of predicted work before it; `requests`: each
    has `endpoint_requests`, by its report, counting at least those whose answer has not begun; `off`: only an empty
    pool.

    `max_requests` and `max_bytes` of bodies may wait for one pool at one priority, for `ttl_seconds` each, or for
    `hold_empty_pool_seconds` where the pool has no ready endpoint (0: they get 503 at once).
    """

    mode: Literal["off", "wait", "requests"] = "off"
    wait_seconds: Seconds = 1.0
    endpoint_requests: Count = 100
    max_requests: Count = 5000
    max_bytes: Count = 256 * 1024 * 1024
    ttl_seconds: Seconds = 60.0
    hold_empty_pool_seconds: Annotated[float, Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0

    @property
    def saturation(self) -> Saturation | None:
        """The condition under which an endpoint has no room; None if endpoints always have room."""
        if self.mode == "off":
            return None
        wait = self.mode == "wait"
        return Saturation(wait, self.wait_seconds if wait else self.endpoint_requests)

    @property
    def may_hold(self) -> bool:
        """Whether any condition can make a request wait."""
        return self.mode != "off" or self.hold_empty_pool_seconds > 0


def flow_flag(text: str) -> FlowSettings:
    """Parse the value of `--flow-control`, in the form of `--policy`: `MODE[:KEY=VALUE,…]`."""
    try:
        choice = Choice.parse(text)
        return msgspec.convert({"mode": choice.name, **choice.parameters}, FlowSettings, strict=False)
    except (PolicyError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def flow_help() -> str:
    """Return the help text, with all parameters and their defaults."""
    fields = (f"{field.name}={field.default:g}" for field in msgspec.structs.fields(FlowSettings)[1:])
    return (
        "when requests wait in the picker: wait (every endpoint has more than wait_seconds of work), requests (every "
        f"endpoint has endpoint_requests) or off (default). Parameters: {', '.join(fields)}; docs/flow-control.md"
    )
