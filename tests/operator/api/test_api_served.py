"""The kinds as a real API server serves them: defaults, subresources, columns, merges, and the admission policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from support.api_specs import document
from support.control_plane import ControlPlane, ControlPlaneFailed
from support.stack import until
from treeline_operator.api.pool import InferencePool
from treeline_tools import policies

pytestmark = [pytest.mark.integration, pytest.mark.deep]

BASE = "/apis/treeline.dev/v1alpha1/namespaces"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
APPLY = "application/apply-patch+yaml"


def pool(name: str, text: str = "") -> dict[str, Any]:
    return document("InferencePool", text, name)


def create(plane: ControlPlane, namespace: str, obj: dict[str, Any]) -> dict[str, Any]:
    plural = f"{obj['kind'].lower()}s"
    made: dict[str, Any] = plane.request("POST", f"{BASE}/{namespace}/{plural}", obj)
    return made


def test_defaults_can_be_read_and_are_those_of_our_types(control_plane, namespace):
    made = create(control_plane, namespace, pool("defaults"))
    unset = pool("defaults")
    assert InferencePool.from_object(made).spec == InferencePool.from_object(unset).spec
    assert made["spec"] == {
        "model": {"uri": "builtin://tiny", "pickerReadsClaim": False},
        "replicas": 1,
        "accelerator": {"type": "cpu", "count": 1, "nodes": 1, "resourceName": "nvidia.com/gpu"},
        "engine": {"type": "treeline", "port": 8000, "dataParallel": 1},
        "endpointPicker": {"policy": "treeline", "failureMode": "FailOpen", "replicas": 1},
        "gateway": {"name": "treeline"},
        "autoscaling": {"type": "None"},
        "drain": {"timeoutSeconds": 60},
        "rollout": {
            "strategy": "SurgeIfCapacity",
            "maxSurge": 1,
            "maxUnavailable": 0,
            "surgeTimeoutSeconds": 120,
            "paused": False,
        },
        "disruptionBudget": {"maxUnavailable": 1},
    }


def test_defaults_are_filled_in_beside_set_fields(control_plane, namespace):
    text = "{engine: {threads: 2}, gateway: {standalone: {port: 8080}}, rollout: {paused: true}}"
    spec = create(control_plane, namespace, pool("partly", text))["spec"]
    assert spec["engine"] == {
        "type": "treeline",
        "port": 8000,
        "dataParallel": 1,
        "threads": 2,
    }
    assert spec["gateway"]["standalone"] == {
        "serviceType": "ClusterIP",
        "port": 8080,
        "replicas": 1,
        "limits": {"receiveTimeoutSeconds": 60, "connections": 10_000, "unansweredRequests": 1000},
        "exposeRouting": False,
        "console": False,
    }
    assert spec["rollout"]["maxSurge"] == 1


def test_a_fragment_of_a_template_is_kept_as_it_is_and_merged_by_name(control_plane, namespace):
    text = "template: {spec: {containers: [{name: runtime, env: [{name: A, value: b}]}], dnsConfig: {searches: [x]}}}"
    made = create(control_plane, namespace, pool("fragment", text))
    assert made["spec"]["template"] == yaml.safe_load(text)["template"]
    sidecar = {"template": {"spec": {"containers": [{"name": "sidecar", "image": "i"}]}}}
    patch = {key: made[key] for key in ("apiVersion", "kind")} | {
        "metadata": {"name": "fragment"},
        "spec": sidecar,
    }
    path = f"{BASE}/{namespace}/inferencepools/fragment?fieldManager=injector&force=true"
    merged = control_plane.request("PATCH", path, patch, content_type=APPLY)
    assert [c["name"] for c in merged["spec"]["template"]["spec"]["containers"]] == ["runtime", "sidecar"]


def test_pools_are_scaled_like_deployments(control_plane, namespace):
    create(control_plane, namespace, pool("scaled", "replicas: 2"))
    path = f"{BASE}/{namespace}/inferencepools/scaled"
    status = {"replicas": 2, "readyReplicas": 1, "selector": "treeline.dev/pool=scaled"}
    control_plane.request("PATCH", f"{path}/status", {"status": status}, content_type="application/merge-patch+json")
    scale = control_plane.request("GET", f"{path}/scale")
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 2, "selector": "treeline.dev/pool=scaled"}
    control_plane.kubectl("-n", namespace, "scale", "tlpool/scaled", "--replicas=5")
    assert control_plane.request("GET", path)["spec"]["replicas"] == 5


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "because",
        "lastTransitionTime": "2026-11-01T00:00:00Z",
        "observedGeneration": 1,
    }


def test_columns_show_the_main_facts(control_plane, namespace):
    create(control_plane, namespace, pool("shown", "replicas: 3"))
    create(control_plane, namespace, document("InferenceModel", "poolRef: {name: shown}", "alias"))
    merge = "application/merge-patch+json"
    status = {
        "replicas": 3,
        "readyReplicas": 2,
        "replicaSummary": "2/3",
        "modelName": "tiny",
        "url": "http://treeline-gateway.x.svc",
        "conditions": [
            condition("Progressing", "False", "RolloutComplete"),
            condition("Ready", "True", "Serving"),
        ],
    }
    base = f"{BASE}/{namespace}"
    control_plane.request("PATCH", f"{base}/inferencepools/shown/status", {"status": status}, content_type=merge)
    accepted = {"status": {"conditions": [condition("Accepted", "False", "ModelNameInUse")]}}
    control_plane.request("PATCH", f"{base}/inferencemodels/alias/status", accepted, content_type=merge)

    def table(*words: str) -> list[list[str]]:
        return [line.split() for line in control_plane.kubectl("-n", namespace, "get", *words).splitlines()]

    heads, row = table("tlpool")
    assert heads == ["NAME", "READY", "MODEL", "REPLICAS", "URL", "REASON", "AGE"]
    assert row[:6] == ["shown", "True", "tiny", "2/3", "http://treeline-gateway.x.svc", "Serving"]
    heads, row = table("tlmodel")
    assert heads == ["NAME", "ACCEPTED", "MODEL", "POOL", "REASON", "AGE"]
    assert row[:5] == ["alias", "False", "chat", "shown", "ModelNameInUse"]
    both = control_plane.kubectl("-n", namespace, "get", "treeline", "-o", "name").split()
    assert both == ["inferencemodel.treeline.dev/alias", "inferencepool.treeline.dev/shown"]


def test_the_status_subresource_does_not_change_the_spec(control_plane, namespace):
    created = create(control_plane, namespace, pool("apart"))
    path = f"{BASE}/{namespace}/inferencepools/apart/status"
    changed = {"spec": {"replicas": 9}, "status": {"replicas": 1}}
    after = control_plane.request("PATCH", path, changed, content_type="application/merge-patch+json")
    assert after["spec"] == created["spec"]
    assert after["metadata"]["generation"] == 1


# The admission policies


@pytest.fixture(scope="module")
def judged(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace in which alone the policies apply, since other tests share the API server."""
    name = "policies-hold"
    label = {"kubernetes.io/metadata.name": name}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    control_plane.request("POST", "/api/v1/namespaces", namespace)
    made = []
    for item in policies.all_policies():
        if item["kind"].endswith("Binding"):
            matched = item["spec"].setdefault("matchResources", {}).setdefault("namespaceSelector", {})
            matched["matchLabels"] = label
        path = f"{ADMISSION}/{'validatingadmissionpolicybindings' if 'policyName' in item['spec'] else POLICIES}"
        control_plane.request("POST", path, item)
        made.append(f"{path}/{item['metadata']['name']}")
    yield name
    for path in reversed(made):
        control_plane.request("DELETE", path)
    control_plane.request("DELETE", f"/api/v1/namespaces/{name}")


