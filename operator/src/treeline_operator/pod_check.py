"""What the API server would refuse in a pod template, as far as its schema and its plainest rules tell without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from treeline_operator.api.misfits import misfit
from treeline_operator.plan.canonical import is_quantity
from treeline_operator.plan.diff import differences
from treeline_operator.quantity import quantity

Object = dict[str, Any]


def problems(template: Object) -> Iterator[str]:
    """What is wrong with a rendered template, each as `path: what`.

    (The client's types of Kubernetes take a second to load, and the running operator never needs them: it asks the API
    server.)
    """
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
        yield from (f"{path}: there is no such field" for path in differences(template, plain))
    yield from _of_spec(template["spec"])


def _of_spec(spec: Object) -> Iterator[str]:
    if spec.get("restartPolicy", "Always") != "Always":
        yield "spec.restartPolicy: a Deployment's pods have Always"
    containers = [*spec.get("initContainers", ()), *spec.get("containers", ())]
    yield from (f"spec: {count} containers are called {name}" for name, count in _twice(containers, "name"))
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    for container in containers:
        where = f"spec.containers[{container['name']}]"
        if not container.get("image"):
            yield f"{where}: image is required; a container of another name than ours is one more container"
        for mount in container.get("volumeMounts", ()):
            if mount.get("name") not in volumes:
                yield f"{where}.volumeMounts: there is no volume {mount.get('name')}"
        mounted = _twice(container.get("volumeMounts", ()), "mountPath")
        yield from (f"{where}.volumeMounts: {count} are at {path}" for path, count in mounted)
        yield from _of_resources(f"{where}.resources", container.get("resources") or {})


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
