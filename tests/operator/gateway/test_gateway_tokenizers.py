"""The picker's tokenizers for engines that serve none: flags, volumes, network and status."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway_cluster import Cluster, container, converged, pool
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.plan.facts import DOWNLOAD
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.plan.revision import inputs
from treeline_operator.plan.runtime import pod_template
from treeline_operator.plan.shared_gateway import SharedGateway, share
from treeline_operator.plan.tokenizers import HubWay, Tokenizers, by_history, not_held
from treeline_operator.world import Images

VLLM: dict[str, Any] = {"engine": {"type": "vllm"}}
HF = {"uri": "hf://org/name@v1"}
CLAIM = {"uri": "pvc://weights/qwen", "name": "qwen", "pickerReadsClaim": True}


def shared(*pools: InferencePool) -> SharedGateway:
    for one in pools:
        assert not list(violations(one)), "the API server would refuse it"
    return share(pools)["treeline"]


def mirrored(address: Any) -> dict[str, Any]:
    download = {"name": DOWNLOAD, "env": [{"name": "HF_ENDPOINT", "value": address}]}
    return {"spec": {"initContainers": [download]}}


def picker_pod(cluster: Cluster) -> dict[str, Any]:
    spec: dict[str, Any] = cluster.get("Deployment", "treeline-epp")["spec"]["template"]["spec"]
    return spec


def told(cluster: Cluster) -> list[str]:
    return [arg for arg in container(cluster, "treeline-epp")["args"] if arg.startswith("--tokenizer")]


def reaches_the_hub(cluster: Cluster) -> bool:
    egress = cluster.get("NetworkPolicy", "treeline-epp")["spec"]["egress"]
    return {"ports": [{"port": 443, "protocol": "TCP"}]} in egress


def test_a_hub_tokenizer_needs_a_flag_a_cache_and_egress() -> None:
    cluster = converged(pool("a", model=HF, **VLLM))
    assert told(cluster) == ["--tokenizer=name=hf://org/name@v1", "--tokenizer-cache=/var/cache/treeline"]
    assert reaches_the_hub(cluster)
    made = container(cluster, "treeline-epp")
    assert {"name": "tokenizers", "mountPath": "/var/cache/treeline"} in made["volumeMounts"]
    assert {"name": "tokenizers", "emptyDir": {"sizeLimit": "2Gi"}} in picker_pod(cluster)["volumes"]
    assert [env["name"] for env in made["env"]] == ["HF_HOME", "HF_HUB_DISABLE_TELEMETRY"]
    assert plan_gateway(cluster.world(pool("a", model=HF, **VLLM))).actions == ()


def test_engines_that_serve_their_tokenizer_change_nothing_of_the_picker() -> None:
    cluster = converged(pool("a", model=HF))
    assert told(cluster) == []
    assert "env" not in container(cluster, "treeline-epp")
    assert not reaches_the_hub(cluster)


def test_the_tokenizers_own_uri_overrides_the_models() -> None:
    model = {"uri": "path:///weights", "name": "mine", "tokenizer": "hf://org/words"}
    cluster = converged(pool("a", model=model, **VLLM))
    assert told(cluster)[0] == "--tokenizer=mine=hf://org/words"


def test_a_claim_is_mounted_read_only_at_the_pickers_path() -> None:
    cluster = converged(pool("a", model=CLAIM, engine={"type": "sglang"}))
    assert told(cluster) == ["--tokenizer=qwen=/mnt/models/weights/qwen"]
    claim = {"claimName": "weights", "readOnly": True}
    assert {"name": "claim-0", "persistentVolumeClaim": claim} in picker_pod(cluster)["volumes"]
    mounted = {"name": "claim-0", "mountPath": "/mnt/models/weights", "readOnly": True}
    assert mounted in container(cluster, "treeline-epp")["volumeMounts"]
    assert not reaches_the_hub(cluster)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"uri": "pvc://weights/qwen"}, "on claim weights, which the picker does not mount"),
        ({"uri": "path:///weights/qwen"}, "at path:///weights/qwen, which is only in the runtime pods"),
        ({"uri": "pvc://weights/a=b", "pickerReadsClaim": True}, "cannot take the model name a=b"),
    ],
)
def test_unreadable_tokenizers_appear_in_the_status_only(model: dict[str, Any], why: str) -> None:
    one = pool("a", model=model, **VLLM)
    assert why in by_history(one)
    assert Tokenizers.of(shared(one)).flags == []
    blind = pool("a", model=model, endpointPicker={"policy": "round_robin"}, **VLLM)
    assert by_history(blind) == "", "no policy would use the caches"
    silent = pool("a", model=model, engine={"type": "custom", "image": "i"})
    assert by_history(silent) == "", "it publishes nothing that would be missed"


def test_the_token_is_a_reference_that_no_pod_waits_for() -> None:
    gated = {**HF, "tokenSecretRef": {"name": "hf", "key": "t"}}
    made = container(
        converged(pool("a", model=gated, template=mirrored("https://hub.example"), **VLLM)), "treeline-epp"
    )
    reference = {"name": "hf", "key": "t", "optional": True}
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}} in made["env"]
    assert {"name": "HF_ENDPOINT", "value": "https://hub.example"} in made["env"]


def test_a_token_is_sent_only_where_its_pool_says() -> None:
    gated = {**HF, "tokenSecretRef": {"name": "hf"}}
    older, younger = (
        pool("a", model=gated, **VLLM),
        pool("b", created=1, model=HF, template=mirrored("http://m"), **VLLM),
    )
    for pools in ((older, younger), (younger, older)):
        found = Tokenizers.of(shared(*pools))
        assert (found.way.token, found.way.mirror) == (("hf", "token"), "")
    assert not_held(older, shared(older, younger)) == ""
    text = not_held(younger, shared(older, younger))
    assert (
        "with Secret hf (key token) from Hugging Face, as an older pool says, and not without a token from http" in text
    )
    plain = pool("c", created=2, model=HF, **VLLM)
    assert not_held(plain, shared(older, plain)) == "", "it asked for nothing that does not hold"


def test_a_token_for_an_unknown_mirror_is_not_used() -> None:
    fragment = mirrored(None)
    (entry,) = fragment["spec"]["initContainers"][0]["env"]
    del entry["value"]
    entry["valueFrom"] = {"configMapKeyRef": {"name": "mirrors", "key": "hub"}}
    one = pool("a", model={**HF, "tokenSecretRef": {"name": "hf"}}, template=fragment, **VLLM)
    found = Tokenizers.of(shared(one))
    assert found.way == HubWay()
    assert found.sources
    assert "neither token nor HF_ENDPOINT of the pool" in not_held(one, shared(one))


def test_one_name_has_one_tokenizer_the_oldest_pools() -> None:
    pools = [pool("b", created=1, model={**HF, "name": "m"}, **VLLM), pool("a", model={**CLAIM, "name": "m"}, **VLLM)]
    found = Tokenizers.of(shared(*pools))
    assert found.flags == ["--tokenizer=m=/mnt/models/weights/qwen"]
    leaving = pool("a", deleting=True, model={**CLAIM, "name": "m"}, **VLLM)
    assert Tokenizers.of(shared(pools[0], leaving)).sources == {"m": "hf://org/name@v1"}


def test_engine_and_picker_render_by_the_same_template() -> None:
    own = {**HF, "chatTemplateRef": {"name": "of-ours", "key": "k"}}
    plain = pool("b", created=1, model={**HF, "name": "plain"}, **VLLM)
    one = pool("a", model=own, **VLLM)
    cluster = converged(one, plain)
    (flag,) = [arg for arg in container(cluster, "treeline-epp")["args"] if arg.startswith("--chat-template")]
    assert flag == "--chat-template=name=/etc/treeline/chat-templates/0/chat_template.jinja"
    volume = {"name": "of-ours", "items": [{"key": "k", "path": "chat_template.jinja"}]}
    assert {"name": "template-0", "configMap": {**volume, "optional": True}} in picker_pod(cluster)["volumes"]
    mounted = {"name": "template-0", "mountPath": "/etc/treeline/chat-templates/0", "readOnly": True}
    assert mounted in container(cluster, "treeline-epp")["volumeMounts"]
    for engine in ("vllm", "sglang"):
        pod = pod_template(pool("a", model=own, engine={"type": engine}), "r", Images())["spec"]
        (serves,) = pod["containers"]
        file = serves["args"][serves["args"].index("--chat-template") + 1]
        assert {"name": "chat-template", "configMap": {**volume, "optional": False}} in pod["volumes"]
        (mount,) = [mount for mount in serves["volumeMounts"] if mount["name"] == "chat-template"]
        assert file == f"{mount['mountPath']}/chat_template.jinja"
    unreachable = pool("a", model={"uri": "path:///m", "chatTemplateRef": {"name": "of-ours"}}, **VLLM)
    assert Tokenizers.of(shared(unreachable)).flags == [], "a template is a part of a tokenizer"


def test_reading_a_claim_does_not_change_runtime_pods() -> None:
    assert inputs(pool("a", model=CLAIM, **VLLM)) == inputs(
        pool("a", model={**CLAIM, "pickerReadsClaim": False}, **VLLM)
    )


def test_a_fragment_of_any_shape_names_no_mirror() -> None:
    for fragment in ({}, {"spec": None}, {"spec": {"initContainers": [3, {"name": DOWNLOAD, "env": "x"}]}}):
        assert Tokenizers.of(shared(pool("a", model=HF, template=fragment, **VLLM))).way == HubWay()
    assert Tokenizers.of(shared(pool("a", model=HF, template=mirrored(3), **VLLM))).way == HubWay()


URIS = st.sampled_from(["hf://o/a", "hf://o/b@v", "pvc://c/x", "pvc://d/x", "path:///p/x"])
POOLS = st.lists(
    st.tuples(URIS, st.booleans(), st.sampled_from(["treeline", "vllm", "sglang"]), st.sampled_from(["m", "n"])),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(asked=POOLS)
def test_every_name_is_reported_once_and_exists(asked: list[tuple[str, bool, str, str]]) -> None:
    pools = [
        pool(
            f"p{number}",
            created=number,
            model={
                "uri": uri,
                "name": name,
                "pickerReadsClaim": reads and uri.startswith("pvc") and engine != "treeline",
            },
            engine={"type": engine},
        )
        for number, (uri, reads, engine, name) in enumerate(asked)
    ]
    found = Tokenizers.of(shared(*pools))
    names = [flag.removeprefix("--tokenizer=").partition("=")[0] for flag in found.flags if "-cache" not in flag]
    assert len(set(names)) == len(names)
    mounted = [mount["mountPath"] for mount in found.mounts]
    assert sorted(volume["name"] for volume in found.volumes) == sorted(mount["name"] for mount in found.mounts)
    for uri in found.sources.values():
        assert uri.startswith("hf://") or any(uri.startswith(f"{path}/") for path in mounted)
    assert found == Tokenizers.of(shared(*reversed(pools))), "the order in which pools are listed does not matter"
    for one in pools:
        if one.spec.engine.type != "treeline" and not by_history(one):
            assert one.spec.model.served_name in found.sources