POLICIES = "validatingadmissionpolicies"


def attempt(plane: ControlPlane, namespace: str, obj: dict[str, Any], *, dry: bool = True) -> httpx.Response:
    with plane.http() as http:
        path = f"{BASE}/{namespace}/{obj['kind'].lower()}s"
        return http.post(path, params={"dryRun": "All"} if dry else {}, json=obj)


def until_said(plane: ControlPlane, namespace: str, obj: dict[str, Any], words: str) -> str:
    """Wait until the API server's answer has the words, and return it: policies and parameters take effect with a
    delay."""

    def said() -> str:
        reply = attempt(plane, namespace, obj)
        text = " ".join([reply.text if reply.is_error else "", *reply.headers.get_list("Warning")])
        return text if words in text else ""

    return str(until(said, f"the words {words!r}"))


PRIVILEGED = [
    ("hostNetwork: true", "hostNetwork, hostPID and hostIPC"),
    ("volumes: [{name: v, hostPath: {path: /}}]", "hostPath volumes"),
    ("containers: [{name: runtime, securityContext: {privileged: true}}]", "privileged containers"),
    (
        "initContainers: [{name: i, securityContext: {capabilities: {add: [SYS_ADMIN]}}}]",
        "added capabilities",
    ),
    ("containers: [{name: runtime, ports: [{containerPort: 1, hostPort: 80}]}]", "host ports"),
    ("containers: [{name: runtime, securityContext: {procMount: Unmasked}}]", "procMount"),
    ("securityContext: {seLinuxOptions: {type: spc_t}}", "SELinux types"),
    ("containers: [{name: runtime, securityContext: {seLinuxOptions: {user: x}}}]", "SELinux types"),
    ("securityContext: {sysctls: [{name: kernel.msgmax, value: '1'}]}", "unsafe sysctls"),
    (
        "containers: [{name: runtime, securityContext: {windowsOptions: {hostProcess: true}}}]",
        "host processes",
    ),
    ("securityContext: {seccompProfile: {type: Unconfined}}", "Unconfined profiles"),
    (
        "containers: [{name: runtime, securityContext: {appArmorProfile: {type: Unconfined}}}]",
        "Unconfined profiles",
    ),
]


