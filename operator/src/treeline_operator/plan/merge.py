"""The user's fragment of a pod template laid over ours: lists by name, and the user wins but for what we need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from treeline_operator.plan.diff import differences
from treeline_operator.plan.objects import Object

_DEEP: Final = frozenset({"containers", "initContainers"})
_BY_KEY: Final = {
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
}
_ADDED: Final = frozenset({"tolerations"})
_HANDLERS: Final = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})
_HANDLED: Final = frozenset({"startupProbe", "readinessProbe", "livenessProbe", "preStop", "postStart"})


class TemplateInvalid(ValueError):
    """The user's fragment does not have the shape of a pod template; the message says where."""


def laid_over(ours: Object, fragments: Iterable[Object], container: str) -> Object:
    """The pod template `ours` with the users' fragments laid over it, one after the other, but for what they cannot
    change of the `container` that is ours and of its pods. Raises TemplateInvalid."""
    return _kept(ours, _over(ours, fragments), container)


def overruled(ours: Object, fragments: Iterable[Object], container: str) -> tuple[str, ...]:
    """The paths of what users say in vain, since the operator keeps its own. Raises TemplateInvalid."""
    asked = _over(ours, fragments)
    return differences(asked, _kept(ours, asked, container))


def _over(ours: Object, fragments: Iterable[Object]) -> Object:
    made = ours
    for fragment in fragments:
        if unknown := sorted(fragment.keys() - ours.keys()):
            raise TemplateInvalid(f"template: {unknown[0]} is not part of a pod template; it has metadata and spec")
        made = merged(made, fragment)
        if made.keys() != ours.keys() or "containers" not in made["spec"]:
            raise TemplateInvalid("template: metadata, spec and its containers cannot be taken away")
    return made


def _kept(ours: Object, made: Object, container: str) -> Object:
    """What a fragment cannot change: our labels, the ports by which pods are reached, and time enough to drain."""
    metadata = {
        **made["metadata"],
        "labels": {**made["metadata"].get("labels", {}), **ours["metadata"]["labels"]},
    }
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
    names_, numbers = {port["name"] for port in ours}, {port["containerPort"] for port in ours}
    added = [port for port in theirs if port.get("name") not in names_]
    if not all(isinstance(port.get("containerPort"), int) for port in added):
        raise TemplateInvalid("template: every item of ports needs a containerPort")
    return [*ours, *(port for port in added if port["containerPort"] not in numbers)]


def merged(ours: Any, theirs: Any, name: str = "") -> Any:
    """`theirs` over `ours`; `name` is the field that both are the value of.

    Maps are merged, and a null takes our field away. Containers are merged by name; environment, volumes, mounts and
    ports are replaced one by one; tolerations are added; all other lists are replaced. A probe or hook has one handler:
    naming another replaces ours. Raises TemplateInvalid.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        kept = ours
        if name in _HANDLED and _HANDLERS & theirs.keys():
            kept = {k: v for k, v in ours.items() if k not in _HANDLERS}
        result = {k: v for k, v in kept.items() if k not in theirs}
        changed = {k: merged(kept.get(k), v, k) for k, v in theirs.items() if v is not None}
        # Our fields keep their place, so that a rendered template reads the same with and without the fragment.
        return {k: result[k] if k in result else changed[k] for k in [*kept, *changed] if k in result or k in changed}
    if isinstance(ours, list) and isinstance(theirs, list):
        return _merged_list(ours, theirs, name)
    for kind, word in ((dict, "map"), (list, "list")):
        if isinstance(ours, kind):
            raise TemplateInvalid(f"template: {name or 'the fragment'} must be a {word}")
    return theirs


def _merged_list(ours: list[Any], theirs: list[Any], name: str) -> list[Any]:
    if name in _ADDED:
        return [*ours, *(item for item in theirs if item not in ours)]
    key = "name" if name in _DEEP else _BY_KEY.get(name)
    if key is None:
        return theirs
    if not all(isinstance(item, dict) and isinstance(item.get(key), str) for item in theirs):
        raise TemplateInvalid(f"template: every item of {name} needs a {key}")
    return _by_key(ours, theirs, key, deep=name in _DEEP)


def _by_key(ours: list[Any], theirs: list[Any], key: str, *, deep: bool) -> list[Any]:
    found = {item.get(key): item for item in ours}
    for item in theirs:
        mine = found.get(item.get(key))
        found[item.get(key)] = merged(mine, item) if deep and mine is not None else item
    return list(found.values())
