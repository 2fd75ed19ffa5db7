"""The engines' adapters agree with the page and the manifests that name their releases, annotations and ports."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.pool_world import template
from treeline_operator import names
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.engines import ENGINES, SGLANG_IMAGE, VLLM_IMAGE, unseen_args
from treeline_operator.plan.presets import resolved
from treeline_operator.plan.runtime import pod_template
from treeline_operator.world import Images
from treeline_runtime.args import parse_args
from treeline_wire import labels

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
OWN_POOLS = {
    obj["metadata"]["name"]: obj
    for path in sorted((MANIFESTS / "samples").glob("*.yaml"))
    for obj in yaml.safe_load_all(path.read_text())
    if obj["kind"] == "InferencePool" and obj["spec"].get("engine", {}).get("type", "treeline") == "treeline"
}
PAGE = (ROOT / "docs" / "engines.md").read_text()


@pytest.mark.parametrize("image", [SGLANG_IMAGE, VLLM_IMAGE])
def test_the_page_names_the_planned_engine_releases(image: str) -> None:
    assert f"`{image}`" in PAGE


@pytest.mark.parametrize("name", OWN_POOLS)
def test_our_runtime_takes_the_command_line_of_a_sample_and_uses_every_gpu(name: str) -> None:
    presets = yaml.safe_load((MANIFESTS / "presets.yaml").read_text())["presets"]
    sample = OWN_POOLS[name]
    named = {**sample, "metadata": {"namespace": "default", "uid": "u", **sample["metadata"]}}
    pool = resolved(InferencePool.from_object(named, strict=True), presets)
    for revision in ("abc", f"abc{names.PREFILL}"):
        (ours,) = pod_template(pool, revision, Images())["spec"]["containers"]
        args = parse_args(ours["args"])
        gpus = int(ours["resources"].get("limits", {}).get("nvidia.com/gpu", 0)) * pool.spec.accelerator.nodes
        assert (args.device, args.tp_size) == (("cuda", gpus) if gpus else ("cpu", 1))
        assert (args.kv_transfer_port is not None) is (pool.spec.prefill is not None)


def test_samples_show_a_model_on_several_gpus() -> None:
    counts = {name: pool["spec"].get("accelerator", {}).get("count", 1) for name, pool in OWN_POOLS.items()}
    assert {name: count for name, count in counts.items() if count > 1} == {
        "llama-70b": 4,
        "llama-70b-nodes": 2,
        "qwen-72b": 2,
    }


def test_the_page_names_the_annotations_that_pods_have() -> None:
    told = template(accelerator={"type": "nvidia"}, engine={"type": "vllm"})["metadata"]["annotations"]
    for annotation in (*told, labels.KV_EVENTS_TOPIC):
        assert f"`{annotation}`" in PAGE


def test_existing_pods_publish_where_those_of_a_pool_do() -> None:
    (deployment,) = yaml.safe_load_all((ROOT / "manifests" / "existing-pods" / "vllm.yaml").read_text())
    (theirs,) = deployment["spec"]["template"]["spec"]["containers"]
    (ours,) = template(accelerator={"type": "nvidia"}, engine={"type": "vllm"})["spec"]["containers"]
    config = "--kv-events-config"
    said, meant = ({**yaml.safe_load(c["args"][c["args"].index(config) + 1])} for c in (theirs, ours))
    assert {"topic": "", **said} == meant
    assert theirs["image"] == ours["image"]
    ports = [{port["name"]: port["containerPort"] for port in c["ports"]} for c in (theirs, ours)]
    assert ports[0] == ports[1]
    env = {one["name"]: one.get("value") for one in ours["env"]}
    assert all(env[one["name"]] == one["value"] for one in theirs["env"])


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ([], ""),
        (["--chat-template-content-format", "string", "--tokenizer-mode=slow"], ""),
        (["--chat-template", "x"], "--chat-template (model.chatTemplateRef sets both)"),
        (["--tokenizer=x"], "--tokenizer (model.tokenizer sets both)"),
        (["x", "--api-key=y"], "--api-key (the picker has none"),
    ],
)
def test_only_settings_that_the_picker_needs_are_reported(args: list[str], found: str) -> None:
    text = unseen_args(ENGINES["vllm"].unseen, args)
    assert found in text
    assert bool(text) is bool(found)
    assert unseen_args(ENGINES["treeline"].unseen, args) == ""