@pytest.mark.parametrize(("fragment", "message"), PRIVILEGED)
def test_privileged_pods_need_the_namespaces_permission(control_plane, judged, namespace, fragment, message):
    template = {"template": {"spec": yaml.safe_load(fragment)}}
    for spec in (template, {"endpointPicker": template}, {"gateway": {"standalone": template}}):
        obj = pool("privileged", json.dumps(spec))
        said = until_said(control_plane, judged, obj, message)
        assert "remove them from the template, or label the namespace treeline.dev/allow-privileged=true" in said
        assert attempt(control_plane, namespace, obj).is_success, "elsewhere the policy does not hold"


def test_a_harmless_template_is_admitted(control_plane, judged):
    until_said(control_plane, judged, pool("p", "template: {spec: {hostIPC: true}}"), "hostIPC")
    fragment = """
        template: {spec: {
          volumes: [{name: v, emptyDir: {}}],
          securityContext: {
            seccompProfile: {type: RuntimeDefault}, seLinuxOptions: {type: container_t, level: 's0:c1,c2'},
            sysctls: [{name: net.ipv4.tcp_syncookies, value: '1'}]},
          containers: [{name: runtime, ports: [{containerPort: 1}], securityContext: {capabilities: {add: [CHOWN]}}}]}}
    """
    assert attempt(control_plane, judged, pool("p", fragment)).is_success
    assert attempt(control_plane, judged, pool("p")).is_success
    assert attempt(control_plane, judged, pool("p", "template: {metadata: {labels: {a: b}}}")).is_success


def test_an_older_pool_can_be_changed_outside_its_template(control_plane, judged):
    labelled = f"/api/v1/namespaces/{judged}"
    merge = "application/merge-patch+json"
    obj = pool("old", "template: {spec: {hostIPC: true}}")
    until_said(control_plane, judged, obj, "hostIPC")

    def allow(value: str | None) -> None:
        labels = {"metadata": {"labels": {policies.ALLOW_PRIVILEGED: value}}}
        control_plane.request("PATCH", labelled, labels, content_type=merge)

    allow("true")
    until(lambda: attempt(control_plane, judged, obj, dry=False).is_success, "the namespace's leave to be seen")
    allow(None)
    until_said(control_plane, judged, pool("new", "template: {spec: {hostIPC: true}}"), "hostIPC")
    path = f"{BASE}/{judged}/inferencepools/old"
    control_plane.request("PATCH", path, {"spec": {"replicas": 3}}, content_type=merge)
    worse = {"spec": {"template": {"spec": {"hostNetwork": True}}}}
    with pytest.raises(ControlPlaneFailed, match="hostNetwork"):
        control_plane.request("PATCH", path, worse, content_type=merge)


def test_a_second_model_of_the_same_name_causes_a_warning(control_plane, judged):
    assert attempt(control_plane, judged, document("InferenceModel", "", "first"), dry=False).is_success
    said = until_said(control_plane, judged, document("InferenceModel", "", "second"), "first")
    assert "InferenceModel first of the same pool has modelName chat" in said
    for text in ("modelName: other", "poolRef: {name: another}"):
        reply = attempt(control_plane, judged, document("InferenceModel", text, "third"))
        assert reply.is_success
        assert "Warning" not in reply.headers


