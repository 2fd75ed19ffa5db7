"""The user's fragment of a pod template laid over ours: lists by name, and the user wins but for what we need."""

from __future__ import annotations

from typing import Any, Final

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
