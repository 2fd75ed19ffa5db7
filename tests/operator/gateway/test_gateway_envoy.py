"""Envoy's configuration by the gateway's plan: Envoy accepts it, and it sets keys, access and limits."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.envoy import ENVOY, self_signed
from support.gateway_cluster import Cluster, container, converged, pool
from treeline_epp.options import options_of as picker_options
from treeline_operator import names
from treeline_operator.actions import Apply, Delete, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.envoy.keys import credentials, discovery_json
from treeline_operator.envoy.listener import PICKED_FILTER
from treeline_operator.plan import edge
from treeline_operator.plan.gateway import plan_gateway
from treeline_wire import headers

pytestmark = pytest.mark.deep


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
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert fails_open(cluster) is (mode == "FailOpen")
    assert "treeline-epp.ns.svc.cluster.local" in data["envoy.json"]
    assert "placeholder" not in data["envoy.json"]
    flags = container(cluster, "treeline-edge")["args"]
    assert (f"--keys-file={edge.KEYS_FILE}" in flags) is has_keys


def test_clients_see_the_routing_where_it_is_enabled_and_nowhere_else() -> None:
    texts = []
    for standalone in ({}, {"exposeRouting": True}):
        cluster = converged(pool("a", gateway={"standalone": standalone}))
        (name,) = [name for name in cluster.names("ConfigMap") if name != "treeline-gateway"]
        texts.append(cluster.get("ConfigMap", name)["data"]["envoy.json"])
    hidden, shown = texts
    assert f'"remove": "{headers.ENDPOINT}"' in hidden
    assert f'"remove": "{headers.CACHED_TOKENS}"' in hidden
    assert f'"key": "{headers.ENDPOINT}"' in shown
    assert f'"remove": "{headers.CACHED_TOKENS}"' not in shown


def test_an_enabled_console_is_reachable_from_envoy_and_shows_nothing_private() -> None:
    cluster = converged(pool("a", gateway={"standalone": {"console": True}}))
    (host,) = envoys_listener(cluster)["route_config"]["virtual_hosts"]
    (console,) = [route for route in host["routes"] if route.get("route", {}).get("cluster") == "console"]
    led = re.compile(console["match"]["safe_regex"]["regex"]).fullmatch
    assert all(map(led, ("/", "/console", "/console/", "/console/main.js")))
    assert not any(map(led, ("/consoles", "/debug/tree", "/endpoints", "//")))
    assert "request_headers_to_remove" not in console, "the picker is to see that it came through a gateway"
    assert "--console" in container(cluster, "treeline-epp")["args"]
    (port,) = [p for p in cluster.get("Service", "treeline-epp")["spec"]["ports"] if p["port"] == 9004]
    assert port["targetPort"] == "admin"
    for name, way in (("treeline-edge", "egress"), ("treeline-epp", "ingress")):
        rules = cluster.get("NetworkPolicy", name)["spec"][way]
        assert {"port": 9004, "protocol": "TCP"} in rules[0]["ports"]
    without = converged(pool("a"))
    assert "--console" not in container(without, "treeline-epp")["args"]
    assert "console" not in json.dumps(envoys_listener(without))


KEYED: dict[str, Any] = {"standalone": {"apiKeysSecretRef": {"name": "keys"}}}
VLLM: dict[str, Any] = {"model": {"uri": "hf://org/name"}, "engine": {"type": "vllm"}}


def envoys_listener(cluster: Cluster) -> dict[str, Any]:
    """Return the connection manager in the configuration that Envoy's pods mount."""
    volumes = cluster.get("Deployment", "treeline-edge")["spec"]["template"]["spec"]["volumes"]
    (config,) = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    document = json.loads(cluster.get("ConfigMap", config)["data"]["envoy.json"])
    (listener,) = [one for one in document["static_resources"]["listeners"] if one["name"] == "gateway"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def told_by_the_edge(cluster: Cluster) -> str | None:
    """Return the isolation header that Envoy adds; None if it adds none."""
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


def fails_open(cluster: Cluster) -> bool:
    """Return whether a request without a picked endpoint may pass."""
    asked = [
        route["typed_per_filter_config"]
        for host in envoys_listener(cluster)["route_config"]["virtual_hosts"]
        for route in host["routes"]
        if "typed_per_filter_config" in route
    ]
    (closed,) = {PICKED_FILTER in filters for filters in asked}
    return not closed


def test_without_a_picker_requests_are_refused_if_only_it_isolates_clients() -> None:
    ours = pool("ours", gateway=KEYED)
    assert fails_open(converged(ours)), "the runtime reads the header itself"
    assert not fails_open(converged(pool("theirs", gateway=KEYED, **VLLM)))
    assert not fails_open(converged(ours, pool("theirs", gateway=KEYED, **VLLM))), "one is enough: it is one Envoy"
    assert fails_open(converged(pool("theirs", gateway={**KEYED, "isolation": "Shared"}, **VLLM)))
    assert fails_open(converged(pool("theirs", **VLLM)))


def test_a_joining_engine_changes_envoys_configuration_if_necessary() -> None:
    cluster = converged(pool("ours", gateway=KEYED))
    before = cluster.get("Deployment", "treeline-edge")["metadata"]["annotations"][names.INPUTS]
    cluster.converge(pool("ours", gateway=KEYED), pool("theirs", gateway=KEYED, **VLLM))
    assert cluster.get("Deployment", "treeline-edge")["metadata"]["annotations"][names.INPUTS] != before


def test_a_changed_configuration_is_a_new_object_and_the_old_stays_while_mounted() -> None:
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
    template = cluster.get("Deployment", "treeline-edge")["spec"]["template"]
    changed = pool("a", gateway={"standalone": {"port": 8080, "serviceType": "NodePort", "replicas": 2}})
    (plan,) = cluster.converge(changed)
    assert [(type(action), action.ref.kind) for action in plan.actions] == [(Apply, "Service"), (Scale, "Deployment")]
    assert cluster.get("Deployment", "treeline-edge")["spec"]["replicas"] == 2
    assert cluster.get("Deployment", "treeline-edge")["spec"]["template"] == template


def test_envoy_gets_as_many_threads_as_it_has_cpus() -> None:
    cases = ((None, 2), ({"limits": {"cpu": "2500m"}}, 3), ({"requests": {"cpu": "100m"}}, 1))
    for resources, threads in cases:
        settings = {} if resources is None else {"resources": resources}
        cluster = converged(pool("a", gateway={"standalone": settings}))
        assert f"--concurrency={threads}" in container(cluster, "treeline-edge")["args"]


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
def test_envoys_buffers_follow_from_its_memory_limit(
    resources: Any, body_limit: int | None, limit: str, heap_mib: int
) -> None:
    standalone = {} if resources is None else {"resources": resources}
    parameters = {} if body_limit is None else {"maxBodyBytes": body_limit}
    gateway = {"standalone": standalone} if standalone else {}
    cluster = converged(pool("a", gateway=gateway, endpointPicker={"parameters": parameters}))
    assert container(cluster, "treeline-edge")["resources"]["limits"]["memory"] == limit
    assert heap_limit(cluster) == heap_mib << 20


def test_limits_reach_envoy_and_picker_and_each_change_rolls_only_affected_pods() -> None:
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
    for part in ('"request_timeout": "7s"', 'listener.gateway.connection_limit": 77', "777"):
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
    assert both - alone >= {"/v1/chat/completions/batch", "/v2/embed"}
    assert "/generate" in alone & both
    assert not {path for path in both if "flush" in path or "metrics" in path}


def test_mutual_tls_is_mounted_into_both_and_configured_in_both(tmp_path: Path) -> None:
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
    # A Gateway's proxy has other default settings than our own.
    assert options.own_proxy
    (data,) = [obj["data"] for obj in cluster.objects.values() if "envoy.json" in obj.get("data", {})]
    assert data.keys() == {"envoy.json", "picker-certificate.json", "picker-authority.json"}
    assert '"treeline-epp.ns.svc"' in data["picker-authority.json"]
    clusters = {c["name"]: c for c in json.loads(data["envoy.json"])["static_resources"]["clusters"]}
    for name in ("ext_proc", "eds"):
        assert clusters[name]["transport_socket"]["typed_config"]["sni"] == "treeline-epp.ns.svc"
    assert "transport_socket" not in clusters["pods"]
