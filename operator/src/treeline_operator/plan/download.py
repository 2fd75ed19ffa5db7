"""A pool's weights in its pods: the volumes, the claim that stores them, and the download."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from treeline_wire.models import HubModel, commits_of, commits_text

from treeline_operator import names
from treeline_operator.api.parts import KeyRef
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import DOWNLOADED, Source
from treeline_operator.plan.facts import DOWNLOAD, created, downloaded, find, is_leaving
from treeline_operator.plan.objects import Object, manifest, mount
from treeline_operator.world import PoolWorld

COMMITS: Final = "commits"
"""The entry in the ConfigMap of `names.commits`; `treeline_runtime.fetch` reads its value from the environment."""


def moving(pool: InferencePool) -> frozenset[str]:
    """The downloads of a branch, a tag or no revision, whose files may change."""
    spec = pool.spec
    uris = {spec.model.uri, spec.model.tokenizer or "", *(adapter.uri for adapter in spec.engine.adapters)}
    return frozenset(uri for uri in uris if uri.startswith("hf://") and not HubModel.parse(uri).is_pinned)


def reported(world: PoolWorld) -> dict[str, dict[str, str]]:
    """Pod → URI → commit, of the downloads that have ended; the oldest pod first."""
    if not moving(world.pool):
        return {}
    pods = sorted((pod.object for pod in world.pods), key=lambda pod: (created(pod), str(pod["metadata"]["name"])))
    return {pod["metadata"]["name"]: found for pod in pods if not is_leaving(pod) and (found := _told(pod))}


def recorded(world: PoolWorld) -> dict[str, str]:
    """URI → commit to record: recorded commits stay; a missing one comes from the oldest pod that has it, else from one
    that is downloading it."""
    there = find(world.children, "ConfigMap", names.commits(world.pool.name))
    known = commits_of(((there.object.get("data") or {}) if there is not None else {}).get(COMMITS, ""))
    wanted = moving(world.pool)
    for commits in (*reported(world).values(), commits_of(commits_text(world.commits))):
        known = {uri: commit for uri, commit in commits.items() if uri in wanted} | known
    return known


def record(commits: Mapping[str, str], meta: Object) -> Object:
    """The ConfigMap that pods of later take their commits from."""
    return manifest("v1", "ConfigMap", meta, data={COMMITS: commits_text(dict(sorted(commits.items())))})


def differing(world: PoolWorld) -> str:
    """The pods with another commit than the recorded one, in words; empty if none."""
    known = recorded(world)
    others = [
        f"pod {pod} has commit {commit} of {uri}, the pool's is {known[uri]}"
        for pod, commits in reported(world).items()
        for uri, commit in commits.items()
        if known.get(uri, commit) != commit
    ]
    return "; ".join(others[:3]) + ("" if len(others) <= 3 else f"; and {len(others) - 3} more")


def _told(pod: Object) -> dict[str, str]:
    ended = downloaded(pod)
    return {} if ended is None else commits_of(ended.get("message") or "")


BUILTIN_ROOT: Final = "/opt/treeline/models"
"""The folder of the models in the runtime image."""
DOWNLOADS: Final = "/models"
CLAIMS: Final = "/mnt/models"
IMAGES: Final = "/mnt/images"
_VOLUME: Final = "models"
_UNSAFE: Final = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of everything that an engine reads, and what the pod needs for them. `fetches` are arguments of
    `treeline_runtime.fetch`: sources and targets of downloads."""

    model: str
    tokenizer: str | None
    adapters: dict[str, str]
    volumes: tuple[dict[str, Any], ...]
    mounts: tuple[dict[str, Any], ...]
    fetches: tuple[str, ...]


