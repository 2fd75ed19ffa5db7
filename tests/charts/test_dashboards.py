"""Dashboards and alerts ask for metrics that exist, in the way that these can be asked."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from support import helm
from support.promql import labels_of
from treeline_epp.endpoints.watcher import EngineState
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.picking.decision import NoEndpoints, Saturated
from treeline_epp.requests.refusals import of_pick
from treeline_epp.requests.routing_ways import Way, WayReason
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_tools import dashboards, envoy_metrics, metrics

pytestmark = pytest.mark.deep

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
"""What labels can be, where a query wants them to be something: nobody notices a query that never finds anything."""
NAMES_OF_OURS = {"envoy_http_conn_manager_prefix": {"gateway"}, "envoy_cluster_name": {"pods", "ext_proc"}}
"""Labels of Envoy's metrics that our configuration of it names; `tests/epp/io/test_listed_metrics.py` asks it."""


def judge(family: metrics.Family, label: str, op: str, value: str) -> None:
    known = VALUES.get((family.name, label)) or NAMES_OF_OURS[label]
    for one in value.split("|") if op in ("MatchOp.Re", "MatchOp.NotRe") else [value]:
        wanted = one if op in ("MatchOp.Re", "MatchOp.NotRe") else re.escape(one)
        assert any(re.fullmatch(wanted, there) for there in known), f"{family.name}: {label} is never {one!r}"


def filled(expr: str) -> str:
    """As Grafana sends it: its variables have values."""
    return expr.replace("$__rate_interval", "5m").replace("$namespace", "a|b")


QUERIES = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{board['uid']}:{panel['title']}:{target['refId']}")
    for board in BOARDS.values()
    for panel in board["panels"]
    for target in panel.get("targets", ())
]


@pytest.mark.parametrize(("expr", "legend"), QUERIES)
def test_every_query_of_a_dashboard_finds_metrics_and_labels_that_exist(expr, legend):
    found = labels_of(filled(expr), METRICS, judge)
    named = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert named <= found
    assert "$" not in filled(expr), "a variable that the dashboard does not have"


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_seconds_are_drawn_as_seconds_and_nothing_else_is(board):
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            times = re.search(r"_seconds(_bucket)?\{", target["expr"]) is not None
            assert times == (panel["fieldConfig"]["defaults"]["unit"] == "s"), f"{panel['title']}: {target['expr']}"


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_what_grafana_itself_would_write(board):
    """Its schema's own classes read it and write it: what they do not know would be missing."""
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
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    presence = re.fullmatch(r"label_values\((\S+), namespace\)", variables["namespace"]["query"])
    assert presence is not None
    assert presence[1] in METRICS


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


def test_of_envoys_metrics_those_are_listed_that_are_used():
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


def test_the_chart_installs_dashboards_and_alerts_only_if_it_is_told_to():
    api = ("--api-versions", "monitoring.coreos.com/v1/PrometheusRule")
    assert rendered(*api) == {}
    found = rendered(*api, "--set", "metrics.dashboards=true,metrics.prometheusRule=true")
    boards = found["ConfigMap"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in boards["data"].items()} == BOARDS
    assert found["PrometheusRule"]["spec"] == {"groups": GROUPS}
    assert set(rendered("--set", "metrics.prometheusRule=true")) == set(), "without its kind it cannot be applied"
