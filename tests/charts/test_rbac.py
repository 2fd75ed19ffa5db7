"""The operator's rights are declared once, cover what its code uses, and never include reading a Secret."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from treeline_operator.controller.kinds import KINDS, OPTIONAL
from treeline_operator.rbac import RULES_GROUPS, rules_need
from treeline_tools import rbac

CHART = Path(__file__).parents[2] / "charts" / "treeline"
ALL = rbac.granted(rbac.WATCHED)


def test_the_charts_rules_equal_the_declared_rights():
    text = (CHART / "files" / "rbac.yaml").read_text()
    assert text == rbac.chart_file(), "run `make generate`"


def test_the_rules_grant_exactly_what_is_declared():
    """Rules leave out rights that an earlier feature grants; no right is lost, with every optional feature off or
    on."""
    entries = yaml.safe_load(rbac.chart_file())
    for place, features in (("watched", rbac.WATCHED), ("own", rbac.OWN)):
        for on in (True, False):
            rules = [r for e in entries[place] if on or not e.get("value") for r in e["rules"]]
            got = {
                (g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
            }
            assert got == rbac.granted(f for f in features if on or not f.value)


def test_secrets_are_created_and_nothing_else():
    touched = {(resource, verb) for _, resource, verb in ALL | rbac.granted(rbac.OWN) if "secret" in resource}
    assert touched == {("secrets", "create")}


def test_nothing_is_granted_by_a_wildcard():
    assert [need for need in ALL | rbac.granted(rbac.OWN) if "*" in "".join(need)] == []


def test_no_right_lets_the_operator_grant_more_than_it_has():
    """Without `bind` and `escalate` the API server itself keeps pickers' Roles within the operator's rights."""
    assert {verb for _, _, verb in ALL} & {"bind", "escalate", "impersonate"} == set()
    pickers = rbac.granted([rbac.Feature("picker", rbac.PICKER)])
    assert pickers <= rbac.granted(f for f in rbac.WATCHED if not f.value)
    rules = rbac.granted([rbac.Feature("rules", tuple(map(rules_need, RULES_GROUPS)))])
    assert rules == rbac.granted(f for f in rbac.WATCHED if f.value == "gatewayRules")


@pytest.mark.parametrize("watched", [*KINDS, *OPTIONAL], ids=lambda watched: watched.resource.api)
def test_every_watched_kind_may_be_listed_and_watched(watched):
    resource = watched.resource
    assert {(resource.group, resource.plural, verb) for verb in ("list", "watch")} <= ALL


def test_an_optional_kind_belongs_to_a_feature_that_a_value_switches():
    by_value = rbac.granted(f for f in rbac.WATCHED if f.value)
    always = {watched.resource.plural for watched in KINDS}
    for watched in OPTIONAL:
        resource = watched.resource
        assert (resource.group, resource.plural, "create") in by_value
        assert resource.plural not in always or resource.group != "treeline.dev"


def test_a_request_belongs_to_the_features_that_declare_it():
    assert rbac.feature_of("apps", "deployments", "patch") == ["workloads"]
    assert rbac.feature_of("coordination.k8s.io", "leases", "update") == ["leader-election"]
    assert rbac.feature_of("", "secrets", "get") == []
    assert rbac.feature_of("treeline.dev", "inferencepools/finalizers", "update") == []
