"""What accounts are kept of requests, and where: for metrics and traces."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from treeline_wire.settings import setting

from treeline_epp.compat.metric_names import GIE, LLMD
from treeline_epp.compat.values import flag_bool

GROUP = "accounts of requests"
OURS = "treeline"
METRICS_FAMILIES = (OURS, GIE, LLMD)


def _families(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(words) - set(METRICS_FAMILIES):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(METRICS_FAMILIES)}")
    return words


@dataclass(frozen=True)
class ObservingSettings:
    """Each is a flag of the same name."""

    metrics_families: tuple[str, ...] = setting(
        ("treeline",),
        group=GROUP,
        metavar="NAME,…",
        parse=_families,
        help="whose names /metrics has: treeline, gie (inference_objective_…, as GIE 1.5) and llm-d (llm_d_epp_…); "
        "what each has is in docs/migrating.md (default treeline)",
    )
    tracing: bool = setting(
        False,
        group=GROUP,
        metavar="BOOL",
        parse=flag_bool,
        help="OpenTelemetry traces, sent over OTLP/gRPC as the variables OTEL_… say (docs/operations.md)",
    )
