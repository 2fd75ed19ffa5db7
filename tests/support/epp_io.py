"""Fakes around the picker: HTTP engines, publishers, and a picker that runs inside the test."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import h11
import httpx
import zmq
import zmq.asyncio
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from treeline_epp.endpoints.adapters.base import KvSource
from treeline_epp.main import serve
from treeline_epp.options import Options, options_of
from treeline_operator.envoy import EnvoyConfig
from treeline_wire import frames
from treeline_wire.events import BlockStored, block_hash, encode_batch, hash_of, root_digest
from treeline_wire.load import encode as encode_load
from treeline_wire.security import CurveKeys
from treeline_wire.tokenizer import TokenizerBundle

from support.envoy import Envoy, Patch, running_envoy
from support.http import client
from support.ports import free_ports


async def until(
    true: Callable[[], Any], what: str, timeout_s: float = 60.0, state: Callable[[], object] = lambda: ""
) -> Any:
    """Wait until something (plain or awaited) is true, and return it; on expiry fail with what was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = true()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}; state: {state()}")
        await asyncio.sleep(0.01)


async def so(value: Awaitable[Any], is_so: Callable[[Any], bool]) -> bool:
    """Return whether an awaited value satisfies a predicate; a condition for `until`."""
    return is_so(await value)


async def equal(value: Awaitable[object], expected: object) -> bool:
    """Return whether an awaited value equals another one; a condition for `until`."""
    return await value == expected


