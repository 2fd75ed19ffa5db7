"""The scheduler process: a `Scheduler` whose transport is ZMQ."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import zmq

from treeline_runtime.args import ServerArgs
from treeline_runtime.config import ConfigError
from treeline_runtime.ipc import HEARTBEAT_S, Addresses, Failed, Heartbeat, Inbox, Outbox, Ready
from treeline_runtime.kvcache.remote import RemotePages
from treeline_runtime.listeners import EventsError, open_keys
from treeline_runtime.messages import FromScheduler, StepRow, ToScheduler, decode_to_scheduler
from treeline_runtime.models import ModelError
from treeline_runtime.models.loader import resolve_device
from treeline_runtime.models.shards import Rank
from treeline_runtime.page_server import PageServer
from treeline_runtime.processes import ChildSpec, StartError, last_words, run_child
from treeline_runtime.published import LoadUpdate, ToPublisher
from treeline_runtime.scheduler import start
from treeline_runtime.scheduler.peers import Peers
from treeline_runtime.scheduler.ranks.protocol import GroupFailed

LOAD_INTERVAL_S = 0.05
"""The shortest interval of load reports to the HTTP process."""
PUBLISHER_BACKLOG = 50_000
"""Updates that may wait for the publisher before sending stops and starts over later."""


class SocketTransport:
    """Implements `Transport` between processes; only `wait` blocks."""

    def __init__(self, spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._spec, self._context = spec, context
        self._inbox = Inbox(context, spec.addresses.of("scheduler"), decode_to_scheduler)
        self._detokenizer = Outbox(context, spec.addresses.of("detokenizer"))
        self._http = Outbox(context, spec.addresses.of("http"))
        self._publisher: Outbox | None = None
        if not spec.args.no_events:
            self._publisher = Outbox(context, spec.addresses.of("publisher"), limit=PUBLISHER_BACKLOG)
        self._load = LoadUpdate()
        self._load_told = True
        self._beat_at = float("-inf")
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def peers(self) -> Peers:
        """The other data-parallel ranks."""
        own, count = self._spec.addresses, self._spec.args.dp_size
        others = [Addresses(own.folder, rank) for rank in range(count) if rank != own.rank]
        outboxes = [Outbox(self._context, other.of("scheduler")) for other in others]

        def tell(row: StepRow) -> None:
            for outbox in outboxes:
                outbox.send(row)

        return Peers(Rank(own.rank, count), Path(own.folder), self, tell)

    def announce_ready(self, limits: dict[str, Any], load: LoadUpdate) -> None:
        """Tells the HTTP process that the scheduler is ready, and routers that it is idle."""
        self._http.send(Ready("scheduler", limits))
        self.publish(load)
        self._beat()

    def receive(self) -> list[ToScheduler]:
        self._beat()
        return self._inbox.take()

    def send(self, messages: list[FromScheduler]) -> None:
        for message in messages:
            self._detokenizer.send(message)

    def publish(self, update: ToPublisher) -> bool:
        if isinstance(update, LoadUpdate):
            self._load, self._load_told = update, False
        return self._publisher is None or self._publisher.send(update)

    def wait(self) -> None:
        if self._inbox.wait_or(self._woken, int(1000 * (HEARTBEAT_S / 2 if self._load_told else LOAD_INTERVAL_S))):
            os.eventfd_read(self._woken)

    def wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def fail(self, reason: str) -> None:
        last_words(self._context, self._spec, Failed("scheduler", reason))
        os._exit(1)  # the scheduler may wait for a lost rank

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= (HEARTBEAT_S if self._load_told else LOAD_INTERVAL_S):
            if self._load_told and self._publisher is not None:
                self._publisher.send(self._load)  # nothing new, but a sign of life
            self._beat_at, self._load_told = now, True
            self._http.send(Heartbeat("scheduler", self._load))


def config_of(spec: ChildSpec) -> ServerArgs:
    """The settings of a rank: its share of the machine's GPUs, or of CPU threads and memory. Raises ConfigError."""
    args = dataclasses.replace(spec.args, model=spec.model_dir)
    if args.dp_size == 1:
        return args
    device = resolve_device(args.device)
    needed = args.dp_size * args.ranks
    if args.host_cache is not None:
        disk = None if args.disk_cache is None else f"{args.disk_cache}/rank-{spec.rank}"
        shares = {name: getattr(args, name) // args.dp_size for name in ("host_cache", "disk_cache_size")}
        args = dataclasses.replace(args, disk_cache=disk, **shares)
    if device.type == "cpu":
        threads = args.threads or max(1, torch.get_num_threads() // needed)
        fraction = None if args.mem_fraction is None else args.mem_fraction / args.dp_size
        return dataclasses.replace(args, threads=threads, mem_fraction=fraction)
    first, there = device.index or 0, torch.cuda.device_count()
    if first + needed > there:
        raise ConfigError(
            f"--dp-size {args.dp_size} needs {needed} GPUs, {args.ranks} for each engine, cuda:{first} to cuda:"
            f"{first + needed - 1}, and this machine has {there}: make one of them smaller"
        )
    return dataclasses.replace(args, device=f"cuda:{first + spec.rank * args.ranks}")


def run(spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    transport = SocketTransport(spec, context)
    try:
        config = config_of(spec)
        scheduler = start(config, transport, peers=transport.peers() if config.shares_experts else None)
        limits = scheduler.limits.as_dict() | {"adapters": scheduler.adapters.names}
        with ExitStack() as stack:
            if (tiers := scheduler.cache.tiers) is not None:
                tiers.store.remote = RemotePages(context, open_keys(spec.args)[0])
                if spec.args.kv_transfer_port is not None:
                    server = PageServer(context, spec.args, spec.rank, tiers.lending, transport.wake)
                    stack.callback(server.close)
                    limits["kv_transfer_port"] = server.port
            gc.collect()
            gc.freeze()  # objects so far are permanent: later collections skip them
            transport.announce_ready(limits, scheduler.load())
            scheduler.grammars.warm()
            scheduler.run_forever(stop=lambda: False)  # ends with the process
    except (ConfigError, EventsError, ModelError, GroupFailed) as error:
        raise StartError(str(error)) from None


if __name__ == "__main__":
    sys.exit(run_child("scheduler", run))
