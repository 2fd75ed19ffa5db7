"""The launcher of an edge pod, with the real Envoy: keys and certificates that change, draining, and every kind of
exit."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.envoy import ENVOY, self_signed
from support.ports import free_ports
from treeline_operator.envoy import EnvoyConfig, Tls, bootstrap, tls_json
from treeline_operator.envoy.launcher import main, options_of

pytestmark = [pytest.mark.integration, pytest.mark.deep]


@dataclass
class Engine:
    """Answers `/v1/models/stream` with one event at once and the rest when `go` is set, everything else at once."""

    port: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.seen.append(head.lower())
                if head.startswith("GET /v1/models/stream"):
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
                    await self.go.wait()
                    writer.write(b"4\r\nlast\r\n0\r\n\r\n")
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()


@dataclass
class Edge:
    """A running launcher, with its Envoy in front of an engine."""

    engine: Engine
    config: EnvoyConfig
    folder: Path
    process: asyncio.subprocess.Process
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"{'https' if self.config.tls else 'http'}://localhost:{self.config.listen_port}"

    @property
    def health(self) -> str:
        return f"http://127.0.0.1:{self.config.health_port}"

    @property
    def log(self) -> str:
        return (self.folder / "edge.log").read_text()

    async def status(self, url: str, **request: Any) -> int:
        """Return the status of a GET; 0 if nothing listens."""
        try:
            return (await self.http.get(url, **request)).status_code
        except httpx.TransportError:
            return 0

    async def with_key(self, key: str) -> int:
        return await self.status(f"{self.url}/v1/models", headers={"authorization": f"Bearer {key}"})

    async def until(self, true: Callable[[], Awaitable[bool]], what: str) -> None:
        for _ in range(6000):
            if await true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"not within 60 s: {what}\n{self.log[-3000:]}")

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 60)


def processes(*words: str) -> list[int]:
    """Return the processes that `pgrep` finds."""
    found = subprocess.run(["pgrep", *words], capture_output=True, text=True).stdout
    return [int(line) for line in found.split()]


@contextlib.asynccontextmanager
async def running(folder: Path, *flags: str, **settings: Any) -> AsyncIterator[Edge]:
    """Run the launcher; its Envoy is ready in the block. Nothing is left after it."""
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    listen, admin, health, nobody = free_ports(4)
    config = EnvoyConfig(
        listen_port=listen,
        admin_port=admin,
        health_port=health,
        ext_proc_port=nobody,
        eds_port=nobody,
        **settings,
    )
    document = copy.deepcopy(bootstrap(config))  # parts of it are constants
    (pods,) = [c for c in document["static_resources"]["clusters"] if c["name"] == "pods"]
    del pods["eds_cluster_config"]
    address = {"socket_address": {"address": "127.0.0.1", "port_value": engine.port}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    pods |= {"type": "STATIC", "load_assignment": {"cluster_name": "pods", "endpoints": endpoints}}
    (folder / "envoy.json").write_text(json.dumps(document))
    words = ["--config", str(folder / "envoy.json"), "--envoy", str(ENVOY), "--concurrency", "1", *flags]
    with (folder / "edge.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "treeline_operator.envoy", *words, stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=60) as http:
            edge = Edge(engine, config, folder, process, http)

            async def ready() -> bool:
                assert process.returncode is None, edge.log
                return await edge.status(f"{edge.health}/ready") == 200

            await edge.until(ready, "Envoy is ready")
            yield edge
    finally:
        engine.go.set()
        if process.returncode is None:
            process.kill()
            await process.wait()
        server.close()
    for _ in range(3000):  # a killed launcher's Envoy goes by itself
        if not processes("-f", str(folder)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("Envoy was left over")


def mounted(folder: Path, **keys: str) -> Path:
    """Write a Secret as the kubelet mounts it: files are links through `..data`, which is replaced at once."""
    secret = folder / "api-keys"
    secret.mkdir(exist_ok=True)
    version = f"..v{len(list(secret.iterdir()))}"
    (secret / version).mkdir()
    for client, key in keys.items():
        (secret / version / client).write_text(key)
        link = secret / client
        if not link.is_symlink():
            link.symlink_to(f"..data/{client}")
    (secret / "..new").symlink_to(version)
    (secret / "..new").replace(secret / "..data")
    for link in secret.iterdir():
        if not link.exists():
            link.unlink()
    return secret


@contextlib.asynccontextmanager
async def long_answer(edge: Edge, **headers: str) -> AsyncIterator[AsyncIterator[str]]:
    """Yield the chunks of an answer: the first has come, the last comes when the engine may go on."""
    async with edge.http.stream("GET", f"{edge.url}/v1/models/stream", headers=headers) as answer:
        chunks = answer.aiter_text()
        assert await anext(chunks) == "first"
        yield chunks


async def test_keys_change_without_a_restart_and_a_running_stream_goes_on(tmp_path: Path) -> None:
    secret, file = mounted(tmp_path, ada="sk-key-old\n", bob="sk-key-bob"), tmp_path / "run" / "keys.json"
    file.parent.mkdir()
    flags = ["--keys-dir", str(secret), "--keys-file", str(file), "--keys-poll", "0.05", "--linger", "0"]
    async with running(tmp_path, *flags, api_keys_file=str(file), console_port=free_ports(1)[0]) as edge:
        # A browser that asks for the console's page has no key, and no picker answers here.
        assert [await edge.status(f"{edge.url}{path}") for path in ("/", "/console", "/console/")] == [503, 503, 503]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert await edge.with_key("sk-key-old") == 200
        assert await edge.with_key("sk-key-new") == 401
        assert await edge.status(f"{edge.url}/v1/models") == 401
        assert "sk-key-old" not in edge.engine.seen[-1]
        assert "x-treeline-client: ada" in edge.engine.seen[-1]
        async with long_answer(edge, authorization="Bearer sk-key-old") as chunks:
            mounted(tmp_path, ada="sk-key-new", bob="sk-key-bob")

            async def changed() -> bool:
                return await edge.with_key("sk-key-new") == 200

            await edge.until(changed, "the new key is known")
            assert await edge.with_key("sk-key-old") == 401
            assert await edge.with_key("sk-key-bob") == 200
            edge.engine.go.set()
            assert await anext(chunks) == "last"
        # An empty Secret admits no client, not every client.
        mounted(tmp_path)

        async def refused() -> bool:
            return await edge.with_key("sk-key-bob") == 401

        await edge.until(refused, "no key is known")
        assert "sk-" not in edge.log
        edge.process.terminate()
        assert await edge.ended() == 0


async def fresh(edge: Edge) -> httpx.Response | None:
    """Return the answer to a request on a new connection; None if nothing accepts it."""
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=60) as newcomer:
        try:
            return await newcomer.get(f"{edge.url}/v1/models")
        except httpx.TransportError:
            return None


async def refuses_newcomers(edge: Edge) -> None:
    """Wait until no new connection is accepted."""

    async def closed() -> bool:
        return await fresh(edge) is None

    await edge.until(closed, "the listener is closed")


async def ends_after_one_more_answer(edge: Edge) -> None:
    """Act as a client that got an answer's headers before the drain began and asks again after a moment: longer than a
    look at Envoy's counters, shorter than the wait for it."""
    await asyncio.sleep(0.6)
    again = await edge.http.get(f"{edge.url}/v1/models")
    assert (again.status_code, again.headers["connection"]) == (200, "close")
    assert await edge.ended() == 0
    assert "drained in" in edge.log


