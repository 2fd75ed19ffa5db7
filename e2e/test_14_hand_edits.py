"""Hand edits that would break the URL are repaired; API keys stay when the pool that named them is deleted."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from e2e.kit.system import Installed, ask, pool

pytestmark = pytest.mark.short
KEY = "sk-journey-14"
GATEWAY = "treeline-gateway"


def edit(treeline: Installed, kind: str, name: str, *operations: dict[str, Any]) -> None:
    """Run `kubectl patch --type json`, as a person would."""
    patch = ("patch", kind, name, "--type=json", f"--patch={json.dumps(list(operations))}")
    treeline.kube.kubectl("-n", treeline.namespace, *patch)


def spec(treeline: Installed, kind: str, name: str) -> dict[str, Any]:
    """Return the live object's spec."""
    found = treeline.kube.get(kind, name, treeline.namespace)
    assert found is not None, f"{kind} {name} is gone"
    return dict(found["spec"])


def test_hand_edits_are_repaired(treeline: Installed) -> None:
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    url, service = treeline.url(), spec(treeline, "service", GATEWAY)
    (deployment,) = {
        owner["name"].rpartition("-")[0]
        for pod in treeline.ready_pods("edge")
        for owner in pod["metadata"]["ownerReferences"]
    }
    containers = spec(treeline, "deployment", deployment)["template"]["spec"]["containers"]

    edit(treeline, "service", GATEWAY, {"op": "add", "path": "/spec/selector/foreign", "value": "key"})
    edit(treeline, "service", GATEWAY, {"op": "replace", "path": "/spec/ports/0/port", "value": 81})
    edit(
        treeline, "deployment", deployment,
        {"op": "add", "path": "/spec/template/spec/containers/0/env", "value": [{"name": "FOREIGN", "value": "1"}]},
    )  # fmt: skip

    def repaired() -> bool:
        now = spec(treeline, "service", GATEWAY)
        template = spec(treeline, "deployment", deployment)["template"]
        return (
            now["selector"] == service["selector"]
            and [port["port"] for port in now["ports"]] == [port["port"] for port in service["ports"]]
            and "FOREIGN" not in json.dumps(template)
            and [one["name"] for one in template["spec"]["containers"]] == [one["name"] for one in containers]
        )

    treeline.until(repaired, "the operator to repair what was edited")
    treeline.await_ready("tiny")
    assert ask(treeline.url() or url).status_code == 200


def test_api_keys_stay_when_the_pool_that_named_them_is_deleted(treeline: Installed) -> None:
    secret = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "clients"},
        "data": {"me": base64.b64encode(KEY.encode()).decode()},
    }  # fmt: skip
    guarded = {"standalone": {"apiKeysSecretRef": {"name": "clients"}}}
    treeline.apply(secret, pool("first", replicas=1, gateway=guarded))
    treeline.await_ready("first")
    treeline.apply(pool("second", replicas=1))
    treeline.await_ready("second")
    url = treeline.url()
    assert ask(url, model_name="second").status_code == 401
    treeline.kube.kubectl("-n", treeline.namespace, "delete", "tlpool", "first", "--timeout=90s")
    treeline.await_ready("second")
    assert ask(url, model_name="second").status_code == 401
