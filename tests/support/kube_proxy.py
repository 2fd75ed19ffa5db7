"""An HTTP proxy in front of a real API server that can lose, refuse, hold and cut connections."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

Fault = Callable[[web.Request], web.Response | None]


def status(code: int, reason: str, **headers: str) -> web.Response:
    """Return a refusal in an API server's format."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": reason,
    }
    return web.json_response(body, status=code, headers={name.replace("_", "-"): v for name, v in headers.items()})


class KubeProxy:
    """Forwards with the identity of a kubeconfig; `kubeconfig` in `folder` leads through it. `fault` sees each request
    and may answer it instead of the API server. While `open` is cleared, requests are held: neither forwarded nor
    answered. `writes` counts forwarded changes, by method and collection."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._target = cluster["server"]
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._tls.load_cert_chain(user["client-certificate"], user["client-key"])
        self._folder = folder
        self._streams: set[asyncio.Task[Any]] = set()
        self.fault: Fault | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.writes: Counter[tuple[str, str]] = Counter()
        self.watches: Counter[str] = Counter()
        self.kubeconfig = folder / "proxied.yaml"

    async def __aenter__(self) -> KubeProxy:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls, limit=0))
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "p",
                    "clusters": [{"name": "p", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                    "users": [{"name": "p", "user": {}}],
                    "contexts": [{"name": "p", "context": {"cluster": "p", "user": "p"}}],
                }
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self.open.set()
        await self._runner.cleanup()
        await self._session.close()

    def cut(self) -> int:
        """Break off every open watch; return how many there were."""
        streams = list(self._streams)
        for task in streams:
            task.cancel()
        return len(streams)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        await self.open.wait()
        if self.fault is not None and (answer := self.fault(request)) is not None:
            return answer
        if request.method not in ("GET", "HEAD"):
            self.writes[request.method, collection(request.path)] += 1
        if not is_watch(request):
            return await self._forward(request)
        # A watch is one from when it is let through: one that is still being opened is cut as well.
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            return await self._forward(request)
        finally:
            self._streams.discard(task)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name in ("Content-Type", "Accept")}
        headers["Accept-Encoding"] = "identity"
        body = await request.read()
        watching = is_watch(request)
        async with self._session.request(
            request.method,
            f"{self._target}{request.path_qs}",
            headers=headers,
            data=body or None,
            timeout=aiohttp.ClientTimeout(total=None if watching else 30),
        ) as answer_:
            if watching and answer_.status == 200:
                return await self._stream(request, answer_)
            passed = {name: answer_.headers[name] for name in ("Content-Type", "ETag") if name in answer_.headers}
            return web.Response(status=answer_.status, body=await answer_.read(), headers=passed)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.watches[collection(request.path)] += 1
        try:
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        except (aiohttp.ClientError, ConnectionError):
            pass
        return response


def is_watch(request: web.Request) -> bool:
    """Return whether the request asks for a watch."""
    return request.query.get("watch") == "true"


def collection(path: str) -> str:
    """Return the collection of a path, without namespace and name."""
    parts = path.strip("/").split("/")
    start = 2 if parts[0] == "api" else 3
    parts = parts[start:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return parts[0] if len(parts) < 3 else f"{parts[0]}/{parts[2]}"
