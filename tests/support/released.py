"""What the last release made and said, as it is kept in ``tests/operator/skew/released.json``, and how it is written.

Kept is what outlives the process that made it, and so meets the next version: the objects of some pools and gateways
(with them all flags, Envoy's configuration and the hashes that revisions are known by), the names that several
components must spell alike, and messages on the wire. ``TREELINE_RELEASED=write pytest tests/operator/skew`` writes
the file anew: at a release, and never to make a test pass after the first one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeline_operator import names
from treeline_operator.world import TEMPLATE_VERSION, Images, Platform, Ref
from treeline_wire import frames, headers, labels, ports, security
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch
from treeline_wire.load import LoadStat, TreelineLoad
from treeline_wire.load import encode as encode_load
from treeline_wire.tokenizer import TokenizerBundle

from support import gateway_cluster
from support.pool_world import EVERY_API, SimCluster, a_pool

FILE = Path(__file__).parents[1] / "operator" / "skew" / "released.json"
Object = dict[str, Any]

HF = {"uri": "hf://org/name", "name": "llama", "tokenSecretRef": {"name": "hf"}, "cache": {"size": "40Gi"}}
POOLS: dict[str, Object] = {
    "plain": {"replicas": 2},
    "full": {
        "model": {**HF, "size": "16Gi"},
        "replicas": 2,
        "accelerator": {"type": "nvidia", "class": "L40S", "runtimeClassName": "nvidia"},
        "engine": {"contextLength": 8192, "memoryFraction": 0.85, "pageSize": 16, "maxRunningRequests": 64},
        "template": {"spec": {"containers": [{"name": "runtime", "env": [{"name": "A", "value": "b"}]}]}},
        "drain": {"timeoutSeconds": 90},
    },
    "sglang": {
        "engine": {"type": "sglang", "tensorParallel": 2},
        "accelerator": {"type": "nvidia", "count": 2},
    },
    "vllm": {
        "model": {"uri": "pvc://weights/qwen"},
        "engine": {"type": "vllm"},
        "accelerator": {"type": "nvidia"},
        "gateway": {"parentRefs": [{"name": "front"}]},
    },
    "custom": {"engine": {"type": "custom", "image": "example.com/engine:1"}},
}
GATEWAYS = gateway_cluster.CASES
NOW = Platform(apis=EVERY_API)

STORED = BlockStored([1, 2], parent_block_hash=9, token_ids=[5, 6, 7, 8], block_size=2, cache_salt="salt")
EVENTS = (STORED, BlockRemoved([1, (1 << 64) - 1]), AllBlocksCleared())
REPORT = TreelineLoad(epoch=7, seq=3, running=2, waiting=1, pages_used=5, pages_total=100, in_flight=3, draining=True)
STAT = LoadStat(1, 2, 3, 4, 0, 5, 6, 7, 8, 9)
REPLIES = (
    frames.Hello(7, 1, 42),
    frames.SnapshotHeader(7, 42, 2),
    frames.SnapshotChunk([STORED]),
    frames.SnapshotEnd(),
)
BUNDLE = TokenizerBundle.build("{}", chat_template="{{ messages }}", special_tokens={"bos_token": "<s>"}, add_bos=True)


def next_version(than: int) -> Platform:
    """The platform of an operator that is newer than ``than``, with images of its own."""
    images = Images("runtime:next", "runtime-cuda:next", "epp:next", "edge:next")
    return replace(NOW, template_version=max(TEMPLATE_VERSION, than + 1), images=images)


def pool_objects(spec: Object) -> list[Object]:
    """The children of a pool whose pods serve."""
    cluster = SimCluster(NOW)
    cluster.converge(a_pool(**spec))
    return list(cluster.objects.values())


def gateway_objects(spec: Object) -> list[Object]:
    """The children of a gateway whose pods serve."""
    cluster = gateway_cluster.Cluster()
    cluster.converge(gateway_cluster.pool("llama", **spec), platform=NOW)
    return [obj for ref, obj in cluster.objects.items() if ref.kind not in ("Pod", "Secret")]


def cluster_of(objects: list[Object], platform: Platform) -> SimCluster:
    """The cluster in which these are a pool's children, with the pods that they ask for."""
    cluster = SimCluster(platform)
    for obj in objects:
        cluster.objects[ref_of(obj)] = obj
    cluster.controllers()
    cluster.make_ready()
    return cluster


def gateway_of(objects: list[Object]) -> gateway_cluster.Cluster:
    """The cluster in which these are a gateway's children, with the pods that they ask for."""
    cluster = gateway_cluster.Cluster()
    cluster.objects |= {ref_of(obj): obj for obj in objects}
    cluster.roll_out()
    return cluster


def ref_of(obj: Object) -> Ref:
    meta = obj["metadata"]
    return Ref(obj["apiVersion"], obj["kind"], meta["namespace"], meta["name"])


def spelled() -> dict[str, Any]:
    """Names and numbers by which components of different versions find and understand each other."""
    made = {
        "headers": vars(headers),
        "labels": vars(labels),
        "ports": vars(ports),
        "keys": {name: getattr(security, name) for name in ("PUBLIC_FILE", "SECRET_FILE")},
        "annotations": {k: v for k, v in vars(names).items() if isinstance(v, str)},
    }
    return {
        where: {k: v for k, v in found.items() if k.isupper() and isinstance(v, str | int)}
        for where, found in made.items()
    } | {
        "objects": {
            function.__name__: function("name")
            for function in (names.anchor, names.url_service, names.epp, names.edge, names.kv_keys)
        }
    }


def messages() -> dict[str, Any]:
    """What travels between a runtime and a picker, as hexadecimal frames, or as text."""
    return {
        "events": encode_batch(1.5, EVENTS).hex(),
        "load": encode_load(REPORT).hex(),
        "stat": encode_load(STAT).hex(),
        "requests": [[f.hex() for f in message] for message in (frames.hello_request(), frames.snapshot_request())],
        "replies": [[f.hex() for f in frames.encode_reply(reply)] for reply in REPLIES],
        "tokenizer": BUNDLE.to_json().decode(),
    }


def contract(version: str) -> dict[str, Any]:
    """All of it, as this version makes it."""
    return {
        "version": version,
        "templateVersion": TEMPLATE_VERSION,
        "names": spelled(),
        "messages": messages(),
        "pools": {case: pool_objects(spec) for case, spec in POOLS.items()},
        "gateways": {case: gateway_objects(spec) for case, spec in GATEWAYS.items()},
    }


def write(version: str) -> None:
    """Note what is made now as what the release ``version`` makes."""
    FILE.write_text(_text(contract(version)) + "\n")


def read() -> dict[str, Any]:
    """What the last release made."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def _text(value: Any, depth: int = 0) -> str:
    """JSON with a line for each object of a cluster."""
    pad = " " * (depth + 1)
    if isinstance(value, dict) and "kind" not in value:
        members = (f"{pad}{json.dumps(key)}: {_text(inner, depth + 1)}" for key, inner in sorted(value.items()))
        return "{\n" + ",\n".join(members) + "\n" + " " * depth + "}"
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + _text(inner, depth + 1) for inner in value) + "\n" + " " * depth + "]"
    return json.dumps(value, sort_keys=True)
