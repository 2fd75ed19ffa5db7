"""What accounts are kept of requests, and where: for metrics, billing and traces."""

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
    usage_log: str = setting(
        "",
        group=GROUP,
        metavar="FILE",
        help="a JSON object a line for each request, for billing: who, model, endpoint, tokens, status; - is standard "
        "output. The file is rotated by size, and opened anew on SIGHUP (docs/operations.md)",
    )
    usage_log_bytes: int = setting(
        100 * 1024 * 1024,
        group=GROUP,
        metavar="BYTES",
        at_least=4096,
        help="of the file before it is rotated (default %(default)s)",
    )
    usage_log_files: int = setting(
        5,
        group=GROUP,
        metavar="N",
        at_least=1,
        at_most=1000,
        help="older files that stay, FILE.1 being the newest (default 5)",
    )
    tracing: bool = setting(
        False,
        group=GROUP,
        metavar="BOOL",
        parse=flag_bool,
        help="OpenTelemetry traces, sent over OTLP/gRPC as the variables OTEL_… say (docs/operations.md)",
    )
