"""The admin port's HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
from support.epp_io import running_picker
from support.http import client
from treeline_epp.admin import PROBES, Page, PageServer, why_not_local
from treeline_epp.console.pages import files


def broken(_query: Mapping[str, str]) -> Page:
    raise RuntimeError("broken")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    pages = {
        "/echo": lambda query: Page(dict(query)),
        "/text": lambda _query: Page(b"plain", content_type="text/plain"),
        "/ready": lambda _query: Page({"ready": False}, 503),
        "/broken": broken,
    }
    admin = PageServer(pages)
    yield await admin.start("127.0.0.1", 0)
    await admin.stop()


async def test_pages_are_served(port: int) -> None:
    async with client(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/echo", params={"pod": "a b"})).json() == {"pod": "a b"}
        text = await http.get("/text")
        assert (text.text, text.headers["content-type"]) == ("plain", "text/plain")
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/broken")).status_code == 500
        assert (await http.get("/nothing")).status_code == 404
        assert (await http.post("/echo")).status_code == 405


@pytest.mark.parametrize(
    "data", [b"\r\n\r\n", b"GET /\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"x" * 20_000, b"\xff\xfe"]
)
async def test_bytes_that_are_not_http_do_not_harm_the_server(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    writer.close()
    async with client() as http:
        assert (await http.get(f"http://127.0.0.1:{port}/text")).text == "plain"


async def test_a_private_page_is_shown_to_loopback_and_refused_to_web_pages() -> None:
    admin = PageServer(dict.fromkeys(("/open", "/ready", "/tree"), lambda _query: Page({})), private=("/tree",))
    port = await admin.start("127.0.0.1", 0)
    try:
        async with client(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/tree")).status_code == 200
            assert (await http.get("/tree", headers={"Sec-Fetch-Site": "none"})).status_code == 200
            for headers in ({"Host": "evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-origin"}):
                assert (await http.get("/tree", headers=headers)).status_code == 403
                assert (await http.get("/open", headers=headers)).status_code == 403
                assert (await http.get("/ready", headers=headers)).status_code == 200
        for version, status in ((b"1.1", b"400"), (b"1.0", b"403")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /tree HTTP/%s\r\n\r\n" % version)
            answer = await asyncio.wait_for(reader.read(), 60)
            assert answer.split(b" ")[1] == status, "no Host"
            writer.close()
    finally:
        await admin.stop()


@pytest.mark.parametrize("address", ["10.0.0.9", "::ffff:10.0.0.9", "fd00::9"])
def test_requests_to_another_address_than_loopback_are_not_local_with_any_host(address: str) -> None:
    assert why_not_local([(b"Host", b"127.0.0.1:9004")], address) == f"the request came to {address}"
    assert why_not_local([(b"Host", b"127.0.0.1:9004")], "::ffff:127.0.0.1") is None


async def test_a_connection_without_a_request_is_closed_after_a_while(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeline_epp.admin._TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /text HT")
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_only_get_and_head_are_served_and_a_connection_is_for_one_request(port: int) -> None:
    async with client(base_url=f"http://127.0.0.1:{port}") as http:
        refused = await http.put("/text")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        got, head = await http.get("/text"), await http.head("/text")
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-type", "content-length", "connection"):
            assert head.headers[name] == got.headers[name]
        assert (await http.get("/text")).headers["connection"] == "close"
        assert (await http.get("/nothing")).json()["pages"] == ["/broken", "/echo", "/ready", "/text"]
        assert (await http.get("/beside/nothing")).json()["pages"] == [], "those of its own folder"


@pytest.mark.parametrize("debug", [True, False])
async def test_no_page_of_the_picker_answers_a_web_page_by_a_name_rebound_to_loopback(debug: bool) -> None:
    """All routes that a picker has, on both of its ports: a new one is in here without a line. Of the console's files,
    which hold nothing, it gets what is in the package."""
    async with running_picker("--endpoint", "a=127.0.0.1:1", debug=debug, ready=False) as picker:
        listed = (await picker.get("/no-such-page")).json()["pages"]
        assert {"/live", "/ready", "/endpoints"} < {*listed}
        assert ("/debug/tree" in listed) is debug
        public = {*files(), "/", "/console"} & {*listed}
        assert bool(public) is debug
        for path in public:
            shown = await picker.get(path)
            async with client(base_url=f"http://127.0.0.1:{picker.options.admin_port}") as http:
                assert (await http.get(path, headers={"Host": "evil.example"})).content == shown.content
        places = [(picker.options.admin_port, path) for path in {*listed} - PROBES - public] + [
            (picker.options.metrics_port, "/metrics")
        ]
        for port, path in places:
            for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
                async with client(base_url=f"http://127.0.0.1:{port}") as http:
                    for ask in (http.get, http.post):
                        assert (await ask(path, headers=headers)).status_code == 403, (path, headers)
