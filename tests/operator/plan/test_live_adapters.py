"""The container that loads adapters into a running engine: its command line, files, credentials and ways out."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from support.operator_status import model
from support.operator_status import pool as of_shop
from support.pool_world import template
from treeline_operator.plan import live_adapters
from treeline_operator.plan.facts import requests
from treeline_runtime.fetch.adapters import parse
from treeline_wire import labels

SECRETS = {"tokenSecretRef": {"name": "hub", "key": "t"}, "credentialsSecretRef": {"name": "store"}}
LORA = {"lora": {"slots": 4, "maxRank": 32, "claims": ["one", "two"], **SECRETS}}


def test_it_takes_its_command_line_and_shares_the_engines_root() -> None:
    pod = template(engine={**LORA, "port": 9700})["spec"]
    (beside,), (engine,) = pod["initContainers"], pod["containers"]
    assert beside["command"] == ["python", "-m", parse.__module__]
    assert beside["restartPolicy"] == "Always", "it runs as long as the engine"
    args = parse(beside["args"])
    assert {f"--lora-root={args.root}", "--max-loras=4", "--max-lora-rank=32"} <= {*engine["args"]}
    assert (args.port, args.admin_port) == (9700, 9701)
    places = {mount["name"]: mount for mount in beside["volumeMounts"]}
    for mount in engine["volumeMounts"]:
        if mount["name"].startswith("adapter"):
            assert mount["readOnly"], "the engine reads"
            assert mount["mountPath"] == places[mount["name"]]["mountPath"]
            assert mount["mountPath"].startswith(f"{args.root}/")
    assert places["adapter-claim-1"]["mountPath"] == f"{args.root}/claims/two"
    assert not places["adapters"].get("readOnly")
    assert places["adapters"]["mountPath"] == f"{args.root}/fetched"
    wishes = next(volume for volume in pod["volumes"] if volume["name"] == "adapter-wishes")
    (item,) = wishes["downwardAPI"]["items"]
    assert item["fieldRef"] == {"fieldPath": f"metadata.annotations['{labels.ADAPTERS}']"}
    assert str(args.wishes) == f"{places['adapter-wishes']['mountPath']}/{item['path']}"


def test_a_pod_begins_without_adapters_and_others_are_as_they_were() -> None:
    assert template(engine=LORA)["metadata"]["annotations"] == {labels.ADAPTERS: "[]"}
    plain = json.dumps(template())
    assert labels.ADAPTERS not in plain
    assert "lora" not in plain


def test_the_sources_credentials_are_with_it_alone() -> None:
    pod = template(model={"uri": "hf://org/name"}, engine=LORA)["spec"]
    download, beside = pod["initContainers"]
    assert beside["envFrom"] == [{"secretRef": {"name": "store"}}]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}}
    assert token in beside["env"]
    for other in (download, *pod["containers"]):
        assert not {"store", "hub"} & {*json.dumps(other).replace('"', " ").split()}


def test_it_counts_beside_the_engine_where_the_scheduler_counts_requests() -> None:
    own, with_it = (requests(template(engine=engine)["spec"]) for engine in ({}, LORA))
    assert with_it["memory"] - own["memory"] == Decimal(128 << 20)


@pytest.mark.parametrize(
    ("engine", "spec", "expected"),
    [
        (LORA, {"adapter": {"uri": "s3://bucket/a"}}, True),
        (LORA, {"adapter": {"uri": "pvc://one/a"}}, False),
        (LORA, {}, False),
        (LORA, {"adapter": {"uri": "s3://bucket/a"}, "poolRef": {"name": "other"}}, False),
        ({}, {"adapter": {"uri": "s3://bucket/a"}}, False),
    ],
)
def test_the_way_out_is_open_while_an_adapter_is_to_download(engine, spec, expected) -> None:
    assert live_adapters.downloads(of_shop(engine=engine), [model("sql", **spec)]) is expected
