"""The dashboard of the operator: pools, reconciliations, the API server."""

from __future__ import annotations

from typing import Final

from treeline_tools.boards.base import PROCESS, Board, Panel, Query, Variable, processes, quantiles, rate, stat

_O: Final = "treeline_operator_"
_NAMED: Final = 'pod=~"$pod", name=~"$name"'  # their namespace is another than the operator's
_UNMET: Final = f'{_NAMED}, type=~"Ready|Accepted", status!="True"'
_NOT_READY: Final = f"{_O}conditions{{{_UNMET}}}"
_TROUBLED: Final = f'{_O}conditions{{{_UNMET}, reason!~"ScaledToZero|Deleting"}}'
_HERE: Final = f"{{{PROCESS}}}"
BOARD: Final = Board(
    "treeline-operator",
    "Treeline / Operator",
    (
        *processes(f"{_O}is_leader"),
        Variable("name", "Pool or model", f"{_O}conditions", "name"),
    ),
    {
        "Now": (
            stat(
                "Pools and models that are not ready",
                "short",
                f"count(max by (kind, namespace, name) ({_TROUBLED}))",
                "Without pools that sleep at zero or are being deleted. A dash means none.",
                alarm=1,
            ),
            stat("Replicas that act", "short", f"sum({_O}is_leader{_HERE})", "One, unless nobody holds the Lease."),
            stat("Waiting for a worker", "short", f"sum({_O}queue_depth{_HERE})", "Pools and models."),
            stat("Longest wait", "s", f"max({_O}queue_oldest_seconds{_HERE})", alarm=300),
        ),
        "Pools and models": (
            Panel(
                "Not ready",
                "short",
                (Query(f"max by (kind, namespace, name, type, status, reason) ({_NOT_READY})"),),
                "docs/reasons.md says what each reason means and what to do.",
                kind="table",
            ),
            Panel("Replica that acts", "short", (Query(f"{_O}is_leader{_HERE}", "{{pod}}"),), stacked=True),
            Panel(
                "Objects set right after somebody changed them",
                "ops",
                (Query(rate(f"{_O}drift_corrected_total", "kind"), "{{kind}}"),),
            ),
        ),
        "Reconciliations": (
            Panel(
                "Reconciliations that ended",
                "ops",
                (Query(rate(f"{_O}reconciles_total", "kind, result"), "{{kind}} {{result}}"),),
            ),
            Panel("How long reconciliations took", "s", quantiles(f"{_O}reconcile_seconds", "kind", (0.5, 0.99))),
            Panel(
                "Waiting for a worker",
                "short",
                (Query(f"sum({_O}queue_depth{_HERE})", "pools and models"),),
            ),
            Panel(
                "How long they wait",
                "s",
                (
                    Query(f"max({_O}queue_oldest_seconds{_HERE})", "the oldest"),
                    *quantiles(f"{_O}queue_wait_seconds", shown=(0.99,)),
                ),
            ),
        ),
        "API server": (
            Panel(
                "Requests",
                "reqps",
                (Query(rate(f"{_O}api_requests_total", "verb, code"), "{{verb}} {{code}}"),),
                "Code 0 means that no answer came.",
                stacked=True,
            ),
            Panel("How long requests took", "s", quantiles(f"{_O}api_request_seconds", "verb", (0.5, 0.99))),
            Panel(
                "Time since the API server was last heard",
                "s",
                (Query(f"max by (kind) ({_O}watch_age_seconds{_HERE})", "{{kind}}"),),
            ),
        ),
    },
)
