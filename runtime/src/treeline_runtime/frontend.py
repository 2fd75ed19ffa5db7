"""The HTTP side of a server: the checkpoint's metadata, the service, and uvicorn on our sockets.

Connections that stall: a request must arrive in time, with a bounded size of headers.

uvicorn has only a timeout between requests; this adds timeouts within them. It also serves a request that offers
another protocol (`Upgrade: h2c`) by HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import importlib.util
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from treeline_wire.chat import TemplateError
from treeline_wire.media import Kind
from treeline_wire.openai_errors import error_body
from treeline_wire.tokenizer import BundleError, TokenizerBundle
from treeline_wire.tracing_env import TracingError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from treeline_runtime.args import ServerArgs
from treeline_runtime.config import ConfigError
from treeline_runtime.download import repository
from treeline_runtime.media.settings import pans, read_settings
from treeline_runtime.media.sources import MediaRules
from treeline_runtime.messages import FinishReason
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.pooling import Pooling, pooling_of
from treeline_runtime.published import LoadUpdate
from treeline_runtime.server.formats import Formats, formats_of
from treeline_runtime.server.limits import ByteBudget
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.pooling_reader import check_template
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader_pool import ReaderPool, ReaderSpec
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_runtime.server.service import Service, State
from treeline_runtime.tokenizer_manager import DpRank, TokenizerManager

if TYPE_CHECKING:
    from treeline_runtime.media.reading import MediaReader
    from treeline_runtime.server.tracing import Tracing


LINGER_S = 1.0
"""Seconds in which a client that still sends can read why it was refused."""
MAX_HEADER_BYTES = 64 << 10


class HttpProtocol(HttpToolsProtocol):
    """A connection. A request that does not arrive in time gets a 408, and the connection is closed."""

    silent_s = 75.0
    """Seconds until the first request of a new connection. Browsers and proxies open some in advance."""
    headers_s = 15.0
    """Seconds for headers, from their first byte."""
    body_pause_s = 20.0
    """Seconds between parts of a body."""
    body_s = 180.0
    """Seconds for a whole body."""
    stalled_s = 300.0
    """Seconds for a client that does not read its answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the last that arrived."""
        self._arrival: asyncio.TimerHandle | None = None
        """Ends the wait for a request's next part."""
        self._stall: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Bytes of the complete headers."""
        self._unfinished_bytes = 0
        """Bytes that came since the headers began, without the first part."""
        self._in_headers = False
        self._refused = False
        self._body_until = 0.0
        self._offers_upgrade = False
        """The parser is at the end of headers after which it would leave HTTP/1.1."""

    # ---- the connection -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.silent_s, "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._flowing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it after a reset, and with it all that a connection holds
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            self._unfinished_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_headers and max(self._unfinished_bytes, self._header_bytes) > MAX_HEADER_BYTES:
            self._refuse(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        """Parses new bytes. Raises HttpParserError.

        The parser stops after a request that offers another protocol. A server may ignore the offer (RFC 9110, 7.8), so
        a new parser starts with the same headers except `Upgrade`.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self._offers_upgrade:  # CONNECT: what follows is for a tunnel that there is not
                    self._refused = True
                    self.send_400_response("CONNECT is not supported.")
                    return
                rest = rest[stop.args[0] :]
                head = self._head_without_upgrade()
                self._offers_upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._flowing()
        self._stall = self.loop.call_later(self.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._flowing()
        super().resume_writing()

    def _flowing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # ---- the request, as it arrives ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes, self._unfinished_bytes = True, 0, 0
        self._expect(self.headers_s, "headers")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self.parser.should_upgrade():
            self._offers_upgrade = self.parser.get_method() != b"CONNECT"
            return
        self._body_until = self.loop.time() + self.body_s
        self._expect(self.body_pause_s, "body")
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            self.flow.resume_reading()  # that the client leaves is seen beside one more request, though not beside two

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._served = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        self._expect(max(0.0, min(self.body_pause_s, self._body_until - self.loop.time())), "body")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._arrived()
        super().on_message_complete()

    def _expect(self, seconds: float, what: str) -> None:
        self._arrived()
        self._arrival = self.loop.call_later(seconds, self._late, what)

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _late(self, what: str) -> None:
        if what == "body" and self.flow.read_paused and self.loop.time() < self._body_until:
            self._expect(self.body_pause_s, what)  # it is we who do not read
            return
        if what and self._answers_another():  # its time begins when it is its turn
            self._body_until = self.loop.time() + self.body_s
            self._expect(self.body_pause_s, what)
            return
        self._refuse(408, f"The request's {what} did not arrive in time" if what else "")

    def _answers_another(self) -> bool:
        """Whether an earlier request of this connection is not fully answered."""
        served = self._served
        return served is not None and not served.response_complete and (self._in_headers or served is not self.cycle)

    def _refuse(self, status: int, message: str) -> None:
        """Sends the reason, unless nothing was asked or an answer has begun, and closes the connection."""
        self._arrived()
        waiting = self.cycle is not None and not self.cycle.response_complete
        if message and not self._answers_another() and not (waiting and self.cycle.response_started):
            body = encode_json(error_body(message, "invalid_request_error", None, "request_timeout"))
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % (
                    status,
                    b"Request Timeout" if status == 408 else b"Request Header Fields Too Large",
                    len(body),
                )
                + body
            )
        if waiting:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refused = True
        # Closing a connection with unread bytes resets it, and the client would not see why.
        self.loop.call_later(LINGER_S if status == 431 else 0, self.transport.close)


