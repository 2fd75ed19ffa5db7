"""Behind a Gateway of Gateway API that is not ours: it asks our picker, by the upstream InferencePool that we make.

TREELINE_E2E_GATEWAY_CLASS names a GatewayClass of the cluster whose gateway supports InferencePool. Without it, on the
`local` provider, Envoy Gateway with Envoy AI Gateway's extension is installed, if both are built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from treeline_bench.control_plane import Missing, programs

from e2e.cluster.images import wanted
from e2e.cluster.local import Local
from e2e.gateway_api import envoy_gateway
from e2e.gateway_api.envoy_gateway import EnvoyGateway, gateway
from e2e.kit.kube import Kube, condition
from e2e.kit.system import Installed, ask, await_answer, in_room, pool
from e2e.kit.traffic import traffic

CLASS = "TREELINE_E2E_GATEWAY_CLASS"
ROUTES = "httproutes.gateway.networking.k8s.io"
UPSTREAM = "inferencepools.inference.networking.k8s.io"


@pytest.fixture(scope="module")
def ours(kube: Kube) -> Iterator[EnvoyGateway | None]:
    """A gateway implementation to install; None if the cluster has one. It is removed at the end."""
    if os.environ.get(CLASS):
        yield None
        return
    local = Local()
    if local.status()["kubeconfig"] != str(kube.kubeconfig):
        pytest.skip(f"no gateway that supports InferencePool is known here: name its GatewayClass in {CLASS}")
    try:
        built = programs(*envoy_gateway.PROGRAMS)
    except Missing as missing:
        pytest.skip(str(missing))
    local.send_programs(envoy_gateway.images(built))
    found = EnvoyGateway(kube, built, next(image.name for image in wanted() if image.word == "edge"))
    yield found
    found.remove()


@pytest.fixture(scope="module")
def class_name(ours: EnvoyGateway | None) -> str:
    """A GatewayClass whose gateway supports InferencePool."""
    if ours is None:
        return os.environ[CLASS]
    ours.install()
    return envoy_gateway.CLASS


def behind_a_gateway(name: str, **spec: Any) -> dict[str, Any]:
    """Return a pool that a Gateway `inference` of its namespace serves."""
    found = pool(name, **spec)
    found["spec"]["gateway"] = {"parentRefs": [{"name": "inference"}]}
    return found


def url_of(treeline: Installed, name: str) -> str:
    """Return the Gateway's URL, once its implementation has published an address."""

    def address() -> str:
        found = treeline.kube.get("gateway", name, treeline.namespace) or {}
        told = (found.get("status") or {}).get("addresses") or ()
        return next((f"http://{one['value']}" for one in told), "")

    return str(treeline.until(address, f"an address of the Gateway {name}"))


def cached(url: str, number: int) -> int:
    """Return how many prompt tokens the chosen pod had cached."""
    usage = ask(url, messages=in_room(number)).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_missing_apis_are_reported_and_used_once_they_exist(treeline: Installed, ours: EnvoyGateway | None) -> None:
    if ours is None:
        pytest.skip("the cluster has Gateway API already")
    treeline.apply(behind_a_gateway("tiny", replicas=1))

    def told(kind: str, reason: str) -> bool:
        return bool(condition(treeline.pool("tiny"), kind).get("reason") == reason)

    treeline.until(lambda: told("GatewayReady", "GatewayApiMissing"), "no Gateway API to be told")
    ours.install_crds()
    treeline.until(lambda: told("RouteAccepted", "RoutePending"), "the route to be made without a restart")
    assert treeline.kube.get(ROUTES, "tiny", treeline.namespace)
    assert treeline.kube.get(UPSTREAM, "tiny-gie", treeline.namespace)
    ours.install_without_extension()
    treeline.apply(gateway("inference", envoy_gateway.CLASS))
    treeline.until(
        lambda: told("RouteAccepted", "UnsupportedByParent"),
        "a gateway that knows no InferencePool to be told",
    )
    assert "InvalidKind" in condition(treeline.pool("tiny"), "RouteAccepted")["message"]
    assert condition(treeline.pool("tiny"), "Ready")["status"] == "False"
    treeline.conclude()


def test_the_gateway_sends_requests_to_the_picked_pod(treeline: Installed, class_name: str, kept: Path) -> None:
    kube, namespace = treeline.kube, treeline.namespace
    treeline.apply(gateway("inference", class_name), behind_a_gateway("tiny"))
    treeline.await_ready("tiny")
    assert condition(treeline.pool("tiny"), "RouteAccepted")["status"] == "True"
    url = url_of(treeline, "inference")
    answer = await_answer(url)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    ours = [name for name in answer.headers if name.startswith("x-treeline-")]
    assert not ours, f"runtimes tell the picker, not clients: {ours}"

    rooms = range(8)
    for number in rooms:
        cached(url, number)
    # Each prompt is in one of the two caches. Without the picker half of them would miss.
    hits = [cached(url, number) > 200 for number in rooms]
    assert all(hits), hits

    with traffic(url, kept=kept) as driver:
        driver.await_served(5)
        treeline.change("tiny", replicas=3)
        treeline.await_ready("tiny")
        driver.await_served(10)
        treeline.change("tiny", replicas=1)
        treeline.await_ready("tiny")
        driver.await_served(5)
        report = driver.stop()
    assert not report.dropped, str(report)

    treeline.conclude()
    treeline.until(
        lambda: not kube.items(ROUTES, namespace) and not kube.items(UPSTREAM, namespace),
        "route and upstream pool to be gone",
    )


def test_one_of_two_pickers_is_deleted_under_traffic(treeline: Installed, class_name: str, kept: Path) -> None:
    """This gateway fails closed whatever the upstream pool sets; a second picker makes up for it."""
    treeline.apply(gateway("inference", class_name), behind_a_gateway("tiny", endpointPicker={"replicas": 2}))
    treeline.await_ready("tiny")
    url = url_of(treeline, "inference")
    await_answer(url)
    with traffic(url, kept=kept) as driver:
        for old in treeline.ready_pods("epp"):
            driver.await_served(5)
            treeline.delete_pod(old)
            treeline.until(
                lambda old=old: (
                    len({p["metadata"]["uid"] for p in treeline.ready_pods("epp")} - {old["metadata"]["uid"]}) == 2
                ),
                "two pickers",
            )
            treeline.await_ready("tiny")
        driver.await_served(10)
        report = driver.stop()
    assert not report.dropped, str(report)


def test_two_models_behind_one_gateway(treeline: Installed, class_name: str) -> None:
    treeline.apply(gateway("inference", class_name), behind_a_gateway("tiny", replicas=1))
    treeline.await_ready("tiny")
    # the oldest pool's route takes what names no model in a header, so there must be an oldest
    treeline.apply(behind_a_gateway("other", replicas=1, model={"uri": "builtin://tiny", "name": "other"}))
    treeline.await_ready("other")
    url = url_of(treeline, "inference")
    await_answer(url)

    def answered(model: str, **headers: str) -> tuple[int, str]:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        found = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30.0)
        return found.status_code, found.json().get("model", "")

    by_name = {"X-Gateway-Model-Name": "other"}
    treeline.until(lambda: answered("other", **by_name) == (200, "other"), "an answer by the other model")
    assert answered("tiny") == (200, "tiny")
    if not os.environ.get(CLASS):
        # This gateway follows the picker on every route, and the picker has read the body.
        assert answered("other") == (200, "other")
    assert answered("neither")[0] == 404