def test_pools_that_disagree_on_their_gateway_cause_a_warning(control_plane, judged):
    first = pool("elder", "gateway: {name: shared}")
    assert attempt(control_plane, judged, first, dry=False).is_success
    differing = "{gateway: {name: shared}, endpointPicker: {replicas: 2}}"
    said = until_said(control_plane, judged, pool("younger", differing), "elder")
    assert "InferencePool elder shares gateway shared and asks for other settings" in said
    for text, warned in {
        "gateway: {name: shared}": False,
        "gateway: {name: shared, standalone: {port: 80}}": False,
        "gateway: {name: shared, standalone: {port: 81}}": True,
        "gateway: {name: shared, parentRefs: [{name: g}]}": True,
        "{gateway: {name: alone}, endpointPicker: {replicas: 2}}": False,
        "{gateway: {name: shared}, endpointPicker: {policy: random}}": False,
    }.items():
        reply = attempt(control_plane, judged, pool("younger", text))
        assert reply.is_success
        assert ("Warning" in reply.headers) is warned, text


KEYS, TLS = "apiKeysSecretRef: {name: k}", "tls: {secretRef: {name: t}}"
VLLM = "model: {uri: hf://o/n}, engine: {type: vllm}"
OPEN = {
    "gateway: {standalone: {serviceType: LoadBalancer}}": ["no apiKeysSecretRef", "no tls"],
    f"gateway: {{standalone: {{serviceType: LoadBalancer, {KEYS}}}}}": ["no tls"],
    f"gateway: {{standalone: {{serviceType: LoadBalancer, {TLS}}}}}": ["no apiKeysSecretRef"],
    f"gateway: {{standalone: {{serviceType: LoadBalancer, {KEYS}, {TLS}}}}}": [],
    f"gateway: {{standalone: {{{KEYS}}}}}": [],
    "gateway: {parentRefs: [{name: g}]}": [],
    "": [],
    f"{{{VLLM}, gateway: {{standalone: {{{KEYS}}}}}}}": ["without a picker requests are refused"],
    f"{{{VLLM}, gateway: {{isolation: Shared, standalone: {{{KEYS}}}}}}}": [],
    f"{{{VLLM}, gateway: {{standalone: {{{KEYS}}}}}, endpointPicker: {{failureMode: FailClose}}}}": [],
    f"{{model: {{uri: path:///m}}, engine: {{type: custom, image: i}}, gateway: {{standalone: {{{KEYS}}}}},"
    " endpointPicker: {failureMode: FailClose}}": ["engine custom isolates clients only if"],
}


def test_an_open_or_weakly_isolated_gateway_causes_a_warning(control_plane, judged):
    until_said(control_plane, judged, pool("p", next(iter(OPEN))), "no apiKeysSecretRef")
    for text, warnings in OPEN.items():
        reply = attempt(control_plane, judged, pool("p", text))
        assert reply.is_success, reply.text
        told = reply.headers.get_list("Warning", split_commas=False)
        said = [one for one in told if "open-gateways" in one]
        assert len(said) == len(warnings), (text, said)
        for words in warnings:
            assert any(words in one for one in said), (text, said)


def test_pools_of_a_gateway_that_differ_in_isolation_cause_a_warning(control_plane, judged):
    settings = f"gateway: {{name: kept, isolation: %s, standalone: {{{KEYS}}}}}"
    assert attempt(control_plane, judged, pool("kept", settings % "PerKey"), dry=False).is_success
    until_said(control_plane, judged, pool("other", settings % "Shared"), "InferencePool kept shares gateway kept")
    assert "Warning" not in attempt(control_plane, judged, pool("other", settings % "PerKey")).headers


def test_policies_are_type_checked_without_a_warning(control_plane, judged):
    def checked() -> list[Any]:
        listed = control_plane.request("GET", f"{ADMISSION}/{POLICIES}")["items"]
        ours = [item for item in listed if item["metadata"]["name"].endswith(".treeline.dev")]
        return [item["status"]["typeChecking"] for item in ours if "typeChecking" in item.get("status", {})]

    assert until(lambda: (found := checked())[3:] and found, "the policies to be checked") == [{}] * 4
