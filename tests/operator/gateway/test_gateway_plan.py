"""The gateway's plan: its objects, its stability, the rights of pods, and its URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support import golden
from support.envoy import ENVOY
from support.gateway_cluster import ATTACHED, CASES, Cluster, container, converged, pool
from treeline_epp.options import options_of as picker_options
from treeline_operator import names, rbac
from treeline_operator.actions import Apply, CreateKeys
from treeline_operator.api.pool import InferencePool
from treeline_operator.envoy.launcher import options_of as launcher_options
from treeline_operator.plan.gateway import gateway_url, plan_gateway
from treeline_operator.plan.gateway_common import GatewayContext
from treeline_operator.plan.objects import POD_MONITOR
from treeline_operator.plan.revision import TargetRevision
from treeline_operator.plan.runtime import workload
from treeline_operator.plan.shared_gateway import share
from treeline_operator.world import Images, Platform
from treeline_wire import ports

GOLDEN = Path(__file__).parent / "golden"


def rendered(cluster: Cluster, kind: str, name: str) -> dict[str, Any]:
    return {k: v for k, v in cluster.get(kind, name).items() if k != "status"}


BASE = "plain"


def parts(case: str) -> dict[str, str]:
    """Return every object of a gateway, and every file of its configuration, as text."""
    cluster = converged(pool("llama", **CASES[case]))
    shown: dict[str, Any] = {}
    for ref in sorted(cluster.objects):
        if ref.kind == "Pod":
            continue
        obj = rendered(cluster, ref.kind, ref.name)
        obj["metadata"] = {k: v for k, v in obj["metadata"].items() if k not in ("uid", "generation")}
        obj["metadata"].get("annotations", {}).pop(names.APPLIED, None)
        if obj["kind"] == "ConfigMap" and "envoy.json" in obj["data"]:
            obj["data"] = {k: json.loads(text) for k, text in obj["data"].items()}
            content = obj["metadata"]["labels"][names.REVISION]
        shown[f"{obj['kind']} {ref.name}"] = obj
    texts = {title: yaml.dump(obj, Dumper=golden.Plain, sort_keys=True, width=110) for title, obj in shown.items()}
    if CASES[case] == ATTACHED:
        return texts
    return {"configuration": f"{content}\n"} | {
        title.replace(content, "CONTENT"): text.replace(content, "CONTENT") for title, text in texts.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_objects_equal_the_reviewed_files(case: str) -> None:
    """The whole plan is compared, as text."""
    golden.check(GOLDEN, case, parts(case), BASE, parts(BASE))


@pytest.mark.parametrize("case", CASES)
def test_a_converged_gateway_asks_for_nothing(case: str) -> None:
    pools = [pool("llama", **CASES[case]), pool("qwen", created=3, **CASES[case])]
    cluster = Cluster()
    plans = cluster.converge(*pools)
    assert plan_gateway(cluster.world(*pools)).actions == ()
    assert plan_gateway(cluster.world(*reversed(pools))).actions == ()
    assert cluster.secrets == ["treeline-kv-keys"]
    # What is there is no other for having been looked at through an API server that shows quantities its own way.
    sizes = container(cluster, "treeline-epp")["resources"]["requests"]
    sizes["cpu"] = f"{float(sizes['cpu'].rstrip('m')) / (1000 if 'm' in sizes['cpu'] else 1):g}"
    assert plan_gateway(cluster.world(*pools)).actions == ()
    assert [len(plan.actions) for plan in plans[:1]] == [1]


def test_the_anchor_comes_first_and_owns_the_rest() -> None:
    a, b = pool("a"), pool("b", created=1)
    cluster = Cluster()
    (only,) = plan_gateway(cluster.world(a, b)).actions
    assert isinstance(only, Apply)
    assert only.object["metadata"]["name"] == "treeline-gateway"
    assert only.object["data"] == {"owner": "a", "pools": "a\nb\n", "protections": "{}"}
    owners = only.object["metadata"]["ownerReferences"]
    assert [(owner["uid"], owner.get("controller", False)) for owner in owners] == [
        ("uid-a", False),
        ("uid-b", False),
    ]
    cluster.do((only,))
    uid = cluster.get("ConfigMap", "treeline-gateway")["metadata"]["uid"]
    actions = plan_gateway(cluster.world(a, b)).actions
    objects = [action.object for action in actions if isinstance(action, Apply | CreateKeys)]
    assert len(objects) == len(actions) == 16
    for obj in objects:
        assert obj["metadata"]["labels"]["treeline.dev/gateway"] == "treeline"
        assert obj["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "treeline"
        (owner,) = obj["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("ConfigMap", uid, True)
        assert len(obj["metadata"]["name"]) <= 63
    kinds = [obj["kind"] for obj in objects]
    # Before a pod starts its rights, its keys and the paths it may take are there.
    assert kinds.index("Deployment") > max(
        kinds.index(kind) for kind in ("NetworkPolicy", "RoleBinding", "Secret", "ServiceAccount")
    )


def test_keys_are_made_once_and_again_only_for_a_picker_without_them() -> None:
    p = pool("a")
    cluster = converged(p)
    assert cluster.secrets == ["treeline-kv-keys"]
    (secret,) = [
        action for action in plan_gateway(_with_anchor_only(p).world(p)).actions if isinstance(action, CreateKeys)
    ]
    assert secret.object["immutable"] is True
    assert "data" not in secret.object
    picker = cluster.get("Pod", "treeline-epp-0")
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-28T11:59:50Z"},
        {"type": "PodReadyToStartContainers", "status": "False"},
    ]
    picker["status"] = {"conditions": conditions}
    plan = plan_gateway(cluster.world(p))
    assert (plan.actions, plan.recheck_s) == ((), 30)
    conditions[0]["lastTransitionTime"] = "2026-11-28T11:59:00Z"
    plan = plan_gateway(cluster.world(p))
    assert [type(action) for action in plan.actions] == [CreateKeys]
    conditions[1]["status"] = "True"
    assert plan_gateway(cluster.world(p)).actions == ()
    # Envoy waits for other Secrets, which are not ours to make.
    cluster.get("Pod", "treeline-edge-0")["status"] = {
        "conditions": [conditions[0], {"type": "PodReadyToStartContainers", "status": "False"}]
    }
    assert plan_gateway(cluster.world(p)).actions == ()


def _with_anchor_only(*pools: InferencePool) -> Cluster:
    cluster = Cluster()
    cluster.do(plan_gateway(cluster.world(*pools)).actions)
    return cluster


@pytest.mark.parametrize("case", CASES)
def test_pods_are_restricted_and_only_the_picker_has_a_token(case: str) -> None:
    cluster = converged(pool("a", **CASES[case]))
    for name in cluster.names("Deployment"):
        pod = cluster.get("Deployment", name)["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is (name == "treeline-epp")
        assert cluster.get("ServiceAccount", pod["serviceAccountName"])["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (only,) = pod["containers"]
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for volume in pod["volumes"]:
            assert volume.keys() & {"secret", "configMap", "emptyDir"}
            assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440
        budget = cluster.get("PodDisruptionBudget", name)["spec"]
        assert (budget["unhealthyPodEvictionPolicy"], budget["maxUnavailable"]) == ("AlwaysAllow", 1)
    everything = json.dumps([obj for obj in cluster.objects.values() if obj["kind"] != "Secret"])
    assert "secretKeyRef" not in everything


def test_the_picker_may_read_declared_kinds_and_change_nothing() -> None:
    cluster = converged(pool("a"))
    rules = cluster.get("Role", "treeline-epp")["rules"]
    assert rules == [need.rule() for need in (*rbac.PICKER, rbac.rules_need(rbac.RULES_GROUPS[0]))]
    assert {verb for rule in rules for verb in rule["verbs"]} <= {"get", "list", "watch"}
    resources = {(group, r) for rule in rules for group in rule["apiGroups"] for r in rule["resources"]}
    assert {
        ("", "pods"),
        ("treeline.dev", "inferencepools"),
        ("treeline.dev", "inferencemodels"),
    } <= resources
    kinds = {"inferencepools", "inferencemodels", "inferenceobjectives", "inferencemodelrewrites"}
    assert {name for _, name in resources} <= {"pods", *kinds}
    binding = cluster.get("RoleBinding", "treeline-epp")
    assert binding["roleRef"]["name"] == binding["subjects"][0]["name"] == "treeline-epp"


def test_timeouts_follow_the_slowest_pool() -> None:
    cluster = converged(pool("a"), pool("b", created=1, drain={"timeoutSeconds": 61}))
    for name, flags in (
        ("treeline-epp", container(cluster, "treeline-epp")["args"]),
        ("treeline-edge", container(cluster, "treeline-edge")["args"]),
    ):
        spec = cluster.get("Deployment", name)["spec"]
        assert "--drain-timeout=120" in flags
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 150
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert container(cluster, "treeline-epp")["lifecycle"]["preStop"]["sleep"]["seconds"] == 5


@settings(deadline=None)
@given(st.lists(st.integers(1, 3600), min_size=1, max_size=4))
def test_no_pool_pod_has_a_longer_grace_than_the_gateways_pods(drains: list[int]) -> None:
    pools = [pool(f"p{i}", drain={"timeoutSeconds": s}) for i, s in enumerate(drains)]
    context = GatewayContext.of(Cluster().world(*pools), share(pools)["treeline"], "uid")
    for p in pools:
        template = workload(p, TargetRevision("r", None), 1, {"labels": {}}, Images())["spec"]["template"]
        assert template["spec"]["terminationGracePeriodSeconds"] <= context.grace_s


@pytest.mark.parametrize("case", CASES)
def test_picker_and_launcher_understand_their_flags(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREELINE_ENVOY", str(ENVOY))
    cluster = converged(pool("a", **CASES[case]))
    told = container(cluster, "treeline-epp")
    assert told["command"] == ["treeline", "pick"]
    options = picker_options(told["args"])
    assert (options.gateway, options.pool_namespace, options.host) == ("treeline", "ns", "0.0.0.0")
    assert options.curve_dir == Path(told["volumeMounts"][0]["mountPath"])
    assert options.secure_serving is (case == "attached")
    if case == "full":
        assert (options.policy, options.max_ttft_seconds, options.max_body_bytes) == (
            "round_robin",
            2.5,
            1 << 20,
        )
    if case != "attached":
        told = container(cluster, "treeline-edge")
        assert told["command"] == ["python", "-m", "treeline_operator.envoy"]
        launcher = launcher_options(told["args"])
        assert launcher.drain_timeout == options.drain_timeout
        mounts = {Path(mount["mountPath"]) for mount in told["volumeMounts"]}
        assert launcher.config.parent in mounts
        assert launcher.keys_dir is None or launcher.keys_dir in mounts


def test_registry_credentials_reach_picker_and_envoy() -> None:
    cluster = Cluster()
    cluster.converge(pool("a"), platform=Platform(images=Images(pull_secrets=("registry",))))
    for name in ("treeline-epp", "treeline-edge"):
        pod = cluster.get("Deployment", name)["spec"]["template"]["spec"]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


# --- for the status ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "balancer", "url"),
    [
        ({}, None, "http://treeline-gateway.ns.svc"),
        ({"port": 8080}, None, "http://treeline-gateway.ns.svc:8080"),
        ({"tls": {"secretRef": {"name": "c"}}}, None, "https://treeline-gateway.ns.svc:80"),
        ({"tls": {"secretRef": {"name": "c"}}, "port": 443}, None, "https://treeline-gateway.ns.svc"),
        ({"serviceType": "LoadBalancer"}, [], "http://treeline-gateway.ns.svc"),
        ({"serviceType": "LoadBalancer"}, [{"ip": "192.0.2.7"}], "http://192.0.2.7"),
        ({"serviceType": "LoadBalancer", "port": 81}, [{"ip": "2001:db8::1"}], "http://[2001:db8::1]:81"),
        ({"serviceType": "LoadBalancer"}, [{"hostname": "lb.example"}], "http://lb.example"),
    ],
)
def test_the_url_is_the_address_for_clients(settings: dict[str, Any], balancer: Any, url: str) -> None:
    p = pool("a", gateway={"standalone": settings})
    cluster = _with_anchor_only(p)
    assert (gateway_url(cluster.world(p)) or "").startswith(("http://treeline", "https://treeline"))
    cluster.do(plan_gateway(cluster.world(p)).actions)
    if balancer is not None:
        cluster.get("Service", "treeline-gateway")["status"] = {"loadBalancer": {"ingress": balancer}}
    assert gateway_url(cluster.world(p)) == url


def test_the_url_of_a_route_is_its_first_name() -> None:
    p, unnamed = pool("a", **ATTACHED), pool("b", created=1, gateway={"parentRefs": [{"name": "own"}]})
    world = Cluster().world(p, unnamed)
    assert gateway_url(world) == gateway_url(world, p) == "https://models.example.com"
    assert gateway_url(world, unnamed) is None
    assert gateway_url(Cluster().world()) is None


def test_headers_of_objectives_are_trusted_if_a_pool_says_so_and_existing_rules_are_followed() -> None:
    def told(platform: Platform, **picker: Any) -> Any:
        cluster = Cluster()
        cluster.converge(pool("a", endpointPicker=picker), platform=platform)
        rules = cluster.get("Role", "treeline-epp")["rules"]
        return picker_options(container(cluster, "treeline-epp")["args"]), [rule["apiGroups"] for rule in rules]

    options, groups = told(Platform())
    assert (options.trust_request_headers, options.rules_group) == (False, rbac.RULES_GROUPS[0])
    options, groups = told(Platform(rules_group="llm-d.ai"), parameters={"trustRequestHeaders": True})
    assert (options.trust_request_headers, options.rules_group) == (True, "llm-d.ai")
    assert groups[2:] == [["llm-d.ai"]]
    options, groups = told(Platform(rules_group=""))
    assert (options.rules_group, len(groups)) == ("", 2)


def test_a_picker_has_a_monitor_if_supported_which_survives_a_missing_api() -> None:
    cluster, pools = Cluster(), [pool("a")]
    cluster.converge(*pools)
    assert cluster.names("PodMonitor") == []
    able = Platform(apis=frozenset({POD_MONITOR}))
    cluster.converge(*pools, platform=able)
    monitor = cluster.get("PodMonitor", "treeline-epp")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    pod = cluster.get("Deployment", "treeline-epp")["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {"name": endpoint["port"], "containerPort": ports.METRICS}.items() <= next(
        port for port in container(cluster, "treeline-epp")["ports"] if port["name"] == endpoint["port"]
    ).items()
    for platform in (able, Platform()):
        assert plan_gateway(cluster.world(*pools, platform=platform)).actions == ()


# ---- fragments of templates -----------------------------------------------------------------------------------

FRAGMENT: dict[str, Any] = {
    "metadata": {"labels": {"team": "search", "app.kubernetes.io/managed-by": "me"}, "annotations": {"a": "b"}},
    "spec": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "priorityClassName": "high",
        "terminationGracePeriodSeconds": 1,
    },
}


def with_templates(**main: Any) -> dict[str, Any]:
    """Return a spec with the fragment for pickers and Envoys, and `main` for their containers."""

    def fragment(name: str) -> dict[str, Any]:
        return {**FRAGMENT, "spec": {**FRAGMENT["spec"], "containers": [{"name": name, **main}]}}

    return {
        "endpointPicker": {"template": fragment("epp")},
        "gateway": {"standalone": {"template": fragment("edge")}},
    }


@pytest.mark.parametrize("name", ["treeline-epp", "treeline-edge"])
def test_pickers_and_envoys_take_fragments_as_runtimes_do(name: str) -> None:
    plain = converged(pool("a")).get("Deployment", name)
    cluster = converged(pool("a", **with_templates(env=[{"name": "MORE", "value": "1"}])))
    made = cluster.get("Deployment", name)["spec"]["template"]
    ours = plain["spec"]["template"]
    assert made["metadata"]["annotations"] == {"a": "b"}
    assert made["metadata"]["labels"] == {"team": "search", **made["metadata"]["labels"]}
    assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] == names.MANAGER
    spec = made["spec"]
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"disk": "fast"}, "high")
    assert spec["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert spec["terminationGracePeriodSeconds"] == ours["spec"]["terminationGracePeriodSeconds"]
    (main,) = spec["containers"]
    (before,) = ours["spec"]["containers"]
    assert main["env"] == [*before.get("env", []), {"name": "MORE", "value": "1"}]
    assert main["ports"] == before["ports"]


def test_the_operators_own_fragment_is_laid_under_the_pools() -> None:
    default = {"spec": {"nodeSelector": {"disk": "slow", "zone": "a"}}}
    roomy = {"spec": {"containers": [{"name": "edge", "resources": {"limits": {"memory": "3Gi", "cpu": "3"}}}]}}
    platform = Platform(epp_template=default, edge_template=roomy)

    def made(name: str, **spec: Any) -> dict[str, Any]:
        cluster = Cluster()
        cluster.converge(pool("a", **spec), platform=platform)
        found: dict[str, Any] = cluster.get("Deployment", name)["spec"]["template"]["spec"]
        return found

    assert made("treeline-epp")["nodeSelector"] == {"disk": "slow", "zone": "a"}
    assert made("treeline-epp", **with_templates())["nodeSelector"] == {"disk": "fast", "zone": "a"}
    (envoy,) = made("treeline-edge")["containers"]
    assert envoy["resources"]["limits"] == {"memory": "3Gi", "cpu": "3"}
    assert "--concurrency=3" in envoy["args"], "Envoy counts on what it is given in the end"
    asked = {"gateway": {"standalone": {"resources": {"limits": {"memory": "2Gi"}}}}}
    (envoy,) = made("treeline-edge", **asked)["containers"]
    assert envoy["resources"]["limits"] == {"memory": "2Gi"}, "what a pool's field says wins"


@pytest.mark.parametrize("name", ["treeline-epp", "treeline-edge"])
def test_a_changed_fragment_rolls_the_pods_and_an_invalid_one_does_not(name: str) -> None:
    cluster = converged(pool("a"))
    before = cluster.get("Deployment", name)["spec"]["template"]
    bad = pool("a", **with_templates(ports=[{"name": "x"}]))
    plan = plan_gateway(cluster.world(bad))
    assert not [action for action in plan.actions if action.ref.name == name]
    assert any(f"Deployment {name} stays as it is: template: every item of ports" in note for note in plan.notes)
    cluster.converge(bad)
    assert cluster.get("Deployment", name)["spec"]["template"] == before
    cluster.converge(pool("a", **with_templates()))
    assert cluster.get("Deployment", name)["spec"]["template"] != before


def test_the_overruled_fragment_of_two_pools_is_reported() -> None:
    shared = share([pool("a", **with_templates()), pool("b", created=3)])["treeline"]
    told = shared.conflicts["b"]
    assert "endpointPicker.template.spec.nodeSelector.disk is unset here, fast in pool a (older)" in told
    assert any(text.startswith("gateway.standalone.template.spec.tolerations is unset here") for text in told)
