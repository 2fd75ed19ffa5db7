"""Finds errors in pod templates that the API server would refuse, as far as its schema and simple rules show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from pydantic import ValidationError

from treeline_operator.api.parts import misfit
from treeline_operator.plan.canonical import is_quantity
from treeline_operator.plan.diff import differences
from treeline_operator.quantity import quantity

Object = dict[str, Any]

_PULL: Final = ("Always", "IfNotPresent", "Never")
_PROFILE: Final = ("Localhost", "RuntimeDefault", "Unconfined")
_SELECTS: Final = ("DoesNotExist", "Exists", "Gt", "In", "Lt", "NotIn")
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "imagePullPolicy": _PULL,
    "image.pullPolicy": _PULL,
    "terminationMessagePolicy": ("FallbackToLogsOnError", "File"),
    "restartPolicy": ("Always", "Never", "OnFailure"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "preemptionPolicy": ("Never", "PreemptLowerPriority"),
    "protocol": ("SCTP", "TCP", "UDP"),
    "scheme": ("HTTP", "HTTPS"),
    "mountPropagation": ("Bidirectional", "HostToContainer", "None"),
    "whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "nodeAffinityPolicy": ("Honor", "Ignore"),
    "nodeTaintsPolicy": ("Honor", "Ignore"),
    "fsGroupChangePolicy": ("Always", "OnRootMismatch"),
    "supplementalGroupsPolicy": ("Merge", "Strict"),
    "procMount": ("Default", "Unmasked"),
    "tolerations.effect": ("", "NoExecute", "NoSchedule", "PreferNoSchedule"),
    "tolerations.operator": ("", "Equal", "Exists", "Gt", "Lt"),
    "matchExpressions.operator": _SELECTS,
    "matchFields.operator": _SELECTS,
    "seccompProfile.type": _PROFILE,
    "appArmorProfile.type": _PROFILE,
    "hostPath.type": (
        *("", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"),
    ),
}
"""Fields with a fixed set of words (core/v1 of Kubernetes 1.35), with their parent field where needed."""
_FREE: Final = frozenset(
    {"metadata", "nodeSelector", "matchLabels", "requests", "limits", "overhead", "volumeAttributes", "options"}
)
"""Maps with keys of the user's choice."""


def problems(template: Object) -> Iterator[str]:
    """Errors in a rendered template, each as `path: error`.

    (Kubernetes' client types take a second to load; the running operator asks the API server instead.)
    """
    misfits = list(_misfits(template))
    # Pods that do not fit the types are not checked further.
    yield from misfits or _of_spec(template["spec"])


def _misfits(template: Object) -> Iterator[str]:
    from kubernetes.client.models.v1_pod_template_spec import V1PodTemplateSpec

    try:
        typed = V1PodTemplateSpec.model_validate(template, extra="forbid")
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            number = isinstance(error["input"], int | float) and not isinstance(error["input"], bool)
            if not (number and is_quantity(tuple(str(part) for part in error["loc"]))):
                yield f"{_path(error['loc'])}: {misfit(error, V1PodTemplateSpec)}"
    else:
        # The types take Python's spelling of a field, too.
        plain = typed.model_dump(mode="json", by_alias=True, exclude_none=True)
        yield from (f"{path}: unknown field" for path in differences(template, plain))


def _of_spec(spec: Object) -> Iterator[str]:
    if spec.get("restartPolicy", "Always") != "Always":
        yield "spec.restartPolicy: a Deployment's pods have Always"
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    yield from (f"spec: {count} containers are called {name}" for name, count in _twice(containers, "name"))
    yield from _of_words("spec", spec)
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    claims = {claim.get("name") for claim in spec.get("resourceClaims") or ()}
    for container in containers:
        where = f"spec.containers[{container['name']}]"
        if not container.get("image"):
            yield f"{where}: image is required; a container of another name than ours is one more container"
        for mount in container.get("volumeMounts") or ():
            if mount.get("name") not in volumes:
                yield f"{where}.volumeMounts: there is no volume {mount.get('name')}"
        mounted = _twice(container.get("volumeMounts") or (), "mountPath")
        yield from (f"{where}.volumeMounts: {count} are at {path}" for path, count in mounted)
        yield from _of_resources(f"{where}.resources", container.get("resources") or {})
        for claim in (container.get("resources") or {}).get("claims") or ():
            if claim.get("name") not in claims:
                yield f"{where}.resources.claims: there is no {claim.get('name')} in spec.resourceClaims"


def _of_words(path: str, value: Any, name: str = "") -> Iterator[str]:
    """Words that fields do not take. `name` is the field that `value` is in."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _of_words(f"{path}[{index}]", item, name)
    elif isinstance(value, dict):
        for field, inner in value.items():
            words = _WORDS.get(f"{name}.{field}", _WORDS.get(field))
            if words is not None and inner is not None and inner not in words:
                yield f"{path}.{field}: {inner!r} is none of {', '.join(filter(None, words))}"
            elif field not in _FREE:
                yield from _of_words(f"{path}.{field}", inner, field)


def _of_resources(where: str, resources: Object) -> Iterator[str]:
    limits = resources.get("limits") or {}
    for kind in ("requests", "limits"):
        for name, asked in (resources.get(kind) or {}).items():
            if quantity(asked) is None:
                yield f"{where}.{kind}.{name}: {asked!r} is no quantity"
    for name, asked in (resources.get("requests") or {}).items():
        least, most = quantity(asked), quantity(limits.get(name))
        if least is not None and most is not None and least > most:
            yield f"{where}: {asked} of {name} are requested and limited to {limits[name]}"


def _twice(items: Any, key: str) -> Iterator[tuple[str, int]]:
    return ((name, count) for name, count in Counter(item.get(key) for item in items).items() if count > 1)


def _path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
