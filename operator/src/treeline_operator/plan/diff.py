"""The differences between desired and present state, and the writes and deletes that follow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import msgspec

from treeline_operator import names
from treeline_operator.actions import Apply, Delete
from treeline_operator.plan.canonical import canonical, is_quantity, is_unset
from treeline_operator.quantity import quantity
from treeline_operator.world import Observed, Ref

_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "schedulingGates": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
}
"""Lists that the API server merges by these keys; all others are replaced as a whole."""
_CONTAINER_PORT: Final = ("containerPort", "protocol")
_SERVICE_PORT: Final = ("port", "protocol")
_KEY_DEFAULTS: Final = {"protocol": "TCP"}

_WHOLE: Final[dict[str, tuple[str, ...]]] = {
    "Service": ("selector", "ports"),
    "Deployment": ("template",),
    "LeaderWorkerSet": ("leaderWorkerTemplate",),
    "PersistentVolumeClaim": (),
}
"""The fields of a `spec` that are the operator's with all that is in them: what others add there is removed. Of the
kinds that are not named it is the whole `spec`."""
_RESTARTED: Final = "kubectl.kubernetes.io/restartedAt"
_NODE_PORT: Final = "nodePort"
_LEFT: Final = frozenset({f"f:{_RESTARTED}", f"f:{_NODE_PORT}"})
"""Fields of others that stay: `kubectl rollout restart`, and the port that external clients use."""

_SELECTORS: Final = frozenset({"f:selector", "f:podSelector", "f:nodeSelector"})
"""Maps that one owner controls as a whole."""
_NOTHING: Final = object()

KEPT_KINDS: Final = frozenset({"PersistentVolumeClaim"})
"""Kinds that pruning keeps: downloaded models stay until their pool is deleted."""


def differences(desired: dict[str, Any], observed: dict[str, Any]) -> tuple[str, ...]:
    """The paths at which a field of `desired` has another value in `observed`. Other fields of `observed`, such as
    defaults and users' labels, are ignored; see `additions`."""
    identity = {"apiVersion", "kind", "status"}
    wanted = {k: v for k, v in desired.items() if k not in identity}
    return tuple(_differing((), "", wanted, observed))


def _differing(keys: tuple[str, ...], path: str, want: Any, have: Any) -> Iterator[str]:
    """Compare recursively. `keys` is the path of field names; `path` is the same for people, with list keys."""
    if want is None:
        return
    if isinstance(want, dict):
        if not isinstance(have, dict):
            yield path
            return
        for name, value in want.items():
            inner = (*keys, name)
            shown = f"{path}.{name}" if path else name
            if name not in have:
                if not is_unset(name, _trimmed(inner, value)):
                    yield shown
            else:
                yield from _differing(inner, shown, value, have[name])
    elif isinstance(want, list | tuple):
        if not isinstance(have, list):
            yield path
            return
        merge_by = merge_keys(keys, want)
        if merge_by is not None:
            yield from _differing_map(keys, path, want, have, merge_by)
        elif len(want) != len(have):
            yield path
        else:
            for index, (one, other) in enumerate(zip(want, have, strict=True)):
                yield from _differing(keys, f"{path}[{index}]", one, other)
    elif not _equal(keys, want, have):
        yield path


def _trimmed(keys: tuple[str, ...], value: Any) -> Any:
    """`value` as the API server would store it; a map with only unset fields is dropped."""
    kept = canonical(value, keys)
    return None if kept == {} and value != {} else kept


def _differing_map(
    keys: tuple[str, ...], path: str, want: Any, have: list[Any], merge_by: tuple[str, ...]
) -> Iterator[str]:
    found = {merge_key(item, merge_by): item for item in have if isinstance(item, dict)}
    for item in want:
        key = merge_key(item, merge_by)
        shown = f"{path}[{','.join(str(part) for part in key)}]"
        if key in found:
            yield from _differing(keys, shown, item, found[key])
        else:
            yield shown


def merge_keys(keys: tuple[str, ...], items: Any) -> tuple[str, ...] | None:
    """By which fields the API server merges a list at this path of keys; None for one that is replaced as a whole."""
    name = keys[-1] if keys else ""
    if name == "ports" and items and all(isinstance(item, dict) for item in items):
        if all("containerPort" in item for item in items):
            return _CONTAINER_PORT
        return None if {"ingress", "egress"} & set(keys) else _SERVICE_PORT
    return _KEYS.get(name)


def merge_key(item: dict[str, Any], merge_by: tuple[str, ...]) -> tuple[Any, ...]:
    """The key of an item in such a list."""
    return tuple(item.get(name, _KEY_DEFAULTS.get(name)) for name in merge_by)


def _equal(keys: tuple[str, ...], want: Any, have: Any) -> bool:
    if want == have and isinstance(want, bool) == isinstance(have, bool):
        return True
    if is_quantity(keys):
        number = quantity(want)
        return number is not None and number == quantity(have)
    return False


def additions(desired: dict[str, Any], observed: Observed) -> tuple[str, ...]:
    """The paths of what others added to the fields that are ours as a whole."""
    fields = _WHOLE.get(desired["kind"])
    mine = (path for path in observed.foreign if fields is None or path[1].removeprefix("f:") in fields)
    there = observed.object if observed.foreign else {}
    return tuple(
        ".".join(step.partition(":")[2] for step in path)
        for path in mine
        if path[-1] not in _LEFT and _is_added(path, _at(desired, path), there)
    )


