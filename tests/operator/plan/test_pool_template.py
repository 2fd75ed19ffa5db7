"""Pod templates: the user's fragment over ours, the fields that it cannot change, valid command lines, drains."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.alias_generators import to_snake
from support.api_specs import document
from support.pod_security import exceptions
from support.pool_world import SimCluster, a_pool, runtime, template
from treeline_operator.api.engine import WORDS
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.plan.engines import ENGINES
from treeline_operator.plan.merge import TemplateInvalid, merged
from treeline_operator.plan.revision import inputs
from treeline_operator.plan.runtime import pod_template, template_problem
from treeline_operator.world import Images
from treeline_runtime.args import parse_args
from treeline_runtime.config import EngineConfig


def patched(**container: Any) -> dict[str, Any]:
    return runtime(template={"spec": {"containers": [{"name": "runtime", **container}]}})


@pytest.mark.parametrize(
    "left",
    [
        {"metadata": {"annotations": {}}},
        {"metadata": {"labels": {}}, "spec": {"nodeSelector": {}}},
        {"spec": {}},
    ],
)
def test_emptied_maps_make_no_new_revision(left: dict[str, Any]) -> None:
    assert inputs(a_pool(template=left)) == inputs(a_pool())


def test_empty_maps_and_nulls_with_meaning_make_another_pod() -> None:
    says = [
        {"spec": {"volumes": [{"name": "scratch", "emptyDir": {}}]}},
        {"metadata": {"annotations": {"of-ours": None}}},
    ]
    assert len({inputs(a_pool(template=template)) for template in says} | {inputs(a_pool())}) == 3


# ---- the fragment -------------------------------------------------------------------------------------------


def test_lists_are_merged_by_name() -> None:
    made = patched(
        env=[
            {"name": "MINE", "value": "1"},
            {"name": "HF_HOME", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
        ],
        volumeMounts=[{"name": "big", "mountPath": "/tmp"}],
    )
    env = {item["name"]: item for item in made["env"]}
    assert env["MINE"] == {"name": "MINE", "value": "1"}
    assert env["HF_HOME"] == {"name": "HF_HOME", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}
    assert env["HOME"]["value"] == "/tmp"
    assert [m["name"] for m in made["volumeMounts"]] == ["big", "cache", "kv-keys"]


def test_ports_are_merged_by_number_and_protocol_and_need_no_name() -> None:
    fragment = [
        {"containerPort": 9999},
        {"containerPort": 9999, "protocol": "UDP"},
        {"containerPort": 9998, "name": "x"},
    ]
    ours = patched()["ports"]
    assert patched(ports=fragment)["ports"] == [*ours, *fragment]
    there = [{"name": "a", "containerPort": 1, "protocol": "TCP"}, {"containerPort": 2}]
    assert merged({"ports": there}, {"ports": [{"containerPort": 1, "hostPort": 7}]}) == {
        "ports": [{"containerPort": 1, "hostPort": 7}, {"containerPort": 2}]
    }
    for bad in ({"name": "x"}, {"containerPort": [1]}, {"containerPort": 1, "protocol": []}):
        with pytest.raises(TemplateInvalid, match="every item of ports needs a containerPort"):
            patched(ports=[bad])


def test_maps_are_merged_and_null_removes() -> None:
    made = template(
        template={
            "metadata": {"annotations": {"a": "b"}},
            "spec": {
                "securityContext": {"runAsUser": None, "fsGroup": 7},
                "nodeSelector": {"disk": "fast"},
                "containers": [
                    {"name": "runtime", "resources": {"limits": {"memory": "4Gi"}}},
                    {"name": "more"},
                ],
            },
        }
    )
    assert made["metadata"]["annotations"] == {"a": "b"}
    security = made["spec"]["securityContext"]
    assert "runAsUser" not in security
    assert (security["fsGroup"], security["runAsNonRoot"]) == (7, True)
    first, second = made["spec"]["containers"]
    assert first["resources"] == {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
    assert second == {"name": "more"}


def test_a_probe_has_one_handler() -> None:
    made = patched(livenessProbe={"exec": {"command": ["true"]}}, readinessProbe={"periodSeconds": 9})
    assert made["livenessProbe"]["exec"] == {"command": ["true"]}
    assert "httpGet" not in made["livenessProbe"]
    assert made["livenessProbe"]["failureThreshold"] == 6
    assert made["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert made["readinessProbe"]["periodSeconds"] == 9


def test_tolerations_are_added() -> None:
    theirs = {"key": "spot", "operator": "Exists"}
    made = template(accelerator={"type": "nvidia"}, template={"spec": {"tolerations": [theirs]}})
    assert [t["key"] for t in made["spec"]["tolerations"]] == ["nvidia.com/gpu", "spot"]


def test_labels_ports_and_the_time_to_drain_stay_ours() -> None:
    made = template(
        template={
            "metadata": {"labels": {"team": "x"}},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {
                        "name": "runtime",
                        "ports": [
                            {"name": "http", "containerPort": 1},
                            {"name": "other", "containerPort": 5557},
                            {"name": "debug", "containerPort": 9999},
                        ],
                    }
                ],
            },
        }
    )
    assert made["metadata"]["labels"]["team"] == "x"
    assert made["metadata"]["labels"]["treeline.dev/serving"] == "true"
    assert made["spec"]["terminationGracePeriodSeconds"] == 75
    ports = {p["name"]: p["containerPort"] for p in made["spec"]["containers"][0]["ports"]}
    ours = {"http": 8000, "kv-events": 5557, "kv-replay": 5657, "load": 5757, "metrics": 9600}
    assert ports == {**ours, "debug": 9999}
    longer = template(template={"spec": {"terminationGracePeriodSeconds": 900}})
    assert longer["spec"]["terminationGracePeriodSeconds"] == 900


@pytest.mark.parametrize(
    ("fragment", "problem"),
    [
        ({"spec": {"containers": "none"}}, "containers must be a list"),
        ({"spec": {"containers": [{"image": "x"}]}}, "every item of containers needs a name"),
        ({"spec": {"containers": 5}}, "containers must be a list"),
        ({"spec": {"containers": [{"name": "runtime", "resources": "x"}]}}, "resources must be a map"),
        ({"spec": {"securityContext": [1]}}, "securityContext must be a map"),
        ({"specs": {}}, "specs is not part of a pod template"),
    ],
)
def test_a_fragment_of_the_wrong_shape_leaves_the_pods_as_they_are(fragment: dict[str, Any], problem: str) -> None:
    pool = a_pool(template=fragment)
    assert problem in template_problem(pool)
    cluster = SimCluster()
    cluster.converge(a_pool())
    plan = cluster.plan(pool)
    assert plan.actions == ()
    assert any(problem in note for note in plan.notes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["a", "tmp", "runtime"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "env", "containers", "volumes", "spec", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_any_fragment_is_merged_or_refused(fragment: Any) -> None:
    ours = pod_template(a_pool(), "abc", Images())["spec"]
    try:
        made = merged(ours, {"containers": [{"name": "runtime", "env": fragment}], "volumes": fragment})
    except TemplateInvalid:
        return
    assert merged(made, {}) == made


# ---- engines ------------------------------------------------------------------------------------------------

_SETTINGS: list[dict[str, Any]] = [
    {},
    {"contextLength": 512, "pageSize": 32, "maxTotalTokens": 9000, "threads": 2, "dtype": "float32"},
    {"memoryFraction": 0.5, "maxRunningRequests": 8, "maxQueuedRequests": 9, "chunkedPrefillSize": 256},
    {"quantization": "fp8", "kvCacheDtype": "fp8_e4m3"},
    {"schedulePolicy": "lpm", "evictionPolicy": "lfu", "args": ["--log-level", "debug"]},
    {"resources": {"limits": {"cpu": "2500m"}}},
]


@pytest.mark.parametrize("engine", _SETTINGS)
def test_our_runtime_takes_the_command_line(engine: dict[str, Any]) -> None:
    args = parse_args(runtime(engine=engine, drain={"timeoutSeconds": 33})["args"])
    assert args.model == "/opt/treeline/models/tiny"
    assert args.served_model_name == "tiny"
    assert args.drain_timeout == 33
    assert args.curve_dir == "/var/run/treeline/keys"
    if "resources" in engine:
        assert args.threads == 2


@pytest.mark.parametrize(
    ("spec", "ranks", "threads"),
    [
        ({"accelerator": {"type": "nvidia", "count": 4}}, 4, None),
        ({"accelerator": {"type": "nvidia", "count": 4}, "engine": {"tensorParallel": 2}}, 2, None),
        ({"accelerator": {"type": "nvidia", "count": 4}, "engine": {"tensorParallel": 1}}, 1, None),
        ({"accelerator": {"type": "nvidia"}}, 1, None),
        ({"engine": {"tensorParallel": 2}}, 2, None),
        ({"engine": {"tensorParallel": 2, "resources": {"limits": {"cpu": 5}}}}, 2, 2),
        ({"engine": {"tensorParallel": 4, "resources": {"limits": {"cpu": 2}}}}, 4, 1),
        ({"engine": {"tensorParallel": 2, "threads": 3, "resources": {"limits": {"cpu": 4}}}}, 2, 3),
    ],
)
def test_our_runtime_is_told_its_ranks_which_share_the_cpus(
    spec: dict[str, Any], ranks: int, threads: int | None
) -> None:
    args = parse_args(runtime(**spec)["args"])
    assert (args.tp_size, args.threads) == (ranks, threads)


def test_a_pools_values_equal_those_of_our_runtime() -> None:
    """tests/runtime/scheduler/test_policies.py compares the policies."""
    fields = get_type_hints(EngineConfig)
    closed = {setting: get_args(fields[to_snake(setting)]) for setting in WORDS if not setting.endswith("Policy")}
    assert closed == {setting: WORDS[setting] for setting in ("dtype", "quantization", "kvCacheDtype")}


@pytest.mark.parametrize(
    "asked", [{"tensorParallel": 2}, {"dataParallel": 2}, {"adapters": [{"name": "a", "uri": "hf://org/adapter"}]}]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_settings_that_an_engine_lacks_are_refused_not_dropped(engine: str, asked: dict[str, Any]) -> None:
    spec = {"model": {"uri": "hf://org/name"}, "engine": {"type": engine, "image": "x"}}
    count = 1 if "adapters" in asked else 2
    more = {**spec, "accelerator": {"type": "nvidia", "count": count}, "engine": {**spec["engine"], **asked}}
    pool = InferencePool.from_object(document("InferencePool", json.dumps(more)))
    assert list(violations(pool)) or runtime(**more)["args"] != runtime(**spec, accelerator={"type": "nvidia"})["args"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_of_an_engine_has_its_ports_and_the_picker_knows_the_first(ranks: int) -> None:
    """SGLang and vLLM count alike: the port of rank r is the first one + r."""
    devices = {"accelerator": {"type": "nvidia", "count": ranks}}
    for engine, sockets in (("vllm", (5557, 5657)), ("sglang", (5557, 5657, 5757))):
        made = template(**devices, engine={"type": engine, "dataParallel": ranks})
        ports = made["spec"]["containers"][0]["ports"]
        numbers = {8000} | {first + rank for first in sockets for rank in range(ranks)}
        assert {port["containerPort"] for port in ports} == numbers
        assert len({port["name"] for port in ports}) == len(ports)
        assert made["metadata"]["annotations"] == {
            "treeline.dev/kv-events-port": "5557",
            "treeline.dev/kv-replay-port": "5657",
            "treeline.dev/data-parallel-size": str(ranks),
        }
    assert "annotations" not in template()["metadata"], "our runtime says it itself"


def test_sglangs_administration_needs_a_key_that_no_object_shows() -> None:
    made = runtime(accelerator={"type": "nvidia"}, engine={"type": "sglang"})
    assert made["args"][made["args"].index("--admin-api-key") + 1] == "$(SGLANG_ADMIN_API_KEY)"
    (given,) = [one for one in made["env"] if one["name"] == "SGLANG_ADMIN_API_KEY"]
    assert given["valueFrom"] == {"secretKeyRef": {"name": "tiny-admin-key", "key": "key"}}


def test_the_users_command_and_arguments_win() -> None:
    made = runtime(engine={"command": ["numactl", "serve"], "args": ["--more"]})
    assert made["command"] == ["numactl", "serve"]
    assert made["args"][-1] == "--more"


def test_registry_credentials_reach_the_pods_and_the_fragment_may_add_some() -> None:
    images = Images(pull_secrets=("one", "two"))
    assert "imagePullSecrets" not in template()["spec"]
    assert pod_template(a_pool(), "abc", images)["spec"]["imagePullSecrets"] == [
        {"name": "one"},
        {"name": "two"},
    ]
    own = a_pool(template={"spec": {"imagePullSecrets": [{"name": "three"}]}})
    made = pod_template(own, "abc", images)["spec"]["imagePullSecrets"]
    assert {secret["name"] for secret in made} == {"one", "two", "three"}


# ---- what a pod is provided with ----------------------------------------------------------------------------

GPU = {"accelerator": {"type": "nvidia"}}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_root_filesystem_is_writable_on_gpus_alone(engine: str) -> None:
    spec = {"model": {"uri": "hf://org/name"}, "engine": {"type": engine, "image": "x"}}
    for more, read_only in ((GPU, False), ({}, True)):
        pod = template(**spec, **more)["spec"]
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"] is read_only, container["name"]
        assert exceptions(pod, gpu=bool(more)) == ()


@pytest.mark.parametrize(
    ("spec", "cpu", "memory"),
    [
        ({}, "100m", "512Mi"),
        (GPU, "2", "8Gi"),
        ({**GPU, "model": {"uri": "hf://org/name", "size": "16Gi"}}, "2", "12Gi"),
        ({**GPU, "model": {"uri": "hf://org/name", "size": "500M"}}, "2", "5Gi"),
        (
            {
                "model": {"uri": "hf://org/name", "size": "140Gi"},
                "accelerator": {"type": "nvidia", "count": 8},
                "engine": {"type": "vllm"},
            },
            "16",
            "102Gi",
        ),
        ({"accelerator": {"type": "nvidia", "count": 4}}, "8", "32Gi"),
        (
            {"model": {"uri": "hf://org/name", "size": "132Gi"}, "accelerator": {"type": "nvidia", "count": 4}},
            "8",
            "82Gi",
        ),
        ({"engine": {"tensorParallel": 2}}, "200m", "1024Mi"),
        ({"accelerator": {"type": "nvidia", "count": 4}, "engine": {"type": "sglang"}}, "8", "32Gi"),
    ],
)
def test_requests_follow_the_devices_and_the_weights(spec: dict[str, Any], cpu: str, memory: str) -> None:
    asked = runtime(**spec)["resources"]["requests"]
    assert (asked["cpu"], asked["memory"]) == (cpu, memory)


def test_named_requests_are_taken_one_by_one() -> None:
    own = {"requests": {"cpu": 7}, "limits": {"memory": "30Gi"}}
    made = runtime(**GPU, engine={"resources": own})["resources"]
    assert made["requests"] == {"cpu": "7", "nvidia.com/gpu": "1"}, "a limit without a request is the request"
    assert made["limits"] == {"nvidia.com/gpu": "1", "memory": "30Gi"}


def test_devices_that_are_claimed_are_not_asked_for_by_their_resource_too() -> None:
    claimed = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}
    ours = {"name": "runtime", "resources": {"claims": [{"name": "gpu"}]}}
    made = template(**GPU, template={"spec": {**claimed, "containers": [ours]}})["spec"]
    resources = made["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "gpu"}]
    assert "limits" not in resources
    assert sorted(resources["requests"]) == ["cpu", "memory"]
    assert made["resourceClaims"] == claimed["resourceClaims"]
    beside = {"name": "sidecar", "image": "x", "resources": {"claims": [{"name": "gpu"}]}}
    kept = template(**GPU, template={"spec": {**claimed, "containers": [beside]}})["spec"]["containers"]
    assert kept[0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}, "another container's claim is not the engine's"


def test_devices_of_amd_are_asked_for_by_their_own_names() -> None:
    engine = {"type": "vllm", "image": "docker.io/rocm/vllm:latest"}
    device = {"type": "amd", "count": 2, "class": "AMD_Instinct_MI300X_OAM"}
    made = template(model={"uri": "hf://o/n"}, engine=engine, accelerator=device)["spec"]
    assert made["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert made["nodeSelector"] == {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}
    assert [toleration["key"] for toleration in made["tolerations"]] == ["amd.com/gpu"]
    assert "--tensor-parallel-size=2" in made["containers"][0]["args"]
    own = template(
        model={"uri": "hf://o/n"}, engine=engine, accelerator={"type": "amd", "resourceName": "amd.com/part"}
    )
    assert own["spec"]["containers"][0]["resources"]["limits"] == {"amd.com/part": "1"}


def volumes(**spec: Any) -> dict[str, Any]:
    return {volume.pop("name"): volume for volume in template(**spec)["spec"]["volumes"]}


def test_local_storage_of_a_pod_is_limited() -> None:
    for engine in ("treeline", "vllm"):
        found = volumes(**GPU, engine={"type": engine})
        assert found["tmp"] == {"emptyDir": {"sizeLimit": "10Gi"}}
        assert found["cache"] == {"emptyDir": {"sizeLimit": "20Gi"}}
    for count, size in ((1, "4Gi"), (2, "4Gi"), (8, "16Gi")):
        accelerator = {"type": "nvidia", "count": count}
        found = volumes(accelerator=accelerator, engine={"type": "vllm"})
        assert found["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": size}}


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ({}, None),
        (GPU, None),
        ({"accelerator": {"type": "nvidia", "count": 2}}, "4Gi"),
        ({"accelerator": {"type": "nvidia", "count": 8}}, "16Gi"),
        ({"engine": {"tensorParallel": 2}}, "4Gi"),
        ({"engine": {"tensorParallel": 4}}, "8Gi"),
    ],
)
def test_ranks_of_our_runtime_have_shared_memory_and_one_process_has_none(
    spec: dict[str, Any], size: str | None
) -> None:
    shared = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    assert volumes(**spec).get("shm") == (None if size is None else shared)
    made = runtime(**spec)
    assert ("/dev/shm" in [m["mountPath"] for m in made["volumeMounts"]]) is (size is not None)
    assert made["securityContext"]["readOnlyRootFilesystem"] is ("accelerator" not in spec)


def test_the_cache_may_be_an_existing_claim_or_a_new_one() -> None:
    for cache, claim in (({"size": "9Gi"}, "tiny-cache"), ({"claimName": "ours"}, "ours")):
        found = volumes(engine={"cache": cache})
        assert found["cache"] == {"persistentVolumeClaim": {"claimName": claim}}


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [
        ("torch", "_inductor/runtime/cache_dir_utils.py", "TORCHINDUCTOR_CACHE_DIR"),
        ("torch", "_inductor/runtime/cache_dir_utils.py", "TRITON_CACHE_DIR"),
        ("huggingface_hub", "constants.py", "HF_HOME"),
    ],
)
def test_cache_variables_are_those_that_the_installed_libraries_read(package: str, module: str, name: str) -> None:
    """The libraries are read, not run: inductor alone takes ten seconds to import."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / module).read_text()
    assert name in re.findall(r"""(?:environ\.get|getenv)\(\s*["'](\w+)["']""", source)


