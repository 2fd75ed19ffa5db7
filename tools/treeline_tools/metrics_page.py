"""docs/metrics.md: the metrics of picker, runtime and operator, some of Envoy's, and the chart's alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from treeline_tools import envoy_metrics, metrics
from treeline_tools.metrics import Family

ALERTS: Final = Path(__file__).parents[2] / "charts" / "treeline" / "files" / "alerts.yaml"

_HEAD: Final = """\
# Metrics

The picker, the runtime and the operator serve these at `/metrics`, each on a port of its own
([operations.md](operations.md) says who may read them).

- A histogram `X` has the series `X_bucket` (label `le`), `X_sum` and `X_count`. A counter starts at 0 with its process.
- A metric with labels appears with its first count: no line means no error yet.
- Dashboards and alerts use the labels that the Prometheus operator adds: `namespace`, `pod` and `job`. If a metric
  already has such a label, it must stay (`honor_labels`).
- Labels name models, endpoints and clients, never prompts, answers or keys.

The chart's `metrics.dashboards` installs Grafana dashboards (`charts/treeline/files/dashboards`, which can also be
imported by hand), `metrics.prometheusRule` the alerts below. Envoy's documentation explains [its other
metrics](https://www.envoyproxy.io/docs/envoy/latest/configuration/upstream/cluster_manager/cluster_stats).
"""

_ROOMS: Final = {
    "picker": "The picker (`treeline pick`, port 9090)",
    "runtime": "The runtime (`treeline serve`, its metrics port)",
    "operator": "The operator (`treeline operate`, port 9090)",
}


def page() -> str:
    """The whole page."""
    return "\n".join((_HEAD, *_metrics(), *_alerts())) + "\n"


def _metrics() -> Iterator[str]:
    for room, found in metrics.families().items():
        yield from _table(_ROOMS[room], found)
    yield from _table("Envoy (port 8081): what dashboards and alerts use", envoy_metrics.FAMILIES)


def _table(title: str, families: Iterable[Family]) -> Iterator[str]:
    yield f"## {title}\n\n| metric | type | labels | |\n|---|---|---|---|"
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        yield f"| `{family.name}` | {family.kind} | {labels} | {_cell(family.text)} |"
    yield ""


def _alerts() -> Iterator[str]:
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    yield "## Alerts\n\nEach links to its runbook.\n"
    yield "| alert | severity | fires when this holds | for |\n|---|---|---|---|"
    for rule in (rule for group in groups for rule in group["rules"]):
        name, severity, lasting = rule["alert"], rule["labels"]["severity"], rule.get("for", "–")
        link = f"[{name}](runbooks.md#{name.lower()})"
        yield f"| {link} | {severity} | `{_cell(rule['expr'])}` | {lasting} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
