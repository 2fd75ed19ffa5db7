"""A gateway's NetworkPolicies, which agree at both ends of each path."""

from __future__ import annotations

from typing import Any

from support.gateway_cluster import ATTACHED, FULL, container, converged, pool
from treeline_operator import names
from treeline_operator.plan.network import pods_policy
from treeline_operator.plan.revision import TargetRevision
from treeline_operator.plan.runtime import workload
from treeline_operator.world import PROMETHEUS, Images, Platform


def test_only_needed_network_paths_are_allowed() -> None:
    cluster = converged(pool("a"), pool("b", created=1, **FULL))
    deny = cluster.get("NetworkPolicy", "treeline-gateway-deny")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert not deny.keys() & {"ingress", "egress"}

    def numbers(rule: dict[str, Any]) -> list[Any]:
        return [(p["port"], p["endPort"]) if "endPort" in p else p["port"] for p in rule["ports"]]

    envoy = cluster.get("NetworkPolicy", "treeline-edge")["spec"]
    anybody, readers = envoy["ingress"]
    assert "from" not in anybody
    assert (numbers(anybody), numbers(readers)) == ([8080], [8081])
    to_picker, to_pods, dns = envoy["egress"]
    assert (numbers(to_picker), numbers(to_pods), numbers(dns)) == ([9002, 9003], [8000, 30000], [53, 53])
    picker = cluster.get("NetworkPolicy", "treeline-epp")["spec"]
    from_envoy, from_operator, from_pickers, readers = picker["ingress"]
    assert from_envoy["from"] == [{"podSelector": selector_of("edge")}]
    assert to_picker["to"] == [{"podSelector": selector_of("epp")}]
    assert (numbers(from_operator), numbers(readers)) == ([9004], [9090])
    assert readers["from"] == list(PROMETHEUS)
    (operator,) = from_operator["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "treeline-system"}
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "treeline-operator"}
    to_pods, to_pickers, to_api, dns = picker["egress"]
    assert to_pickers["to"] == from_pickers["from"] == [{"podSelector": selector_of("epp")}]
    assert to_pickers["ports"] == from_pickers["ports"] == [{"port": 9005, "protocol": "UDP"}]
    assert numbers(to_pods) == [8000, 30000, (5557, 5560), (5657, 5660), (5757, 5760)]
    assert (numbers(to_api), numbers(dns)) == ([443, 6443], [53, 53])
    # What goes out at this end is let in at the other.
    for p in (pool("a"), pool("b", created=1, **FULL)):
        ours = pods_policy(p, (), Platform(metrics_from=()), {}, meet=0)["spec"]["ingress"]
        let_in = {rule["from"][0]["podSelector"]["matchLabels"].get(names.COMPONENT): rule for rule in ours}
        assert set(numbers(let_in["edge"])) <= set(numbers(envoy["egress"][1]))
        reached = {port[0] if isinstance(port, tuple) else port for port in numbers(to_pods)}
        assert {port[0] if isinstance(port, tuple) else port for port in numbers(let_in["epp"])} <= reached
        template = workload(p, TargetRevision("r", None), 1, {"labels": {}}, Images())["spec"]["template"]
        assert to_pods["to"][0]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for name, policy in (("edge", envoy), ("epp", picker)):
        template = cluster.get("Deployment", f"treeline-{name}")["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= template.items()


def selector_of(component: str) -> dict[str, Any]:
    return {"matchLabels": {"treeline.dev/gateway": "treeline", "treeline.dev/component": component}}


def test_an_existing_gateway_is_admitted_instead_of_our_envoy() -> None:
    cluster = converged(pool("a", **ATTACHED))
    assert cluster.names("Deployment") == ["treeline-epp"]
    assert cluster.names("Service") == ["treeline-epp", "treeline-epp-peers"]
    assert "--secure-serving" in container(cluster, "treeline-epp")["args"]
    ingress = cluster.get("NetworkPolicy", "treeline-epp")["spec"]["ingress"][0]
    admitted = [peer["namespaceSelector"]["matchLabels"] for peer in ingress["from"]]
    assert admitted == [
        {"kubernetes.io/metadata.name": "infra"},
        {"kubernetes.io/metadata.name": "ns"},
        {"treeline.dev/gateway-access": "true"},
    ]
    assert "--secure-serving" not in container(converged(pool("a")), "treeline-epp")["args"]
