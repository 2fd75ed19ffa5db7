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

Generated from the code (`make generate`): what the picker, the runtime and the operator show at `/metrics`, each on a
port that serves nothing else ([operations.md](operations.md) has the ports and who may read them). Names, types, labels
and help are as on the page.

- A histogram `X` has the series `X_bucket` (label `le`), `X_sum` and `X_count`. A counter starts at 0 with its process.
- What has labels appears with its first count: no error yet, no line.
- Whoever scrapes adds labels. The dashboards and alerts here use those that the Prometheus operator adds: `namespace`,
  `pod` and `job`. Where a metric of the operator, the picker or Envoy has such a label, its own must stay
  (`honor_labels`).
- Prompts, answers and keys are in no label. Names of models, endpoints and clients are.

In the chart, `metrics.dashboards` installs Grafana dashboards (`charts/treeline/files/dashboards`, which can also be
imported by hand) and `metrics.prometheusRule` the alerts below. Envoy has hundreds of metrics, [explained by
itself](https://www.envoyproxy.io/docs/envoy/latest/configuration/upstream/cluster_manager/cluster_stats).
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
    yield "## Alerts\n\n| alert | severity | fires when this holds | for | what it means |\n|---|---|---|---|---|"
    for rule in (rule for group in groups for rule in group["rules"]):
        name, severity, lasting = rule["alert"], rule["labels"]["severity"], rule.get("for", "–")
        said = rule["annotations"]["description"]
        link = f"[{name}](runbooks.md#{name.lower()})"
        yield f"| {link} | {severity} | `{_cell(rule['expr'])}` | {lasting} | {_cell(said)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
