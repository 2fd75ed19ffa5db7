"""Presets: a pool's own fields override its preset's, and invalid results are reported."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.pool_world import SimCluster, a_pool
from treeline_epp.kube.pools import Pool, own_pool
from treeline_operator.api.conditions import Reason
from treeline_operator.api.pool import InferencePool
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.store import Store
from treeline_operator.plan.presets import OWN, PresetProblem, resolved
from treeline_operator.plan.revision import inputs
from treeline_operator.plan.runtime import pod_template
from treeline_operator.status.causes import Cause
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Images, Platform, _presets

H100: dict[str, Any] = {
    "accelerator": {"type": "nvidia", "class": "H100", "count": 2},
    "engine": {
        "type": "vllm",
        "image": "registry.example/vllm:1",
        "args": ["--enable-x"],
        "contextLength": 8192,
        "resources": {"requests": {"cpu": "8"}},
        "adapters": [{"name": "a", "uri": "hf://o/a"}],
    },
    "template": {
        "spec": {
            "priorityClassName": "high",
            "nodeSelector": {"disk": "fast"},
            "containers": [{"name": "runtime", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}],
        }
    },
}


def over(preset: dict[str, Any], **spec: Any) -> InferencePool:
    return resolved(a_pool(preset="p", **spec), {"p": preset})


def test_a_pool_with_only_a_model_is_the_preset_with_that_model() -> None:
    whole = {**H100, "model": {"uri": "hf://o/n"}}
    pool = resolved(a_pool(preset="p", model={"uri": "hf://o/n"}), {"p": H100})
    assert inputs(pool) == inputs(a_pool(**whole)), "the same pods as those of a pool that says all of it"
    assert resolved(a_pool(), {"p": H100}) == a_pool()


def test_the_pools_fields_win_and_lists_merge_by_key() -> None:
    mine = {"spec": {"containers": [{"name": "runtime", "env": [{"name": "B", "value": "2"}]}, {"name": "more"}]}}
    engine = {"type": "vllm", "contextLength": 1024, "args": ["--y"], "adapters": [{"name": "b", "uri": "hf://o/b"}]}
    accelerator = {"type": "nvidia", "count": 4}
    spec = over(H100, model={"uri": "hf://o/n"}, engine=engine, accelerator=accelerator, template=mine).spec
    assert (spec.engine.image, spec.engine.context_length, spec.engine.args) == (
        "registry.example/vllm:1",
        1024,
        ("--y",),
    )
    assert [adapter.name for adapter in spec.engine.adapters] == ["a", "b"]
    assert (spec.accelerator.class_, spec.accelerator.count, spec.replicas) == ("H100", 4, 1)
    assert spec.template is not None
    first, second = spec.template["spec"]["containers"]
    assert {env["name"]: env["value"] for env in first["env"]} == {"A": "1", "B": "2"}
    assert second == {"name": "more"}
    assert spec.template["spec"]["nodeSelector"] == {"disk": "fast"}


def test_a_null_in_the_pools_template_removes_fields_of_preset_and_operator() -> None:
    preset = {"template": {"spec": {"nodeSelector": {"disk": "fast"}}}}
    pool = over(preset, template={"spec": {"nodeSelector": None, "securityContext": {"runAsUser": None}}})
    made = pod_template(pool, "r", Images())["spec"]
    assert "nodeSelector" not in made
    assert "runAsUser" not in made["securityContext"]


def test_a_missing_preset_is_named_with_the_existing_ones() -> None:
    with pytest.raises(PresetProblem, match="unknown preset q; the operator has: a, p") as told:
        resolved(a_pool(preset="q"), {"p": {}, "a": {}})
    assert told.value.reason is Reason.PRESET_MISSING


@pytest.mark.parametrize(
    ("preset", "spec", "says"),
    [
        ({"engine": {"type": "vllm"}}, {"engine": {"type": "sglang"}}, "its engine.type is vllm, the pool's is sglang"),
        ({"engine": {"tpye": "vllm"}}, {}, "engine.tpye: unknown field; did you mean type?"),
        ({"engine": {"contextLength": "many"}}, {}, "engine.contextLength: Input should be a valid integer"),
        ({"engine": "vllm"}, {}, "engine: Input should be"),
        ({"engine": {"args": {}}}, {"engine": {"args": ["-x"]}}, "args must be a map"),
        (
            {"autoscaling": {"picker": {"queuedTokens": 5}}},
            {"replicas": 2},
            "with preset p: spec.autoscaling.picker: picker is for type Picker only",
        ),
        ({"engine": {"type": "vllm"}}, {"model": {"uri": "builtin://tiny"}}, "spec.model.uri: builtin:// models are"),
    ],
)
def test_a_preset_that_makes_no_pool_is_a_conflict(preset: dict[str, Any], spec: dict[str, Any], says: str) -> None:
    with pytest.raises(PresetProblem) as told:
        over(preset, **spec)
    assert told.value.reason is Reason.PRESET_CONFLICT
    assert says in str(told.value)


@pytest.mark.parametrize("field", OWN)
def test_a_preset_cannot_set_a_pools_own_fields(field: str) -> None:
    preset: Any = 3
    for part in reversed(field.split(".")):
        preset = {part: preset}
    with pytest.raises(PresetProblem, match=f"{field} is not allowed in a preset"):
        over(preset)


def test_the_operator_reads_pools_with_their_presets() -> None:
    def seen(platform: Platform) -> InferencePool | Cause | None:
        store = Store()
        store.put(a_pool(preset="p", metadata={"resourceVersion": "1"}).model_dump(mode="json", by_alias=True))
        return Observer(store, platform).pool("serving", "tiny")

    known = seen(Platform(presets={"p": {"engine": {"contextLength": 512}}}))
    assert isinstance(known, InferencePool)
    assert known.spec.engine.context_length == 512
    unknown = seen(Platform())
    assert isinstance(unknown, Cause)
    assert unknown.reason is Reason.PRESET_MISSING


def test_a_picker_sees_the_pool_that_the_preset_makes_of_it() -> None:
    preset = {"engine": {**H100["engine"], "port": 9000}, "endpointPicker": {"policy": "prefix_hash"}}
    own = a_pool(preset="p", model={"uri": "hf://o/n"}, metadata={"resourceVersion": "1"})
    whole = resolved(own, {"p": preset})
    status = pool_status(SimCluster().world(whole))
    assert status["preset"]["name"] == "p"

    def seen(pool: InferencePool, **fields: Any) -> Pool:
        return own_pool(msgspec.Raw(msgspec.json.encode(pool.model_dump(mode="json", by_alias=True) | fields)))

    assert seen(own, status=status) == seen(whole)
    assert seen(own).engine == "treeline", "before the operator has said anything"
    other = a_pool(preset="q", model={"uri": "hf://o/n"})
    assert seen(other, status=status) == seen(other), "what it said of another preset"
    assert "preset" not in pool_status(SimCluster().world(a_pool()))


def test_presets_are_given_as_json_or_by_the_values_of_the_chart(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"replicas": 1, "presets": {"p": H100}}, indent=1))
    assert _presets(json.dumps({"p": H100})) == _presets(str(values)) == {"p": H100}
    for bad in ("[]", '{"p": 1}', str(tmp_path / "none"), "{", '{"p":' * 3000 + "1" + "}" * 3000):
        with pytest.raises(argparse.ArgumentTypeError):
            _presets(bad)