async def test_a_drain_keeps_a_running_stream_alive_and_lingers_first(tmp_path: Path) -> None:
    async with running(tmp_path, "--linger", "4") as edge:
        async with long_answer(edge) as chunks:
            edge.process.terminate()

            async def told() -> bool:
                return "draining" in edge.log

            await edge.until(told, "the signal was seen")
            # It may be the only pod there is: until another one had time to start, nothing says that it goes.
            assert await edge.status(f"{edge.health}/ready") == 200
            first = await fresh(edge)
            assert first is not None
            assert "connection" not in first.headers

            async def asked_to_close() -> bool:
                answered = await fresh(edge)
                assert answered is not None, "the listener closed within the linger time"
                assert answered.status_code == 200
                return answered.headers.get("connection") == "close"

            await edge.until(asked_to_close, "clients are asked to close")
            assert await edge.status(f"{edge.health}/ready") == 200

            await refuses_newcomers(edge)
            # Readiness is false now, and metrics can still be read.
            assert await edge.status(f"{edge.health}/ready") == 503
            assert "envoy_http_downstream_rq_active" in (await edge.http.get(f"{edge.health}/metrics")).text
            assert edge.process.returncode is None
            edge.engine.go.set()
            assert [chunk async for chunk in chunks] == ["last"]
        await ends_after_one_more_answer(edge)


async def test_a_client_that_asks_again_after_a_long_answer_is_served_and_disconnected(tmp_path: Path) -> None:
    """Its answer began before the drain, so it does not know that the connection is to be closed."""
    async with running(tmp_path, "--linger", "0") as edge:
        async with long_answer(edge) as chunks:
            edge.process.terminate()

            await refuses_newcomers(edge)
            edge.engine.go.set()
            assert "".join([chunk async for chunk in chunks]) == "last"
        await ends_after_one_more_answer(edge)


