"""The HTTP side of a server: what it reads of a checkpoint, the service that answers, uvicorn on our sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from treeline_wire.chat import TemplateError
from treeline_wire.tokenizer import BundleError, TokenizerBundle
from treeline_wire.tracing_env import TracingError

from treeline_runtime.args import ServerArgs
from treeline_runtime.config import ConfigError
from treeline_runtime.ipc import Outbox
from treeline_runtime.messages import FinishReason
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.pooling import Pooling, pooling_of
from treeline_runtime.server.formats import Formats, formats_of
from treeline_runtime.server.limits import ByteBudget
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.pooling_reader import check_template
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader_pool import ReaderPool, ReaderSpec
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_runtime.server.service import Service, State
from treeline_runtime.server.timeouts import HttpProtocol
from treeline_runtime.tokenizer_manager import TokenizerManager

if TYPE_CHECKING:
    from treeline_runtime.server.tracing import Tracing

KEEP_ALIVE_S = 3700
"""Longer than proxies keep idle connections (Envoy: an hour), so that it is never we who close one under a request."""
FAREWELL_S = 1.0
"""Time for error answers to leave."""
STOPPED = FinishReason("error", message="The server is shutting down", status=503)
MAX_SERVED_NAME = 256
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 32 << 10


class ServeError(Exception):
    """The server cannot start or go on; the message says why."""


def served_name(args: ServerArgs) -> str:
    """What requests call the model: as asked, the Hub id, or the folder's name."""
    if args.served_model_name:
        return args.served_model_name[:MAX_SERVED_NAME]
    path = Path(args.model).expanduser()
    return path.resolve().name if path.is_dir() else args.model


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What an HTTP process reads of a checkpoint."""

    directory: Path
    config: dict[str, Any]
    prompts: Prompts
    defaults: SamplingDefaults
    pooling: Pooling | None
    formats: Formats

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
            formats = formats_of(prompts.bundle, args.reasoning_parser, args.tool_call_parser)
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


def new_service(
    args: ServerArgs, model: ServedModel, to_scheduler: Outbox, to_detokenizer: Outbox, to_publisher: Outbox | None
) -> tuple[Service, ReaderPool]:
    """What answers requests, and the processes that read large bodies for it. Raises ServeError."""
    name = served_name(args)
    metrics = Metrics(name)
    pool = ReaderPool(
        ReaderSpec(str(model.directory), name, model.defaults, args.log_level, model.pooling, model.formats)
    )
    service = Service(
        model_name=name,
        prompts=model.prompts,
        defaults=model.defaults,
        manager=TokenizerManager(metrics, to_scheduler, to_detokenizer, to_publisher),
        metrics=metrics,
        state=State(),
        budget=ByteBudget(args.max_bytes_in_flight),
        pooling=model.pooling,
        formats=model.formats,
        pool=pool,
        uses_priority=args.uses_priority,
        tracing=_tracing(name) if args.tracing else None,
    )
    return service, pool


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
    """uvicorn on one socket, without its signal handling: signals mean more here than stopping HTTP."""

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
        """Wakes up once a second, for the date in headers; uvicorn's own does ten times, and there are several."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._told_to_stop.wait()

    def start(self) -> asyncio.Task[None]:
        """Serves until `stop_all`."""
        return asyncio.create_task(self.serve([self._listener]))


async def stop_all(servers: Sequence[HttpServer], serving: Sequence[asyncio.Task[None]]) -> None:
    """Stops what was started, giving answers that are on their way `FAREWELL_S`."""
    for number in (signal.SIGTERM, signal.SIGINT):  # stop, and do not wait
        for server in servers:
            server.handle_exit(number, None)
    await asyncio.wait(serving, timeout=FAREWELL_S)


def give_back_large_blocks() -> None:
    """Parts of bodies and answers get memory of their own from the system, and their going gives it back.

    By default glibc takes it from the heap, where whatever was allocated since keeps it from shrinking.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
