"""From Kubernetes objects to pools, rules and endpoints: pure functions over JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kube_api import own_model, own_pool, pod
from treeline_epp.endpoints.spec import EndpointSpec, KvPorts
from treeline_epp.endpoints.transfer import Protocol, Role
from treeline_epp.kube import pools
from treeline_epp.kube.objects import read_model
from treeline_epp.kube.pods import endpoints, read_pod
from treeline_epp.kube.pools import Pool


def raw(obj: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(obj).encode())


def pool(name: str = "a", **spec: Any) -> Pool:
    return pools.own_pool(raw(own_pool(name, **spec)))


def found(*pods: dict[str, Any], of: tuple[Pool, ...] | None = None) -> tuple[EndpointSpec, ...]:
    return endpoints((pool(),) if of is None else of, [read_pod(raw(item)) for item in pods])


def test_a_ready_pod_of_a_pool_is_an_endpoint() -> None:
    (spec,) = found(pod("p", uid="u", restarts=2))
    assert spec == EndpointSpec("p", "10.0.0.1:8000", pool="a", uid="u:2", engine="treeline")
    (spec,) = found(pod("p", ip="fd00:0::1"), of=(pool(port=9000),))
    assert spec.address == "[fd00::1]:9000"


@pytest.mark.parametrize(
    ("labels", "annotation", "role", "protocol"),
    [
        ({}, None, Role.BOTH, None),
        ({"treeline.dev/role": "prefill"}, None, Role.PREFILL, None),
        ({"treeline.dev/role": "decode"}, "sglang", Role.DECODE, Protocol.SGLANG),
        ({"treeline.dev/role": "decode"}, "pigeon", Role.DECODE, None),
        ({"treeline.dev/role": "both", "llm-d.ai/role": "decode"}, None, Role.BOTH, None),
        ({"llm-d.ai/role": "decode"}, None, Role.DECODE, Protocol.LLM_D),
        ({"llm-d.ai/role": "prefill-decode"}, None, Role.BOTH, Protocol.LLM_D),
        ({"llm-d.ai/role": "prefill"}, "nixl", Role.PREFILL, Protocol.NIXL),
    ],
)
def test_labels_say_which_part_of_a_request_a_pod_computes(
    labels: dict[str, str], annotation: str | None, role: Role, protocol: Protocol | None
) -> None:
    annotations = {} if annotation is None else {"treeline.dev/kv-transfer": annotation}
    (spec,) = found(pod("p", labels={"treeline.dev/pool": "a", **labels}, annotations=annotations))
    assert (spec.role, spec.protocol) == (role, protocol)


def test_foreign_unaddressed_and_ended_pods_are_no_endpoints() -> None:
    ended = pod("e")
    ended["status"]["phase"] = "Failed"
    assert (
        found(
            pod("x", labels={}),
            pod("y", labels={"treeline.dev/pool": "b"}),
            pod("z", ip=None),
            ended,
            pod("r", labels={"treeline.dev/pool": "a", "treeline.dev/role": "encode"}),
            pod("t", labels={"treeline.dev/pool": "a", "leaderworkerset.sigs.k8s.io/worker-index": "1"}),
        )
        == ()
    )


def test_readiness_deletion_and_the_serving_label_decide_the_use_of_a_pod() -> None:
    serving = {"treeline.dev/pool": "a", "treeline.dev/serving": "false", "treeline.dev/role": "both"}
    specs = found(
        pod("a", ip="10.0.0.1"),
        pod("b", ip="10.0.0.2", ready=False),
        pod("c", ip="10.0.0.3", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("d", ip="10.0.0.4", labels=serving),
    )
    assert [(s.name, s.ready, s.draining) for s in specs] == [
        ("a", True, False),
        ("b", False, False),
        ("c", True, True),
        ("d", True, True),
    ]


def test_only_a_restart_of_the_runtime_counts_as_another_process() -> None:
    item = pod("p", uid="u", restarts=1)
    item["status"]["containerStatuses"].append({"name": "sidecar", "restartCount": 9})
    assert found(item)[0].uid == "u:1"
    item["status"]["containerStatuses"] = [{"name": "x", "restartCount": 2}, {"name": "y", "restartCount": 3}]
    assert found(item)[0].uid == "u:5"
    del item["status"]["containerStatuses"]
    assert found(item)[0].uid == "u:0"


def test_the_newer_of_two_pods_has_their_common_address() -> None:
    old = pod("z", creationTimestamp="2026-01-01T00:00:00Z")
    new = pod("a", creationTimestamp="2026-01-02T00:00:00Z")
    assert [spec.name for spec in found(old, new)] == ["a"]
    assert [spec.name for spec in found(new, old)] == ["a"]


UPSTREAM = {
    "metadata": {"name": "up"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm", "env": "x"}},
        "targetPorts": [{"number": 3000}, {"number": 3002}],
    },
}


def test_upstream_pools_have_an_endpoint_for_each_port() -> None:
    made = pools.upstream_pool(raw(UPSTREAM))
    labels = {"app": "vllm", "env": "x", "more": "y"}
    specs = found(pod("p", labels=labels), pod("q", labels={"app": "vllm"}), of=(made,))
    assert [(s.name, s.address, s.pool, s.trust_ready) for s in specs] == [
        ("p-rank-0", "10.0.0.1:3000", "up", True),
        ("p-rank-1", "10.0.0.1:3002", "up", True),
    ]


@pytest.mark.parametrize(
    ("annotations", "ports"),
    [
        ({}, [3000, 3002]),
        ({"inference.networking.k8s.io/active-ports": "3002"}, [3002]),
        ({"inference.networking.k8s.io/active-ports": " 3000 , 3002,9"}, [3000, 3002]),
        ({"inference.networking.k8s.io/active-ports": ""}, []),
        ({"inference.networking.k8s.io/active-ports": "x,-1,３０００"}, []),
        ({"llm-d.ai/active-ports": "3000"}, [3000]),
        ({"inference.networking.k8s.io/active-ports": "3002", "llm-d.ai/active-ports": "3000"}, [3002]),
    ],
)
def test_the_annotation_names_the_ports_in_use(annotations: dict[str, str], ports: list[int]) -> None:
    item = pod("p", labels={"app": "vllm", "env": "x"}, annotations=annotations)
    specs = found(item, of=(pools.upstream_pool(raw(UPSTREAM)),))
    assert [int(spec.address.rpartition(":")[2]) for spec in specs] == ports
    assert all(spec.name == f"p-rank-{0 if spec.address.endswith('3000') else 1}" for spec in specs)


def test_a_pool_without_a_selector_has_no_pods() -> None:
    made = pools.upstream_pool(raw({"metadata": {"name": "x"}, "spec": {"targetPorts": [{"number": 1}]}}))
    assert found(pod("p", labels={"app": "vllm"}), of=(made,)) == ()
    assert [s.name for s in found(pod("p", labels={"a": "b"}), of=(pools.selected_pods({"a": "b"}, [1, 1]),))] == [
        "p-rank-0"
    ]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"uri": "builtin://tiny"}, "tiny"),
        ({"uri": "hf://org/Llama-3@main"}, "Llama-3"),
        ({"uri": "pvc://claim/some/model/"}, "model"),
        ({"uri": "pvc://claim"}, "claim"),
        ({"uri": "path:///models/x@y"}, "x@y"),
        ({"uri": "hf://org/name", "name": "mine"}, "mine"),
    ],
)
def test_our_pools_serve_the_given_name_or_the_last_part_of_the_uri(model: dict[str, str], name: str) -> None:
    obj = own_pool("a")
    obj["spec"]["model"] = model
    assert pools.own_pool(raw(obj)).models == (name,)


def test_pools_without_the_defaults_of_the_schema_get_them_here() -> None:
    made = pools.own_pool(raw({"metadata": {"name": "a"}, "spec": {"model": {"uri": "builtin://tiny"}}}))
    assert (made.gateway, made.ports) == ("treeline", (8000,))


def test_models_become_rules() -> None:
    obj = own_model(
        "m",
        "a",
        model="chat",
        criticality="Sheddable",
        targetModels=[{"name": "x", "weight": 9}, {"name": "y", "weight": 1}],
        fallbackPools=[{"name": "b"}],
    )
    rule = read_model(raw(obj))
    assert rule is not None
    assert (rule.name, rule.model_name, rule.pool, rule.criticality) == ("m", "chat", "a", "Sheddable")
    assert (rule.targets, rule.fallback_pools) == ((("x", 9), ("y", 1)), ("b",))
    assert rule.created == "2026-01-01T00:00:00Z"
    upstream = {
        "metadata": {"name": "m"},
        "spec": {"modelName": "chat", "poolRef": {"group": "g", "kind": "InferencePool", "name": "a"}},
    }
    standard = read_model(raw(upstream))
    assert standard is not None
    assert standard.criticality == "Standard"
    obj["metadata"] |= {"deletionTimestamp": "2026-01-02T00:00:00Z", "finalizers": ["x.example/y"]}
    assert read_model(raw(obj)) is None, "its name is free"


def test_an_adapter_answers_once_the_operator_says_what_engines_call_it() -> None:
    obj = own_model("m", "a", model="sql", adapter={"uri": "hf://o/a", "digest": "0" * 16})
    waits = read_model(raw(obj))
    assert waits is not None
    assert waits.adapter == "sql@", "which no engine serves"
    for status, expected in (
        ({}, "sql@"),
        ({"adapter": {"loaded": 0}}, "sql@"),
        ({"adapter": {"name": "sql@1"}}, "sql@1"),
    ):
        told = read_model(raw({**obj, "status": status}))
        assert told is not None
        assert told.adapter == expected


PODS = st.builds(
    lambda name, ip, ready, pool, gone, ports: pod(
        name,
        ip=ip,
        ready=ready,
        labels={"treeline.dev/pool": pool, "app": "vllm", "env": "x"},
        creationTimestamp=f"2026-01-0{len(name)}T00:00:00Z",
        **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if gone else {}),
        annotations={"llm-d.ai/active-ports": ports} if ports else {},
    ),
    st.sampled_from(["p", "q", "pp", "p-rank-0"]),
    st.sampled_from([None, "10.0.0.1", "10.0.0.2", "fd00::1", "nonsense"]),
    st.booleans(),
    st.sampled_from(["a", "b", "other"]),
    st.booleans(),
    st.sampled_from(["", "3000", "1,2"]),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(PODS, max_size=8, unique_by=lambda item: item["metadata"]["name"]), st.booleans())
def test_no_name_and_no_address_occurs_twice(items: list[dict[str, Any]], upstream: bool) -> None:
    of = (pools.upstream_pool(raw(UPSTREAM)),) if upstream else (pool("a"), pool("b", port=9000))
    specs = found(*items, of=of)
    assert len({spec.name for spec in specs}) == len(specs)
    assert len({spec.address for spec in specs}) == len(specs)
    assert list(specs) == sorted(specs, key=lambda spec: spec.name)
    assert specs == found(*reversed(items), of=of)


CONFIG = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5990", "replay_endpoint": "tcp://*:5991", "topic": "t"}'


def calling(*args: str, command: tuple[str, ...] = (), **meta: Any) -> dict[str, Any]:
    """Return a pod whose engine has this command line."""
    item = pod("p", **meta)
    item["spec"] = {"containers": [{"name": "sidecar"}, {"name": "x", "command": [*command], "args": [*args]}]}
    return item


@pytest.mark.parametrize(
    "item",
    [
        calling("--kv-events-config", CONFIG, "--data-parallel-size", "2"),
        calling(f"--kv-events-config={CONFIG}", "-dp=2"),
        calling("serve", "m", command=("vllm", "--kv_events_config", CONFIG, "--data_parallel_size=2")),
        calling(f"exec vllm serve m \\\n --kv-events-config '{CONFIG}' -dp 2", command=("/bin/sh", "-c")),
    ],
)
def test_an_engines_publisher_is_read_from_its_arguments(item: dict[str, Any]) -> None:
    (spec,) = found(item)
    assert spec.kv == KvPorts(5990, 5991, "t", 2)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--kv-events-config",),
        ("--kv-events-config", "{"),
        ("--kv-events-config", "$(KV_EVENTS)"),
        ("--kv-events-config", "[" * 100_000),
        ("sh", "-c", f"exec vllm serve --kv-events-config '{CONFIG}' " + "x " * 10_000),
        ("sh", "-c", "exec vllm -dp 2 " + "x " * 5_000, "-c", f"vllm --kv-events-config '{CONFIG}'" + " x" * 5_000),
        ("--kv-events-config", '{"publisher": "null", "enable_kv_cache_events": true}'),
        ("--kv-events-config", '{"publisher": "zmq", "enable_kv_cache_events": false}'),
        ("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/x"}'),
        ("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}'),
        ("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:99999"}'),
        ("sh -c 'vllm serve --kv-events-config {",),
    ],
)
def test_unusable_arguments_give_no_publisher(arguments: tuple[str, ...]) -> None:
    assert found(calling(*arguments))[0].kv is None


@pytest.mark.parametrize(
    ("config", "listens"),
    [
        ({"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}, True),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://[::]:5557"}, True),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://0.0.0.0:5557"}, False),  # SGLang alone binds this one
        ({"publisher": "zmq", "endpoint": "tcp://0.0.0.0:5557"}, True),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://epp.llm-d:5557"}, False),
        ({"publisher": "zmq", "endpoint": "tcp://10.0.0.7:5557"}, False),
        ({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}, False),
        ({"publisher": "zmq", "endpoint": "tcp://10.0.0.7:5557", "bind": True}, True),
        ({"publisher": "zmq", "endpoint": "tcp://*:5557", "bind": False}, False),
    ],
)
def test_an_endpoint_that_the_engine_dials_is_detected(config: dict[str, Any], listens: bool) -> None:
    dials = "" if listens else config["endpoint"]
    assert found(calling("--kv-events-config", json.dumps(config)))[0].kv == KvPorts(5557, dials=dials)


def test_sglang_names_its_publisher_and_vllm_switches_it_on() -> None:
    assert found(calling("--kv-events-config", '{"publisher": "zmq"}', "--dp-size", "4"))[0].kv == KvPorts(
        5557, ranks=4
    )
    assert found(calling("--kv-events-config", '{"enable_kv_cache_events": true}'))[0].kv == KvPorts(5557)


def test_annotations_override_arguments() -> None:
    told = {
        "treeline.dev/kv-events-port": "6000",
        "treeline.dev/kv-replay-port": "6100",
        "treeline.dev/kv-events-topic": "kv",
        "treeline.dev/data-parallel-size": "8",
    }
    assert found(calling("--kv-events-config", CONFIG, annotations=told))[0].kv == KvPorts(6000, 6100, "kv", 8)
    told = {"treeline.dev/kv-events-port": "6000", "treeline.dev/data-parallel-size": "many"}
    assert found(calling(annotations=told))[0].kv == KvPorts(6000)
    for port in ("0", "-1", "99999", "x", "", "1" * 5000, "\u0661"):
        assert found(calling(annotations={"treeline.dev/kv-events-port": port}))[0].kv is None


def test_ranks_with_their_own_ports_publish_separately() -> None:
    made = pools.upstream_pool(raw(UPSTREAM))
    item = calling("--kv-events-config", CONFIG, "-dp", "2", labels={"app": "vllm", "env": "x"})
    assert [spec.kv for spec in found(item, of=(made,))] == [
        KvPorts(5990, 5991, "t", 1, 0),
        KvPorts(5990, 5991, "t", 1, 1),
    ]


def test_a_changed_publisher_makes_another_endpoint() -> None:
    one = found(calling(annotations={"treeline.dev/kv-events-port": "6000"}))[0]
    other = found(calling(annotations={"treeline.dev/kv-events-port": "6001"}))[0]
    assert one.identity != other.identity
