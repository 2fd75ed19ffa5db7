"""Dashboards and alerts query metrics that exist, with operations that suit them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from support import helm
from support.control_plane import ROOT
from treeline_epp.endpoints.watcher import EngineState
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.picking.decision import NoEndpoints, Saturated
from treeline_epp.requests.refusals import of_pick
from treeline_epp.requests.routing_ways import Way, WayReason
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_tools import dashboards, envoy_metrics, metrics
from treeline_tools.metrics import Family

SCRAPED = frozenset({"namespace", "pod", "job"})
"""Labels that the Prometheus operator adds to every series of a pod."""
_COUNTS = ("rate", "increase")


class WrongQuery(Exception):
    """A query names an unknown metric or label, or combines them wrongly."""


Judge = Callable[[Family, str, str, str], None]
"""Checks a matcher: family, label, operator as in `promql.MatchOp`, value."""


def labels_of(
    expr: str, metrics: Mapping[str, Family], judge: Judge = lambda family, label, op, value: None
) -> frozenset[str]:
    """Return the labels that the result can have. Raises ValueError for invalid PromQL, and `WrongQuery`. `metrics` by
    the names of their series. `judge` gets every matcher of a label that is the metric's own."""
    return _Reader(metrics, judge).labels(promql.parse(expr))


class _Reader:
    def __init__(self, metrics: Mapping[str, Family], judge: Judge) -> None:
        self._metrics = metrics
        self._judge = judge

    def labels(self, expr: promql.Expr) -> frozenset[str]:
        match expr:
            case promql.VectorSelector():
                return self._selected(expr, counted=False)
            case promql.Call():
                return self._called(expr)
            case promql.AggregateExpr():
                return self._aggregated(expr)
            case promql.BinaryExpr():
                left, right = self.labels(expr.lhs), self.labels(expr.rhs)
                if left and right and expr.modifier is None and left != right:
                    raise WrongQuery(f"{expr}: the sides have other labels, {sorted(left)} and {sorted(right)}")
                return left or right
            case promql.ParenExpr():
                return self.labels(expr.expr)
            case promql.NumberLiteral():
                return frozenset()
            case _:
                raise WrongQuery(f"{expr}: a {type(expr).__name__} is not expected here")

    def _selected(self, selector: promql.VectorSelector, *, counted: bool) -> frozenset[str]:
        family = self._metrics.get(selector.name or "")
        if family is None:
            raise WrongQuery(f"{selector}: no process exports that")
        if counted != (family.kind != "gauge"):
            raise WrongQuery(f"{selector}: rate and increase are for counters and histograms, and these need them")
        own = frozenset(family.labels) | ({"le"} if str(selector.name).endswith("_bucket") else set())
        for matcher in selector.matchers.matchers:
            if matcher.name not in own | SCRAPED:
                raise WrongQuery(f"{selector}: it has no label {matcher.name}, only {sorted(own)}")
            if matcher.name in own - SCRAPED:
                self._judge(family, matcher.name, str(matcher.op), matcher.value)
        return own | SCRAPED

    def _called(self, call: promql.Call) -> frozenset[str]:
        if call.func.name in _COUNTS:
            (matrix,) = call.args
            if not isinstance(matrix, promql.MatrixSelector):
                raise WrongQuery(f"{call}: of a selection over a time")
            return self._selected(matrix.vector_selector, counted=True)
        if call.func.name == "absent":
            self.labels(call.args[0])
            return frozenset()
        if call.func.name == "histogram_quantile":
            found = self.labels(call.args[1])
            if "le" not in found:
                raise WrongQuery(f"{call}: `le` is not among {sorted(found)}")
            return found - {"le"}
        raise WrongQuery(f"{call}: the function {call.func.name} is not expected here")

    def _aggregated(self, expr: promql.AggregateExpr) -> frozenset[str]:
        found = self.labels(expr.expr)
        if expr.modifier is None:
            return found if str(expr.op) in ("topk", "bottomk") else frozenset()
        if expr.modifier.type != promql.AggModifierType.By:
            raise WrongQuery(f"{expr}: say by which labels, not without which")
        by = frozenset(expr.modifier.labels)
        if not by <= found:
            raise WrongQuery(f"{expr}: there is no {sorted(by - found)}, only {sorted(found)}")
        return by