def files(pool: InferencePool) -> Files:
    """Lay out a pool's model, tokenizer and adapters."""
    spec = pool.spec
    weights = [spec.model.uri, *(adapter.uri for adapter in spec.engine.adapters)]
    sources = {uri: Source.parse(uri) for uri in weights}
    fetches = [
        arg
        for uri, source in sources.items()
        if source.scheme in DOWNLOADED
        for arg in (f"--uri={uri}", f"--to={path(source)}")
    ]
    tokenizer = spec.model.tokenizer
    if tokenizer and tokenizer not in sources:
        sources[tokenizer] = Source.parse(tokenizer)
        if sources[tokenizer].scheme in DOWNLOADED:
            fetches += [f"--tokenizer-uri={tokenizer}", f"--tokenizer-to={path(sources[tokenizer])}"]
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, claim in enumerate(sorted({s.root for s in sources.values() if s.scheme == "pvc"})):
        name = f"claim-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        mounts.append(mount(name, f"{CLAIMS}/{claim}"))
    for number, image in enumerate(sorted({s.root for s in sources.values() if s.scheme == "oci"})):
        name = f"image-{number}"
        volumes.append({"name": name, "image": {"reference": image}})
        mounts.append(mount(name, path(Source("oci", image))))
    if fetches:
        volumes.append({"name": _VOLUME, **_downloads_volume(pool)})
        mounts.append(mount(_VOLUME, DOWNLOADS))
    return Files(
        model=path(sources[spec.model.uri]),
        tokenizer=path(sources[tokenizer]) if tokenizer else None,
        adapters={adapter.name: path(sources[adapter.uri]) for adapter in spec.engine.adapters},
        volumes=tuple(volumes),
        mounts=tuple(mounts),
        fetches=tuple(fetches),
    )


def path(source: Source) -> str:
    """The path of a source in the pod."""
    match source.scheme:
        case "builtin":
            return f"{BUILTIN_ROOT}/{source.root}"
        case "path":
            return source.root
        case "pvc":
            return f"{CLAIMS}/{source.root}/{source.path}".rstrip("/")
        case "oci":
            # A path to mount at has no colon.
            return f"{IMAGES}/{source.root.replace(':', '=')}/{source.path}".rstrip("/")
        case "s3" | "gs":
            # No part of a URI has a comma: no two sources are one folder.
            return f"{DOWNLOADS}/{','.join([source.scheme, source.root, *filter(None, source.path.split('/'))])}"
    folder = f"{source.root}@{source.revision}" if source.revision else source.root
    return f"{DOWNLOADS}/{_UNSAFE.sub('--', folder)}"


def _downloads_volume(pool: InferencePool) -> dict[str, Any]:
    cache = pool.spec.model.cache
    if cache is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": cache.claim_name or claim_name(pool.name)}}


def download_env(token: KeyRef | None, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The environment of a container that downloads; `token` is Hugging Face's."""
    env: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},
        {"name": "HF_HOME", "value": "/tmp/hf"},
        {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"},
        {"name": "HF_HUB_DISABLE_PROGRESS_BARS", "value": "1"},
        # Chunks would be cached for a second download, which never happens here.
        {"name": "HF_XET_CHUNK_CACHE_SIZE_BYTES", "value": "0"},
        *more,
    ]
    if token is not None:
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    return env


def init_container(pool: InferencePool, found: Files, image: str, pull_policy: str) -> dict[str, Any] | None:
    """The container that downloads, None if there is nothing to download. Only it ever sees token and credentials."""
    if not found.fetches:
        return None
    model = pool.spec.model
    commits = {"configMapKeyRef": {"name": names.commits(pool.name), "key": COMMITS, "optional": True}}
    more = [{"name": "TREELINE_COMMITS", "valueFrom": commits}] if moving(pool) else []
    container: dict[str, Any] = {
        "name": DOWNLOAD,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["python", "-m", "treeline_runtime.fetch"],
        "args": list(found.fetches),
        "env": download_env(model.token_secret_ref, *more),
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
        "terminationMessagePolicy": "File",
        "volumeMounts": [{"name": _VOLUME, "mountPath": DOWNLOADS}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    if model.credentials_secret_ref is not None:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret_ref.name}}]
    if model.cache is None and model.size is not None:
        container["resources"]["requests"]["ephemeral-storage"] = model.size
    return container


def claim_name(pool: str) -> str:
    """The claim that is made for a pool's downloads."""
    return f"{pool}-models"
