"""The console through a real Envoy: by way of proxies in front of it, and under a flood."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from support.envoy import self_signed
from support.epp_io import Plane, data_plane, engines
from support.http import client
from support.ports import free_ports
from treeline_operator.envoy import Tls
from treeline_operator.envoy.config import Limits
from treeline_wire import headers as names

pytestmark = [pytest.mark.integration, pytest.mark.deep]

FILES = ("", "main.js", "console.css", "icon.svg")
OF_A_PAGE = {"Sec-Fetch-Site": "same-origin"}


@contextlib.asynccontextmanager
async def plane(folder: Path, **settings: object) -> AsyncIterator[Plane]:
    (port,) = free_ports(1)
    async with (
        engines(1) as fakes,
        data_plane(folder, fakes, "--admin-port", str(port), "--console", console_port=port, **settings) as running,
    ):
        yield running


@contextlib.asynccontextmanager
async def proxy(
    target: str, *, host: str | None = None, adds: Mapping[str, str] = {}, tls: Tls | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy in front of `target`. The proxy sends `host` as the Host, or the one that the client sent."""

    async def forward(request: web.Request) -> web.Response:
        kept = {"Host": host or request.host, **adds}
        kept |= {name: value for name, value in request.headers.items() if name.lower().startswith("sec-")}
        async with client() as http:
            answer = await http.request(request.method, target + request.path_qs, headers=kept)
        return web.Response(
            body=answer.content,
            status=answer.status_code,
            headers={name: answer.headers[name] for name in ("content-type", "location") if name in answer.headers},
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    (port,) = free_ports(1)
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate_file, tls.key_file)
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
    scheme = "http" if tls is None else "https"
    trusted = {} if tls is None else {"verify": ssl.create_default_context(cafile=tls.certificate_file)}
    try:
        async with client(base_url=f"{scheme}://localhost:{port}", **trusted) as http:
            yield http
    finally:
        await runner.cleanup()


async def test_a_client_that_came_over_tls_is_led_to_the_page_over_tls_and_by_the_name_it_used(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)
    async with plane(tmp_path) as running:
        for host in (None, f"127.0.0.1:{running.envoy.config.listen_port}"):
            says = {"X-Forwarded-Proto": "https"}
            async with proxy(running.envoy.url, host=host, adds=says, tls=tls) as browser:
                for path in ("/", "/console"):
                    page = await browser.get(path, follow_redirects=True)
                    assert page.status_code == 200
                    assert page.url == f"{browser.base_url}/console/", "neither http nor the gateway's own name"
                    assert "<title>Treeline</title>" in page.text
    async with plane(tmp_path, tls=tls) as running, client(verify=False, follow_redirects=True) as http:
        page = await http.get(running.envoy.url.replace("http:", "https:") + "/")
        assert (page.status_code, page.url.scheme) == (200, "https")


async def test_a_proxy_that_keeps_the_host_shows_the_page_and_nothing_private(tmp_path: Path) -> None:
    async with plane(tmp_path) as running:
        async with proxy(running.envoy.url, host="models.example") as stranger:
            for file in FILES:
                assert (await stranger.get(f"/console/{file}")).status_code == 200, file
            refused = await stranger.get("/console/data", headers=OF_A_PAGE)
            assert refused.status_code == 403
            assert "'models.example'" in refused.json()["error"]
        assert (await running.http.get("/console/data", headers=OF_A_PAGE)).status_code == 200


@pytest.mark.parametrize(
    "adds",
    [
        {"X-Forwarded-For": "203.0.113.9"},
        {"X-Forwarded-Host": "models.example"},
        {"X-Real-IP": "203.0.113.9"},
        {"Forwarded": "for=203.0.113.9"},
        {"Via": "1.1 proxy"},
    ],
    ids=lambda adds: next(iter(adds)),
)
async def test_a_proxy_that_changes_the_host_and_says_that_it_is_one_shows_nothing_private(
    tmp_path: Path, adds: Mapping[str, str]
) -> None:
    async with plane(tmp_path) as running:
        own = running.envoy.url.removeprefix("http://")
        async with proxy(running.envoy.url, host=own, adds=adds) as stranger:
            assert (await stranger.get("/console/", headers=OF_A_PAGE)).status_code == 200
            refused = await stranger.get("/console/data", headers=OF_A_PAGE)
            assert refused.status_code == 403
            assert "a proxy passed it on" in refused.json()["error"]


async def test_where_the_console_is_off_nothing_of_it_is_there(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as running:
        for path in ("/", "/console", "/console/", "/console/data"):
            assert (await running.http.get(path)).status_code == 404, path


async def test_answers_of_the_console_name_no_endpoint_and_no_page_beside_it(tmp_path: Path) -> None:
    async with plane(tmp_path, add_endpoint_header=True) as running:
        get = running.http.get
        assert names.ENDPOINT in (await running.complete()).headers
        for path in ("/", "/console/", "/console/data", "/console/nothing"):
            assert names.ENDPOINT not in (await get(path)).headers, path
        forged = await get("/console/", headers={names.DESTINATION: "127.0.0.1:1"})
        assert forged.status_code == 200
        missing = await get("/console/nothing")
        assert missing.status_code == 404
        assert missing.json()["pages"]
        assert all(page.startswith("/console/") for page in missing.json()["pages"])


async def test_head_has_the_headers_of_get(tmp_path: Path) -> None:
    async with plane(tmp_path) as running:
        for path in ("/", "/console/", "/console/main.js", "/console/data"):
            got, head = [await ask(path) for ask in (running.http.get, running.http.head)]
            assert (head.status_code, head.content) == (got.status_code, b"")
            for name in {*got.headers} - {"date", "content-length", "x-request-id"}:
                assert head.headers[name] == got.headers[name], (path, name)
            assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize("limits", [Limits(), Limits(client_requests_per_s=10_000)], ids=["alone", "beside clients'"])
async def test_a_flood_reaches_the_picker_by_so_many_requests_a_second_and_no_client_notices(
    tmp_path: Path, limits: Limits
) -> None:
    per_s = 100
    async with plane(tmp_path, limits=limits) as running, client(base_url=running.envoy.url) as stranger:
        came = Counter[int]()
        began = time.monotonic()

        async def flood() -> None:
            while came.total() < 6 * per_s:
                came[(await stranger.get("/console/main.js")).status_code] += 1

        await asyncio.gather(*(flood() for _ in range(4)))
        lasted = time.monotonic() - began
        assert came[200] >= 2 * per_s, "a burst is served"
        assert came[200] <= per_s * (lasted + 3)
        assert came[429] == came.total() - came[200]
        refused = await anext(answer async for answer in until_refused(stranger))
        assert "ask again" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert await running.status() == 200, "what engines are asked has its own rates"


async def until_refused(http: httpx.AsyncClient) -> AsyncIterator[httpx.Response]:
    while True:
        answer = await http.get("/console/icon.svg")
        if answer.status_code == 429:
            yield answer
