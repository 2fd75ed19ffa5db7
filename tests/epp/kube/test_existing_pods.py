"""manifests/existing-pods: a standalone picker for an upstream InferencePool over pods that another system runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.control_plane import ROOT, ControlPlane, control_plane_or_skip
from support.epp_io import engines, running_picker
from support.epp_kube import Cluster, asked, listed, listed_so
from treeline_epp.options import options_of
from treeline_wire import ports

MANIFESTS = ROOT / "manifests" / "existing-pods"
FILES = sorted(MANIFESTS.glob("*.yaml"))
NAMESPACE = "default"
OF_TOKENIZERS = "--tokenizer"


def objects(file: Path) -> dict[str, dict[str, Any]]:
    return {obj["kind"]: obj for obj in yaml.safe_load_all(file.read_text())}


PICKER, POOL, VLLM = (objects(MANIFESTS / f"{name}.yaml") for name in ("picker", "pool", "vllm"))


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


def told() -> list[str]:
    """Return the picker's flags, without those for tokenizers, which would be downloaded."""
    return [arg for arg in container(PICKER["Deployment"])["args"] if not arg.startswith(OF_TOKENIZERS)]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server for these tests alone, with Gateway API and without our kinds."""
    plane = control_plane_or_skip(controllers=())
    plane.start()
    crds = ROOT / "e2e/gateway_api/crds"
    plane.install_crds(crds / "gateway-api", crds / "inference-extension")
    plane.kubectl("create", "serviceaccount", "default")
    yield plane
    plane.stop()


def test_the_files_name_each_other() -> None:
    reference = POOL["InferencePool"]["spec"]["endpointPickerRef"]
    service = PICKER["Service"]
    assert reference["name"] == service["metadata"]["name"]
    (port,) = [port for port in service["spec"]["ports"] if port["port"] == reference["port"]["number"]]
    named = {port["name"]: port["containerPort"] for port in container(PICKER["Deployment"])["ports"]}
    assert named[port["targetPort"]] == ports.EXT_PROC
    labels = PICKER["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    engine = VLLM["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert POOL["InferencePool"]["spec"]["selector"]["matchLabels"].items() <= engine.items()
    serves = {port["name"]: port["containerPort"] for port in container(VLLM["Deployment"])["ports"]}
    assert [port["number"] for port in POOL["InferencePool"]["spec"]["targetPorts"]] == [serves["http"]]
    (model,) = [arg.partition("=")[2] for arg in container(PICKER["Deployment"])["args"] if "hf://" in arg]
    assert f"--served-model-name={model.partition('=')[0]}" in container(VLLM["Deployment"])["args"]


def test_the_picker_understands_its_flags_and_speaks_tls() -> None:
    options = options_of(told())
    assert (options.pool_name, options.pool_group) == (
        POOL["InferencePool"]["metadata"]["name"],
        "inference.networking.k8s.io",
    )
    assert options.secure_serving
    probed = {
        name: container(PICKER["Deployment"])[f"{name}Probe"]["httpGet"]["port"] for name in ("readiness", "liveness")
    }
    assert set(probed.values()) == {"admin"}
    named = {port["name"]: port["containerPort"] for port in container(PICKER["Deployment"])["ports"]}
    assert (named["admin"], named["metrics"]) == (options.admin_port, options.metrics_port)


@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_api_server_accepts_each_file(plane: ControlPlane, file: Path) -> None:
    apply = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", str(file))
    assert len(plane.kubectl(*apply).splitlines()) == len(list(yaml.safe_load_all(file.read_text())))
    head = file.read_text().split("apiVersion", 1)[0]
    assert "# Needs:" in head
    assert f"kubectl apply -f manifests/existing-pods/{file.name}" in head


@pytest.mark.integration
@pytest.mark.deep
async def test_the_rights_are_enough_and_the_pods_are_found(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("picker", "pool"):
        plane.kubectl("apply", "--server-side", "-f", str(MANIFESTS / f"{file}.yaml"))
    account = PICKER["RoleBinding"]["subjects"][0]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    monkeypatch.setenv("NAMESPACE", NAMESPACE)
    labels = VLLM["Deployment"]["spec"]["template"]["metadata"]["labels"]
    cluster = Cluster(plane, NAMESPACE)
    async with engines() as (engine, _):
        port = [{"op": "replace", "path": "/spec/targetPorts/0/number", "value": engine.port}]
        pools = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools/qwen3-vllm"
        await cluster.request("PATCH", pools, port, content_type="application/json-patch+json")
        await cluster.create_pod("theirs", labels)
        flags = (*told(), "--secure-serving=false", "--kubeconfig", str(plane.kubeconfig(user)))
        async with running_picker(*flags) as picker:
            await listed_so(picker, "theirs-rank-0", ready=True, address=engine.address)
            assert set(await listed(picker)) == {"theirs-rank-0"}
            assert await asked(picker, "tiny") == engine.address