FILES = helm.CHART / "files"
METRICS = (
    {"up": metrics.Family("up", "gauge", ("treeline_component",), "")}
    | metrics.by_series()
    | {name: family for family in envoy_metrics.FAMILIES for name in family.series}
)
BOARDS = {path.name: json.loads(path.read_text()) for path in sorted((FILES / "dashboards").glob("*.json"))}
GROUPS = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]

VALUES: dict[tuple[str, str], set[str]] = {
    ("treeline_epp_endpoints", "state"): set(EngineState),
    ("treeline_epp_kv_subscriptions", "state"): set(SubscriptionState),
    ("treeline_epp_refusals_total", "code"): {of_pick(NoEndpoints("")).code, of_pick(Saturated("", 1)).code},
    ("treeline_epp_endpoints_routed", "way"): set(Way),
    ("treeline_epp_endpoints_routed", "reason"): {"", *WayReason},
    ("up", "treeline_component"): {"", "runtime", "epp", "edge", "operator"},
    ("treeline_operator_conditions", "kind"): {"InferencePool", "InferenceModel"},
    ("treeline_operator_conditions", "type"): set(ConditionType),
    ("treeline_operator_conditions", "reason"): set(Reason),
    ("treeline_operator_conditions", "status"): {"True", "False", "Unknown"},
    ("envoy_http_downstream_rq_xx", "envoy_response_code_class"): set("12345"),
    ("treeline:http_responses_total", "status"): {str(status) for status in range(100, 600)},
}
"""Values of labels that queries compare with: a query that never finds anything goes unnoticed."""
NAMES_OF_OURS = {"envoy_http_conn_manager_prefix": {"gateway"}, "envoy_cluster_name": {"pods", "ext_proc"}}
"""Labels of Envoy's metrics whose values our configuration sets; `tests/epp/io/test_listed_metrics.py` asks Envoy."""


CHOSEN = "chosen"
"""Replaces the variables of a dashboard."""


def judge(family: metrics.Family, label: str, op: str, value: str) -> None:
    if value == CHOSEN:
        return
    known = VALUES.get((family.name, label)) or NAMES_OF_OURS[label]
    for one in value.split("|") if op in ("MatchOp.Re", "MatchOp.NotRe") else [value]:
        wanted = one if op in ("MatchOp.Re", "MatchOp.NotRe") else re.escape(one)
        assert any(re.fullmatch(wanted, there) for there in known), f"{family.name}: {label} is never {one!r}"


def filled(expr: str, board: dict[str, Any]) -> str:
    """Replace the dashboard's variables by values, as Grafana does."""
    expr = expr.replace("$__rate_interval", "5m")
    for variable in board["templating"]["list"]:
        expr = re.sub(rf"\${variable['name']}\b", CHOSEN, expr)
    assert "$" not in expr, f"a variable that the dashboard does not have: {expr}"
    return expr


QUERIES = [
    pytest.param(
        filled(target["expr"], board), target["legendFormat"], id=f"{board['uid']}:{panel['title']}:{target['refId']}"
    )
    for board in BOARDS.values()
    for panel in board["panels"]
    for target in panel.get("targets", ())
]


