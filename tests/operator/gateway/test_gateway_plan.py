"""The gateway's plan: what is made, that it comes to rest, who may see what, and when pods roll."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support import golden
from support.envoy import ENVOY, self_signed
from support.gateway_cluster import ATTACHED, CASES, FULL, Cluster, pool
from treeline_epp.options import options_of as picker_options
from treeline_operator import names, rbac
from treeline_operator.actions import Apply, CreateKeys, Delete, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.envoy.keys import credentials, discovery_json
from treeline_operator.envoy.launcher import options_of as launcher_options
from treeline_operator.plan import edge
from treeline_operator.plan.gateway import gateway_url, plan_gateway
from treeline_operator.plan.gateway_common import GatewayContext
from treeline_operator.plan.network import pods_policy
from treeline_operator.plan.revision import TargetRevision
from treeline_operator.plan.runtime import deployment
from treeline_operator.plan.shared_gateway import share
from treeline_operator.world import PROMETHEUS, TEMPLATE_VERSION, Images, Observed, Platform
from treeline_wire import headers

GOLDEN = Path(__file__).parent / "golden"


def converged(*pools: InferencePool) -> Cluster:
    cluster = Cluster()
    cluster.converge(*pools)
    return cluster


def rendered(cluster: Cluster, kind: str, name: str) -> dict[str, Any]:
    return {k: v for k, v in cluster.get(kind, name).items() if k != "status"}


def container(cluster: Cluster, deployment: str) -> dict[str, Any]:
    (found,) = cluster.get("Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    return found  # type: ignore[no-any-return]


# --- what is made -----------------------------------------------------------------------------------------------------


BASE = "plain"


def parts(case: str) -> dict[str, str]:
    """Every object of a gateway, and of its configuration every file, as text."""
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
def test_what_is_made_is_what_was_agreed(case: str) -> None:
    """The whole of it, as text. A change of a pod template here wants a new TEMPLATE_VERSION, or pods roll unasked."""
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
    assert only.object["data"] == {"owner": "a", "pools": "a\nb\n"}
    owners = only.object["metadata"]["ownerReferences"]
    assert [(owner["uid"], owner.get("controller", False)) for owner in owners] == [
        ("uid-a", False),
        ("uid-b", False),
    ]
    cluster.do((only,))
    uid = cluster.get("ConfigMap", "treeline-gateway")["metadata"]["uid"]
    actions = plan_gateway(cluster.world(a, b)).actions
    objects = [action.object for action in actions if isinstance(action, Apply | CreateKeys)]
    assert len(objects) == len(actions) == 15
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


def test_the_keys_are_made_once_and_again_only_for_a_picker_that_cannot_have_them() -> None:
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


def test_the_picker_may_read_what_was_declared_and_change_nothing() -> None:
    cluster = converged(pool("a"))
    rules = cluster.get("Role", "treeline-epp")["rules"]
    assert rules == [need.rule() for need in rbac.PICKER]
    assert {verb for rule in rules for verb in rule["verbs"]} <= {"get", "list", "watch"}
    resources = {(group, r) for rule in rules for group in rule["apiGroups"] for r in rule["resources"]}
    assert {
        ("", "pods"),
        ("treeline.dev", "inferencepools"),
        ("treeline.dev", "inferencemodels"),
    } <= resources
    assert {name for _, name in resources} <= {"pods", "inferencepools", "inferencemodels"}
    binding = cluster.get("RoleBinding", "treeline-epp")
    assert binding["roleRef"]["name"] == binding["subjects"][0]["name"] == "treeline-epp"


def test_everything_may_take_as_long_as_the_slowest_pool() -> None:
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
def test_no_pod_of_a_pool_gets_longer_to_end_than_those_in_front_of_it(drains: list[int]) -> None:
    pools = [pool(f"p{i}", drain={"timeoutSeconds": s}) for i, s in enumerate(drains)]
    context = GatewayContext.of(Cluster().world(*pools), share(pools)["treeline"], "uid")
    for p in pools:
        template = deployment(p, TargetRevision("r", "", 1, None), 1, {"labels": {}}, Images())["spec"]["template"]
        assert template["spec"]["terminationGracePeriodSeconds"] <= context.grace_s


@pytest.mark.parametrize("case", CASES)
def test_picker_and_launcher_understand_what_they_are_told(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREELINE_ENVOY", str(ENVOY))
    cluster = converged(pool("a", **CASES[case]))
    told = container(cluster, "treeline-epp")
    assert told["command"] == ["treeline", "pick"]
    options = picker_options(told["args"])
    assert (options.gateway, options.pool_namespace, options.host) == ("treeline", "ns", "0.0.0.0")
    assert options.curve_dir == Path(told["volumeMounts"][0]["mountPath"])
    assert options.secure_serving is options.health_checking is (case == "attached")
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


# --- Envoy ------------------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["FailOpen", "FailClose"])
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("has_tls", [False, True])
def test_the_real_envoy_accepts_every_configuration(
    mode: str, has_keys: bool, has_tls: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings: dict[str, Any] = {}
    if has_keys:
        settings["apiKeysSecretRef"] = {"name": "clients"}
    if has_tls:
        settings["tls"] = {"secretRef": {"name": "certificate"}}
    cluster = converged(pool("a", endpointPicker={"failureMode": mode}, gateway={"standalone": settings}))
    (name,) = [name for name in cluster.names("ConfigMap") if name != "treeline-gateway"]
    mounted = {
        edge.CONFIG_DIR: tmp_path / "config",
        edge.TLS_DIR: tmp_path / "tls",
        edge.RUN_DIR: tmp_path / "run",
    }
    for folder in mounted.values():
        folder.mkdir()
    data = cluster.get("ConfigMap", name)["data"]
    assert sorted(data) == (["envoy.json", "tls.json"] if has_tls else ["envoy.json"])
    for file, text in data.items():
        for path, folder in mounted.items():
            text = text.replace(path, str(folder))
        (mounted[edge.CONFIG_DIR] / file).write_text(text)
    (mounted[edge.RUN_DIR] / "api-keys.json").write_text(discovery_json(credentials({"ada": ["sk-1"]}), "1"))
    if has_tls:
        made = self_signed(mounted[edge.TLS_DIR])
        Path(made.certificate_file).rename(mounted[edge.TLS_DIR] / "tls.crt")
        Path(made.key_file).rename(mounted[edge.TLS_DIR] / "tls.key")
    done = subprocess.run(
        [
            ENVOY,
            "--mode",
            "validate",
            "--config-path",
            mounted[edge.CONFIG_DIR] / "envoy.json",
            "-l",
            "error",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("failure_mode_allow" in data["envoy.json"]) is (mode == "FailOpen")
    assert "treeline-epp.ns.svc.cluster.local" in data["envoy.json"]
    assert "placeholder" not in data["envoy.json"]
    flags = container(cluster, "treeline-edge")["args"]
    assert (f"--keys-file={edge.KEYS_FILE}" in flags) is has_keys


def test_clients_see_the_routing_where_somebody_asks_for_it_and_nowhere_else() -> None:
    texts = []
    for standalone in ({}, {"exposeRouting": True}):
        cluster = converged(pool("a", gateway={"standalone": standalone}))
        (name,) = [name for name in cluster.names("ConfigMap") if name != "treeline-gateway"]
        texts.append(cluster.get("ConfigMap", name)["data"]["envoy.json"])
    hidden, shown = texts
    assert f'"remove": "{headers.ENDPOINT}"' in hidden
    assert f'"remove": "{headers.CACHED_TOKENS}"' in hidden
    assert f'"key": "{headers.ENDPOINT}"' in shown
    assert headers.CACHED_TOKENS not in shown


KEYED: dict[str, Any] = {"standalone": {"apiKeysSecretRef": {"name": "keys"}}}
VLLM: dict[str, Any] = {"model": {"uri": "hf://org/name"}, "engine": {"type": "vllm"}}


def envoys_listener(cluster: Cluster) -> dict[str, Any]:
    """The connection manager in the configuration that Envoy's pods mount."""
    volumes = cluster.get("Deployment", "treeline-edge")["spec"]["template"]["spec"]["volumes"]
    (config,) = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    document = json.loads(cluster.get("ConfigMap", config)["data"]["envoy.json"])
    (listener,) = [one for one in document["static_resources"]["listeners"] if one["name"] == "gateway"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def told_by_the_edge(cluster: Cluster) -> str | None:
    """What Envoy says of isolation; None where it says nothing."""
    manager = envoys_listener(cluster)
    changes = manager["http_filters"][0]["typed_config"]["mutations"]["request_mutations"]
    appended = [change["append"]["header"] for change in changes if "append" in change]
    return next((header["value"] for header in appended if header["key"] == headers.ISOLATION), None)


@pytest.mark.parametrize(
    ("gateway", "said", "trusted"),
    [
        ({}, None, False),
        ({"isolation": "Shared"}, None, False),
        (KEYED, headers.PER_KEY, True),
        ({**KEYED, "isolation": "PerKey"}, headers.PER_KEY, True),
        ({**KEYED, "isolation": "Shared"}, headers.SHARED, True),
        ({"isolation": "Shared", "standalone": {**KEYED["standalone"], "exposeRouting": True}}, None, True),
    ],
)
def test_clients_with_keys_have_caches_of_their_own_unless_they_are_to_share(
    gateway: dict[str, Any], said: str | None, trusted: bool
) -> None:
    cluster = converged(pool("llama", gateway=gateway))
    assert told_by_the_edge(cluster) == said
    assert ("--trust-edge" in container(cluster, "treeline-epp")["args"]) is trusted


def fails_open(*pools: InferencePool) -> bool:
    filters = envoys_listener(converged(*pools))["http_filters"]
    (asking,) = [one["typed_config"] for one in filters if one["name"].endswith("ext_proc")]
    return bool(asking.get("failure_mode_allow", False))


def test_without_a_picker_requests_are_refused_where_it_alone_keeps_clients_apart() -> None:
    ours = pool("ours", gateway=KEYED)
    assert fails_open(ours), "the runtime reads the header itself"
    assert not fails_open(pool("theirs", gateway=KEYED, **VLLM))
    assert not fails_open(ours, pool("theirs", gateway=KEYED, **VLLM)), "one is enough: it is one Envoy"
    assert fails_open(pool("theirs", gateway={**KEYED, "isolation": "Shared"}, **VLLM))
    assert fails_open(pool("theirs", **VLLM))


def test_an_engine_that_joins_changes_envoys_configuration_where_it_must() -> None:
    cluster = converged(pool("ours", gateway=KEYED))
    before = cluster.get("Deployment", "treeline-edge")["metadata"]["annotations"][names.INPUTS]
    cluster.converge(pool("ours", gateway=KEYED), pool("theirs", gateway=KEYED, **VLLM))
    assert cluster.get("Deployment", "treeline-edge")["metadata"]["annotations"][names.INPUTS] != before


def test_a_changed_configuration_is_a_new_one_and_the_old_stays_while_pods_mount_it() -> None:
    cluster, changed = converged(pool("a")), pool("a", endpointPicker={"failureMode": "FailClose"})
    (old,) = [name for name in cluster.names("ConfigMap") if name != "treeline-gateway"]
    plan = plan_gateway(cluster.world(changed))
    assert not [action for action in plan.actions if isinstance(action, Delete)]
    cluster.do(plan.actions)
    # The Deployment has not been looked at yet by its controller, and then not all its pods are new.
    assert plan_gateway(cluster.world(changed)).actions == ()
    lingering = cluster.objects.pop(next(ref for ref in cluster.objects if ref.name == "treeline-edge-0"))
    cluster.roll_out()
    ref = next(ref for ref in cluster.objects if ref.name == "treeline-edge-0")._replace(name="treeline-edge-old")
    cluster.objects[ref] = {**lingering, "metadata": {**lingering["metadata"], "name": ref.name}}
    assert plan_gateway(cluster.world(changed)).actions == ()
    del cluster.objects[ref]
    (last,) = plan_gateway(cluster.world(changed)).actions
    assert isinstance(last, Delete)
    assert last.ref.name == old


def test_a_change_of_the_service_rolls_nothing() -> None:
    cluster = converged(pool("a"))
    changed = pool("a", gateway={"standalone": {"port": 8080, "serviceType": "NodePort", "replicas": 2}})
    (plan,) = cluster.converge(changed)
    assert sorted(action.ref.kind for action in plan.actions) == ["Deployment", "Service"]
    (scaled,) = [a for a in plan.actions if isinstance(a, Apply) and a.ref.kind == "Deployment"]
    assert cluster.get("Deployment", "treeline-edge")["spec"]["replicas"] == 2
    assert scaled.object["spec"]["template"] == cluster.get("Deployment", "treeline-edge")["spec"]["template"]


def test_envoy_gets_as_many_threads_as_it_has_cpus() -> None:
    cases = ((None, 2), ({"limits": {"cpu": "2500m"}}, 3), ({"requests": {"cpu": "100m"}}, 1))
    for resources, threads in cases:
        settings = {} if resources is None else {"resources": resources}
        cluster = converged(pool("a", gateway={"standalone": settings}))
        assert f"--concurrency={threads}" in container(cluster, "treeline-edge")["args"]


# --- networks ---------------------------------------------------------------------------------------------------------


def heap_limit(cluster: Cluster) -> int:
    (text,) = [obj["data"]["envoy.json"] for obj in cluster.objects.values() if "envoy.json" in obj.get("data", {})]
    monitors = json.loads(text)["overload_manager"]
    (heap,) = [m for m in monitors["resource_monitors"] if "fixed_heap" in m["name"]]
    return int(heap["typed_config"]["max_heap_size_bytes"])


@pytest.mark.parametrize(
    ("resources", "body_limit", "limit", "heap_mib"),
    [
        (None, None, "1024Mi", 768),
        ({"limits": {"cpu": 2}}, None, "1024Mi", 768),
        ({"limits": {"memory": "2Gi"}}, None, "2Gi", 1536),
        ({"requests": {"memory": "3Gi"}}, None, "3072Mi", 2304),
        (None, 1 << 30, "8192Mi", 6144),
        ({"limits": {"memory": "16Mi"}}, None, "16Mi", 32),
    ],
)
def test_what_envoy_takes_in_follows_from_its_memory_limit_which_is_always_there(
    resources: Any, body_limit: int | None, limit: str, heap_mib: int
) -> None:
    standalone = {} if resources is None else {"resources": resources}
    parameters = {} if body_limit is None else {"maxBodyBytes": body_limit}
    gateway = {"standalone": standalone} if standalone else {}
    cluster = converged(pool("a", gateway=gateway, endpointPicker={"parameters": parameters}))
    assert container(cluster, "treeline-edge")["resources"]["limits"]["memory"] == limit
    assert heap_limit(cluster) == heap_mib << 20


def test_limits_reach_envoy_and_picker_and_each_change_rolls_only_who_is_concerned() -> None:
    plain = converged(pool("a"))
    limits = {"receiveTimeoutSeconds": 7, "connections": 77, "requestsPerSecond": 777}
    changed = converged(pool("a", gateway={"standalone": {"limits": limits}}))
    shares = converged(pool("a", gateway={"standalone": {"limits": {"unansweredRequests": 5}}}))
    assert "--max-client-requests=1000" in container(plain, "treeline-epp")["args"]
    assert "--max-client-requests=5" in container(shares, "treeline-epp")["args"]

    def inputs(cluster: Cluster, name: str) -> str:
        return str(cluster.get("Deployment", name)["metadata"]["annotations"][names.INPUTS])

    for cluster, rolled in ((changed, "treeline-edge"), (shares, "treeline-epp")):
        for name in ("treeline-edge", "treeline-epp"):
            assert (inputs(cluster, name) == inputs(plain, name)) == (name != rolled)
    text = next(obj["data"]["envoy.json"] for obj in changed.objects.values() if "envoy.json" in obj.get("data", {}))
    for part in ('"request_timeout": "7s"', '"max_active_downstream_connections": "77"', "777"):
        assert part in text


def test_a_gateway_serves_the_inference_paths_of_all_its_pools_engines() -> None:
    def paths(*pools: InferencePool) -> set[str]:
        text = next(
            obj["data"]["envoy.json"]
            for obj in converged(*pools).objects.values()
            if "envoy.json" in obj.get("data", {})
        )
        manager = json.loads(text)["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
        (host,) = manager["typed_config"]["route_config"]["virtual_hosts"]
        return {route["match"]["path"] for route in host["routes"] if "path" in route["match"]}

    alone = paths(pool("a"))
    both = paths(pool("a"), pool("b", created=1, engine={"type": "vllm"}))
    assert both - alone >= {"/v1/embeddings", "/rerank"}
    assert "/generate" in alone & both
    assert not {path for path in both if "flush" in path or "metrics" in path}


def test_all_is_denied_but_the_paths_that_are_needed() -> None:
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
    from_envoy, from_operator, readers = picker["ingress"]
    assert from_envoy["from"] == [{"podSelector": selector_of("edge")}]
    assert to_picker["to"] == [{"podSelector": selector_of("epp")}]
    assert (numbers(from_operator), numbers(readers)) == ([9004, 9090], [9090])
    assert readers["from"] == list(PROMETHEUS)
    (operator,) = from_operator["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "treeline-system"}
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "treeline-operator"}
    to_pods, to_api, dns = picker["egress"]
    assert numbers(to_pods) == [8000, 30000, (5557, 5560), (5657, 5660), (5757, 5760)]
    assert (numbers(to_api), numbers(dns)) == ([443, 6443], [53, 53])
    # What goes out at this end is let in at the other.
    for p in (pool("a"), pool("b", created=1, **FULL)):
        ours = pods_policy(p, (), Platform(metrics_from=()), {})["spec"]["ingress"]
        let_in = {rule["from"][0]["podSelector"]["matchLabels"].get(names.COMPONENT): rule for rule in ours}
        assert set(numbers(let_in["edge"])) <= set(numbers(envoy["egress"][1]))
        reached = {port[0] if isinstance(port, tuple) else port for port in numbers(to_pods)}
        assert {port[0] if isinstance(port, tuple) else port for port in numbers(let_in["epp"])} <= reached
        template = deployment(p, TargetRevision("r", "", 1, None), 1, {"labels": {}}, Images())["spec"]["template"]
        assert to_pods["to"][0]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for name, policy in (("edge", envoy), ("epp", picker)):
        template = cluster.get("Deployment", f"treeline-{name}")["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= template.items()


def selector_of(component: str) -> dict[str, Any]:
    return {"matchLabels": {"treeline.dev/gateway": "treeline", "treeline.dev/component": component}}


def test_a_gateway_that_exists_is_let_in_instead_of_an_envoy() -> None:
    cluster = converged(pool("a", **ATTACHED))
    assert cluster.names("Deployment") == ["treeline-epp"]
    assert cluster.names("Service") == ["treeline-epp"]
    assert "--secure-serving" in container(cluster, "treeline-epp")["args"]
    ingress = cluster.get("NetworkPolicy", "treeline-epp")["spec"]["ingress"][0]
    admitted = [peer["namespaceSelector"]["matchLabels"] for peer in ingress["from"]]
    assert admitted == [
        {"kubernetes.io/metadata.name": "infra"},
        {"kubernetes.io/metadata.name": "ns"},
        {"treeline.dev/gateway-access": "true"},
    ]
    assert "--secure-serving" not in container(converged(pool("a")), "treeline-epp")["args"]


def test_going_to_a_gateway_that_exists_takes_envoy_away_and_back() -> None:
    cluster, standalone, attached = converged(pool("a")), pool("a"), pool("a", **ATTACHED)
    before = sorted(ref for ref in cluster.objects if ref.kind != "Pod")
    cluster.converge(attached)
    assert not [ref for ref in cluster.objects if "edge" in ref.name]
    assert cluster.names("Service") == ["treeline-epp"]
    cluster.converge(standalone)
    assert sorted(ref for ref in cluster.objects if ref.kind != "Pod") == before


# --- who shares -------------------------------------------------------------------------------------------------------


def test_pools_join_and_leave_without_rolling_anything_and_the_last_takes_all() -> None:
    a, b = pool("a"), pool("b", created=1)
    cluster = converged(a)
    (plan,) = cluster.converge(a, b)
    assert [action.ref.name for action in plan.actions] == ["treeline-gateway"]
    # The oldest goes: the next one owns, the gateway stays.
    (plan,) = cluster.converge(b)
    assert [action.ref.name for action in plan.actions] == ["treeline-gateway"]
    anchor = cluster.get("ConfigMap", "treeline-gateway")
    assert [owner["uid"] for owner in anchor["metadata"]["ownerReferences"]] == ["uid-b"]
    # Being deleted, the last one changes nothing, whatever else it says.
    going = pool("b", created=1, deleting=True, endpointPicker={"policy": "random"})
    assert plan_gateway(cluster.world(going)).actions == ()
    cluster.roll_out()
    cluster.collect(living=set())
    assert {ref.kind for ref in cluster.objects} <= {"Pod"}
    assert plan_gateway(cluster.world()).actions == ()


def test_a_gateway_that_the_last_pool_left_for_another_is_taken_down() -> None:
    cluster, moved = converged(pool("a")), pool("a", gateway={"name": "other"})
    (gone,) = plan_gateway(cluster.world(moved)).actions
    assert isinstance(gone, Delete)
    assert gone.ref.name == "treeline-gateway"
    cluster.do((gone,))
    cluster.collect({"uid-a"})
    assert {ref.kind for ref in cluster.objects} <= {"Pod"}


def test_a_pool_that_cannot_be_read_holds_the_gateway() -> None:
    cluster, p = converged(pool("a")), pool("a")
    meta = {"name": "strange", "namespace": "ns", "uid": "uid-strange"}
    strange = Observed.of({"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": meta})
    held = dataclasses.replace(cluster.world(), unreadable=(strange,))
    assert plan_gateway(held).actions == ()
    assert plan_gateway(held).notes == ("pool strange cannot be read; the gateway stays as it is",)
    shared = dataclasses.replace(cluster.world(p), unreadable=(strange,))
    (anchor,) = plan_gateway(shared).actions
    assert isinstance(anchor, Apply)
    assert [o["uid"] for o in anchor.object["metadata"]["ownerReferences"]] == ["uid-a", "uid-strange"]
    cluster.do((anchor,))
    assert plan_gateway(dataclasses.replace(cluster.world(p), unreadable=(strange,))).actions == ()


def test_the_oldest_pool_decides_and_the_plan_says_whom_it_overrules() -> None:
    a, b = pool("a"), pool("b", created=1, endpointPicker={"policy": "random", "replicas": 2})
    cluster = Cluster()
    cluster.converge(b, a)
    assert "--policy=treeline" in container(cluster, "treeline-epp")["args"]
    assert plan_gateway(cluster.world(a, b)).notes == (
        "pool b: endpointPicker.policy is random here, treeline in pool a (older)",
        "pool b: endpointPicker.replicas is 2 here, 1 in pool a (older)",
    )
    cluster.converge(b)
    assert "--policy=random" in container(cluster, "treeline-epp")["args"]
    assert cluster.get("Deployment", "treeline-epp")["spec"]["replicas"] == 2


def test_a_deleted_anchor_is_waited_for_and_made_anew() -> None:
    cluster, p = converged(pool("a")), pool("a")
    anchor = cluster.get("ConfigMap", "treeline-gateway")
    anchor["metadata"]["deletionTimestamp"] = "2026-11-28T12:00:00Z"
    plan = plan_gateway(cluster.world(p))
    assert plan.actions == ()
    assert plan.recheck_s
    cluster.objects = {ref: obj for ref, obj in cluster.objects.items() if obj is not anchor}
    cluster.collect({"uid-a"})
    cluster.converge(p)
    assert cluster.names("Deployment") == ["treeline-edge", "treeline-epp"]


def test_what_a_former_gateway_of_the_name_left_is_not_taken_over_but_waited_for() -> None:
    """A pool that is deleted and made anew at once meets the children of its former gateway before they are collected.
    Its picker has keys that go too, and that nobody sees."""
    cluster, p = converged(pool("a")), pool("a")
    cluster.get("ConfigMap", "treeline-gateway")["metadata"]["uid"] = "uid-of-the-next"
    plan = plan_gateway(cluster.world(p))
    assert plan.actions == ()
    assert plan.recheck_s
    assert "treeline-epp" in plan.notes[0]
    cluster.collect({"uid-a"})
    assert cluster.names("Deployment") == []
    cluster.secrets.clear()
    cluster.converge(p)
    assert cluster.names("Deployment") == ["treeline-edge", "treeline-epp"]
    assert cluster.secrets == ["treeline-kv-keys"]


# --- drift, versions --------------------------------------------------------------------------------------------------


def test_what_somebody_changed_is_set_back_and_what_is_not_ours_stays() -> None:
    cluster, p = converged(pool("a")), pool("a")
    service = cluster.get("Service", "treeline-gateway")
    service["spec"]["clusterIP"] = "10.0.0.1"
    service["metadata"]["annotations"]["theirs"] = "1"
    assert plan_gateway(cluster.world(p)).actions == ()
    service["spec"]["ports"][0]["port"] = 81
    container(cluster, "treeline-epp")["image"] = "example.com/other"
    drifts = {a.ref.name: a.drift for a in plan_gateway(cluster.world(p)).actions if isinstance(a, Apply)}
    assert drifts == {
        "treeline-gateway": ("spec.ports[80,TCP]",),
        "treeline-epp": ("spec.template.spec.containers[epp].image",),
    }
    cluster.converge(p)
    assert service["metadata"]["annotations"]["theirs"] == "1"
    assert cluster.get("Service", "treeline-gateway")["spec"]["clusterIP"] == "10.0.0.1"


NEXT = TEMPLATE_VERSION + 1
NEWER = Platform(images=Images(epp="epp:2", edge="edge:2"), template_version=NEXT)


@pytest.mark.parametrize("platform", [NEWER, dataclasses.replace(NEWER, template_version=TEMPLATE_VERSION)])
def test_an_operator_upgrade_rolls_nothing(platform: Platform) -> None:
    p, cluster = pool("a"), converged(pool("a"))
    before = {name: cluster.get("Deployment", name)["spec"] for name in cluster.names("Deployment")}
    plan = plan_gateway(cluster.world(p, platform=platform))
    assert plan.actions == ()
    left_alone = [note for note in plan.notes if f"template version {TEMPLATE_VERSION}" in note]
    assert len(left_alone) == (2 if platform.template_version == NEXT else 0)
    # Its number of pods is not the template's.
    more = pool("a", endpointPicker={"replicas": 2}, gateway={"standalone": {"replicas": 4}})
    plans = cluster.converge(more, platform=platform)
    kinds = {type(a) for plan in plans for a in plan.actions if a.ref.kind == "Deployment"}
    assert kinds == ({Scale} if platform.template_version == NEXT else {Apply})
    for name, spec in before.items():
        now = cluster.get("Deployment", name)["spec"]
        assert now["template"] == spec["template"]
        assert now["replicas"] == {"treeline-epp": 2, "treeline-edge": 4}[name]


def test_registry_credentials_reach_picker_and_envoy() -> None:
    cluster = Cluster()
    cluster.converge(pool("a"), platform=Platform(images=Images(pull_secrets=("registry",))))
    for name in ("treeline-epp", "treeline-edge"):
        pod = cluster.get("Deployment", name)["spec"]["template"]["spec"]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_any_pool_may_ask_for_the_newer_version() -> None:
    cluster = converged(pool("a"), pool("b", created=1))
    asking = [pool("a"), pool("b", created=1, rollout={"templateVersion": NEXT})]
    cluster.converge(*asking, platform=NEWER)
    for name in ("treeline-epp", "treeline-edge"):
        deployment = cluster.get("Deployment", name)
        assert deployment["metadata"]["annotations"][names.TEMPLATE_VERSION] == str(NEXT)
        assert container(cluster, name)["image"] == f"{name.removeprefix('treeline-')}:2"
    # More than this operator has is as much as it has.
    eager = [pool("a", rollout={"templateVersion": 9}), asking[1]]
    assert plan_gateway(cluster.world(*eager, platform=NEWER)).actions == ()
    # An older operator, put back, leaves alone what the newer one made.
    assert plan_gateway(cluster.world(pool("a"), asking[1], platform=Platform())).actions == ()


def test_a_change_of_the_spec_is_made_by_the_newest_generator() -> None:
    cluster = converged(pool("a"))
    cluster.converge(pool("a", endpointPicker={"policy": "random"}), platform=NEWER)
    assert container(cluster, "treeline-epp")["image"] == "epp:2"
    # Envoy was not asked to be anything else.
    assert container(cluster, "treeline-edge")["image"] == "treeline-edge:latest"


def test_an_old_envoy_whose_configuration_was_deleted_is_made_anew() -> None:
    cluster, p = converged(pool("a")), pool("a")
    ref = next(ref for ref in cluster.objects if re.fullmatch("treeline-edge-[0-9a-f]{10}", ref.name))
    del cluster.objects[ref]
    cluster.converge(p, platform=NEWER)
    assert container(cluster, "treeline-edge")["image"] == "edge:2"
    assert container(cluster, "treeline-epp")["image"] == "treeline-epp:latest"


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
def test_the_url_is_where_clients_reach_it(settings: dict[str, Any], balancer: Any, url: str) -> None:
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


def test_the_children_that_a_status_is_read_from() -> None:
    children = converged(pool("a")).world(pool("a")).children
    assert {(child.ref.kind, child.ref.name) for child in children} >= {
        ("ConfigMap", "treeline-gateway"),
        ("Deployment", "treeline-epp"),
        ("Deployment", "treeline-edge"),
        ("Service", "treeline-gateway"),
    }


def test_mutual_tls_is_mounted_into_both_and_told_to_both(tmp_path: Path) -> None:
    settings = {"standalone": {"pickerTls": {"secretRef": {"name": "inner"}}}}
    cluster = converged(pool("a", gateway=settings))
    for name, folder in (
        ("treeline-edge", "/etc/treeline/picker-tls"),
        ("treeline-epp", "/etc/treeline/tls"),
    ):
        template = cluster.get("Deployment", name)["spec"]["template"]["spec"]
        (volume,) = [v["name"] for v in template["volumes"] if v.get("secret", {}).get("secretName") == "inner"]
        mounts = {m["name"]: m["mountPath"] for m in container(cluster, name)["volumeMounts"]}
        assert mounts[volume] == folder
    options = picker_options(container(cluster, "treeline-epp")["args"])
    assert (options.secure_serving, options.require_client_certificates) == (True, True)
    assert str(options.cert_path) == "/etc/treeline/tls"
    # What is told to a Gateway's proxy by default is not what is told to our own.
    assert (options.fallback_endpoints, options.expose_routing) == (1, True)
    (data,) = [obj["data"] for obj in cluster.objects.values() if "envoy.json" in obj.get("data", {})]
    assert data.keys() == {"envoy.json", "picker-certificate.json", "picker-authority.json"}
    assert '"treeline-epp.ns.svc"' in data["picker-authority.json"]
    clusters = {c["name"]: c for c in json.loads(data["envoy.json"])["static_resources"]["clusters"]}
    for name in ("ext_proc", "eds"):
        assert clusters[name]["transport_socket"]["typed_config"]["sni"] == "treeline-epp.ns.svc"
    assert "transport_socket" not in clusters["pods"]


def test_through_a_gateway_that_exists_mutual_tls_and_limits_of_our_own_envoy_mean_nothing() -> None:
    cluster = converged(pool("a", **ATTACHED))
    args = container(cluster, "treeline-epp")["args"]
    assert not [word for word in args if "client" in word or "cert" in word]
