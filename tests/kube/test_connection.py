"""Retries, typed errors and the guard of writes, against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from treeline_kube.client import Client
from treeline_kube.clock import now
from treeline_kube.connection import Call, Retry
from treeline_kube.errors import (
    AlreadyExists,
    Cause,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    LostLease,
    NotFound,
    Throttled,
    Timeout,
    Unauthorized,
    Unavailable,
    error_of,
)
from treeline_kube.resources import Ref

REF = Ref("v1", "ConfigMap", "ns", "it")
OBJECT = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "it", "namespace": "ns"}}
QUICK = Retry(attempt_s=0.4, budget_s=3.0, attempts=5, base_s=0.005, cap_s=0.02)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply(body: Any, code: int = 200, headers: dict[str, str] | None = None) -> Handler:
    """Return a new answer each time: one that was sent cannot be sent again."""

    async def answer(request: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, status=code, headers=headers)

    return answer


def refusal(code: int, reason: str = "", headers: dict[str, str] | None = None, **details: Any) -> Handler:
    assert str(error_of(502, b"[" * 100_000, None, "x")).startswith("x: [[[")
    assert str(error_of(502, b'{"a":' * 100_000, None, "x")).startswith('x: {"a"')
    body = {"kind": "Status", "message": f"refused: {reason}", "reason": reason, "details": details or None}
    return reply(body, code, headers)


class Script:
    """Answers requests in the scripted order, then with 200; records requests and their times."""

    def __init__(self) -> None:
        self.answers: list[Handler] = []
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.times: list[float] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.times.append(time.monotonic())
        self.bodies.append(await request.read())
        return await (self.answers.pop(0) if self.answers else reply(OBJECT))(request)


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    runner = web.AppRunner(web.Application())
    runner.app.router.add_route("*", "/{path:.*}", script.handle)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
    await site.start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield script
    await runner.cleanup()


@pytest.fixture
async def cluster(script: Script) -> AsyncIterator[Client]:
    async with Client(Configuration(host=script.url), retry=QUICK, seed=1) as cluster:
        yield cluster


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("verb", "answers", "seen", "error"),
    [
        pytest.param("apply", [refusal(429)] * 4, 5, None, id="a storm of 429 is waited out"),
        pytest.param("create", [refusal(429)], 2, None, id="after 429 nothing was done"),
        *(pytest.param("apply", [one], 2, None) for one in (refusal(500), refusal(503), reply("bad", 502), hang_up)),
        *(pytest.param("create", [one], 1, Unavailable, id="it may have been done") for one in (refusal(500), hang_up)),
        pytest.param("apply", [refusal(500)] * 9, QUICK.attempts, Unavailable, id="attempts are bounded"),
    ],
)
async def test_idempotent_requests_are_repeated(
    script: Script, cluster: Client, verb: str, answers: list[Handler], seen: int, error: type[KubeError] | None
) -> None:
    script.answers = [*answers]
    with pytest.raises(error) if error else contextlib.nullcontext():
        assert await getattr(cluster, verb)(OBJECT) == OBJECT
    assert len(script.seen) == seen


async def test_retry_after_is_obeyed(script: Script, cluster: Client) -> None:
    script.answers = [refusal(429, headers={"Retry-After": "1"})]
    await cluster.get(REF)
    assert script.times[1] - script.times[0] >= 1.0


async def test_a_wait_beyond_the_budget_is_left_to_the_caller(script: Script, cluster: Client) -> None:
    script.answers = [refusal(429, headers={"Retry-After": "60"})]
    with pytest.raises(Throttled) as refused:
        await cluster.get(REF)
    assert refused.value.retry_after_s == 60
    assert len(script.seen) == 1


async def test_a_slow_answer_is_a_timeout_and_tried_again(script: Script, cluster: Client) -> None:
    script.answers = [hang]
    assert await cluster.get(REF) == OBJECT
    script.answers = [hang] * 9
    with pytest.raises(Timeout, match=r"no answer in 0\.\d s"):
        await cluster.request(Call("get", "x", "/x", retry=Retry(attempt_s=0.2, budget_s=0.5, base_s=0.01)))


async def test_a_missing_server_is_a_typed_error(cluster: Client) -> None:
    cluster.configuration.host = "http://127.0.0.1:9"
    with pytest.raises(Unavailable) as refused:
        await cluster.create(OBJECT)
    assert not refused.value.sent


async def test_a_final_refusal_is_not_retried(script: Script, cluster: Client) -> None:
    script.answers = [refusal(422, "Invalid", causes=[{"field": "spec.x", "reason": "R", "message": "no"}])]
    with pytest.raises(Invalid) as refused:
        await cluster.apply(OBJECT)
    assert refused.value.causes == (Cause("spec.x", "R", "no"),)
    assert refused.value.has_cause("R")
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (405, "MethodNotAllowed", KubeError),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (410, "Expired", Gone),
        (410, "Gone", Gone),
        (413, "RequestEntityTooLarge", Invalid),
        (422, "Invalid", Invalid),
        (429, "TooManyRequests", Throttled),
        (500, "InternalError", Unavailable),
        (503, "ServiceUnavailable", Unavailable),
        (504, "Timeout", Timeout),
    ],
)
def test_every_refusal_has_its_type(code: int, reason: str, kind: type[KubeError]) -> None:
    error = error_of(code, json.dumps({"message": "m", "reason": reason}).encode(), None, "get /x")
    assert type(error) is kind
    assert (str(error), error.code, error.reason) == ("get /x: m", code, reason)


def test_an_answer_that_is_not_the_api_servers_is_quoted_in_the_error() -> None:
    assert str(error_of(502, b"<html>bad gateway", None, "get /x")) == "get /x: <html>bad gateway"
    assert str(error_of(502, b"", None, "get /x")) == "get /x: HTTP 502"
    body = b'{"details": {"retryAfterSeconds": 3}}'
    assert error_of(429, body, None, "x").retry_after_s == 3
    assert error_of(429, body, "7", "x").retry_after_s == 7
    assert error_of(429, b"{}", "Wed, 21 Oct 2015 07:28:00 GMT", "x").retry_after_s is None


async def test_without_the_lease_nothing_is_written(script: Script, cluster: Client) -> None:
    cluster.deadline = lambda: now() - 0.001
    for write in (
        cluster.apply(OBJECT),
        cluster.create(OBJECT),
        cluster.delete(REF, uid="u"),
        cluster.scale(REF, "u", 1),
        cluster.update(OBJECT),
    ):
        with pytest.raises(LostLease):
            await write
    assert script.seen == []
    assert await cluster.get(REF) == OBJECT
    await cluster.update(OBJECT, guarded=False)


async def test_a_retry_does_not_outlive_the_lease(script: Script, cluster: Client) -> None:
    script.answers = [hang, refusal(500)]
    until = now() + 0.2
    cluster.deadline = lambda: until
    with pytest.raises(LostLease):
        await cluster.apply(OBJECT)
    assert len(script.seen) == 1


async def test_requests_are_counted(script: Script, cluster: Client) -> None:
    seen: list[tuple[str, str, int]] = []
    cluster.on_request = lambda verb, resource, code, seconds: seen.append((verb, resource, code))
    script.answers = [refusal(429), reply(OBJECT), hang_up]
    await cluster.apply(OBJECT)
    await cluster.apply_status(OBJECT)
    assert seen == [
        ("patch", "configmaps", 429),
        ("patch", "configmaps", 200),
        ("patch", "configmaps/status", 0),
        ("patch", "configmaps/status", 200),
    ]


async def test_requests_have_the_expected_form(script: Script, cluster: Client) -> None:
    await cluster.apply(OBJECT)
    request = script.seen[0]
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/ns/configmaps/it")
    assert request.content_type == "application/apply-patch+yaml"
    assert dict(request.query) == {
        "fieldManager": "treeline",
        "fieldValidation": "Strict",
        "force": "true",
    }
    assert json.loads(script.bodies[0]) == OBJECT
    await cluster.delete(REF, uid="u")
    assert json.loads(script.bodies[1]) == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": "u"},
        "propagationPolicy": "Background",
    }


async def test_a_log_is_read_once(script: Script, cluster: Client) -> None:
    script.answers = [reply("one\ntwo\n")]
    assert await cluster.logs("ns", "pod", "runtime", tail_lines=2) == "one\ntwo\n"
    assert script.seen[0].path == "/api/v1/namespaces/ns/pods/pod/log"
    assert dict(script.seen[0].query) == {
        "container": "runtime",
        "tailLines": "2",
        "limitBytes": "32768",
    }


async def test_a_warning_of_the_server_is_logged_once(
    script: Script, cluster: Client, caplog: pytest.LogCaptureFixture
) -> None:
    script.answers = [reply(OBJECT, headers={"Warning": '299 - "v1 is old"'})] * 2
    await cluster.get(REF)
    await cluster.get(REF)
    assert [record.getMessage() for record in caplog.records] == ['the API server warns: 299 - "v1 is old"']


async def test_a_token_that_ran_out_is_read_again_once(script: Script, tmp_path: Path) -> None:
    def kubeconfig(token: str) -> Path:
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            "clusters": [{"name": "c", "cluster": {"server": script.url}}],
            "users": [{"name": "c", "user": {"token": token}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    async with await Client.from_config(kubeconfig("first"), retry=QUICK) as cluster:
        kubeconfig("second")
        script.answers = [refusal(401)]
        assert await cluster.get(REF) == OBJECT
        assert [r.headers["authorization"] for r in script.seen] == ["Bearer first", "Bearer second"]
        script.answers = [refusal(401)] * 3
        with pytest.raises(Unauthorized):
            await cluster.get(REF)
        assert len(script.seen) == 4
        script.answers = [refusal(401)]
        kubeconfig("third")
        watch = Call("watch", "pods", "/api/v1/pods", [("watch", "true")])
        with pytest.raises(Unauthorized):
            async with cluster.watch(watch, 1.0):
                pass
        async with cluster.watch(watch, 1.0):
            assert script.seen[-1].headers["authorization"] == "Bearer third", "it was read for the next try"


async def test_an_unknown_kind_is_looked_up_once(script: Script, cluster: Client) -> None:
    kinds = [
        {"name": "widgets", "kind": "Widget", "namespaced": True},
        {"name": "widgets/status", "kind": "Widget", "namespaced": True},
    ]
    script.answers = [reply({"resources": kinds})]
    for _ in range(2):
        await cluster.get(Ref("x.dev/v1", "Widget", "ns", "w"))
    assert [request.path for request in script.seen] == [
        "/apis/x.dev/v1",
        "/apis/x.dev/v1/namespaces/ns/widgets/w",
        "/apis/x.dev/v1/namespaces/ns/widgets/w",
    ]
    script.answers = [reply({"resources": kinds})]
    with pytest.raises(NotFound, match="no Gadget"):
        await cluster.get(Ref("x.dev/v1", "Gadget", "ns", "w"))
    with pytest.raises(ValueError, match="needs a namespace"):
        await cluster.get(Ref("v1", "Pod", "", "p"))


async def test_a_list_that_grew_too_old_is_gone(script: Script, cluster: Client) -> None:
    page = {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]}
    script.answers = [reply(page), refusal(410, "Expired")]
    items = cluster.list("v1", "ConfigMap", "ns", "a=b,c", page=1)
    assert await anext(items) == {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    with pytest.raises(Gone):
        await anext(items)
    assert dict(script.seen[1].query) == {"limit": "1", "labelSelector": "a=b,c", "continue": "more"}