@pytest.mark.parametrize(("expr", "legend"), QUERIES)
def test_every_query_of_a_dashboard_finds_metrics_and_labels_that_exist(expr, legend):
    found = labels_of(expr, METRICS, judge)
    named = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert named <= found


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_the_variables_of_a_dashboard_are_values_of_labels_that_exist_and_are_used(board):
    asked = json.dumps([*board["panels"], board["templating"]])
    for variable in board["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert found is not None
        selector = promql.parse(filled(found[1], board))
        assert found[2] in {*METRICS[selector.name].labels, *SCRAPED}
        assert all(one.name in SCRAPED for one in selector.matchers.matchers)
        assert f"${variable['name']}" in asked


def test_dashboards_have_variables_for_namespace_pod_pool_and_model():
    names = {uid: {one["name"] for one in board["templating"]["list"]} for uid, board in BOARDS.items()}
    assert all({"namespace", "pod"} <= found for found in names.values())
    assert {"pool", "model"} <= names["treeline-engines.json"]
    assert "pool" in names["treeline-routing.json"]


def unit_of(panel: dict[str, Any], target: dict[str, Any]) -> str:
    """Return the unit in which a query's values are shown."""
    if panel["type"] == "heatmap":
        return str(panel["options"]["yAxis"]["unit"])
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == target["legendFormat"]:
            return str(override["properties"][0]["value"])
    return str(panel["fieldConfig"]["defaults"]["unit"])


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_seconds_are_drawn_as_seconds_and_nothing_else_is(board):
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            times = re.search(r"_seconds(_bucket)?\{", target["expr"]) is not None
            assert times == (unit_of(panel, target) == "s"), f"{panel['title']}: {target['expr']}"


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_panel_is_of_the_kind_that_its_query_is_for(board):
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            assert (panel["type"] == "heatmap") == target["expr"].startswith("sum by (le)"), panel["title"]
            assert (panel["type"] == "table") == target.get("instant", False), panel["title"]
            if panel["type"] == "stat":
                assert len(panel["targets"]) == 1
                assert labels_of(filled(target["expr"], board), METRICS, judge) == frozenset(), "one number"
            if panel["type"] == "table":
                rows = {labels_of(filled(one["expr"], board), METRICS, judge) for one in panel["targets"]}
                assert len(rows) == 1, f"{panel['title']}: they are the columns of the same rows"
    kinds = {panel["type"] for panel in board["panels"]}
    assert kinds >= {"row", "stat", "timeseries"}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_what_grafana_itself_would_write(board):
    """Grafana's own schema classes read and write it; fields that they do not know would be missing."""
    written = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))

    def compare(ours: Any, theirs: Any, path: str) -> None:
        if isinstance(ours, dict):
            assert set(ours) <= set(theirs), f"{path}: {set(ours) - set(theirs)}"
            for key, value in ours.items():
                compare(value, theirs[key], f"{path}.{key}")
        elif isinstance(ours, list):
            assert len(ours) == len(theirs), path
            for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                compare(one, other, f"{path}[{at}]")
        else:
            assert ours == theirs, path

    compare(board, written, board["uid"])


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_the_panels_of_a_dashboard_lie_beside_each_other(board):
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_files_are_the_dashboards_and_no_others():
    assert set(BOARDS) == set(dashboards.documents())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_finds_metrics_and_labels_that_exist(rule):
    found = labels_of(rule["expr"], METRICS, judge)
    named = set(re.findall(r"\$labels\.(\w+)", "".join(rule["annotations"].values())))
    assert named <= found
    assert "namespace" in found or rule["expr"].startswith("absent("), "whose it is decides who is told"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_is_wrong_and_what_to_do(rule):
    assert rule["alert"].startswith("Treeline")
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_its_runbook(rule):
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    sections = re.split(r"^## (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    said = {title.lower(): text for title, text in zip(sections[1::2], sections[2::2], strict=True)}
    assert anchor == rule["alert"].lower()
    assert len(said[anchor].split()) > 15, "what to do"


def test_every_runbook_has_its_alert():
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert titles == [rule["alert"] for rule in RULES]


def test_the_listed_envoy_metrics_are_those_in_use():
    asked = " ".join([*(rule["expr"] for rule in RULES), *(str(param.values[0]) for param in QUERIES)])
    for family in envoy_metrics.FAMILIES:
        assert any(re.search(rf"\b{series}\b", asked) for series in family.series), family.name


def test_no_name_is_taken_twice():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)


def rendered(*options: str) -> dict[str, dict[str, Any]]:
    kinds = ("ConfigMap", "PrometheusRule")
    return {item["kind"]: item for item in helm.render(*options) if item["kind"] in kinds}


@pytest.mark.deep
def test_the_chart_installs_dashboards_and_alerts_only_if_enabled():
    api = ("--api-versions", "monitoring.coreos.com/v1/PrometheusRule")
    assert rendered(*api) == {}
    found = rendered(*api, "--set", "metrics.dashboards=true,metrics.prometheusRule=true")
    boards = found["ConfigMap"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in boards["data"].items()} == BOARDS
    assert found["PrometheusRule"]["spec"] == {"groups": GROUPS}
    assert set(rendered("--set", "metrics.prometheusRule=true")) == set(), "without its kind it cannot be applied"
