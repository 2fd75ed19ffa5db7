"""Drives a headless Chromium over its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.epp_io import until

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--no-proxy-server", "--remote-debugging-port=0"),
)


class Tab:
    """One page. `troubles` are the messages that its console shows in red: exceptions, refused loads, broken
    policies."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.troubles: list[str] = []

    async def open(self) -> None:
        target = await self._send("Target.createTarget", url="about:blank")
        found = await self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self._send(f"{domain}.enable")

    async def read(self) -> None:
        """Read the browser's messages until it ends."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                waiting = self._waiting.pop(said["id"])
                if not waiting.done():
                    waiting.set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.troubles.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.troubles.append(said["params"]["entry"]["text"])

    async def _send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        answer = await asyncio.wait_for(waiting, 60)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def go(self, url: str) -> None:
        """Open a URL, as if typed into the address bar."""
        assert "errorText" not in await self._send("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        answer = await self._send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until the expression is true."""
        await until(lambda: self.run(script), script, 60, lambda: self.troubles)

    async def press(self, key: str, text: str = "") -> None:
        """Press a key where the focus is. `text` is what it types, if anything."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}.get(key, ord(key[0].upper()))
        named: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        if typed := text or {"Enter": "\r"}.get(key, ""):
            named["text"] = typed
        await self._send("Input.dispatchKeyEvent", type="keyDown", **named)
        await self._send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def type(self, text: str) -> None:
        """Insert a text where the focus is, as if pasted."""
        await self._send("Input.insertText", text=text)

    async def look(self, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window, and whether its user prefers `light` or `dark`."""
        await self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self) -> bytes:
        """Return a picture of the window as PNG."""
        found = await self._send("Page.captureScreenshot", format="png")
        return base64.b64decode(found["data"])

    async def text(self, selector: str) -> str:
        """Return an element's visible text."""
        return str(await self.run(f"document.querySelector({selector!r}).innerText"))


@contextlib.asynccontextmanager
async def browser_tab(folder: Path) -> AsyncIterator[Tab]:
    """Run a browser with one empty page. Without Chromium the test is skipped."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is installed")
    profile = folder / "profile"
    words = (program, *_FLAGS, f"--user-data-dir={profile}", "about:blank")
    quiet = asyncio.subprocess.DEVNULL
    environment = {**os.environ, "HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet, env=environment)
    try:
        port_file = profile / "DevToolsActivePort"
        await until(lambda: port_file.exists() and port_file.read_text().count("\n"), "the browser listens", 30)
        port, path = port_file.read_text().split("\n")[:2]
        async with aiohttp.ClientSession() as http, http.ws_connect(f"http://127.0.0.1:{port}{path}") as socket:
            tab = Tab(socket)
            reading = asyncio.create_task(tab.read())
            try:
                await tab.open()
                yield tab
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
    finally:
        process.kill()
        await process.wait()
