"""The plan refuses exactly the pod templates that an API server refuses."""

from __future__ import annotations

from typing import Any

import pytest
from support.control_plane import ControlPlane, ControlPlaneFailed
from support.pool_world import template
from treeline_operator.pod_check import problems

CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}

INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "claim that is not declared": (
        {"containers": [{"name": "runtime", "resources": {"claims": [{"name": "gpu"}]}}]},
        "spec.containers[runtime].resources.claims: there is no gpu in spec.resourceClaims",
    ),
    "claim of another name": (
        {"resourceClaims": [CLAIM], "containers": [{"name": "runtime", "resources": {"claims": [{"name": "gpus"}]}}]},
        "resources.claims: there is no gpus in",
    ),
    "pull policy": (
        {"containers": [{"name": "runtime", "imagePullPolicy": "nope"}]},
        "spec.containers[0].imagePullPolicy: 'nope' is none of Always, IfNotPresent, Never",
    ),
    "restart policy": ({"restartPolicy": "Sometimes"}, "'Sometimes' is none of Always, Never, OnFailure"),
    "DNS": ({"dnsPolicy": "Cluster"}, "spec.dnsPolicy: 'Cluster' is none of"),
    "protocol": ({"containers": [{"name": "runtime", "ports": [{"containerPort": 9, "protocol": "tcp"}]}]}, "'tcp' is"),
    "effect": ({"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoRun"}]}, "effect: 'NoRun' is none of"),
    "operator": ({"tolerations": [{"key": "a", "operator": "Is"}]}, "].operator: 'Is' is none of Equal"),
    "probe": (
        {"containers": [{"name": "runtime", "livenessProbe": {"httpGet": {"port": 1, "scheme": "http"}}}]},
        "livenessProbe.httpGet.scheme: 'http' is none of HTTP, HTTPS",
    ),
    "host path": (
        {"volumes": [{"name": "v", "hostPath": {"path": "/x", "type": "Dir"}}]},
        ".hostPath.type: 'Dir' is none of BlockDevice",
    ),
    "affinity": (
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "in", "values": ["b"]}]}]
                    }
                }
            }
        },
        "matchExpressions[0].operator: 'in' is none of",
    ),
    "seccomp": ({"securityContext": {"seccompProfile": {"type": "Default"}}}, "'Default' is none of Localhost"),
    "spread": (
        {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "Never"}]},
        "'Never' is none of DoNotSchedule",
    ),
}
VALID: dict[str, dict[str, Any]] = {
    "claim": {
        "resourceClaims": [CLAIM],
        "containers": [{"name": "runtime", "resources": {"claims": [{"name": "gpu", "request": "one"}]}}],
    },
    "words of the user's": {
        "nodeSelector": {"protocol": "udp", "scheme": "dark"},
        "volumes": [{"name": "v", "csi": {"driver": "d.example", "volumeAttributes": {"protocol": "nfs"}}}],
        "tolerations": [{"operator": "Exists", "effect": ""}],
        "containers": [{"name": "runtime", "ports": [{"containerPort": 9, "protocol": "UDP"}]}],
    },
    "a sidecar": {"initContainers": [{"name": "mesh", "image": "m", "restartPolicy": "Always"}]},
}


@pytest.mark.parametrize(("spec", "says"), INVALID.values(), ids=INVALID)
def test_errors_of_pods_have_their_path(spec: dict[str, Any], says: str) -> None:
    assert says in "; ".join(problems(template(template={"spec": spec})))


@pytest.mark.parametrize("spec", VALID.values(), ids=VALID)
def test_valid_pods_have_no_problems(spec: dict[str, Any]) -> None:
    assert list(problems(template(template={"spec": spec}))) == []


@pytest.mark.parametrize(
    "spec",
    [
        {"volumes": None},
        {"volumes": [3]},
        {"containers": [{"name": "more", "volumeMounts": None, "resources": None}]},
        {"containers": [{"name": "runtime", "resources": {"claims": 3}}]},
    ],
)
def test_data_of_another_shape_is_reported_without_a_crash(spec: dict[str, Any]) -> None:
    made = template()
    assert list(problems({**made, "spec": {**made["spec"], **spec}}))


@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize(
    ("spec", "good"),
    [*((spec, False) for spec, _ in INVALID.values()), *((spec, True) for spec in VALID.values())],
    ids=[*INVALID, *VALID],
)
def test_an_api_server_gives_the_same_verdicts(
    control_plane: ControlPlane, namespace: str, spec: dict[str, Any], good: bool
) -> None:
    pods = template(template={"spec": spec})
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"selector": {"matchLabels": pods["metadata"]["labels"]}, "template": pods},
    }
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments?dryRun=All"
    if good:
        control_plane.request("POST", path, deployment)
    else:
        with pytest.raises(ControlPlaneFailed, match="422"):
            control_plane.request("POST", path, deployment)
