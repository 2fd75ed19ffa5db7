"""Names, labels and annotations of everything that the operator makes."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from treeline_wire import labels

FIELD_MANAGER: Final = "treeline-operator"
STATUS_MANAGER: Final = "treeline-operator-status"

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "treeline"
GATEWAY: Final = "treeline.dev/gateway"
COMPONENT: Final = "treeline.dev/component"
REVISION: Final = "treeline.dev/revision"

APPLIED: Final = "treeline.dev/applied"
"""Hash of what we applied last, to see a field that we stopped to set."""
INPUTS: Final = "treeline.dev/inputs"
"""Hash of what in the pools' specs the pods of a picker or an Envoy were made from."""

DRAINING_SINCE: Final = "treeline.dev/draining-since"
"""The time when a leaving pod was taken out of rotation."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Of equally ready pods a ReplicaSet deletes the ones with the lowest cost first."""
LOWEST_COST: Final = "-2147483648"

ADMIN_KEY_FILE: Final = "key"
"""The entry in the Secret of `admin_key`."""
PICKER_ADMIN_PORT: Final = "admin"
"""Name of the port on which a picker's pod serves its probes and its list of endpoints."""
MAX_NAME: Final = 40
"""The longest name of a pool or gateway: derived names with their suffixes fit 63."""


def digest(value: Any, length: int = 10) -> str:
    """A short hash of plain JSON data, independent of key order."""
    text = msgspec.json.encode(value, order="sorted")
    return hashlib.sha256(text).hexdigest()[:length]


def deployment(pool: str, revision: str) -> str:
    """The Deployment of one revision of a pool."""
    return f"{pool}-{revision}"


PREFILL: Final = "-prefill"
"""Ending of the name of a revision whose pods compute prompts for those of the revision without it."""


def is_prefill(revision: str) -> bool:
    """Whether a revision's pods compute prompts only."""
    return revision.endswith(PREFILL)


def anchor(gateway: str) -> str:
    """The ConfigMap that owns everything that is shared by the pools of a gateway."""
    return f"{gateway}-gateway"


def url_service(gateway: str) -> str:
    """The Service behind which Envoy listens: the URL."""
    return f"{gateway}-gateway"


def epp(gateway: str) -> str:
    """Deployment, Service, ServiceAccount and Role of the picker."""
    return f"{gateway}-epp"


def epp_peers(gateway: str) -> str:
    """The headless Service with the pickers' own addresses."""
    return f"{epp(gateway)}-peers"


def edge(gateway: str) -> str:
    """Deployment, ServiceAccount and ConfigMap of Envoy."""
    return f"{gateway}-edge"


def kv_keys(gateway: str) -> str:
    """The Secret with the CURVE key pair of the runtimes' KV sockets."""
    return f"{gateway}-kv-keys"


def admin_key(pool: str) -> str:
    """The Secret with the key to the administration of a pool's engines."""
    return f"{pool}-admin-key"


def commits(pool: str) -> str:
    """The ConfigMap with the commits that a pool's pods download."""
    return f"{pool}-commits"


def upstream_pool(pool: str) -> str:
    """The Gateway API Inference Extension's InferencePool that mirrors ours."""
    return pool + labels.MIRROR_SUFFIX
