"""The scheduler process: the engine's `Scheduler`, with its messages carried over ZMQ."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterable, Iterator

import msgspec
import torch
import zmq

from treeline_runtime.args import ServerArgs
from treeline_runtime.child import ChildSpec, StartError, run_child
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.ipc import Heartbeat, Inbox, Outbox, Ready
from treeline_runtime.messages import (
    CacheEvent,
    CacheUpdate,
    Cleared,
    FromScheduler,
    LoadUpdate,
    Reply,
    Stored,
    ToPublisher,
    ToScheduler,
    decode_to_scheduler,
)
from treeline_runtime.models import ModelError
from treeline_runtime.models.loader import load_model
from treeline_runtime.scheduler import Scheduler

HEARTBEAT_S = 0.5
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
        self._publisher = (
            None
            if spec.args.no_events
            else Outbox(context, spec.addresses.publisher, limit=PUBLISHER_BACKLOG)
        )
        self._updates = 0
        self._lossy = False
        self._steps = 0
        self._load = self.load()
        self._beat_at = 0.0
        self._load_told = True
        self._http.send(Ready("scheduler", self.limits.as_dict()))
        self.publish(self._load)
        self._beat()

    def receive(self) -> list[ToScheduler]:
        self._steps += 1
        self._beat()
        return self._inbox.take()

    def send(self, messages: list[FromScheduler]) -> None:
        for message in messages:
            if isinstance(message, Reply) and message.data is not None and "blocks" in message.data:
                # who asks for the tree also asks the publisher, and must ask it about the same moment
                data = message.data | {"updates": 0 if self._publisher is None else self._updates}
                message = msgspec.structs.replace(message, data=data)
            self._detokenizer.send(message)

    def publish(self, update: ToPublisher) -> None:
        if isinstance(update, LoadUpdate):
            self._load, self._load_told = update, False
        if self._publisher is None:
            return
        if not self._lossy:
            self._lossy = not self._publish(update)
        elif self._publish(CacheUpdate([Cleared(), *self._whole_tree()])):
            self._lossy = False  # the publisher was away for long; it starts over from the tree as it is

    def _publish(self, update: ToPublisher) -> bool:
        assert self._publisher is not None
        sent = self._publisher.send(update)
        if sent and isinstance(update, CacheUpdate):
            self._updates += 1
        return sent

    def _whole_tree(self) -> Iterator[CacheEvent]:
        return stored_runs(self.cache.tree.blocks())

    def wait(self) -> None:
        self._inbox.wait(int(1000 * (HEARTBEAT_S / 2 if self._load_told else LOAD_INTERVAL_S)))

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= (HEARTBEAT_S if self._load_told else LOAD_INTERVAL_S):
            self._beat_at, self._load_told = now, True
            self._http.send(Heartbeat(self._steps, self._load))


def stored_runs(blocks: Iterable[tuple[int, int | None, list[int], str | None]]) -> Iterator[Stored]:
    """(hash, parent, tokens, namespace) of pages, parents first → events of as many pages as continue each other.

    Which tokens were sampled is not known any more, so all count as sampled.
    """
    run: Stored | None = None
    for block, parent, tokens, namespace in blocks:
        if run is not None and parent == run.block_hashes[-1] and namespace == run.namespace:
            run.block_hashes.append(block)
            run.token_ids.extend(tokens)
            continue
        if run is not None:
            yield run
        run = Stored([block], parent, list(tokens), namespace, output_from=0)
    if run is not None:
        yield run


def run(spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    faulthandler.enable()  # the watchdog ends a stuck scheduler with SIGABRT: then its stacks are in the log
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
