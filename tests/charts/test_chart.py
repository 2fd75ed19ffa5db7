"""The chart's objects equal reviewed files, and unknown values are refused."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.version import Version
from support import golden, helm
from treeline_operator import operate
from treeline_operator.api.pool import PoolSpec
from treeline_operator.plan.presets import OWN
from treeline_operator.rbac import RULES_GROUPS
from treeline_operator.world import PROMETHEUS, Platform
from treeline_wire import ports

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "treeline"
GOLDEN = Path(__file__).parent / "golden"
MONITORS = tuple(f"monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule"))

RENDERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "namespaced": ("--set", "scope.namespaces={team-a,team-b}"),
    "everything": (
        "--values",
        str(Path(__file__).parent / "everything.yaml"),
        *(word for api in MONITORS for word in ("--api-versions", api)),
    ),
    "nothing": (
        "--set",
        "crds.install=false,policies.install=false,rbac.create=false,serviceAccount.create=false",
        "--set",
        "serviceAccount.name=given,podDisruptionBudget.enabled=false,networkPolicy.enabled=false,metrics.service=false",
    ),
}

LONG = ("CustomResourceDefinition", "ValidatingAdmissionPolicy", "PrometheusRule", "ConfigMap")
"""Kinds with long contents that are tested elsewhere: their goldens show that they are there."""


def shown(item: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k not in ("spec", "data")} if item["kind"] in LONG else item


def of_kind(items: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [item for item in items if item["kind"] in kinds]


def parts(case: str) -> dict[str, str]:
    """Return the rendered objects as YAML, by kind, namespace and name."""
    items = helm.render(*RENDERS[case])
    found = {
        f"{item['kind']} {item['metadata'].get('namespace', '')}/{item['metadata']['name']}": yaml.dump(
            shown(item), Dumper=golden.Plain, sort_keys=False, width=120, default_flow_style=None
        )
        for item in items
    }
    assert len(found) == len(items)
    return found


@pytest.mark.parametrize("case", RENDERS)
def test_renders_equal_the_reviewed_files(case):
    base = parts("default")
    golden.check(GOLDEN, case, base if case == "default" else parts(case), "default", base)


@pytest.mark.parametrize("case", ["default", "everything"])
def test_helm_lint_passes(case):
    options = [word for word in RENDERS[case] if word != "--api-versions" and word not in MONITORS]
    done = helm.run("lint", "--strict", str(CHART), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_uninstalling_keeps_the_crds_unless_configured_otherwise():
    def crds(*options: str) -> dict[str, str | None]:
        found = of_kind(helm.render(*options), "CustomResourceDefinition")
        policy = "helm.sh/resource-policy"
        return {i["metadata"]["name"]: i["metadata"].get("annotations", {}).get(policy) for i in found}

    names = ("inferencemodels.treeline.dev", "inferencepools.treeline.dev")
    assert crds() == dict.fromkeys(names, "keep")
    assert crds("--set", "crds.keep=false") == dict.fromkeys(names)
    assert crds("--set", "crds.install=false") == {}


def test_a_namespaced_install_has_no_cluster_wide_objects_but_definitions():
    items = helm.render(*RENDERS["namespaced"])
    assert of_kind(items, "ClusterRole", "ClusterRoleBinding") == []
    roles = {item["metadata"]["namespace"]: item for item in of_kind(items, "Role")}
    assert set(roles) == {"team-a", "team-b", "treeline-system"}
    everywhere = of_kind(helm.render(), "ClusterRole")
    (cluster_role,) = [item for item in everywhere if item["metadata"]["name"].endswith("-operator")]
    assert roles["team-a"]["rules"] == roles["team-b"]["rules"] == cluster_role["rules"]


def test_only_enabled_features_get_rights():
    off = ("--set", "rbac.gatewayApi=false,rbac.leaderWorkerSet=false,rbac.prometheus=false")
    (role,) = [
        item for item in of_kind(helm.render(*off), "ClusterRole") if item["metadata"]["name"].endswith("-operator")
    ]
    written = {g for rule in role["rules"] if "create" in rule["verbs"] for g in rule["apiGroups"]}
    assert not {g for g in written if g.startswith(("gateway.", "inference.", "leaderworkerset.", "monitoring."))}


def test_pickers_follow_no_objectives_without_the_right():
    def told(*values: str) -> str:
        (deployment,) = of_kind(helm.render(*values), "Deployment")
        (arg,) = (a for a in deployment["spec"]["template"]["spec"]["containers"][0]["args"] if "rules-group" in a)
        return str(arg)

    assert told() == f"--rules-group={RULES_GROUPS[0]}"
    assert told("--set", "operator.rulesGroup=llm-d.ai") == "--rules-group=llm-d.ai"
    assert told("--set", "rbac.gatewayRules=false") == "--rules-group="


def test_pickers_know_the_operator_by_its_pods_labels():
    (deployment,) = of_kind(helm.render("--set", "nameOverride=x", release="y"), "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert set(Platform().operator_labels) <= set(labels.items())


def test_the_operator_holds_the_lease_that_its_role_grants():
    items = helm.render("--set", "fullnameOverride=our")
    (role,) = of_kind(items, "Role")
    (deployment,) = of_kind(items, "Deployment")
    assert [rule.get("resourceNames") for rule in role["rules"]] == [None, ["our-operator"]]
    assert "--lease-name=our-operator" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def arguments_of(items: list[dict[str, Any]]) -> argparse.Namespace:
    """Parse the arguments that the chart gives the operator."""
    (deployment,) = of_kind(items, "Deployment")
    word, *flags = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert word == "operate"
    return operate.parser().parse_args(flags)


@pytest.mark.parametrize("case", RENDERS)
def test_the_operator_understands_the_arguments_that_the_chart_gives(case):
    items = helm.render(*RENDERS[case])
    (deployment,) = of_kind(items, "Deployment")
    given = arguments_of(items)
    assert given.host == "0.0.0.0", "the kubelet and Prometheus come from outside of the pod"
    assert given.leader_elect
    assert given.namespace == (["team-a", "team-b"] if case == "namespaced" else [])
    ports = deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {port["containerPort"] for port in ports} == {given.health_port, given.metrics_port}


def metrics_rules(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (policy,) = of_kind(items, "NetworkPolicy")
    return [rule for rule in policy["spec"]["ingress"] if {"port": 9090, "protocol": "TCP"} in rule["ports"]]


def test_metrics_readers_are_set_once_for_the_operator_and_its_objects():
    items = helm.render()
    (rule,) = metrics_rules(items)
    assert rule["from"] == list(PROMETHEUS)
    assert arguments_of(items).metrics_from == PROMETHEUS
    chosen = [{"namespaceSelector": {"matchLabels": {"team": "a b"}}}]
    items = helm.render("--set-json", f"networkPolicy.metricsFrom={json.dumps(chosen)}")
    (rule,) = metrics_rules(items)
    assert rule["from"] == chosen
    assert arguments_of(items).metrics_from == tuple(chosen)


def test_fragments_for_the_pods_of_all_pickers_and_envoys_reach_the_operator():
    assert (arguments_of(helm.render()).epp_template, arguments_of(helm.render()).edge_template) == (None, None)
    fragment = {"spec": {"nodeSelector": {"a/b": "c d"}, "priorityClassName": "high"}}
    for name in ("epp", "edge"):
        items = helm.render("--set-json", f"templates.{name}={json.dumps(fragment)}")
        assert getattr(arguments_of(items), f"{name}_template") == fragment


def test_presets_reach_the_operator_and_have_only_fields_of_a_pool():
    assert arguments_of(helm.render()).presets is None
    presets = {"h100": {"engine": {"type": "vllm", "args": ["--a b"]}, "model": {"cache": {"size": "1Gi"}}}, "none": {}}
    assert arguments_of(helm.render("--set-json", f"presets={json.dumps(presets)}")).presets == presets
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    fields = {field.alias or name for name, field in PoolSpec.model_fields.items()}
    assert set(schema["definitions"]["preset"]["propertyNames"]["enum"]) == fields - set(OWN)


def test_an_empty_list_of_readers_admits_nobody():
    items = helm.render("--set-json", "networkPolicy.metricsFrom=[]")
    assert metrics_rules(items) == [], "a rule with an empty list would admit everybody"
    assert arguments_of(items).metrics_from == ()


def test_prometheus_reaches_engine_api_ports_only_if_enabled():
    assert arguments_of(helm.render()).scrape_api_ports is False
    assert arguments_of(helm.render("--set", "networkPolicy.scrapeApiPorts=true")).scrape_api_ports is True


def test_the_operator_is_let_out_to_the_admin_port_of_pickers():
    (policy,) = of_kind(helm.render(), "NetworkPolicy")
    (rule,) = [rule for rule in policy["spec"]["egress"] if "podSelector" in str(rule.get("to"))]
    assert ports.PICKER_ADMIN in [port["port"] for port in rule["ports"]]


def test_a_digest_wins_over_a_tag_and_the_registry_comes_first():
    digest = "sha256:" + "0" * 64
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    options = f"images.registry=r.example:5000/team/,images.epp.tag=x,images.epp.digest={digest}"
    (deployment,) = of_kind(helm.render("--set", options), "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--image-epp=r.example:5000/team/treeline-epp@{digest}" in args
    assert f"--image-runtime-cuda=r.example:5000/team/treeline-runtime:{version}-cuda" in args


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("operator.replica=3", "'replica' not allowed"),
        ("crd.install=false", "'crd' not allowed"),
        ("scope.namespace=a", "'namespace' not allowed"),
        ("images.pullPolicy=Sometimes", "pullPolicy"),
        ("images.epp.digest=sha256:abc", "digest"),
        ("operator.replicas=two", "replicas"),
        ("scope.namespaces={Bad_Name}", "namespaces"),
        ("networkPolicy.metricsFrom={monitoring}", "metricsFrom"),
        ("networkPolicy.metricsFrom[0].namespace.name=monitoring", "metricsFrom"),
    ],
)
def test_a_mistyped_value_is_refused_by_name(value, said):
    done = helm.run("template", "t", str(CHART), "--set", value)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_schema_knows_every_value_and_no_other():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)

    def compare(known: dict[str, Any], given: Any, path: str) -> None:
        known = schema["definitions"][known["$ref"].rsplit("/", 1)[1]] if "$ref" in known else known
        if "properties" not in known:
            return
        assert known.get("additionalProperties") is False, path
        assert set(known["properties"]) - {"global"} == set(given), path
        for key, value in given.items():
            compare(known["properties"][key], value, f"{path}.{key}")

    compare(schema, values, "values")


def test_notes_say_what_is_missing_and_what_comes_next():
    def notes(*options: str) -> str:
        done = helm.run("install", "treeline", str(CHART), "--dry-run=client", "--namespace", "ai", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    told = notes()
    assert "[none] Gateway API:" in told
    assert "kubectl -n ai rollout status deployment/treeline-operator" in told
    sample = yaml.safe_load(told.partition("<<'EOF'\n")[2].partition("EOF\n")[0])
    assert sample["kind"] == "InferencePool"
    assert "[MISS] custom resources" in notes("--set", "crds.install=false")
    assert "deletes every pool" in notes("--set", "crds.keep=false")


@pytest.mark.parametrize("script", ["chart_readme", "install_manifest"])
def test_generated_files_are_current(script):
    helm.run("version")  # without helm the test is skipped
    done = subprocess.run([sys.executable, ROOT / "scripts" / f"{script}.py", "--check"], check=False)
    assert done.returncode == 0, f"run: python scripts/{script}.py"


def test_the_plain_install_is_the_chart_in_a_namespace_of_its_own():
    items = helm.documents((ROOT / "manifests" / "install.yaml").read_text())
    namespace, *rest = items
    assert namespace["kind"] == "Namespace"
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    name = namespace["metadata"]["name"]
    assert {item["metadata"].get("namespace", name) for item in rest} == {name}
    chart = helm.render(namespace=name)
    assert {(i["kind"], i["metadata"]["name"]) for i in rest} == {(i["kind"], i["metadata"]["name"]) for i in chart}


def test_versions_are_those_of_the_rooms():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (room,) = re.findall(r'^version = "(.*)"$', (ROOT / "operator" / "pyproject.toml").read_text(), re.MULTILINE)
    assert Version(chart["appVersion"]) == Version(room)
    assert f":{chart['appVersion']}\n" in chart["annotations"]["artifacthub.io/images"]
