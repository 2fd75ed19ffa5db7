"""The dashboard of the operator: pools, reconciliations, the API server."""

from __future__ import annotations

from typing import Final

from treeline_tools.boards.base import HERE, SELECTED, Board, Panel, Query, quantiles, rate

_O: Final = "treeline_operator_"
BOARD: Final = Board(
    "treeline-operator",
    "Treeline / Operator",
    f"{_O}is_leader",
    {
        "Pools and models": (
            Panel(
                "Pools and models that are not ready",
                "short",
                (
                    Query(
                        f"sum by (kind, status, reason) ({_O}conditions{{{SELECTED}, "
                        'type=~"Ready|Accepted", status!="True"})',
                        "{{kind}} {{status}}: {{reason}}",
                    ),
                ),
                stacked=True,
            ),
            Panel("Replica that acts", "short", (Query(f"{_O}is_leader{HERE}", "{{pod}}"),), stacked=True),
            Panel(
                "Set right after somebody changed it",
                "ops",
                (Query(rate(f"{_O}drift_corrected_total", "kind"), "{{kind}}"),),
            ),
        ),
        "Reconciliations": (
            Panel(
                "Ended",
                "ops",
                (Query(rate(f"{_O}reconciles_total", "kind, result"), "{{kind}} {{result}}"),),
            ),
            Panel("How long they took", "s", quantiles(f"{_O}reconcile_seconds", "kind", (0.5, 0.99))),
            Panel(
                "Keys that wait for a worker",
                "short",
                (Query(f"sum({_O}queue_depth{HERE})", "keys"),),
            ),
            Panel(
                "How long keys wait",
                "s",
                (
                    Query(f"max({_O}queue_oldest_seconds{HERE})", "the oldest"),
                    *quantiles(f"{_O}queue_wait_seconds", shown=(0.99,)),
                ),
            ),
        ),
        "API server": (
            Panel(
                "Requests",
                "reqps",
                (Query(rate(f"{_O}api_requests_total", "verb, code"), "{{verb}} {{code}}"),),
                "Code 0 is no answer.",
                stacked=True,
            ),
            Panel("How long they took", "s", quantiles(f"{_O}api_request_seconds", "verb", (0.5, 0.99))),
            Panel(
                "Since the API server was heard",
                "s",
                (Query(f"max by (kind) ({_O}watch_age_seconds{HERE})", "{{kind}}"),),
            ),
        ),
    },
)