def _is_added(path: tuple[str, ...], wanted: Any, there: dict[str, Any]) -> bool:
    return wanted is _NOTHING or (path[-1] in _SELECTORS and canonical(wanted) != canonical(_at(there, path)))


def _at(value: Any, path: tuple[str, ...]) -> Any:
    """The field that `managedFields` spell so, or _NOTHING."""
    for step in path:
        form, _, key = step.partition(":")
        if form == "f" and isinstance(value, dict):
            value = value.get(key, _NOTHING)
        elif form == "k" and isinstance(value, list):
            wanted = msgspec.json.decode(key)
            items = (item for item in value if merge_key(item, tuple(wanted)) == tuple(wanted.values()))
            value = next(items, _NOTHING)
        else:
            return _NOTHING
    return value


def whole_spec(desired: dict[str, Any], there: dict[str, Any]) -> dict[str, Any] | None:
    """The `spec` of `there` with the fields that we own as a whole replaced by the desired ones; None if there are
    none."""
    fields = _WHOLE.get(desired["kind"])
    if "spec" not in desired or fields == ():
        return None
    if fields is None:
        spec: dict[str, Any] = desired["spec"]
        return spec
    spec = {**there["spec"], **{name: desired["spec"][name] for name in fields}}
    if desired["kind"] == "Service":
        ports = {port.get("name"): port[_NODE_PORT] for port in there["spec"].get("ports", ()) if _NODE_PORT in port}
        known = ({_NODE_PORT: ports[port["name"]]} if port["name"] in ports else {} for port in spec["ports"])
        spec["ports"] = [{**more, **port} for port, more in zip(spec["ports"], known, strict=True)]
    elif restarted := (there["spec"].get("template", {}).get("metadata", {}).get("annotations") or {}).get(_RESTARTED):
        meta = spec["template"]["metadata"]
        annotations = {**meta.get("annotations", {}), _RESTARTED: restarted}
        spec["template"] = {**spec["template"], "metadata": {**meta, "annotations": annotations}}
    return spec


def applying(
    desired: dict[str, Any], observed: Observed | None, why: str, *, ignore_paths: Collection[str] = ()
) -> Apply | None:
    """The write that makes `observed` equal `desired`; None if it is equal.

    `ignore_paths` are fields that others set at any time (the replicas of a revision): they alone cause no write.
    `drift` is reported only if our intent equals that of our last write.
    """
    desired = _unmarked(desired)
    mark = names.digest(canonical(_without(desired, ignore_paths)))
    annotations = {**desired["metadata"].get("annotations", {}), names.APPLIED: mark}
    wanted = {**desired, "metadata": {**desired["metadata"], "annotations": annotations}}
    if observed is None:
        return Apply(wanted, why)
    there = observed.object
    before = there["metadata"].get("annotations", {}).get(names.APPLIED)
    differing = tuple(path for path in differences(desired, there) if path not in ignore_paths)
    added = additions(desired, observed)
    if before == mark:
        drift = (*differing, *added)
        return Apply(wanted, f"{why}: changed by hand", drift, bool(added)) if drift else None
    return Apply(wanted, why, clears=bool(added))


def _unmarked(desired: dict[str, Any]) -> dict[str, Any]:
    """`desired` without a mark: marks are computed from it, so it must not contain one."""
    annotations = desired["metadata"].get("annotations", {})
    if names.APPLIED not in annotations:
        return desired
    kept = {name: value for name, value in annotations.items() if name != names.APPLIED}
    return {**desired, "metadata": {**desired["metadata"], "annotations": kept}}


def _without(obj: dict[str, Any], paths: Collection[str]) -> dict[str, Any]:
    for path in paths:
        name, _, rest = path.partition(".")
        if name in obj:
            inner = {k: v for k, v in obj.items() if k != name}
            obj = {**inner, name: _without(obj[name], (rest,))} if rest else inner
    return obj


def prune(
    children: Collection[Observed], wanted: Collection[Ref], owner_uid: str, *, kept: Collection[Ref] = ()
) -> tuple[Delete, ...]:
    """Deletes of objects with our label and the controller `owner_uid` that are no longer wanted, except objects that
    are already being deleted, and downloaded models."""
    stays = {_identity(ref) for ref in (*wanted, *kept)}
    return tuple(
        Delete(child.ref, child.uid, "no longer wanted")
        for child in sorted(children, key=lambda child: child.ref)
        if _identity(child.ref) not in stays
        and child.ref.kind not in KEPT_KINDS
        and is_ours(child.object["metadata"], owner_uid)
    )


def is_ours(metadata: dict[str, Any], owner_uid: str) -> bool:
    """Whether an object is ours to delete: labelled, controlled by this owner, and not yet being deleted."""
    if metadata.get("deletionTimestamp") or metadata.get("labels", {}).get(names.MANAGED_BY) != names.MANAGER:
        return False
    owners = metadata.get("ownerReferences", ())
    return any(owner.get("controller") and owner["uid"] == owner_uid for owner in owners)


def _identity(ref: Ref) -> tuple[str, str, str, str]:
    """The same object in another version of its group is the same object."""
    group = ref.api_version.rpartition("/")[0]
    return group, ref.kind, ref.namespace, ref.name
