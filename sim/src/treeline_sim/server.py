"""The engine model behind sockets: an OpenAI server with KV events and load, in real or accelerated time.

So real pickers and routers can be tested with the model of the simulation. Its clock runs `speedup` times as fast as
the wall clock. In the dialect `treeline` it speaks every contract of our runtime; in `vllm` it names its publisher
under `/kv_event_sources`, answers only replays, and reports load only on `/metrics`.

With `cases` it models nothing: it answers at once, from a table, so that a benchmark measures only the router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec
from treeline_wire import headers
from treeline_wire.events import encode_batch
from treeline_wire.load import TreelineLoad
from treeline_wire.tokenizer import TokenizerBundle

from treeline_sim.connection import Connection, response
from treeline_sim.model.engine import FOREVER, Engine, EngineConfig
from treeline_sim.model.work import Happened, Phase, Work
from treeline_sim.openai import CHAT, COMPLETIONS, Asked, BadRequest, Reader, Shapes, SimCase
from treeline_sim.publisher import TOPIC, Publisher
from treeline_sim.tokens import TokenPrompt

REPORT_EVERY_S = 0.05
SMALLEST_SLEEP_S = 0.005
"""Shorter steps are taken together: an event loop wakes up no more precisely."""


class Dialect(StrEnum):
    """The contracts that a server speaks."""

    TREELINE = "treeline"
    VLLM = "vllm"


@dataclass(frozen=True)
class ServerConfig:
    """One simulated server. Port 0 binds any free port."""

    engine: EngineConfig
    name: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 0
    events_port: int = 0
    replay_port: int = 0
    load_port: int = 0
    epoch: int = 1
    speedup: float = 1.0
    dialect: Dialect = Dialect.TREELINE
    context: int = 131_072
    cases: tuple[SimCase, ...] | None = None
    """Known requests: all are answered at once, and the cache stays as they define it. None: the model."""

    def __post_init__(self) -> None:
        if not 0 < self.speedup <= 1000:
            raise ValueError("time passes between 0 and 1000 times as fast")


@dataclass(eq=False, slots=True)
class _Stream:
    """A request that is being served. `sent` tokens of its output have reached the client."""

    connection: Connection
    asked: Asked
    shapes: Shapes
    sent: int = 0


class SimServer:
    """Serves from `start` to `close`. `ports` are http, events, replay and load."""

    def __init__(self, config: ServerConfig, bundle: TokenizerBundle) -> None:
        engine = config.engine
        slowest = engine.speed.step_s(0, 0) / config.speedup
        steps = max(1, int(SMALLEST_SLEEP_S / slowest))
        self.config = config
        self.engine = Engine(replace(engine, max_steps=min(engine.max_steps, steps)), config.epoch)
        self._bundle = bundle
        self._reader = Reader(bundle, engine.block_size, config.context)
        ours = config.dialect is Dialect.TREELINE
        ports = config.events_port, config.replay_port, config.load_port
        self._publisher = Publisher(self.engine.journal.reply, self.load, config.host, *ports, ours=ours)
        self._table = None if config.cases is None else self._answers(config.cases)
        nothing = TokenPrompt([], engine.block_size)
        self._unknown = {
            path: self._answer(Asked(path == CHAT, nothing, nothing, 1, False, False)) for path in (COMPLETIONS, CHAT)
        }
        self._streams: dict[_Stream, Work] = {}
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._report: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._server: asyncio.Server | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        config = self.config
        self._server = await self._loop.create_server(
            lambda: Connection(self._serve), config.host, config.port, backlog=1024
        )
        self._publishing = asyncio.create_task(self._publisher.run())
        self.ports = {
            "http": int(self._server.sockets[0].getsockname()[1]),
            "events": self._publisher.events_port,
            "replay": self._publisher.replay_port,
            "load": self._publisher.load_port,
        }

    async def close(self) -> None:
        """Stop; open streams are cut."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for timer in (self._timer, self._report):
            if timer is not None:
                timer.cancel()
        for stream in list(self._streams):
            stream.connection.cut()
        if self._publishing is None:
            self._publisher.close()
        else:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)

    # Answers at once

    def _answers(self, cases: tuple[SimCase, ...]) -> list[bytes]:
        asked = [self._reader.read(case.path, case.body) for case in cases]
        for one, case in zip(asked, cases, strict=True):
            if case.held:
                self.engine.hold(one.prompt, len(one.prompt.blocks))
        self.engine.journal.flush(time.time())
        return [self._answer(replace(one, output_tokens=1, stream=False)) for one in asked]

    def _answer(self, asked: Asked) -> bytes:
        prompt = asked.prompt
        cached = min(self.engine.cache.matched(prompt.blocks), max(prompt.tokens - 1, 0) // prompt.block_size)
        cached *= prompt.block_size
        counts = {headers.CACHED_TOKENS: str(cached), headers.PROMPT_TOKENS: str(prompt.tokens)}
        shapes = Shapes(asked, self.config.name, 0, self._reader.text)
        return response(200, shapes.whole(cached), counts)

    # Load reports

    def load(self) -> TreelineLoad:
        """Return the engine's report, in seconds of the wall clock."""
        load, speedup = self.engine.load(), self.config.speedup
        return msgspec.structs.replace(
            load,
            prefill_tokens_per_s=load.prefill_tokens_per_s * speedup,
            decode_step_ms=load.decode_step_ms / speedup,
        )

    # Time

    def _now(self) -> float:
        assert self._loop is not None
        return (self._loop.time() - self._began) * self.config.speedup

    def _wake(self) -> None:
        """Take the step that has ended; late wake-ups do not slow the engine down."""
        self._timer = None
        self._catch_up()
        self._sleep()

    def _catch_up(self) -> float:
        """Take the steps that have ended by now; return the time."""
        now = self._now()
        while self.engine.ends_at <= now:
            self._take(self.engine.advance(self.engine.ends_at))
        return now

    def _sleep(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.engine.ends_at < FOREVER and not self._closed:
            assert self._loop is not None
            self._timer = self._loop.call_at(self._began + self.engine.ends_at / self.config.speedup, self._wake)

    def _take(self, happened: Happened) -> None:
        if happened.batch is not None:
            seq, batch = happened.batch
            self._publisher.publish(seq, encode_batch(batch.ts, batch.events))
        for stream, work in list(self._streams.items()):
            self._tell(stream, work)
        for work in happened.refused:
            self._refuse(_stream(work), 400, "the prompt is longer than the engine's memory")
        for work in happened.done:
            stream = _stream(work)
            if self._streams.pop(stream, None) is not None:
                self._finish(stream, work)
        self._changed()

    def _changed(self) -> None:
        if self.config.dialect is Dialect.TREELINE and self._report is None and not self._closed:
            assert self._loop is not None
            self._report = self._loop.call_later(REPORT_EVERY_S, self._send_report)

    def _send_report(self) -> None:
        self._report = None
        self._publisher.report()

    # Requests

    def _serve(self, connection: Connection, method: str, path: str, body: bytes) -> None:
        if self._closed:
            connection.cut()
        elif method == "POST" and path in self._unknown:
            if self._table is not None:
                known = connection.case.isdecimal() and int(connection.case) < len(self._table)
                connection.write(self._table[int(connection.case)] if known else self._unknown[path])
                return
            try:
                asked = self._reader.read(path, body)
            except BadRequest as error:
                connection.send(400, _error(str(error), "invalid_request_error"))
                return
            self._begin(connection, asked)
        else:
            self._page(connection, method, path)

    def _page(self, connection: Connection, method: str, path: str) -> None:
        page = self._pages().get(path) if method == "GET" else None
        if page is None:
            connection.send(404, _error(f"{method} {path[:200]} is not served here", "not_found"))
        elif path == "/metrics":
            connection.send(200, page(), content_type="text/plain; version=0.0.4")
        else:
            connection.send(200, page())

    def _begin(self, connection: Connection, asked: Asked) -> None:
        self._count += 1
        stream = _Stream(connection, asked, Shapes(asked, self.config.name, self._count, self._reader.text))
        work = Work(asked.prompt, asked.whole, asked.output_tokens, stream)
        if not self.engine.submit(work, self._catch_up()):
            full = _error("the queue is full", "overloaded")
            connection.send(503, full, {headers.OVERLOADED: "1"})
            return
        self._streams[stream] = work
        connection.on_gone = lambda: self._gone(stream)
        if asked.stream and self.config.dialect is Dialect.VLLM:
            connection.start({})
        self._changed()
        self._sleep()

    def _tell(self, stream: _Stream, work: Work) -> None:
        """Send the new tokens of an output."""
        written = min(self.engine.written(work), work.output_tokens)
        if written <= stream.sent or not stream.asked.stream:
            return
        if not stream.sent and self.config.dialect is Dialect.TREELINE:
            stream.connection.start(_counts(work))
        stream.connection.chunk(stream.shapes.part(written - stream.sent, first=not stream.sent))
        stream.sent = written

    def _finish(self, stream: _Stream, work: Work) -> None:
        cached = work.cached_tokens or 0
        if stream.asked.stream:
            self._tell(stream, work)
            stream.connection.chunk(stream.shapes.last(cached))
            stream.connection.end()
        else:
            counts = _counts(work) if self.config.dialect is Dialect.TREELINE else {}
            stream.connection.send(200, stream.shapes.whole(cached), counts)

    def _refuse(self, stream: _Stream, status: int, message: str) -> None:
        self._streams.pop(stream, None)
        content = _error(message, "invalid_request_error")
        if stream.asked.stream and (stream.sent or self.config.dialect is Dialect.VLLM):
            stream.connection.chunk(b"data: " + content + b"\n\n")
            stream.connection.end()
        else:
            stream.connection.send(status, content)

    def _gone(self, stream: _Stream) -> None:
        work = self._streams.pop(stream, None)
        if work is not None and work.phase is not Phase.DONE:
            self.engine.abort(work)
            self._changed()

    # Pages

    def _pages(self) -> dict[str, Callable[[], bytes]]:
        pages: dict[str, Callable[[], bytes]] = {
            path: lambda: b'{"status":"ok"}' for path in ("/health", "/live", "/ready")
        }
        pages["/v1/models"] = self._models
        pages["/metrics"] = self._metrics
        if self.config.dialect is Dialect.TREELINE:
            pages["/server_info"] = self._server_info
            pages["/treeline/tokenizer"] = self._bundle.to_json
        else:
            pages["/kv_event_sources"] = self._sources
            del pages["/ready"], pages["/live"]
        return pages

    def _models(self) -> bytes:
        owner = self.config.dialect.value
        model = {"id": self.config.name, "object": "model", "created": 0, "owned_by": owner}
        return msgspec.json.encode({"object": "list", "data": [model | {"max_model_len": self.config.context}]})

    def _server_info(self) -> bytes:
        info: dict[str, Any] = {
            "version": "sim",
            "served_model_name": self.config.name,
            "page_size": self.config.engine.block_size,
            "epoch": self.config.epoch,
            "tokenizer_fingerprint": self._bundle.fingerprint,
            "draining": False,
            "kv_events": {
                "publisher": "zmq",
                "endpoint_host": self.config.host,
                "endpoint_port_base": self.ports["events"],
                "replay_endpoint_port_base": self.ports["replay"],
                "load_endpoint_port_base": self.ports["load"],
                "topic": TOPIC.decode(),
                "load_topic": "treeline.load",
                "block_size": self.config.engine.block_size,
                "dp_size": 1,
                "curve": False,
            },
        }
        return msgspec.json.encode(info)

    def _sources(self) -> bytes:
        return msgspec.json.encode(
            {
                "0": {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": f"tcp://*:{self.ports['events']}",
                    "replay_endpoint": f"tcp://*:{self.ports['replay']}",
                    "topic": TOPIC.decode(),
                }
            }
        )

    def _metrics(self) -> bytes:
        engine, cache = self.engine, self.engine.cache
        name = f'model_name="{self.config.name}"'
        used = (cache.private + cache.cached - cache.evictable) / cache.capacity
        blocks = f'block_size="{cache.block_size}",num_gpu_blocks="{cache.capacity}"'
        lines = [
            f"vllm:num_requests_running{{{name}}} {engine.running}",
            f"vllm:num_requests_waiting{{{name}}} {engine.waiting}",
            f"vllm:kv_cache_usage_perc{{{name}}} {used:.6f}",
            f"vllm:cache_config_info{{{blocks}}} 1",
            f"vllm:request_prefill_kv_computed_tokens_sum{{{name}}} {engine.computed_tokens}",
            f"vllm:request_prefill_kv_computed_tokens_count{{{name}}} {engine.computed_prompts}",
            f"vllm:generation_tokens_total{{{name}}} {engine.output_tokens}",
        ]
        return ("\n".join(lines) + "\n").encode()


def _stream(work: Work) -> _Stream:
    assert isinstance(work.tag, _Stream)
    return work.tag


def _counts(work: Work) -> dict[str, str]:
    return {headers.CACHED_TOKENS: str(work.cached_tokens or 0), headers.PROMPT_TOKENS: str(work.prompt.tokens)}


def _error(message: str, kind: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind}})
