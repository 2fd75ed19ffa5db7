"""What one version made and said is understood by the next one, and is not rolled by it.

`released.json` is what the last release made (`support.released`). An operator of this version takes over its
objects; pickers, Envoys, launchers, runtimes and downloads of this version take its flags, its configuration and its
messages. What a version later than this one may add is played by fields that nobody knows.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import gateway_cluster, released
from support.envoy import ENVOY, running_envoy
from support.epp_io import engines, running_picker
from support.pool_world import SimCluster, a_pool
from support.ports import free_ports
from treeline_epp.kube.pools import own_pool
from treeline_epp.options import options_of as picker_options
from treeline_operator import names
from treeline_operator.api.pool import InferencePool
from treeline_operator.controller import picker_probe
from treeline_operator.envoy import EnvoyConfig
from treeline_operator.envoy.launcher import options_of as launcher_options
from treeline_operator.plan import edge, revision
from treeline_operator.world import TEMPLATE_VERSION, PickerEndpoint, Platform
from treeline_runtime.args import parse_args as runtime_options
from treeline_runtime.fetch.__main__ import parse as download_options
from treeline_wire import frames
from treeline_wire.events import decode_batch
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, decode_load
from treeline_wire.tokenizer import TokenizerBundle

if (version := os.environ.get("TREELINE_RELEASED")) is not None:
    released.write(version)
RELEASED = released.read()
NEXT = released.next_version(RELEASED["templateVersion"])
Templates = dict[str, Any]


def templates(cluster: SimCluster | gateway_cluster.Cluster) -> Templates:
    """The pod templates of all Deployments: what must not change, or pods are replaced."""
    found = {ref.name: obj for ref, obj in cluster.objects.items() if ref.kind == "Deployment"}
    return {name: copy.deepcopy(obj["spec"]["template"]) for name, obj in found.items()}


def a_released_pool(case: str, platform: Platform) -> SimCluster:
    return released.cluster_of(copy.deepcopy(RELEASED["pools"][case]), platform)


def a_released_gateway(case: str) -> gateway_cluster.Cluster:
    return released.gateway_of(copy.deepcopy(RELEASED["gateways"][case]))


def member(case: str, **more: Any) -> InferencePool:
    return gateway_cluster.pool("llama", **{**released.GATEWAYS[case], **more})


# --- an operator on the world of another version ----------------------------------------------------------------------


@pytest.mark.parametrize("case", released.POOLS)
def test_a_newer_operator_rolls_no_pod_of_a_pool_until_it_is_asked_to(case: str) -> None:
    spec = released.POOLS[case]
    cluster = a_released_pool(case, NEXT)
    before, pods = templates(cluster), set(cluster.pods)
    cluster.converge(a_pool(**spec))
    assert (templates(cluster), set(cluster.pods)) == (before, pods)
    assert cluster.plan(a_pool(**spec)).actions == ()

    asked = a_pool(**spec, rollout={"templateVersion": NEXT.template_version})
    cluster.converge(asked)
    assert pods & set(cluster.pods) == set()
    serving = [obj for obj in cluster.deployments().values() if obj["spec"]["replicas"]]
    versions = {obj["metadata"]["annotations"][names.TEMPLATE_VERSION] for obj in serving}
    assert versions == {str(NEXT.template_version)}


@pytest.mark.parametrize("case", released.GATEWAYS)
def test_a_newer_operator_rolls_neither_picker_nor_envoy_until_it_is_asked_to(case: str) -> None:
    cluster = a_released_gateway(case)
    before = templates(cluster)
    cluster.converge(member(case), platform=NEXT)
    assert templates(cluster) == before
    cluster.converge(member(case, rollout={"templateVersion": NEXT.template_version}), platform=NEXT)
    rolled = set()
    for ref, obj in cluster.objects.items():
        if ref.kind == "Deployment":
            assert obj["metadata"]["annotations"][names.TEMPLATE_VERSION] == str(NEXT.template_version)
            rolled |= {ref.name} if obj["spec"]["template"] != before[ref.name] else set()
    assert "treeline-edge" in rolled or case == "attached"


STEPS = ("upgrade", "back", "more", "fewer", "pause", "lost pod")


@settings(max_examples=30, deadline=None)
@given(case=st.sampled_from(list(released.POOLS)), story=st.lists(st.sampled_from(STEPS), max_size=8))
def test_no_story_of_upgrades_rollbacks_and_everyday_changes_rolls_a_pod(case: str, story: list[str]) -> None:
    spec = dict(released.POOLS[case])
    cluster = a_released_pool(case, NEXT)
    before = templates(cluster)
    for step in story:
        match step:
            case "upgrade" | "back":
                cluster.platform = NEXT if step == "upgrade" else released.NOW
            case "more" | "fewer":
                spec["replicas"] = max(0, spec.get("replicas", 1) + (1 if step == "more" else -1))
            case "pause":
                spec["rollout"] = {"paused": not spec.get("rollout", {}).get("paused", False)}
            case "lost pod":
                cluster.pods.pop(min(cluster.pods, default=""), None)
        cluster.converge(a_pool(**spec))
        # The version that made them may mend them, never another one; and neither makes others.
        assert {name: t["spec"] for name, t in templates(cluster).items()} == {
            name: t["spec"] for name, t in before.items()
        }
        assert len(cluster.pods) == spec.get("replicas", 1)


@pytest.mark.parametrize("case", released.POOLS)
def test_an_older_operator_leaves_alone_what_a_newer_one_made(case: str) -> None:
    """A rollback of the operator."""
    pool = a_pool(**released.POOLS[case])
    cluster = SimCluster(NEXT)
    cluster.converge(pool)
    before, pods = templates(cluster), set(cluster.pods)
    cluster.platform = released.NOW
    cluster.converge(pool)
    assert (templates(cluster), set(cluster.pods)) == (before, pods)


@pytest.mark.parametrize("case", released.GATEWAYS)
def test_an_older_operator_leaves_alone_the_gateway_of_a_newer_one(case: str) -> None:
    cluster = gateway_cluster.Cluster()
    cluster.converge(member(case), platform=NEXT)
    before = templates(cluster)
    cluster.converge(member(case), platform=released.NOW)
    assert templates(cluster) == before


MADE = {
    **{f"pool-{case}": ("pools", case, released.pool_objects, spec) for case, spec in released.POOLS.items()},
    **{f"gateway-{case}": ("gateways", case, released.gateway_objects, s) for case, s in released.GATEWAYS.items()},
}


@pytest.mark.parametrize("name", MADE)
def test_a_spec_that_says_the_same_is_made_into_the_same(name: str) -> None:
    """The hash of a spec is what keeps an upgrade from rolling: how it is computed never changes. And what was released
    under a number of the template is what that number makes."""
    kind, case, make, spec = MADE[name]
    then, now = (
        {obj["metadata"]["annotations"][names.INPUTS]: obj for obj in objects if obj["kind"] == "Deployment"}
        for objects in (RELEASED[kind][case], make(spec))
    )
    assert then.keys() == now.keys()
    if RELEASED["version"] and RELEASED["templateVersion"] == TEMPLATE_VERSION:
        for inputs, obj in then.items():
            assert obj["spec"]["template"] == now[inputs]["spec"]["template"], "raise world.TEMPLATE_VERSION"


LATER = {"ofALaterVersion": {"a": [1, None]}}


@pytest.mark.parametrize("case", ["plain", "full", "vllm"])
def test_fields_of_a_later_version_are_passed_over_and_change_no_revision(case: str) -> None:
    """CRDs go first, and an operator may be rolled back: both leave an operator with fields that it does not know."""
    known = {
        "model": {"uri": "builtin://tiny"},
        "engine": {},
        "gateway": {},
        "drain": {},
        **released.POOLS[case],
    }
    meta = {"name": "tiny", "namespace": "serving", "uid": "pool-uid"}
    body = {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": meta}
    sections = ("model", "engine", "gateway", "drain")
    grown = {**known, **{section: {**known[section], **LATER} for section in sections}, **LATER}
    then, now = (InferencePool.from_object({**body, "spec": spec}) for spec in (known, grown))
    assert now.spec == then.spec
    assert revision.inputs(now) == revision.inputs(then)
    of_picker = (own_pool(msgspec.Raw(msgspec.json.encode({**body, "spec": spec}))) for spec in (known, grown))
    assert len(set(map(repr, of_picker))) == 1


# --- flags, configuration, names --------------------------------------------------------------------------------------


def containers(of: str) -> list[tuple[str, dict[str, Any]]]:
    """Every container with the component's name that the last release made, with its case."""
    return [
        (f"{kind}-{case}", container)
        for kind in ("pools", "gateways")
        for case, objects in RELEASED[kind].items()
        for obj in objects
        if obj["kind"] == "Deployment"
        for pod in [obj["spec"]["template"]["spec"]]
        for container in (*pod.get("initContainers", ()), *pod["containers"])
        if container["name"] == of
    ]


