"""Pods that load adapters while they run: a container beside the engine brings the files and asks the engine.

It alone has the credentials of the sources. The engine's administration stays on the pod's loopback, which they share;
what the pod is to have is an annotation of the pod, so only who may change pods may say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from treeline_wire import labels

from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import is_downloaded
from treeline_operator.plan.download import download_env
from treeline_operator.plan.facts import ADAPTERS
from treeline_operator.plan.objects import Object, mount

_ROOT: Final = "/adapters"
"""The engine's --lora-root. Its two parts are volumes side by side: none can be mounted in a read-only one."""
_FETCHED: Final = f"{_ROOT}/fetched"
_WISHES: Final = "/etc/treeline/adapters"
_FILE: Final = "wishes"


def downloads(pool: InferencePool, models: Iterable[InferenceModel]) -> bool:
    """Whether a pool's pods may have to download an adapter, which they may at any time."""
    adapters = (model.spec.adapter for model in models if model.spec.pool_ref.name == pool.name)
    return pool.spec.engine.lora is not None and any(one is not None and is_downloaded(one.uri) for one in adapters)


def flags(pool: InferencePool) -> list[str]:
    """The engine's flags; none if its pods do not load adapters."""
    own = pool.spec.engine.lora
    if own is None:
        return []
    return [f"--lora-root={_ROOT}", f"--max-loras={own.slots}", f"--max-lora-rank={own.max_rank}"]


def no_wishes(pool: InferencePool) -> tuple[tuple[str, str], ...]:
    """The annotation that is filled later: a volume shows it as a file, whose changes reach a running pod."""
    return () if pool.spec.engine.lora is None else ((labels.ADAPTERS, "[]"),)


def mounts(pool: InferencePool, *, writes: bool = False) -> Iterator[Object]:
    """The files of adapters, as the engine reads them, or as the container beside it writes them."""
    own = pool.spec.engine.lora
    if own is not None:
        yield mount("adapters", _FETCHED, read_only=not writes)
        for number, claim in enumerate(own.claims):
            yield mount(f"adapter-claim-{number}", f"{_ROOT}/claims/{claim}")


def volumes(pool: InferencePool) -> Iterator[Object]:
    """Volumes of these mounts, and the wishes."""
    own = pool.spec.engine.lora
    if own is None:
        return
    yield {"name": "adapters", "emptyDir": {}}
    for number, claim in enumerate(own.claims):
        yield {"name": f"adapter-claim-{number}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    item = {"path": _FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{labels.ADAPTERS}']"}}
    yield {"name": "adapter-wishes", "downwardAPI": {"items": [item]}}


def container(pool: InferencePool, image: str, pull_policy: str, admin_port: int, security: Object) -> Object | None:
    """The container beside the engine; None if its pods do not load adapters."""
    own = pool.spec.engine.lora
    if own is None:
        return None
    made: dict[str, Any] = {
        "name": ADAPTERS,
        "image": image,
        "imagePullPolicy": pull_policy,
        "restartPolicy": "Always",
        "command": ["python", "-m", "treeline_runtime.fetch.adapters"],
        "args": [
            f"--wishes={_WISHES}/{_FILE}",
            f"--root={_ROOT}",
            f"--port={pool.spec.engine.port}",
            f"--admin-port={admin_port}",
        ],
        "env": download_env(own.token_secret_ref),
        "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}},
        "volumeMounts": [
            *mounts(pool, writes=True),
            mount("adapter-wishes", _WISHES),
            mount("tmp", "/tmp", read_only=False),
        ],
        "securityContext": security,
    }
    if own.credentials_secret_ref is not None:
        made["envFrom"] = [{"secretRef": {"name": own.credentials_secret_ref.name}}]
    return made
