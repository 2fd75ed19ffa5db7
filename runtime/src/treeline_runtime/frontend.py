"""What every HTTP process of a server has: the model's tokenizer, the service that answers, requests in flight.

The first HTTP process is the parent (`serve`), which also has the server's life in its hands; the others, if there are
any, are its workers (`http_worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import importlib.metadata
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
import zmq
from starlette.types import ASGIApp
from treeline_wire.chat import TemplateError
from treeline_wire.tokenizer import BundleError, TokenizerBundle
from treeline_wire.tracing_env import TracingError

from treeline_runtime.args import ServerArgs
from treeline_runtime.child import ChildSpec
from treeline_runtime.config import ConfigError
from treeline_runtime.ipc import Begin, Observed, Outbox, Process
from treeline_runtime.listeners import url_of
from treeline_runtime.messages import BatchTextOut, FinishReason
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.pooling import Pooling, pooling_of
from treeline_runtime.models.wrapped import language_model
from treeline_runtime.server import surfaces
from treeline_runtime.server.formats import Formats, formats_of
from treeline_runtime.server.limits import ByteBudget, Limits
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.pooling_reader import check_template
from treeline_runtime.server.probes import Probes, ServerInfo
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

    @property
    def hidden_size(self) -> int:
        """0 where config.json does not say it: then the scheduler refuses to start."""
        size = language_model(self.config).get("hidden_size")
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


class Frontend:
    """The share of one HTTP process in a server. Made in a running event loop."""

    def __init__(
        self,
        spec: ChildSpec,
        model: ServedModel,
        context: zmq.Context[zmq.Socket[bytes]],
        state: State,
        *,
        to_publisher: Outbox | None = None,
        to_workers: Sequence[Outbox] = (),
        report: Callable[[Observed], object] | None = None,
    ) -> None:
        """`to_publisher` and `to_workers`: of the first HTTP process. `report`: of workers, see `EngineHealth`. Raises
        ServeError."""
        self._args = args = spec.args
        name = served_name(args)
        self.to_scheduler = Outbox(context, spec.addresses.scheduler)
        self.metrics = Metrics(name)
        self.pool = ReaderPool(
            ReaderSpec(str(model.directory), name, model.defaults, args.log_level, model.pooling, model.formats)
        )
        self.service = Service(
            model_name=name,
            prompts=model.prompts,
            defaults=model.defaults,
            manager=TokenizerManager(
                self.metrics,
                self.to_scheduler,
                Outbox(context, spec.addresses.of(Process("detokenizer"))),
                to_publisher,
                to_workers=to_workers,
                rank=spec.rank,
            ),
            metrics=self.metrics,
            state=state,
            budget=ByteBudget(args.max_bytes_in_flight // args.http_workers),
            pooling=model.pooling,
            formats=model.formats,
            pool=self.pool,
            uses_priority=args.uses_priority,
            hidden_size=model.hidden_size if args.enable_return_hidden_states else None,
            tracing=_tracing(name) if args.tracing else None,
        )
        info = ServerInfo(
            args=args,
            version=importlib.metadata.version("treeline-runtime"),
            epoch=spec.epoch,
            model_config=model.config,
            started_at=spec.started_at,
        )
        self.probes = Probes(self.service, info, report)

    def inference(self) -> ASGIApp:
        """What listens on the main port."""
        args = self._args
        return surfaces.inference(
            self.service,
            self.probes,
            key=args.api_key,
            metrics_at=None if args.metrics_port is None else url_of(args.metrics_host, args.metrics_port),
            admin_at=None if args.admin_port is None else url_of(args.admin_host, args.admin_port),
            documented=not args.no_docs,
            allowed_origins=args.cors_allow_origin,
        )

    def begin(self, begin: Begin) -> None:
        """The engine is ready."""
        scheduler = begin.scheduler
        self.service.limits = Limits(
            context_length=scheduler["context_length"], max_request_tokens=scheduler["longest_request"]
        )
        self.probes.scheduler_info, self.probes.kv_events = scheduler, begin.kv_events
        self.pool.start()
        gc.collect()
        gc.freeze()  # what is there now stays: no later collection walks through it while requests wait

    def on_batch(self, batch: BatchTextOut) -> None:
        self.service.manager.on_batch(batch)
        self.probes.health.on_batch(batch)

    async def close(self) -> None:
        self.service.prompts.close()
        await self.pool.stop()
        if self.service.tracing is not None:
            await self.service.tracing.stop(FAREWELL_S)


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
