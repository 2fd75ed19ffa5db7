"""`spec.tracing`: pods, picker and Envoy of a pool send their spans to one collector, and can reach it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from support.gateway_cluster import Cluster, container, converged, pool
from support.pool_world import a_pool, template
from treeline_epp.options import options_of
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.network import pods_policy
from treeline_operator.plan.revision import inputs
from treeline_operator.world import Platform
from treeline_runtime.args import parse_args

COLLECTOR = {"endpoint": "http://collector.observability:4400", "ratio": 0.25}
VARIABLES = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.observability:4400",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.25",
}
VLLM: dict[str, Any] = {"model": {"uri": "hf://org/name"}, "engine": {"type": "vllm"}}
OUT = {"ports": [{"port": 4400, "protocol": "TCP"}]}


def engine(**spec: Any) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment of a pod's engine."""
    made = template(**spec)["spec"]["containers"][0]
    return made["args"], {one["name"]: one.get("value", "") for one in made["env"]}


def test_a_runtime_gets_tracing_by_flag_and_variables_in_a_new_revision() -> None:
    args, env = engine(tracing=COLLECTOR)
    assert parse_args(args).tracing
    assert VARIABLES.items() <= env.items()
    plain, without = engine()
    assert not parse_args(plain).tracing
    assert not without.keys() & VARIABLES.keys()
    assert inputs(a_pool(tracing=COLLECTOR)) != inputs(a_pool())


def test_vllm_gets_tracing_by_its_own_flag_and_other_engines_are_not_traced() -> None:
    args, env = engine(**VLLM, tracing=COLLECTOR)
    assert args[args.index("--otlp-traces-endpoint") + 1] == COLLECTOR["endpoint"]
    assert {**VARIABLES, "OTEL_SERVICE_NAME": "vllm"}.items() <= env.items()
    assert "--otlp-traces-endpoint" not in engine(**VLLM)[0]
    sglang = {**VLLM, "engine": {"type": "sglang"}}
    assert engine(**sglang, tracing=COLLECTOR) == engine(**sglang)


def envoys(cluster: Cluster) -> dict[str, Any]:
    (name,) = [name for name in cluster.names("ConfigMap") if name.startswith("treeline-edge")]
    found: dict[str, Any] = json.loads(cluster.get("ConfigMap", name)["data"]["envoy.json"])
    return found


def test_picker_and_envoy_send_to_the_collector_of_the_gateways_owner() -> None:
    later = {"endpoint": "http://another:4317"}
    cluster = converged(pool("a", tracing=COLLECTOR), pool("b", created=1), pool("c", created=2, tracing=later))
    picker = container(cluster, "treeline-epp")
    assert options_of(picker["args"]).tracing
    assert {one["name"]: one.get("value") for one in picker["env"]} == VARIABLES
    (found,) = [one for one in envoys(cluster)["static_resources"]["clusters"] if one["name"] == "collector"]
    (lb,) = found["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert lb["endpoint"]["address"]["socket_address"] == {"address": "collector.observability", "port_value": 4400}
    assert '"random_sampling": {"value": 25.0}' in json.dumps(envoys(cluster))
    for name in ("treeline-edge", "treeline-epp"):
        assert OUT in cluster.get("NetworkPolicy", name)["spec"]["egress"]


def test_pods_may_reach_their_collector_and_other_pools_get_no_egress() -> None:
    def egress(of: InferencePool) -> list[Any]:
        found: list[Any] = pods_policy(of, (), Platform(), {}, meet=0)["spec"]["egress"]
        return found

    assert egress(pool("b", tracing=COLLECTOR)) == [*egress(pool("a")), OUT]


def test_without_tracing_nothing_changes() -> None:
    cluster = converged(pool("a"))
    assert "collector" not in json.dumps(envoys(cluster))
    assert "--tracing" not in container(cluster, "treeline-epp")["args"]
    assert "env" not in container(cluster, "treeline-epp")


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_a_ratio_lies_between_0_and_1(ratio: float) -> None:
    with pytest.raises(ValidationError, match="ratio"):
        a_pool(tracing={**COLLECTOR, "ratio": ratio})


@pytest.mark.parametrize("url", ["https://c:4317", "http://c:0", "http://c:65536", "http://c/v1", "c:4317", "http://C"])
def test_a_collector_that_cannot_be_reached_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="endpoint"):
        a_pool(tracing={"endpoint": url})


@pytest.mark.parametrize("url", ["http://c", "http://c:1", "http://c:65535", "http://10.0.0.7:4317"])
def test_every_accepted_url_has_a_host_and_a_port(url: str) -> None:
    tracing = a_pool(tracing={"endpoint": url}).spec.tracing
    assert tracing is not None
    host, port = tracing.collector
    assert url.startswith(f"http://{host}")
    assert 1 <= port <= 65535