async def test_a_drain_ends_when_time_is_up_or_at_a_second_signal(tmp_path: Path) -> None:
    for name, flags, signals in (
        ("late", ["--linger", "0", "--drain-timeout", "0.5"], 1),
        ("hurry", ["--linger", "0", "--drain-timeout", "60"], 2),
    ):
        folder = tmp_path / name
        folder.mkdir()
        async with running(folder, *flags) as edge:
            async with long_answer(edge) as chunks:
                for _ in range(signals):
                    edge.process.send_signal(signal.SIGINT)

                    async def told(edge: Edge = edge) -> bool:
                        return "draining" in edge.log

                    await edge.until(told, "the signal was seen")
                with pytest.raises(httpx.TransportError):
                    await anext(chunks)
            assert await edge.ended() == 0
            assert ("ending with 1 requests" in edge.log) is (name == "late")


async def test_the_health_port_shows_readiness_and_metrics_and_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path) as edge:
        assert await edge.status(f"{edge.health}/ready") == 200
        metrics = await edge.http.get(f"{edge.health}/metrics")
        assert "envoy_server_live" in metrics.text
        pages = [
            "/",
            "/stats",
            "/stats/prometheus",
            "/config_dump",
            "/clusters",
            "/quitquitquit",
            "/ready/../certs",
        ]
        pages += ["/metrics/../config_dump", "//config_dump", "/readyz"]
        assert {await edge.status(edge.health + page) for page in pages} == {404}
        for page in ("/ready", "/metrics", "/quitquitquit", "/healthcheck/fail"):
            assert (await edge.http.post(edge.health + page)).status_code == 404
        # The listener of the clients knows none of it: it serves what engines infer, and nothing else.
        assert await edge.status(f"{edge.url}/metrics") == 404
        assert (await edge.http.get(f"{edge.url}/v1/models")).text == "ok"
        # Envoy's end is the launcher's.
        (envoy,) = processes("-P", str(edge.process.pid))
        os.kill(envoy, signal.SIGKILL)
        assert await edge.ended() == 1
        assert "killed by signal 9" in edge.log


async def test_a_certificate_changes_without_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "tls"

    def certificate(version: str) -> Tls:
        (folder / version).mkdir(parents=True)
        return self_signed(folder / version)

    first = certificate("..v1")
    (folder / "..data").symlink_to("..v1")
    names = [Path(file).name for file in (first.certificate_file, first.key_file)]
    for name in names:
        (folder / name).symlink_to(f"..data/{name}")
    tls = Tls(str(folder / names[0]), str(folder / names[1]), str(tmp_path / "tls.json"))
    (tmp_path / "tls.json").write_text(tls_json(tls))

    async def served(port: int) -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=60)

    async with running(tmp_path, tls=tls) as edge:
        port = edge.config.listen_port
        old = await served(port)
        async with long_answer(edge) as chunks:
            certificate("..v2")
            (folder / "..new").symlink_to("..v2")
            (folder / "..new").replace(folder / "..data")

            async def changed() -> bool:
                return await served(port) != old

            await edge.until(changed, "the new certificate is served")
            edge.engine.go.set()
            assert await anext(chunks) == "last"


def test_a_bootstrap_that_envoy_refuses_ends_the_launcher(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "envoy.json"
    assert main(["--config", str(config)]) == 1
    assert "cannot read" in capfd.readouterr().err
    config.write_text("{}")
    assert main(["--config", str(config)]) == 1
    assert "admin port" in capfd.readouterr().err
    config.write_text(json.dumps({**bootstrap(EnvoyConfig(admin_port=9901)), "nonsense": 1}))
    assert main(["--config", str(config), "--envoy", str(ENVOY)]) == 1
    assert "Envoy ended by itself, with status 1" in capfd.readouterr().err
    assert main(["--config", str(config), "--envoy", str(tmp_path / "none")]) == 1
    assert "cannot run" in capfd.readouterr().err
    words = ["--config", str(config), "--keys-dir", str(tmp_path / "no"), "--keys-file", str(tmp_path / "f")]
    assert main(words) == 1
    assert "is the Secret mounted" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keys-dir", "x"], "belong together"),
        (["--drain-timeout", "0"], "--drain-timeout: must be above 0, got 0.0"),
        (["--linger", "-1"], "--linger: must be at least 0, got -1.0"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of(["--config", "envoy.json", *words])
    assert message in capsys.readouterr().err