KEEP_ALIVE_S = 3700
"""Longer than proxies keep idle connections (Envoy: an hour), so that we never close one under a request."""
FAREWELL_S = 1.0
"""Time to send error answers."""
STOPPED = FinishReason("error", message="The server is shutting down", status=503)
MAX_SERVED_NAME = 256
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 32 << 10


class ServeError(Exception):
    """The server cannot start or continue; the message says why."""


def served_name(args: ServerArgs) -> str:
    """The model's name in requests: as given, the Hub id, or the folder's name."""
    if args.served_model_name:
        return args.served_model_name[:MAX_SERVED_NAME]
    path = Path(args.model).expanduser()
    return path.resolve().name if path.is_dir() else repository(args.model)


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The parts of a checkpoint that an HTTP process needs."""

    directory: Path
    config: dict[str, Any]
    prompts: Prompts
    defaults: SamplingDefaults
    pooling: Pooling | None
    formats: Formats

    @property
    def hidden_size(self) -> int:
        """0 if config.json lacks it; the scheduler then refuses to start."""
        size = self.config.get("hidden_size")
        return size if isinstance(size, int) else 0

    @classmethod
    def read(cls, args: ServerArgs, directory: Path) -> ServedModel:
        """Raises ServeError."""
        try:
            defaults = SamplingDefaults()
            if args.sampling_defaults == "model":
                defaults = SamplingDefaults.from_model(directory)
            pooling = pooling_of(directory, args.task, matryoshka=args.matryoshka)
            prompts = Prompts(TokenizerBundle.from_dir(directory))
            check_template(pooling, prompts)
            formats = formats_of(prompts.bundle, args.reasoning_parser, args.tool_call_parser, args.strict_schemas)
            return cls(directory, _read_json(directory / "config.json"), prompts, defaults, pooling, formats)
        except ConfigError as error:
            raise ServeError(str(error)) from None
        except (BundleError, ModelError, TemplateError, ValueError) as error:
            raise ServeError(f"--model: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ServeError(f"--model: cannot read {path}: {error}") from None


def new_service(args: ServerArgs, model: ServedModel, ranks: Sequence[DpRank]) -> tuple[Service, ReaderPool]:
    """The service that answers requests, with its reader processes. Raises ServeError."""
    name = served_name(args)
    if name in (module.partition("=")[0] for module in args.lora_modules):
        raise ServeError(f"--lora-modules: {name!r} is the name of the model itself")
    metrics = Metrics(name, len(ranks))
    rules = _media_rules(args, model)
    pool = ReaderPool(
        ReaderSpec(
            str(model.directory.absolute()),
            name,
            model.defaults,
            args.log_level,
            model.pooling,
            model.formats,
            args.log_format,
            rules,
        )
    )
    service = Service(
        model_name=name,
        prompts=model.prompts,
        defaults=model.defaults,
        manager=TokenizerManager(metrics, ranks),
        metrics=metrics,
        state=State(loads=[LoadUpdate()] * len(ranks)),
        budget=ByteBudget(args.max_bytes_in_flight),
        pooling=model.pooling,
        formats=model.formats,
        pool=pool,
        rules=rules,
        media=None if rules is None or not rules.kinds else _media_reader(args, model, rules),
        uses_priority=args.uses_priority,
        hidden_size=model.hidden_size if args.enable_return_hidden_states else None,
        tracing=_tracing(name) if args.tracing else None,
    )
    return service, pool


_DECODERS = {"image": ("PIL",), "video": ("PIL", "av"), "audio": ("av",)}
"""The libraries that decode each kind, besides those that all kinds need."""


def _media_rules(args: ServerArgs, model: ServedModel) -> MediaRules | None:
    """What requests may have besides text; None if the model reads text alone."""
    spec = model.prompts.bundle.media
    if spec is None or model.pooling is not None:
        return None
    off = dict[str, str]()
    for kind in spec.placeholders:
        needed = (*_DECODERS[kind], "transformers", "httpcore2")
        if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
            off[kind] = f"this server lacks {' and '.join(lacking)} to read media: install treeline-runtime[media]"
    if pans(model.directory):
        off.setdefault("image", "pan and scan is not supported: set do_pan_and_scan to false")
    if "video" in spec.placeholders:
        try:
            read_settings(model.directory)
        except ValueError as error:
            off.setdefault("video", f"the model's video processor is not supported: {error}")
    return MediaRules(spec, args.max_images, off)


def _media_reader(args: ServerArgs, model: ServedModel, rules: MediaRules) -> MediaReader:
    """Raises ServeError."""
    from treeline_runtime.media import files, pool, reading
    from treeline_runtime.media.fetch import Fetcher

    try:
        fetcher = Fetcher(args.allowed_media_domains) if args.allowed_media_domains else None
    except ValueError as error:
        raise ServeError(f"--allowed-media-domains: {error}") from None
    outputs = files.MediaFiles()
    limits: dict[Kind, int] = {
        "image": args.max_image_pixels,
        "video": args.max_video_seconds,
        "audio": args.max_audio_seconds,
    }
    known = {kind: most for kind, most in limits.items() if kind in rules.kinds}
    processes = pool.MediaPool(str(model.directory.absolute()), known, outputs)
    return reading.MediaReader(rules, model.prompts, processes, outputs, fetcher, args.media_timeout)


def _tracing(model_name: str) -> Tracing | None:
    """Raises ServeError."""
    from treeline_wire import tracing as sdk

    from treeline_runtime.server import tracing

    try:
        spans = sdk.exporter()
        return None if spans is None else tracing.Tracing(sdk.provider(spans, tracing.SERVICE), model_name)
    except TracingError as error:
        raise ServeError(f"--tracing: {error}") from None


class HttpServer(uvicorn.Server):
    """uvicorn on one socket, without its signal handling."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                loop="none",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._listener = listener
        self._told_to_stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._told_to_stop.set()

    async def main_loop(self) -> None:
        """Wakes up once a second, for the date header; uvicorn's own does ten times, in each server."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._told_to_stop.wait()

    def start(self) -> asyncio.Task[None]:
        """Serves until `stop_all`."""
        return asyncio.create_task(self.serve([self._listener]))


async def stop_all(servers: Sequence[HttpServer], serving: Sequence[asyncio.Task[None]]) -> None:
    """Stops the servers, giving running answers `FAREWELL_S`."""
    for number in (signal.SIGTERM, signal.SIGINT):  # stop, and do not wait
        for server in servers:
            server.handle_exit(number, None)
    await asyncio.wait(serving, timeout=FAREWELL_S)


def give_back_large_blocks() -> None:
    """Makes glibc take parts of bodies and answers directly from the system, and return them when freed.

    By default they are on the heap, which cannot shrink below later allocations.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
