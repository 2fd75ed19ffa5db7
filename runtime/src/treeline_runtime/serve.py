"""`treeline serve`: a server's life from arguments to exit status.

    bind the ports → find the model → start the children → serve HTTP (503) → all ready: serve → stop → drain → end all

A server ends in one of three ways: a signal (drain, status 0; Ctrl-C before it is ready: status 130), a second signal
(at once, status 128 + signal), or the end of a child (requests in flight get an error, status 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import logging
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
import zmq
from treeline_wire.load import LOAD_TOPIC
from treeline_wire.security import is_loopback

from treeline_runtime.args import ServerArgs
from treeline_runtime.config import ConfigError
from treeline_runtime.download import resolve_model
from treeline_runtime.frontend import FAREWELL_S, STOPPED, HttpServer, ServedModel, ServeError, new_service, stop_all
from treeline_runtime.ipc import Addresses, AsyncInbox, Failed, Heartbeat, Outbox, Ready, ToHttp, decode_to_http
from treeline_runtime.listeners import Listeners, address, check_event_ports, listening, open_keys, url, url_of
from treeline_runtime.messages import BatchTextOut, DrainReq, FinishReason, Reply
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.preflight import check_before_loading
from treeline_runtime.nodes import run_node
from treeline_runtime.processes import ChildSpec, ProcessGroup, SocketFolder, how_ended
from treeline_runtime.server import surfaces
from treeline_runtime.server.administration import Administration
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.probes import Probes, ServerInfo
from treeline_runtime.tokenizer_manager import DpRank

if TYPE_CHECKING:
    import grpc

INTERRUPT_DRAIN_S = 3.0
"""Time that Ctrl-C gives running requests."""
QUIET_S = 0.5
"""Time without requests after which a drained server closes its connections."""
REFUSALS_S = 3.0
"""The longest that it waits for this."""
LAST_WORDS_S = 0.2
"""Time for the last message of a child that has ended."""

logger = logging.getLogger("treeline")


class Server:
    """A runtime: the HTTP process and its children. Create it in a running event loop; `run` once."""

    def __init__(
        self,
        args: ServerArgs,
        listeners: Listeners,
        model: ServedModel,
        socket_folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        signals: asyncio.Queue[signal.Signals],
    ) -> None:
        """`signals` gets SIGTERM and SIGINT. Raises ServeError."""
        self._args = args
        self._listeners = listeners
        self._context = context
        epoch = secrets.randbits(64) or 1
        self._ranks = [
            ChildSpec(args, Addresses(str(socket_folder), rank), str(model.directory), epoch)
            for rank in range(args.dp_size)
        ]
        """By data-parallel rank: what its processes are told."""
        self._started = time.monotonic()
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._signals = signals
        self._children = ["scheduler", "detokenizer", *([] if args.no_events else ["publisher"])]
        self._ready: dict[str, dict[str, Any]] = {}
        """What children said when they were ready, by name."""
        self._stopping = False
        boxes = [{kind: Outbox(context, spec.addresses.of(kind)) for kind in self._children} for spec in self._ranks]
        ranks = [DpRank(one["scheduler"], one["detokenizer"], one.get("publisher")) for one in boxes]
        self._service, self._pool = new_service(args, model, ranks)
        self._state = self._service.state
        info = ServerInfo(
            args=args,
            version=importlib.metadata.version("treeline-runtime"),
            epoch=epoch,
            model_config=model.config,
            started_at=time.time(),
        )
        self._probes = Probes(self._service, info)

    # ---- life -----------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serves until a signal or failure stops it; returns the exit status."""
        group = ProcessGroup(self._on_end)
        servers = self._servers()
        inboxes = []
        try:
            for spec in self._ranks:
                on_message = functools.partial(self._on_message, spec)
                inboxes.append(AsyncInbox(self._context, spec.addresses.of("http"), decode_to_http, on_message))
                for process in self._children:
                    group.start(process, spec)
            calls = await self._calls()
            serving = [server.start() for server in servers]
            watchdog = asyncio.create_task(self._watch(group))
            health = asyncio.create_task(self._probes.health.watch())
            try:
                return await self._until_stopped(serving)
            finally:
                watchdog.cancel()
                health.cancel()
                await stop_all(servers, serving)
                if calls is not None:
                    await calls.stop(FAREWELL_S)
        finally:
            self._stopping = True
            self._service.prompts.close()
            await self._pool.stop()
            if self._service.media is not None:
                await self._service.media.stop()
            if self._service.tracing is not None:
                await self._service.tracing.stop(FAREWELL_S)
            await group.stop()
            for inbox in inboxes:
                inbox.close()

    async def _until_stopped(self, serving: Sequence[asyncio.Task[None]]) -> int:
        asked = asyncio.create_task(self._signals.get())
        await _first(asked, self._failure, *serving)
        if self._failure.done():
            return await self._fail(self._failure.result())
        if not asked.done():
            return await self._fail("the HTTP server ended unexpectedly")
        if asked.result() == signal.SIGINT and not self._state.ready:
            logger.info("SIGINT: stopping, before it was ready")
            return 128 + signal.SIGINT
        drain = asyncio.create_task(self._drain(asked.result()))
        again = asyncio.create_task(self._signals.get())
        await _first(drain, again, self._failure)
        if drain.done():
            return 0
        drain.cancel()
        if self._failure.done():
            return await self._fail(self._failure.result())
        logger.warning("%s again: stopping at once", again.result().name)
        self._state.refusing = True
        self._service.manager.fail_all(STOPPED)
        await self._settle(FAREWELL_S)
        return 128 + again.result()

    async def _fail(self, why: str) -> int:
        """Tells everybody who waits, then ends with status 1."""
        logger.error("%s; stopping", why)
        self._state.failure = why
        cut = self._service.manager.fail_all(FinishReason("error", message=f"The server failed: {why}", status=503))
        if cut:
            logger.error("%d requests in flight were ended", cut)
        await self._settle(FAREWELL_S)
        return 1

    async def _drain(self, number: signal.Signals) -> None:
        """Reacts to SIGTERM: tells routers, goes on accepting for --pre-stop, then waits for running requests."""
        args, state = self._args, self._state
        state.draining = True
        for rank in self._service.manager.ranks:
            rank.scheduler.send(DrainReq())
            if rank.publisher is not None:
                rank.publisher.send(DrainReq())
        if number == signal.SIGTERM:
            logger.info("SIGTERM: draining, %d requests in flight", self._service.active)
            await asyncio.sleep(args.pre_stop)
            limit_s = args.drain_timeout
        else:
            logger.info("%s: stopping, %d requests in flight", number.name, self._service.active)
            limit_s = min(args.drain_timeout, INTERRUPT_DRAIN_S)
        state.refusing = True
        if not await self._settle(limit_s):
            cut = self._service.manager.fail_all(STOPPED)
            logger.warning("%d requests had not finished after %g s and were ended", cut, limit_s)
            await self._settle(FAREWELL_S)
        if number == signal.SIGTERM:
            await self._quiet()

    async def _quiet(self) -> None:
        """Waits until routers send nothing any more; what they send is refused, so that they try another server.

        A request may be on its way to an idle connection, or to the listener's queue, while these are closed: it is
        lost, and HTTP/1.1 cannot say beforehand that they will be.
        """
        seen = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFUSALS_S):
                while self._service.active or seen != self._service.came:
                    seen = self._service.came
                    await asyncio.sleep(QUIET_S)

    async def _settle(self, timeout_s: float) -> bool:
        """Waits until no request is running; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._service.idle.wait()
        except TimeoutError:
            return False
        return True

    async def _watch(self, group: ProcessGroup) -> None:
        """Ends loading after --start-timeout, and a stuck child after --watchdog-timeout."""
        args, state = self._args, self._state
        while not state.ready:
            await asyncio.sleep(0.2)
            if time.monotonic() - self._started > args.start_timeout:
                missing = [name for name in self._names if name not in self._ready]
                self._report(f"not ready after {args.start_timeout:g} s: waiting for {', '.join(missing)}")
                return
        while args.watchdog_timeout:
            await asyncio.sleep(min(1.0, args.watchdog_timeout / 4))
            process, still_s = state.most_stale_child(time.monotonic())
            if still_s > args.watchdog_timeout:
                self._report(f"the {process} has not moved for {still_s:.0f} s")
                group.abort(process)
                return

    # ---- what children say --------------------------------------------------------------------------------

    @property
    def _names(self) -> list[str]:
        return [spec.name(process) for spec in self._ranks for process in self._children]

    def _on_message(self, spec: ChildSpec, message: ToHttp) -> None:
        """`spec`: of the rank that it comes from."""
        match message:
            case BatchTextOut():
                self._service.manager.on_batch(message)
                self._probes.health.on_batch(message, spec.rank)
            case Heartbeat():
                if self._state.heartbeat_at:
                    self._state.heartbeat_at[spec.name(message.process)] = time.monotonic()
                self._state.heartbeats += 1
                if message.load is not None:
                    self._state.loads[spec.rank] = message.load
            case Reply():
                self._service.manager.on_reply(message)
            case Ready():
                self._ready[spec.name(message.process)] = message.info
                if len(self._ready) == len(self._names):
                    self._on_ready()
            case Failed():
                self._report(f"the {spec.name(message.process)} process failed: {message.message}")

    def _on_ready(self) -> None:
        args, service, metrics = self._args, self._service, self._service.metrics
        schedulers = [self._ready[spec.name("scheduler")] for spec in self._ranks]
        scheduler = min(schedulers, key=lambda info: info["longest_request"])  # a request may go to any rank
        publisher = self._ready.get(self._ranks[0].name("publisher"))
        service.limits = Limits(scheduler["context_length"], scheduler["longest_request"], args.dp_size)
        self._state.adapters = scheduler.pop("adapters")
        self._probes.scheduler_info = scheduler
        self._probes.kv_events = None if publisher is None else _kv_events(publisher, args)
        self._pool.start()
        if service.media is not None:
            service.media.start()
        gc.collect()
        gc.freeze()  # objects so far are permanent: later collections skip them
        self._state.heartbeat_at = dict.fromkeys(self._names, time.monotonic())
        self._state.ready = True
        took_s = time.monotonic() - self._started
        metrics.set("startup_time_seconds", took_s)
        metrics.set("context_len", scheduler["context_length"])
        metrics.set("page_size", args.page_size)
        logger.info(
            "ready after %.1f s: %s on %s, %scache of %d tokens (%s, %d bytes each), contexts of %d",
            took_s,
            self._service.model_name,
            url(self._listeners.http),
            "" if args.dp_size == 1 else f"{args.dp_size} ranks, each with a ",
            scheduler["max_total_tokens"],
            scheduler["kv_dtype"],
            scheduler["kv_bytes_per_token"],
            scheduler["context_length"],
        )

    def _on_end(self, name: str, status: int) -> None:
        if self._stopping:
            return
        why = f"the {name} process {how_ended(status)}"
        if status == 1:  # its last message with the reason may still arrive
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._report, why)
        else:
            self._report(why)

    def _report(self, why: str) -> None:
        """Only the first failure counts; others follow from it."""
        if not self._failure.done():
            self._failure.set_result(why)

    # ---- pieces -------------------------------------------------------------------------------------------

    def _servers(self) -> list[HttpServer]:
        """An HTTP server per listener. All answer until the drain has ended."""
        args, listeners, service, probes = self._args, self._listeners, self._service, self._probes
        inference = surfaces.inference(
            service,
            probes,
            key=args.api_key,
            metrics_at=None if args.metrics_port is None else url_of(args.metrics_host, args.metrics_port),
            admin_at=None if args.admin_port is None else url_of(args.admin_host, args.admin_port),
            allowed_origins=args.cors_allow_origin,
        )
        found = [HttpServer(inference, listeners.http)]
        if listeners.metrics is not None:
            found.append(HttpServer(surfaces.metrics(service, probes), listeners.metrics))
        if listeners.admin is not None:
            loopback = is_loopback(address(listeners.admin)[0])
            engine = Administration(service, args)
            administration = surfaces.administration(service, probes, engine, key=args.admin_key, loopback=loopback)
            found.append(HttpServer(administration, listeners.admin))
        return found

    async def _calls(self) -> grpc.aio.Server | None:
        """The gRPC server, if it is asked for. Raises ListenError."""
        if self._args.grpc_port is None:
            return None
        from treeline_runtime.grpc.server import started  # what few servers need

        return await started(self._service, self._probes, self._args, address(self._listeners.http)[0])


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _kv_events(publisher: dict[str, Any], args: ServerArgs) -> dict[str, Any]:
    """Where this server publishes, in SGLang's names. `publisher`: rank 0's words when ready; other ports follow."""
    return {
        "publisher": "zmq",
        "endpoint_host": "*" if publisher["host"] in ("0.0.0.0", "::") else publisher["host"],
        "endpoint_port_base": publisher["events_port"],
        "replay_endpoint_port_base": publisher["replay_port"],
        "load_endpoint_port_base": publisher["load_port"],
        "topic": args.kv_events_topic,
        "load_topic": LOAD_TOPIC.decode(),
        "block_size": args.page_size,
        "dp_size": args.dp_size,
        "curve": publisher["curve"],
    }


def checked_model(args: ServerArgs, copies: int = 1) -> Path:
    """The checkpoint's folder, downloaded if need be, after all checks that need no weights. `copies`: how many servers
    with these arguments share the machine. Raises ModelNotFound, ServeError."""
    try:
        return resolve_model(
            args.model,
            needs_weights=args.load_format != "dummy",
            check=lambda directory: check_before_loading(args, directory, copies, args.dp_size),
        )
    except ModelError as error:
        raise ServeError(f"--model: {error}") from None
    except ConfigError as error:
        raise ServeError(str(error)) from None


def serve(args: ServerArgs) -> int:
    """Runs a server, or a node's ranks for the server of node 0, until it is stopped; returns the exit status. Raises
    ListenError, ServeError, EventsError, ModelNotFound.
    """
    if args.node_rank:
        try:
            return run_node(args, checked_model(args))
        except ConfigError as error:
            raise ServeError(str(error)) from None
    with listening(args) as listeners:
        if not args.no_events or args.kv_transfer_port is not None:
            check_event_ports(args, open_keys(args)[1])
        model_dir = checked_model(args)
        logger.info("listening on %s", url(listeners.http))
        for what, listener in (("metrics", listeners.metrics), ("administration", listeners.admin)):
            if listener is not None:
                logger.info("%s on %s", what, url(listener))
        args = dataclasses.replace(
            args,
            port=address(listeners.http)[1],
            metrics_port=None if listeners.metrics is None else address(listeners.metrics)[1],
            admin_port=None if listeners.admin is None else address(listeners.admin)[1],
        )
        model = ServedModel.read(args, model_dir)
        if model.pooling is None:
            found = model.formats
            logger.info("reasoning parser: %s; tool call parser: %s", found.reasoning or "none", found.tools or "none")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(args, listeners, model))


async def _run(args: ServerArgs, listeners: Listeners, model: ServedModel) -> int:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):  # from here on there is a folder to remove, and soon children to end
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with SocketFolder() as folder:
        try:
            return await Server(args, listeners, model, folder, context, signals).run()
        finally:
            context.destroy(linger=0)