def test_components_of_this_version_take_the_flags_of_the_last_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator that is older than the images it is told to use."""
    monkeypatch.setenv("TREELINE_ENVOY", str(ENVOY))
    taken = {"epp": picker_options, "edge": launcher_options}
    found = [(parse, told["args"]) for name, parse in taken.items() for _, told in containers(name)]
    own = ["python", "-m", "treeline_runtime"]
    found += [(runtime_options, told["args"]) for _, told in containers("runtime") if told.get("command") == own]
    found += [(download_options, told["args"]) for _, told in containers("model")]
    assert len(found) >= 3 + 2 + 2 + 1
    for parse, arguments in found:
        assert parse(arguments)


def test_names_that_several_components_spell_are_those_of_the_last_release() -> None:
    now = released.spelled()
    for where, spelled in RELEASED["names"].items():
        assert spelled.items() <= now[where].items(), where


@pytest.mark.integration
@pytest.mark.deep
async def test_an_envoy_of_the_last_release_works_with_this_versions_picker(tmp_path: Path) -> None:
    listen, admin, health = free_ports(3)
    (text,) = (
        obj["data"]["envoy.json"]
        for obj in RELEASED["gateways"]["plain"]
        if obj["kind"] == "ConfigMap" and "envoy.json" in obj["data"]
    )
    async with engines(1) as (engine,), running_picker("--endpoint", f"one={engine.address}") as picker:
        grpc, eds = picker.options.grpc_port, picker.options.grpc_health_port
        ports = RELEASED["names"]["ports"]
        there = (edge.LISTEN_PORT, edge.ADMIN_PORT, edge.HEALTH_PORT, ports["EXT_PROC"], ports["EDS"])
        moved = dict(zip(there, (listen, admin, health, grpc, eds), strict=True))
        config = EnvoyConfig(listen_port=listen, admin_port=admin, access_log=None)

        def as_released(bootstrap: dict[str, Any]) -> None:
            bootstrap.clear()
            bootstrap.update(relocated(json.loads(text), moved))

        async with running_envoy(config, tmp_path, patch=as_released) as envoy, httpx.AsyncClient(timeout=60) as http:
            body = {"model": "tiny", "prompt": "hello"}
            answer = await http.post(f"{envoy.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert [seen.path for seen in engine.served] == ["/v1/completions"]
            answer = await http.get(f"http://127.0.0.1:{health}/ready")
            assert answer.status_code == 200
        page = (await picker.get("/endpoints")).content
        assert msgspec.json.decode(page).keys() >= {"synced", "pools"}


# --- messages ---------------------------------------------------------------------------------------------------------


def relocated(value: Any, moved: dict[int, int]) -> Any:
    """The configuration with every socket on loopback, at another port."""
    if isinstance(value, list):
        return [relocated(item, moved) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() >= {"address", "port_value"}:
        return {**value, "address": "127.0.0.1", "port_value": moved[value["port_value"]]}
    return {key: relocated(item, moved) for key, item in value.items()}


# --- messages ---------------------------------------------------------------------------------------------------------

SAID = RELEASED["messages"]


def message(frames_in_hex: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in frames_in_hex]


def packed(document: Any) -> bytes:
    return msgspec.msgpack.encode(document)


def test_messages_of_the_last_release_mean_what_they_meant() -> None:
    batch = decode_batch(bytes.fromhex(SAID["events"]))
    assert (batch.ts, tuple(batch.events), batch.rejected) == (1.5, released.EVENTS, {})
    assert decode_load(TREELINE_LOAD_TOPIC, bytes.fromhex(SAID["load"])) == released.REPORT
    assert decode_load(LOAD_TOPIC, bytes.fromhex(SAID["stat"])) == released.STAT
    assert tuple(frames.parse_reply(message(one)) for one in SAID["replies"]) == released.REPLIES
    asked = [frames.parse_request(message(one)) for one in SAID["requests"]]
    assert asked == [frames.HelloRequest(1), frames.SnapshotRequest(1)]
    assert TokenizerBundle.from_json(SAID["tokenizer"].encode()) == released.BUNDLE


def test_what_a_later_version_adds_to_a_message_is_passed_over() -> None:
    """Members of maps anywhere, the tails of arrays, a higher version of a reply, events of a new kind."""
    ts, events, rank = msgspec.msgpack.decode(bytes.fromhex(SAID["events"]))
    grown = [ts, [{**event, **LATER} for event in events] + [{"type": "BlockMoved", **LATER}], rank, LATER]
    batch = decode_batch(packed(grown))
    assert (tuple(batch.events), batch.rejected) == (released.EVENTS, {"unknown_type": 1})

    load = msgspec.msgpack.decode(bytes.fromhex(SAID["load"]))
    assert decode_load(TREELINE_LOAD_TOPIC, packed({**load, **LATER})) == released.REPORT
    stat = msgspec.msgpack.decode(bytes.fromhex(SAID["stat"]))
    assert decode_load(LOAD_TOPIC, packed([*stat, 17, LATER])) == released.STAT

    for reply, one in zip(released.REPLIES, SAID["replies"], strict=True):
        *head, _, payload = message(one)
        said = msgspec.msgpack.decode(payload)
        if isinstance(said, dict):
            assert frames.parse_reply([*head, b"2", packed({**said, **LATER})]) == reply
    for one in SAID["requests"]:
        *head, _ = message(one)
        assert frames.parse_request([*head, b"2"]) == type(frames.parse_request(message(one)))(2)  # type: ignore[misc]

    bundle = json.loads(SAID["tokenizer"])
    assert TokenizerBundle.from_json(json.dumps({**bundle, **LATER}).encode()) == released.BUNDLE


def test_a_message_may_lack_what_a_later_version_will_find_there() -> None:
    """The other way round: an older sender knows fewer members. All but what identifies a thing have defaults."""
    assert decode_load(TREELINE_LOAD_TOPIC, packed({})) == type(released.REPORT)()
    assert decode_load(LOAD_TOPIC, packed(["LoadStat"])) == type(released.STAT)()
    ts, events, _ = msgspec.msgpack.decode(bytes.fromhex(SAID["events"]))
    bare = [{key: event[key] for key in ("type", "block_hashes") if key in event} for event in events]
    batch = decode_batch(packed([ts, bare]))
    assert [type(event) for event in batch.events] == [type(event) for event in released.EVENTS]


def test_the_operator_reads_the_list_of_a_picker_of_either_version() -> None:
    endpoint = {"name": "a-1", "address": "10.0.0.1:8000", "ready": True, "draining": False}
    said = {"synced": True, "pools": {"a": {"models": ["tiny"], "endpoints": [endpoint]}}, "detail": {}}
    view = picker_probe._view(picker_probe._decode(json.dumps(said).encode()))
    assert view.pools == {"a": (PickerEndpoint("a-1", "10.0.0.1:8000", ready=True),)}
    assert view.models == {"a": ("tiny",)}
    pool = {**said["pools"]["a"], "endpoints": [{**endpoint, **LATER}], **LATER}  # type: ignore[index]
    later = json.dumps({**said, "pools": {"a": pool}, **LATER}).encode()
    assert picker_probe._view(picker_probe._decode(later)) == view