@pytest.mark.parametrize(
    ("engine", "count", "flags"),
    [
        ({"type": "vllm"}, 8, {"--tensor-parallel-size": "8"}),
        ({"type": "sglang"}, 8, {"--tp-size": "8"}),
        ({"type": "treeline"}, 8, {"--tp-size": "8"}),
        ({"type": "treeline", "tensorParallel": 4}, 8, {"--tp-size": "4"}),
        ({"type": "treeline"}, 1, {}),
        ({"type": "vllm"}, 1, {}),
        ({"type": "vllm", "tensorParallel": 2}, 8, {"--tensor-parallel-size": "2"}),
        ({"type": "vllm", "tensorParallel": 1}, 8, {}),
        ({"type": "sglang", "dataParallel": 4}, 8, {"--tp-size": "2", "--dp-size": "4"}),
        (
            {"type": "sglang", "dataParallel": 8, "args": ["--enable-dp-attention"]},
            8,
            {"--tp-size": "8", "--dp-size": "8"},
        ),
        ({"type": "vllm", "args": ["--pipeline-parallel-size=4"]}, 8, {}),
        ({"type": "vllm", "args": ["-tp", "4"]}, 8, {}),
        ({"type": "custom", "image": "x"}, 8, {}),
    ],
)
def test_layers_are_split_over_the_devices_unless_configured_otherwise(
    engine: dict[str, Any], count: int, flags: dict[str, str]
) -> None:
    made = runtime(accelerator={"type": "nvidia", "count": count}, engine=engine)
    args = " ".join(made.get("args", ())).replace("=", " ").split()
    own = engine.get("args", [])
    found = {
        flag: args[args.index(flag) + 1]
        for flag in ("--tensor-parallel-size", "--tp-size", "--dp-size", "--data-parallel-size")
        if flag in args and flag not in own
    }
    assert found == flags


@pytest.mark.parametrize("engine", ["treeline", "sglang", "vllm"])
def test_stating_the_default_split_keeps_the_pods_and_another_makes_a_revision(engine: str) -> None:
    devices = {"accelerator": {"type": "nvidia", "count": 4}}
    said = a_pool(**devices, engine={"type": engine, "tensorParallel": 4})
    assert inputs(a_pool(**devices, engine={"type": engine})) == inputs(said)
    one = a_pool(**devices, engine={"type": engine, "tensorParallel": 1})
    two = a_pool(accelerator={"type": "nvidia", "count": 2}, engine={"type": engine})
    assert len({inputs(said), inputs(one), inputs(two)}) == 3