@dataclass
class Seen:
    """A request that reached an engine."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


PROBED: Final = (
    *("/ready", "/v1/models", "/server_info", "/treeline/tokenizer", "/metrics", "/prometheus/metrics"),
    *("/kv_event_sources", "/version"),
)
"""Paths that the picker itself requests from an engine."""


@dataclass
class FakeEngine:
    """An HTTP engine: probes, information, and an echo for everything else.

    `documents` maps paths to JSON documents (or bytes), `statuses` to what is answered instead; others are echoed.
    `reply_headers` go with echoes; `reply_status` is their status. `hold` keeps them back, `hold_body` all but their
    headers. `last_words` are written instead of an echo, and the connection is closed. `role` is what the picker's
    flags say of it.
    """

    name: str = "engine"
    models: tuple[str, ...] = ("tiny",)
    ready: bool = True
    documents: dict[str, Any] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    reply_headers: dict[str, str] = field(default_factory=dict)
    reply_status: int = 200
    reply_body: bytes | None = None
    last_words: bytes | None = None
    hold: asyncio.Event | None = None
    hold_body: asyncio.Event | None = None
    seen: list[Seen] = field(default_factory=list)
    port: int = 0
    role: str = ""
    readers: list[asyncio.StreamReader] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def served(self) -> list[Seen]:
        """Return the clients' requests, without the picker's own."""
        return [s for s in self.seen if s.path not in PROBED]

    @property
    def hung_up(self) -> int:
        """Return how many connections their clients have ended."""
        return sum(reader.at_eof() or reader.exception() is not None for reader in self.readers)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die at once: connections are cut."""
        if self._server is not None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.readers.append(reader)
        try:
            await self._speak(reader, writer)
        except (OSError, h11.RemoteProtocolError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        request: h11.Request | None = None
        body = b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                await self._answer(connection, writer, request, body)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()
            else:
                return

    async def _answer(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request, body: bytes
    ) -> None:
        headers = {k.decode(): v.decode() for k, v in request.headers}
        path = request.target.decode()
        self.seen.append(Seen(request.method.decode(), path, headers, body))
        if self.last_words is not None and path not in PROBED:
            writer.write(self.last_words)
            raise ConnectionAbortedError
        status, extra, content = self._content(path, headers, body)
        if self.hold is not None and path not in PROBED:
            await self.hold.wait()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        out = [("content-length", str(len(data))), ("content-type", "application/json"), *extra.items()]
        merged = {key.lower(): value for key, value in out}
        writer.write(connection.send(h11.Response(status_code=status, headers=list(merged.items()))) or b"")
        if self.hold_body is not None and path not in PROBED:
            await writer.drain()
            await self.hold_body.wait()
        if request.method != b"HEAD":
            writer.write(connection.send(h11.Data(data=data)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()

    def _content(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], Any]:
        if path in self.missing or path in self.statuses:
            return self.statuses.get(path, 404), {}, {}
        if path == "/ready":
            return (200 if self.ready else 503), {}, {}
        if path in self.documents:
            return 200, {}, self.documents[path]
        if path == "/v1/models":
            return (
                200,
                {},
                {"object": "list", "data": [{"id": model, "object": "model"} for model in self.models]},
            )
        if path in ("/server_info", "/treeline/tokenizer", "/metrics", "/prometheus/metrics"):
            return 404, {}, {}
        echo = {"engine": self.name, "path": path, "headers": headers, "body_bytes": len(body)}
        return self.reply_status, self.reply_headers, echo if self.reply_body is None else self.reply_body


@contextlib.asynccontextmanager
async def engines(count: int = 2, **settings: Any) -> AsyncIterator[list[FakeEngine]]:
    """Run some engines, named e0, e1 …"""
    made = [FakeEngine(name=f"e{i}", **settings) for i in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in made:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield made


@dataclass
class RunningPicker:
    """A picker inside the test's own loop."""

    options: Options
    task: asyncio.Task[None]
    stopping: asyncio.Event

    async def get(self, path: str, *, patience_s: float = 60.0) -> httpx.Response:
        """Return a page of the admin port."""
        async with client(timeout=patience_s) as http:
            return await http.get(f"http://127.0.0.1:{self.options.admin_port}{path}")

    async def metrics(self) -> dict[str, float]:
        """Return metrics by full name, labels included."""
        async with client(timeout=60) as http:
            page = await http.get(f"http://127.0.0.1:{self.options.metrics_port}/metrics")
        lines = page.text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def metric(self, name: str) -> float | None:
        return (await self.metrics()).get(name)

    async def stop(self) -> None:
        """Stop the picker as SIGTERM does."""
        self.stopping.set()
        await asyncio.wait_for(self.task, 60)


@contextlib.asynccontextmanager
async def running_picker(*argv: str, debug: bool = True, ready: bool = True) -> AsyncIterator[RunningPicker]:
    """Run a picker with these flags, on free ports unless they name some. Waits until it is ready, or only answers."""
    flags = ["--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port"]
    words = list(argv)
    for flag, port in zip(flags, free_ports(4), strict=True):
        if flag not in words:
            words += [flag, str(port)]
    words += ["--drain-timeout", "0.2", *(["--enable-debug-endpoints"] if debug else [])]
    options = options_of(words)
    stopping = asyncio.Event()
    task = asyncio.create_task(serve(options, stopping))
    picker = RunningPicker(options, task, stopping)
    try:
        deadline = time.monotonic() + 60
        while True:
            if task.done():
                task.result()
            with contextlib.suppress(httpx.HTTPError):
                if (await picker.get("/ready", patience_s=0.5)).status_code == 200 or not ready:
                    break
            assert time.monotonic() < deadline, "the picker did not become ready"
            await asyncio.sleep(0.02)
        yield picker
    finally:
        if not task.done():
            await picker.stop()


@dataclass
class Plane:
    """Envoy, picker and engines."""

    envoy: Envoy
    picker: RunningPicker
    engines: list[FakeEngine]
    http: httpx.AsyncClient

    async def complete(self, prompt: str | list[str] = "hello", **request: Any) -> httpx.Response:
        """Send one completion through Envoy."""
        headers = request.pop("headers", {})
        body = {"model": "tiny", "prompt": prompt, **request}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def status(self, **request: Any) -> int:
        """Send one completion and return its status."""
        return (await self.complete(**request)).status_code


@contextlib.asynccontextmanager
async def data_plane(
    folder: Path, fakes: list[FakeEngine], *flags: str, patch: Patch = lambda _: None, **settings: Any
) -> AsyncIterator[Plane]:
    """Run Envoy and a picker in front of these engines. `settings` are Envoy's."""
    listen, admin = free_ports(2)
    named = (f"{fake.name}={fake.address}{',' if fake.role else ''}{fake.role}" for fake in fakes)
    endpoints = [word for name in named for word in ("--endpoint", name)]
    async with running_picker(*endpoints, *flags) as picker:
        config = EnvoyConfig(
            listen_port=listen,
            admin_port=admin,
            ext_proc_port=picker.options.grpc_port,
            eds_port=picker.options.grpc_health_port,
            access_log=str(folder / "access.log"),
            **settings,
        )
        async with (
            running_envoy(config, folder, patch=patch) as envoy,
            client(base_url=envoy.url, timeout=60) as http,
        ):
            yield Plane(envoy, picker, fakes, http)


@functools.cache
def small_bundle() -> TokenizerBundle:
    """Return a byte-level tokenizer with a token for each byte, and a template that writes `role:content;`."""
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return TokenizerBundle.build(tokenizer.to_str(), chat_template=template)


class FakePublisher:
    """An engine's sockets: live events, replay with our hello and snapshot, load reports. State is what a test set.

    `blocks` is the cache: everything stored so far, in order; `drop` lists seqs that get lost on the live socket.
    """

    def __init__(self, *, epoch: int = 1, curve: CurveKeys | None = None, ports: tuple[int, ...] = (0, 0, 0)) -> None:
        self.epoch = epoch
        self.seq = -1
        self.blocks: list[BlockStored] = []
        self.drop: set[int] = set()
        self.asked: list[str] = []
        self._batches: list[bytes] = []
        self._curve = curve
        self._context = zmq.asyncio.Context()
        self._live, self.events_port = self._bind(zmq.XPUB, ports[0])
        self._router, self.replay_port = self._bind(zmq.ROUTER, ports[1])
        self._load, self.load_port = self._bind(zmq.XPUB, ports[2])
        self._serving = asyncio.create_task(self._serve())

    @property
    def ports(self) -> tuple[int, int, int]:
        return self.events_port, self.replay_port, self.load_port

    @property
    def source(self) -> KvSource:
        return KvSource("127.0.0.1", *self.ports, curve=self._curve is not None, hello=True)

    def kv_events(self) -> dict[str, Any]:
        """Return its entry in `/server_info`."""
        return {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.events_port,
            "replay_endpoint_port_base": self.replay_port,
            "load_endpoint_port_base": self.load_port,
            "topic": "",
            "load_topic": "load",
            "block_size": 16,
            "dp_size": 1,
            "curve": self._curve is not None,
        }

    def _bind(self, kind: int, port: int) -> tuple[zmq.asyncio.Socket, int]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        if self._curve is not None:
            self._curve.secure_server(sock)
        sock.bind(f"tcp://127.0.0.1:{port or '*'}")
        return sock, int(sock.last_endpoint.rpartition(b":")[2])

    async def subscribed(self) -> None:
        """Wait for a subscriber of the events."""
        await asyncio.wait_for(self._live.recv(), 60)

    async def load_subscribed(self) -> None:
        """Wait for a subscriber of the load reports."""
        await asyncio.wait_for(self._load.recv(), 60)

    async def store(self, *blocks: BlockStored) -> None:
        """Cache some blocks and publish them."""
        self.blocks += blocks
        await self.send(encode_batch(time.time(), list(blocks)))

    async def send(self, payload: bytes) -> None:
        """Publish any payload as the next batch."""
        self.seq += 1
        self._batches.append(payload)
        if self.seq not in self.drop:
            await self._live.send_multipart(frames.live(b"", self.seq, payload))

    async def report(self, topic: bytes, load: Any) -> None:
        """Publish a load report."""
        await self._load.send_multipart([topic, encode_load(load)])

    def stop(self) -> None:
        """Die; the ports are free afterwards."""
        self._serving.cancel()
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            identity, *rest = await self._router.recv_multipart()
            request = frames.parse_request(rest)
            self.asked.append(type(request).__name__)
            for reply in self._replies(request):
                await self._router.send_multipart([identity, *frames.encode_reply(reply)])

    def _replies(self, request: frames.Request | None) -> list[frames.Reply]:
        newest = self.seq if self.seq >= 0 else None
        match request:
            case frames.HelloRequest():
                return [frames.Hello(self.epoch, None if newest is None else 0, newest)]
            case frames.SnapshotRequest():
                header = frames.SnapshotHeader(self.epoch, self.seq, len(self.blocks))
                return [header, frames.SnapshotChunk(self.blocks), frames.SnapshotEnd()]
            case frames.ReplayRequest(start_seq=start):
                items = [frames.ReplayItem(b"", s, self._batches[s]) for s in range(start, self.seq + 1)]
                return [*items, frames.ReplayEnd()]
            case _:
                return []


def stored(
    tokens: Sequence[int], *, parent: BlockStored | None = None, size: int = 16, namespace: str | None = None
) -> BlockStored:
    """Return a run of whole blocks, hashed as our runtime hashes them (each block's own digest chain)."""
    digest = root_digest(namespace) if parent is None else _DIGESTS[parent.block_hashes[-1]]
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        digest = block_hash(digest, tokens[start : start + size])
        hashes.append(hash_of(digest))
        _DIGESTS[hashes[-1]] = digest
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else parent.block_hashes[-1],
        token_ids=list(tokens[: len(hashes) * size]),
        block_size=size,
        cache_salt=namespace,
    )


_DIGESTS: dict[int, bytes] = {}
