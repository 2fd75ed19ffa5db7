"""A real API server accepts the objects of chart and samples, and grants rights that suffice for pickers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import helm
from support.control_plane import ControlPlane
from treeline_operator import rbac
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
KINDS = {"InferencePool": InferencePool, "InferenceModel": InferenceModel}


@pytest.fixture(scope="module")
def restricted(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace that admits restricted pods only, and the two namespaces of a namespaced install."""
    label = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/warn": "restricted",
    }
    namespaces = ("charts-system", "team-a", "team-b")
    for name in namespaces:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label}}
        control_plane.request("POST", "/api/v1/namespaces", body)
    yield namespaces[0]
    for name in namespaces:
        control_plane.request("DELETE", f"/api/v1/namespaces/{name}")


def try_out(plane: ControlPlane, items: list[dict[str, Any]], *options: str) -> str:
    """Return kubectl's output for a server-side dry run of these objects. Fails if one is refused."""
    text = "---\n".join(json.dumps(item) + "\n" for item in items)
    apply = (
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
    )
    return plane.kubectl(*apply, *options, stdin=text)


def test_the_api_server_accepts_every_object_of_every_render_and_of_the_plain_install(control_plane, restricted):
    renders = [
        helm.render(*options, namespace=restricted)
        for options in (
            (),
            ("--set", "scope.namespaces={team-a,team-b}"),
            ("--values", str(Path(__file__).parent / "everything.yaml")),
        )
    ]
    plain = helm.documents((ROOT / "manifests" / "install.yaml").read_text())
    # in a dry run its own namespace is not there for the rest
    renders.append(
        [
            {**i, "metadata": {**i["metadata"], "namespace": restricted}} if "namespace" in i["metadata"] else i
            for i in plain
        ]
    )
    different = list({json.dumps(item): item for items in renders for item in items}.values())
    said = try_out(control_plane, different)
    assert len(said.splitlines()) == len(different)


def test_a_restricted_namespace_admits_the_operators_pods(control_plane, restricted):
    (deployment,) = (i for i in helm.render(namespace=restricted) if i["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "pod-test"}}
    control_plane.request("POST", f"/api/v1/namespaces/{restricted}/serviceaccounts", account)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "operator"},
        "spec": {**template["spec"], "serviceAccountName": "pod-test"},
    }
    control_plane.request("POST", f"/api/v1/namespaces/{restricted}/pods?dryRun=All", pod)


def test_the_operator_may_give_pickers_their_rights_and_may_not_read_secrets(control_plane, restricted):
    """The API server lets nobody grant more rights than he has: checked with the rights of a namespaced install."""
    mine = ("Role", "RoleBinding", "ServiceAccount")
    items = [i for i in helm.render("--set", "scope.namespaces={team-a}", namespace=restricted) if i["kind"] in mine]
    control_plane.kubectl("apply", "-f", "-", stdin="---\n".join(json.dumps(i) + "\n" for i in items))
    operator = control_plane.service_account(restricted, "treeline-operator")
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "picker", "namespace": "team-a"},
        "rules": [need.rule() for need in (*rbac.PICKER, *map(rbac.rules_need, rbac.RULES_GROUPS))],
    }
    apply = ("apply", "--server-side", "--dry-run=server", "--validate=false", "-f", "-")
    control_plane.kubectl(*apply, kubeconfig=operator, stdin=json.dumps(role))
    role["rules"].append({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]})
    refused = control_plane.kubectl(*apply, kubeconfig=operator, stdin=json.dumps(role), check=False)
    assert "attempting to grant RBAC permissions not currently held" in refused
    may = control_plane.kubectl("auth", "can-i", "--list", "--namespace=team-a", kubeconfig=operator)
    assert [line.split()[-1] for line in may.splitlines() if line.startswith("secrets")] == ["[create]"]


def test_an_apply_that_makes_an_object_needs_the_right_to_create(control_plane, namespace):
    """It explains why `create` is declared beside `patch`, though only one request of the operator is a POST."""
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "patcher"}}
    role["rules"] = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["patch"]}]
    binding = {
        **role,
        "kind": "RoleBinding",
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "patcher"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "patcher"}],
    }
    del binding["rules"]
    items = "---\n".join(json.dumps(item) + "\n" for item in (role, binding))
    control_plane.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=items)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "new"}}
    path = f"/api/v1/namespaces/{namespace}/configmaps/new?fieldManager=patcher"
    with control_plane.http("patcher", ()) as client:
        reply = client.patch(path, json=body, headers={"Content-Type": "application/apply-patch+yaml"})
    assert reply.status_code == 403
    assert "cannot create" in reply.json()["message"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_api_server_accepts_each_sample(control_plane, namespace, sample):
    items = list(yaml.safe_load_all(sample.read_text()))
    said = try_out(control_plane, items, "--namespace", namespace)
    assert len(said.splitlines()) == len(items)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_operator_understands_each_sample(sample):
    text = sample.read_text()
    head = text.split("apiVersion", 1)[0]
    assert "# Needs:" in head
    assert f"kubectl apply -f manifests/samples/{sample.name}" in head
    ours = [item for item in yaml.safe_load_all(text) if item["apiVersion"].startswith("treeline.dev/")]
    assert ours
    for item in ours:
        assert list(violations(KINDS[item["kind"]].from_object(item, strict=True))) == []
