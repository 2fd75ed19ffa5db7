"""The planned NetworkPolicies open the right ports to the right peers, as Kubernetes reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from support.gateway_cluster import ATTACHED, Cluster, pool
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.network import pods_policy
from treeline_operator.plan.revision import TargetRevision
from treeline_operator.plan.runtime import workload
from treeline_operator.world import Images, Platform
from treeline_wire import ports

METRICS = {"runtime": ports.RUNTIME_METRICS, "epp": ports.METRICS, "edge": 8081}
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"type": "vllm"},
    "sglang": {"type": "sglang", "port": 30000},
    "custom": {"type": "custom", "image": "example.com/engine:1", "port": 9000},
}


@dataclass(frozen=True)
class Pod:
    namespace: str
    labels: dict[str, str] = field(default_factory=dict)


PROMETHEUS = Pod("monitoring", {"app.kubernetes.io/name": "prometheus"})
OPERATOR = Pod("treeline-system", {"app.kubernetes.io/name": "treeline-operator"})
IMPOSTOR = Pod("tenant", {"app.kubernetes.io/name": "prometheus"})
NEIGHBOUR = Pod("ns", {"app.kubernetes.io/name": "prometheus"})
"""A pod in the pool's own namespace, where the pool's author may start pods."""
COLLEAGUE = Pod("monitoring", {"app.kubernetes.io/name": "grafana"})


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a selector matches: `matchLabels`, and `matchExpressions` with In, as far as our policies use
    them."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def is_peer(peer: dict[str, Any], pod: Pod, home: str) -> bool:
    assert peer, "an empty peer is not allowed"
    assert "ipBlock" not in peer, "of pods nothing is known but namespace and labels"
    namespace_labels = {"kubernetes.io/metadata.name": pod.namespace}
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], namespace_labels):
            return False
    elif pod.namespace != home:
        return False
    return selects(peer.get("podSelector", {}), pod.labels)


def reached(policies: list[dict[str, Any]], target: Pod, source: Pod) -> set[int]:
    """Return the TCP ports of `target` that `source` may connect to."""
    mine = [p for p in policies if selects(p["spec"]["podSelector"], target.labels)]
    assert any("Ingress" in p["spec"]["policyTypes"] for p in mine), "otherwise all is allowed"
    found: set[int] = set()
    for policy in mine:
        for rule in policy["spec"].get("ingress", ()):
            if rule.get("from") and not any(is_peer(peer, source, target.namespace) for peer in rule["from"]):
                continue
            for port in rule.get("ports", ({"port": 1, "endPort": 65535, "protocol": "TCP"},)):
                if port["protocol"] == "TCP":
                    found |= set(range(port["port"], port.get("endPort", port["port"]) + 1))
    return found


def everything(of: InferencePool, platform: Platform) -> tuple[list[dict[str, Any]], dict[str, Pod]]:
    """Return the policies of a pool and its gateway, and a pod of each component."""
    cluster = Cluster()
    cluster.converge(of, platform=platform)
    policies = [cluster.get("NetworkPolicy", name) for name in cluster.names("NetworkPolicy")]
    pages = of.spec.engine.data_parallel * bool(of.spec.engine.host_cache)
    policies.append(pods_policy(of, of.spec.gateway.parent_refs, platform, {}, meet=pages))
    template = workload(of, TargetRevision("r", None), 1, {"labels": {}}, Images())["spec"]["template"]
    pods = {"runtime": Pod("ns", template["metadata"]["labels"])}
    for component in ("epp", "edge"):
        name = f"treeline-{component}"
        if name in cluster.names("Deployment"):
            labels = cluster.get("Deployment", name)["spec"]["template"]["metadata"]["labels"]
            pods[component] = Pod("ns", labels)
    return policies, pods


@pytest.mark.parametrize("spec", [{}, ATTACHED], ids=["standalone", "gateway-api"])
def test_prometheus_reaches_a_port_that_serves_metrics_and_no_other(spec: dict[str, Any]) -> None:
    policies, pods = everything(pool("a", **spec), Platform())
    for component, pod in pods.items():
        for_anybody = reached(policies, pod, Pod("anywhere"))
        assert reached(policies, pod, PROMETHEUS) - for_anybody == {METRICS[component]}


@pytest.mark.parametrize("stranger", [IMPOSTOR, NEIGHBOUR, COLLEAGUE], ids=lambda pod: f"{pod.namespace}")
def test_a_pod_that_only_claims_to_be_prometheus_reaches_only_the_gateway(stranger: Pod) -> None:
    policies, pods = everything(pool("a"), Platform())
    got = {component: reached(policies, pod, stranger) for component, pod in pods.items()}
    assert got == {"runtime": set(), "epp": set(), "edge": {8080}}


def test_only_the_operator_reaches_the_pickers_admin_port() -> None:
    policies, pods = everything(pool("a"), Platform())
    peers = [PROMETHEUS, IMPOSTOR, NEIGHBOUR, COLLEAGUE, OPERATOR, *pods.values()]
    for source in peers:
        assert ports.RUNTIME_ADMIN not in reached(policies, pods["runtime"], source)
        assert 9901 not in reached(policies, pods["edge"], source), "Envoy's admin page"
        admitted = ports.PICKER_ADMIN in reached(policies, pods["epp"], source)
        assert admitted == (source is OPERATOR)
    assert reached(policies, pods["runtime"], OPERATOR) == set()


def test_metrics_peers_can_be_chosen_or_none() -> None:
    chosen = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tenant"}}}
    policies, pods = everything(pool("a"), Platform(metrics_from=(chosen,)))
    for component, pod in pods.items():
        assert METRICS[component] in reached(policies, pod, IMPOSTOR)
        assert METRICS[component] not in reached(policies, pod, PROMETHEUS)
    policies, pods = everything(pool("a"), Platform(metrics_from=()))
    for component, pod in pods.items():
        assert METRICS[component] not in reached(policies, pod, PROMETHEUS)
        assert METRICS[component] not in reached(policies, pod, Pod("anywhere"))


@pytest.mark.parametrize("engine", ENGINES)
def test_prometheus_reaches_an_engines_api_port_only_if_enabled(engine: str) -> None:
    model = {"uri": "path:///weights", "name": "m"}
    asked = pool("a", model=model, engine=ENGINES[engine])
    policies, pods = everything(asked, Platform())
    assert reached(policies, pods["runtime"], PROMETHEUS) == set()
    policies, pods = everything(asked, Platform(scrape_api_ports=True))
    assert reached(policies, pods["runtime"], PROMETHEUS) == {asked.spec.engine.port}
    assert reached(policies, pods["runtime"], IMPOSTOR) == set()


def test_enabling_api_ports_of_engines_does_not_open_ours() -> None:
    policies, pods = everything(pool("a"), Platform(scrape_api_ports=True))
    assert reached(policies, pods["runtime"], PROMETHEUS) == {ports.RUNTIME_METRICS}


@pytest.mark.parametrize("port", [ports.RUNTIME_METRICS, ports.RUNTIME_ADMIN])
def test_an_engines_api_on_one_of_our_ports_moves_ours(port: int) -> None:
    of = pool("a", engine={"port": port})
    policies, pods = everything(of, Platform())
    template = workload(of, TargetRevision("r", None), 1, {"labels": {}}, Images())["spec"]["template"]
    (container,) = template["spec"]["containers"]
    numbers = {p["name"]: p["containerPort"] for p in container["ports"]}
    flags = dict(zip(container["args"][::2], container["args"][1::2], strict=False))
    assert len(set(numbers.values())) == len(numbers)
    assert (numbers["http"], flags["--port"]) == (port, str(port))
    assert flags["--metrics-port"] == str(numbers["metrics"]) != str(port)
    assert flags["--admin-port"] not in map(str, numbers.values())
    assert reached(policies, pods["runtime"], PROMETHEUS) == {numbers["metrics"]}


def test_pages_are_fetched_from_pods_of_the_same_pool_and_namespace_alone() -> None:
    kept = pool("a", engine={"hostCache": "1Gi", "dataParallel": 2})
    policies, pods = everything(kept, Platform())
    mine = pods["runtime"]
    assert reached(policies, mine, mine) == {ports.KV_TRANSFER, ports.KV_TRANSFER + 1}
    others = [everything(pool("b", engine={"hostCache": "1Gi"}), Platform())[1]["runtime"], Pod("tenant", mine.labels)]
    for source in (*others, PROMETHEUS, OPERATOR, NEIGHBOUR, pods["edge"], pods["epp"]):
        assert ports.KV_TRANSFER not in reached(policies, mine, source)
