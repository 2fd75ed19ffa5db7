"""Lays the user's fragment of a pod template over ours: lists by name. The user's value wins, except for fields that we
need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from treeline_operator.plan.diff import differences, merge_key
from treeline_operator.plan.objects import Object

_DEEP: Final = frozenset({"containers", "initContainers"})
_BY_KEY: Final = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets", "adapters"), ("name",)),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "hostAliases": ("ip",),
}
_ADDED: Final = frozenset({"tolerations"})
_HANDLERS: Final = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})
_OF_GROUPS: Final = "leaderworkerset.sigs.k8s.io/"
"""Prefix of the labels and annotations that LeaderWorkerSet's controller sets."""
_HANDLED: Final = frozenset({"startupProbe", "readinessProbe", "livenessProbe", "preStop", "postStart"})


class TemplateInvalid(ValueError):
    """The user's fragment is not shaped like a pod template; the message says where."""


def laid_over(ours: Object, fragments: Iterable[Object], container: str) -> Object:
    """The pod template `ours` with the users' fragments laid over it, one after the other. Fields of the pod and of our
    `container` that fragments cannot change stay as they are. Raises TemplateInvalid."""
    return _kept(ours, _over(ours, fragments), container)


def overruled(ours: Object, fragments: Iterable[Object], container: str) -> tuple[str, ...]:
    """The paths in a user's fragment without effect, because the operator keeps its own values. Raises
    TemplateInvalid."""
    asked = _over(ours, fragments)
    return differences(asked, _kept(ours, asked, container))


def _over(ours: Object, fragments: Iterable[Object]) -> Object:
    made = ours
    for fragment in fragments:
        if unknown := sorted(fragment.keys() - ours.keys()):
            raise TemplateInvalid(f"template: {unknown[0]} is not part of a pod template: use metadata and spec")
        made = merged(made, fragment)
        if made.keys() != ours.keys() or "containers" not in made["spec"]:
            raise TemplateInvalid("template: metadata, spec and its containers cannot be removed")
    return made


def _kept(ours: Object, made: Object, container: str) -> Object:
    """Restore the fields that a fragment cannot change: our labels, the numbers of groups, the ports that others
    connect to, and time to drain."""
    metadata = {**made["metadata"], "labels": {**made["metadata"].get("labels", {}), **ours["metadata"]["labels"]}}
    for name in metadata.keys() & {"labels", "annotations"}:
        metadata[name] = {key: value for key, value in metadata[name].items() if not key.startswith(_OF_GROUPS)}
    spec = {**made["spec"]}
    grace = ours["spec"]["terminationGracePeriodSeconds"]
    asked = spec.get("terminationGracePeriodSeconds")
    spec["terminationGracePeriodSeconds"] = max(grace, asked) if isinstance(asked, int) else grace
    main = next(c for c in ours["spec"]["containers"] if c["name"] == container)
    spec["containers"] = [
        {**c, "ports": _ports(main["ports"], c.get("ports", ()))} if c["name"] == container else c
        for c in spec["containers"]
    ]
    return {**made, "metadata": metadata, "spec": spec}


def _ports(ours: list[Object], theirs: Any) -> list[Object]:
    names_, numbers = ({port[field] for port in ours} for field in ("name", "containerPort"))
    return [*ours, *(p for p in theirs if p.get("name") not in names_ and p["containerPort"] not in numbers)]


def merged(ours: Any, theirs: Any, name: str = "", *, keep_unset: bool = False) -> Any:
    """Merge `theirs` over `ours`; `name` is the field of both.

    Maps are merged, and null removes our field; with `keep_unset` it stays, for a later merge. Containers are merged by
    name; environment, volumes, mounts and ports are replaced one by one; tolerations are added; other lists are
    replaced. A probe or hook has one handler: another one replaces ours. Raises TemplateInvalid.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        kept = ours
        if name in _HANDLED and _HANDLERS & theirs.keys():
            kept = {k: v for k, v in ours.items() if k not in _HANDLERS}
        result = {k: v for k, v in kept.items() if k not in theirs}
        said = {k: v for k, v in theirs.items() if keep_unset or v is not None}
        changed = {k: v if v is None else merged(kept.get(k), v, k, keep_unset=keep_unset) for k, v in said.items()}
        # Our fields keep their place, so that a rendered template reads the same with and without the fragment.
        return {k: result[k] if k in result else changed[k] for k in [*kept, *changed] if k in result or k in changed}
    if isinstance(ours, list) and isinstance(theirs, list):
        return _merged_list(ours, theirs, name, keep_unset)
    for kind, word in ((dict, "map"), (list, "list")):
        if isinstance(ours, kind):
            raise TemplateInvalid(f"template: {name or 'the fragment'} must be a {word}")
    return theirs


def _merged_list(ours: list[Any], theirs: list[Any], name: str, keep_unset: bool) -> list[Any]:
    if name in _ADDED:
        return [*ours, *(item for item in theirs if item not in ours)]
    keys = _BY_KEY.get(name)
    if keys is None:
        return theirs
    if not all(isinstance(item, dict) and keys[0] in item and _is_key(item, keys) for item in theirs):
        raise TemplateInvalid(f"template: every item of {name} needs a {keys[0]}")
    found = {merge_key(item, keys): item for item in ours}
    for item in theirs:
        key = merge_key(item, keys)
        mine = found.get(key) if name in _DEEP else None
        found[key] = item if mine is None else merged(mine, item, keep_unset=keep_unset)
    return list(found.values())


def _is_key(item: Object, keys: Iterable[str]) -> bool:
    return all(isinstance(item.get(name, ""), str | int) for name in keys)
