"""The scheduler process: the engine's `Scheduler`, with its messages carried over ZMQ."""

from __future__ import annotations

import sys
import time

import msgspec
import torch
import zmq

from treeline_runtime.args import ServerArgs
from treeline_runtime.child import ChildSpec, StartError, run_child
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.ipc import HEARTBEAT_S, Heartbeat, Inbox, Outbox, Ready
from treeline_runtime.messages import (
    FromScheduler,
    LoadUpdate,
    Reply,
    ToPublisher,
    ToScheduler,
    decode_to_scheduler,
)
from treeline_runtime.models import ModelError
from treeline_runtime.models.loader import load_model
from treeline_runtime.publisher.outlet import Outlet
from treeline_runtime.scheduler import Scheduler

LOAD_INTERVAL_S = 0.05
"""A changed load is reported to the HTTP process at most this often."""
PUBLISHER_BACKLOG = 50_000
"""Updates that may wait for the publisher before we stop sending, and later start over."""


def scheduler_config(args: ServerArgs, model_dir: str) -> SchedulerConfig:
    """Raises ConfigError."""
    return SchedulerConfig(
        model=model_dir,
        dtype=args.dtype,  # type: ignore[arg-type]  # the parser's choices are the type's
        device=args.device,
        threads=args.threads,
        load_format=args.load_format,  # type: ignore[arg-type]
        context_length=args.context_length,
        page_size=args.page_size,
        max_total_tokens=args.max_total_tokens,
        mem_fraction=args.mem_fraction,
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        chunked_prefill_size=args.chunked_prefill_size,
        schedule_policy=args.schedule_policy,
        eviction_policy=args.eviction_policy,
    )


class SocketScheduler(Scheduler):
    """`Scheduler` between sockets. Nothing here blocks but `wait`."""

    def connect(self, spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Opens the sockets and says that the scheduler is ready."""
        self._inbox = Inbox(context, spec.addresses.scheduler, decode_to_scheduler)
        self._detokenizer = Outbox(context, spec.addresses.detokenizer)
        self._http = Outbox(context, spec.addresses.http)
        self._outlet = None
        if not spec.args.no_events:
            publisher = Outbox(context, spec.addresses.publisher, limit=PUBLISHER_BACKLOG)
            self._outlet = Outlet(publisher.send, self.cache.tree.blocks)
        self._load = self.load()
        self._beat_at = 0.0
        self._load_told = True
        self._http.send(Ready("scheduler", self.limits.as_dict()))
        self.publish(self._load)
        self._beat()

    def receive(self) -> list[ToScheduler]:
        self._beat()
        return self._inbox.take()

    def send(self, messages: list[FromScheduler]) -> None:
        for message in messages:
            if isinstance(message, Reply) and message.data is not None and "blocks" in message.data:
                # who asks for the tree also asks the publisher, and must ask it about the same moment
                data = message.data | {"updates": 0 if self._outlet is None else self._outlet.updates}
                message = msgspec.structs.replace(message, data=data)
            self._detokenizer.send(message)

    def publish(self, update: ToPublisher) -> None:
        if isinstance(update, LoadUpdate):
            self._load, self._load_told = update, False
        if self._outlet is not None:
            self._outlet.publish(update)

    def wait(self) -> None:
        if self._outlet is not None:
            self._outlet.catch_up()
        self._inbox.wait(int(1000 * (HEARTBEAT_S / 2 if self._load_told else LOAD_INTERVAL_S)))

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= (HEARTBEAT_S if self._load_told else LOAD_INTERVAL_S):
            if self._load_told and self._outlet is not None:
                self._outlet.publish(self._load)  # nothing new, but a sign of life
            self._beat_at, self._load_told = now, True
            self._http.send(Heartbeat("scheduler", self._load))


def run(spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    try:
        config = scheduler_config(spec.args, spec.model_dir)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        scheduler = SocketScheduler(config, load_model(config))
    except (ConfigError, ModelError) as error:
        raise StartError(str(error)) from None
    scheduler.connect(spec, context)
    scheduler.run_forever(stop=lambda: False)  # ends with the process


if __name__ == "__main__":
    sys.exit(run_child("scheduler", run))
