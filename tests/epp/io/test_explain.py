"""`treeline pick explain` and the debug pages that it reads, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.http import client
from treeline_epp import explain_command
from treeline_epp.admin import Handler, Page, PageServer, Question
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.explain_api import DECISIONS, EXPLAIN
from treeline_epp.metrics import Metrics
from treeline_epp.pages import decisions_page, explain_page
from treeline_epp.picking.decision import Lease
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.decision_log import DecisionLog
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire.load import TreelineLoad

CHAT = {"model": "m", "messages": [{"role": "user", "content": "the secret word"}]}


@pytest.fixture
async def router() -> Router:
    picker = Picker(PickerConfig(seed=1))
    for name, address in (("a", "10.0.0.1:8000"), ("b", "10.0.0.2:8000"), ("c", "10.0.0.3:8000")):
        picker.add_endpoint(EndpointSpec(name, address))
        picker.on_load(name, TreelineLoad(prefill_tokens_per_s=1e4, waiting_uncached_tokens=ord(name)), 0.0)
    picker.set_draining("c", True)
    return Router(picker, ModelRegistry(), Metrics(), clock=lambda: 1.0)


@pytest.fixture
async def url(router: Router) -> AsyncIterator[str]:
    pages: dict[str, Handler] = {"/ready": lambda _query: Page({"ready": True})}
    log = router.decisions = DecisionLog()
    pages[DECISIONS] = lambda query: decisions_page(log, query)
    questions: dict[str, Question] = {EXPLAIN: lambda data: explain_page(router, data)}
    private = [DECISIONS, *questions]
    admin = PageServer(pages, private, questions=questions, question_bytes=10_000)
    port = await admin.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await admin.stop()


async def explain(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = await asyncio.to_thread(explain_command.main, argv)
    said = capsys.readouterr()
    return status, said.out, said.err


def route(router: Router) -> None:
    headers = {":path": "/v1/chat/completions", ":method": "POST", "x-request-id": "r1"}
    assert isinstance(router.route(RouteRequest(headers, json.dumps(CHAT).encode(), None)), Lease)


async def test_a_body_from_a_file_is_explained_as_a_table(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "chat.json"
    body.write_text(json.dumps(CHAT))
    status, out, _ = await explain(capsys, str(body), "--url", url)
    head, columns, first, second, left_out = out.splitlines()
    assert (status, head) == (0, "policy predicted_ttft")
    assert columns.split()[:7] == ["rank", "endpoint", "cached", "host", "disk", "uncached", "queued"]
    assert (first.split()[:2], second.split()[:2]) == (["1", "a"], ["2", "b"])
    assert left_out == "   -  c: drains"


async def test_json_has_every_term_and_nothing_was_reserved(
    router: Router, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "chat.json"
    body.write_text(json.dumps(CHAT))
    _, out, _ = await explain(capsys, str(body), "--url", url, "--json")
    first = json.loads(out)["endpoints"][0]
    assert first["terms"]["queued_tokens"] == 97
    assert first["terms"]["cost_s"] > first["terms"]["prefill_s"] > 0
    assert not any(endpoint.load.reservations for endpoint in router.picker.endpoints.values())


async def test_a_request_that_would_be_refused_says_so(
    router: Router, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "chat.json"
    body.write_text("[]")
    status, out, _ = await explain(capsys, str(body), "--url", url)
    assert (status, out.splitlines()[1]) == (1, "refused: The request body must be a JSON object.")
    for name in "ab":
        router.picker.set_ready(name, False)
    body.write_text(json.dumps(CHAT))
    status, out, _ = await explain(capsys, str(body), "--url", url)
    assert (status, out.splitlines()[1]) == (1, "refused: no endpoint is ready")
    assert "   -  a: is not ready" in out.splitlines()


async def test_the_last_decisions_are_shown_without_their_prompts(
    router: Router, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (await explain(capsys, "--url", url, "--last", "5"))[1] == "no decision has been taken yet\n"
    route(router)
    status, out, _ = await explain(capsys, "--url", url, "--last", "5")
    assert (status, out.splitlines()[0]) == (0, "r1: a, policy predicted_ttft")
    assert "   -  c: drains" in out.splitlines()
    assert "prompt" not in out
    _, out, _ = await explain(capsys, "--url", url, "--last", "5", "--json")
    (told,) = json.loads(out)["decisions"]
    assert told["endpoint"] == "a"
    assert "secret" not in out


async def test_pages_refuse_invalid_requests(url: str) -> None:
    async with client(base_url=url) as http:
        for wrong in (b"", b"{}", b'{"path": 1}', b'{"path": "/", "body": "%", "headers": {}}', b"\xff"):
            assert (await http.post("/debug/explain", content=wrong)).status_code == 400
        assert (await http.post("/debug/explain", content=b" " * 10_001)).status_code == 413
        assert (await http.get("/debug/explain")).status_code == 405
        assert (await http.post("/debug/decisions")).status_code == 405
        assert (await http.post("/nothing")).status_code == 405
        assert (await http.get("/debug/decisions", params={"last": "many"})).status_code == 400
        browser = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
        assert (await http.post("/debug/explain", content=b"{}", headers=browser)).status_code == 403


async def test_an_unreachable_picker_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "chat.json"
    body.write_text("{}")
    pages: dict[str, Handler] = {"/debug/decisions": lambda _query: Page(b"<html>", content_type="text/html")}
    admin = PageServer(pages)
    port = await admin.start("127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{port}"
        status, _, err = await explain(capsys, str(body), "--url", url)
        assert status == 1
        assert "--enable-debug-endpoints" in err
        assert "does not answer as a picker" in (await explain(capsys, "--last", "1", "--url", url))[2]
    finally:
        await admin.stop()
    said = (await explain(capsys, str(body), "--url", url))[2]
    assert "admin port (Connection refused): start one, or give --url" in said
    assert "is not an address" in (await explain(capsys, str(body), "--url", "unix:/x"))[2]
    assert "No such file" in (await explain(capsys, str(tmp_path / "none"), "--url", url))[2]
