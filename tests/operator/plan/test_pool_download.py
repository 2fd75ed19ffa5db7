"""A pod gets its model: the download's command line, credentials that it alone sees, image volumes."""

from __future__ import annotations

import json

from support.pool_world import a_pool, template
from treeline_operator.plan.download import files
from treeline_operator.plan.runtime import pod_template
from treeline_operator.world import Images
from treeline_runtime.fetch.__main__ import parse


def test_the_download_takes_its_command_line() -> None:
    pool = a_pool(
        model={"uri": "hf://org/name@v1", "tokenizer": "hf://org/words"},
        accelerator={"type": "nvidia"},
        engine={"type": "vllm", "adapters": [{"name": "a", "uri": "hf://org/adapter"}]},
    )
    (init,) = pod_template(pool, "abc", Images())["spec"]["initContainers"]
    assert init["command"] == ["python", "-m", parse.__module__.removesuffix(".__main__")]
    parsed = parse(init["args"])
    assert parsed.uri == ["hf://org/name@v1", "hf://org/adapter"]
    assert parsed.tokenizer_uri == "hf://org/words"
    assert parsed.to[0] == files(pool).model == "/models/org--name--v1"
    assert init["image"] == Images().epp, "the engine's node need not have the runtime's image"


def test_credentials_of_an_object_store_reach_the_download_alone() -> None:
    pool = a_pool(model={"uri": "s3://bucket/llama/8b", "credentialsSecretRef": {"name": "store"}})
    pod = pod_template(pool, "abc", Images())["spec"]
    (init,) = pod["initContainers"]
    assert init["args"] == ["--uri=s3://bucket/llama/8b", "--to=/models/s3,bucket,llama,8b"]
    assert init["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert "store" not in json.dumps(pod["containers"])
    assert "/models/s3,bucket,llama,8b" in json.dumps(pod["containers"])


def test_a_model_in_an_image_is_mounted_and_not_downloaded() -> None:
    adapter = {"name": "a", "uri": "oci://r.io/org/adapter:v2"}
    pool = a_pool(
        model={"uri": "oci://r.io:5000/org/name:v1/weights"},
        accelerator={"type": "nvidia"},
        engine={"type": "vllm", "adapters": [adapter]},
    )
    pod = pod_template(pool, "abc", Images())["spec"]
    assert "initContainers" not in pod
    images = {volume["name"]: volume["image"]["reference"] for volume in pod["volumes"] if "image" in volume}
    assert sorted(images.values()) == ["r.io/org/adapter:v2", "r.io:5000/org/name:v1"]
    (main,) = pod["containers"]
    places = {images[m["name"]]: m["mountPath"] for m in main["volumeMounts"] if m["name"] in images}
    assert places["r.io:5000/org/name:v1"] == "/mnt/images/r.io=5000/org/name=v1"
    assert files(pool).model == f"{places['r.io:5000/org/name:v1']}/weights"
    assert files(pool).adapters == {"a": places["r.io/org/adapter:v2"]}


def test_the_token_is_in_the_download_only() -> None:
    made = template(model={"uri": "hf://org/name", "tokenSecretRef": {"name": "hf", "key": "t"}})
    assert json.dumps(made["spec"]["containers"]).count("HF_TOKEN") == 0
    (init,) = made["spec"]["initContainers"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "t"}}} in init["env"]
