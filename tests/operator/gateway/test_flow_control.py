"""Flow control in a pool: its fields become the picker's flags, and quotas a mounted file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.control_plane import ControlPlane
from support.gateway_cluster import Cluster, container, converged, pool
from treeline_epp.flow.quotas import QuotaFile
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.options import Options, options_of
from treeline_kube.client import Client
from treeline_operator.actions import Apply
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.plan.shared_gateway import share
from treeline_operator.world import GatewayWorld, Observed, Platform

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "flow-control.yaml"


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def picker_of(cluster: Cluster) -> Options:
    return options_of(container(cluster, "treeline-epp")["args"])


def planned(**flow: Any) -> Options:
    return picker_of(converged(pool("a", endpointPicker={"flowControl": flow})))


def test_pools_without_flow_control_or_with_everything_off_are_unchanged() -> None:
    plain = container(converged(pool("a")), "treeline-epp")
    assert not any("flow" in word or "quota" in word or "hold" in word for word in plain["args"])
    assert container(converged(pool("a", endpointPicker={"flowControl": {}})), "treeline-epp") == plain


def test_a_pod_is_full_by_its_work_unless_requests_are_counted() -> None:
    assert planned(enabled=True).flow_control.mode == "wait"
    assert planned(enabled=True, waitSeconds=0.25).flow_control.wait_seconds == 0.25
    counted = planned(enabled=True, endpointRequests=7)
    assert (counted.flow_control.mode, counted.flow_control.endpoint_requests) == ("requests", 7)


def test_every_bound_reaches_the_picker() -> None:
    options = planned(
        enabled=True,
        maxRequests=1_000_000,
        maxBytes=1 << 29,
        ttlSeconds=0.5,
        holdEmptyPoolSeconds=3600,
        fairnessHeader="x-team",
        quotas={"configMapRef": {"name": "q"}},
    )
    assert (options.flow_control.max_requests, options.flow_control.max_bytes, options.flow_control.ttl_seconds) == (
        1_000_000,
        1 << 29,
        0.5,
    )
    assert (options.flow_control.hold_empty_pool_seconds, options.fairness_header) == (3600.0, "x-team")
    assert options.quotas_file == Path("/etc/treeline/quotas/quotas.yaml")


def shown(**picker: Any) -> str:
    """Return our Envoy's configuration for a pool with these picker settings."""
    cluster = converged(pool("a", endpointPicker=picker))
    (name,) = [name for name in cluster.names("ConfigMap") if name.startswith("treeline-edge")]
    return cluster.get("ConfigMap", name)["data"]["envoy.json"]


def test_with_quotas_the_picker_counts_output_tokens() -> None:
    asked = '"response_body_mode":"STREAMED"'
    quotas = {"quotas": {"secretRef": {"name": "q"}}}
    assert asked in shown(flowControl=quotas).replace(" ", "")
    assert asked not in shown(flowControl={"enabled": True}).replace(" ", "")
    assert asked not in shown().replace(" ", "")


def test_a_sleeping_pool_can_hold_requests_without_other_flow_control() -> None:
    options = planned(holdEmptyPoolSeconds=300, maxRequests=9)
    assert options.flow_control.may_hold
    assert (
        options.flow_control.mode,
        options.flow_control.hold_empty_pool_seconds,
        options.flow_control.max_requests,
    ) == ("off", 300.0, 9)


def test_unset_fields_have_the_pickers_defaults() -> None:
    """The texts of the API name these defaults."""
    found = planned(enabled=True)
    defaults = FlowSettings()
    assert (
        (found.flow_control.wait_seconds, found.flow_control.ttl_seconds)
        == (defaults.wait_seconds, 60.0)
        == (1.0, 60.0)
    )
    assert (found.flow_control.max_requests, found.flow_control.max_bytes) == (5000, 256 << 20)


