"""Which commits of the Hub the pods of a pool have: what the first of them found is passed to all that come later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from treeline_wire.models import HubModel, commits_of, commits_text

from treeline_operator import names
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.facts import created, downloaded, find, is_leaving
from treeline_operator.plan.objects import Object, manifest
from treeline_operator.world import PoolWorld

KEY: Final = "commits"
"""In the ConfigMap of `names.commits`; `treeline_runtime.fetch` reads its value from the environment."""


def moving(pool: InferencePool) -> frozenset[str]:
    """What the pods download of a branch or a tag, or of no revision at all: tomorrow it may be other files."""
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
    """URI → commit, as it is written down: what is there stays, and of what is missing the word of the oldest pod
    that has it counts, or else of one that downloads it."""
    there = find(world.children, "ConfigMap", names.commits(world.pool.name))
    known = commits_of(((there.object.get("data") or {}) if there is not None else {}).get(KEY, ""))
    wanted = moving(world.pool)
    for commits in (*reported(world).values(), commits_of(commits_text(world.commits))):
        known = {uri: commit for uri, commit in commits.items() if uri in wanted} | known
    return known


def record(commits: Mapping[str, str], meta: Object) -> Object:
    """The ConfigMap that pods of later take their commits from."""
    return manifest("v1", "ConfigMap", meta, data={KEY: commits_text(dict(sorted(commits.items())))})


def differing(world: PoolWorld) -> str:
    """Which pods have another commit than the one that is written down, in words; empty where none has."""
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