@pytest.mark.parametrize(
    ("ref", "source"),
    [
        ({"configMapRef": {"name": "q", "key": "a.json"}}, {"configMap": {"name": "q"}}),
        ({"secretRef": {"name": "q", "key": "a.json"}}, {"secret": {"secretName": "q", "defaultMode": 0o440}}),
    ],
)
def test_quotas_are_mounted_as_a_folder_for_any_key_name(ref: dict[str, Any], source: dict[str, Any]) -> None:
    cluster = converged(pool("a", endpointPicker={"flowControl": {"quotas": ref}}))
    pod = cluster.get("Deployment", "treeline-epp")["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "quotas"]
    (kind, found), (expected_kind, expected) = volume.popitem(), source.popitem()
    assert (kind, found) == (expected_kind, {**expected, "items": [{"key": "a.json", "path": "quotas.yaml"}]})
    (mount,) = [one for one in container(cluster, "treeline-epp")["volumeMounts"] if one["name"] == "quotas"]
    file = picker_of(cluster).quotas_file
    assert file is not None
    assert (mount["readOnly"], Path(mount["mountPath"]), "subPath" in mount) == (True, file.parent, False)


def test_a_change_of_flow_control_rolls_the_picker_and_a_younger_pool_that_differs_is_reported() -> None:
    older, younger = pool("a", endpointPicker={"flowControl": {"enabled": True}}), pool("b", created=3)
    cluster = converged(older, younger)
    assert picker_of(cluster).flow_control.mode == "wait"
    (conflict,) = share([older, younger])["treeline"].conflicts["b"]
    assert "endpointPicker.flowControl" in conflict
    before = cluster.get("Deployment", "treeline-epp")["spec"]["template"]
    cluster.converge(pool("a", endpointPicker={"flowControl": {"enabled": True, "ttlSeconds": 5}}), younger)
    assert cluster.get("Deployment", "treeline-epp")["spec"]["template"] != before


def test_the_samples_quotas_are_what_the_picker_reads(tmp_path: Path) -> None:
    config_map, obj = yaml.safe_load_all(SAMPLE.read_text())
    ref = obj["spec"]["endpointPicker"]["flowControl"]["quotas"]["configMapRef"]
    assert ref["name"] == config_map["metadata"]["name"]
    file = tmp_path / "quotas.yaml"
    file.write_text(config_map["data"][ref.get("key", "quotas.yaml")])
    limits = QuotaFile(file).table.clients["batch"]
    assert (limits.tokens_per_minute, limits.requests_per_minute) == (20_000, 120)


@pytest.mark.integration
@pytest.mark.deep
async def test_the_sample_is_applied_and_its_picker_gets_every_flag(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("apply", "--validate=strict", "--namespace", namespace, "-f", str(SAMPLE))
    path = f"/apis/treeline.dev/v1alpha1/namespaces/{namespace}/inferencepools/tiny"
    ours = InferencePool.from_object(control_plane.request("GET", path))
    anchor = plan_gateway(GatewayWorld(namespace, "treeline", (ours,), (), (), Platform(), ours.born)).actions
    async with await Client.from_config(control_plane.admin) as client:
        children = []
        for action in anchor:
            assert isinstance(action, Apply)
            children.append(Observed.of(await client.apply(action.object)))
        world = GatewayWorld(namespace, "treeline", (ours,), tuple(children), (), Platform(), ours.born)
        (workload,) = [
            one.object
            for one in plan_gateway(world).actions
            if isinstance(one, Apply) and (one.ref.kind, one.ref.name) == ("Deployment", "treeline-epp")
        ]
        made = await client.apply(workload)
    pod = made["spec"]["template"]["spec"]
    (picker,) = pod["containers"]
    options = options_of(picker["args"])
    assert (options.flow_control.mode, options.flow_control.endpoint_requests, options.fairness_header) == (
        "requests",
        8,
        "x-team",
    )
    assert (options.flow_control.hold_empty_pool_seconds, options.flow_control.ttl_seconds) == (300.0, 30.0)
    names = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    assert names == {"picker-quotas"}
