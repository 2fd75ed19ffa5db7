"""Rank 0's side of a group: it starts the other ranks' processes, tells them what to compute, and watches them.

Each rank has a pipe for its words; a thread here reads it. The first reason for which a rank ends is the group's: the
others are then killed, and the engine hears of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import zmq

from treeline_runtime.collectives import Ranks, join
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.models.shards import Rank
from treeline_runtime.processes import SocketFolder, how_ended, spawn
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.ranks.protocol import (
    Call,
    Clear,
    Command,
    Delayed,
    Digests,
    GroupFailed,
    LastWords,
    Launch,
    Orders,
    Settle,
    Step,
    Vote,
    Word,
    encode,
    told,
)

SILENT_S = 15.0
"""A rank that says nothing for so long, while it says that it is alive four times a second, has stopped."""
CAUSE_S = 0.5
"""Time in which the rank that began it says why, after another has lost it."""
END_S = 3.0
"""Time for the ranks to end by themselves."""

logger = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(Word).decode


def rank_config(config: SchedulerConfig, index: int, device: torch.device) -> SchedulerConfig:
    """One rank's part of the machine. Its GPU is so many after the first; ranks on CPUs share the cores. Raises
    ConfigError if there are too few GPUs."""
    plain: dict[str, Any] = {name: getattr(config, name) for name in SchedulerConfig.__dataclass_fields__}
    plain["model"] = os.path.abspath(config.model)  # the working directory may change
    if device.type != "cuda":
        threads = config.threads or max(1, torch.get_num_threads() // config.ranks)
        return SchedulerConfig(**plain | {"device": "cpu", "threads": threads})
    first, there = device.index or 0, torch.cuda.device_count()
    if first + config.ranks > there:
        raise ConfigError(
            f"--tp-size {config.tp_size} and --pp-size {config.pp_size} need the GPUs cuda:{first} to "
            f"cuda:{first + config.ranks - 1}; torch sees {there}"
        )
    return SchedulerConfig(**plain | {"device": f"cuda:{first + index}"})


class Followers:
    """The other ranks, as rank 0 sees them. Implements `Group`."""

    ranks: Ranks

    def __init__(self, config: SchedulerConfig, device: torch.device, on_failure: Callable[[str], None]) -> None:
        """Starts the processes and meets them. on_failure: called once, in any thread, with the reason for which the
        group ends; not after `close`. Raises ConfigError."""
        self._on_failure = on_failure
        self._digests = Digests()
        self._reason: str | None = None
        self._failed = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._votes: queue.SimpleQueue[Vote | None] = queue.SimpleQueue()
        """None: there will be no more."""
        own = rank_config(config, 0, device)
        self._files = contextlib.ExitStack()
        self._folder = self._files.enter_context(SocketFolder())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(1, config.ranks):
                self._start(config, index, device)
            self.settle()
            self.ranks = join(Rank.of(0, config.tp_size, config.pp_size), self._folder, torch.device(own.device))
            self.settle()
            self._files.close()  # all are connected: nothing is left if this process is killed
        except BaseException:
            self.close()
            raise
        self.config = own

    def _start(self, config: SchedulerConfig, index: int, device: torch.device) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(f"ipc://{self._folder}/{index}.ipc")
        self._sockets.append(socket)
        child = spawn("treeline_runtime.scheduler.ranks.process", stdout=subprocess.PIPE)
        self._children.append(child)
        threading.Thread(target=self._watch, args=(index, child), name=f"rank {index}", daemon=True).start()
        orders = Orders(
            rank_config(config, index, device),
            index,
            str(self._folder),
            getattr(config, "log_level", "warning"),
            getattr(config, "log_format", None),
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its thread says why
            os.write(child.stdin.fileno(), msgspec.json.encode(orders) + b"\n")

    # ---- Group --------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, launch: Launch) -> None:
        encoded = encode(plan)
        self._send(Step(msgspec.Raw(encoded), launch, self._digests.after(encoded, launch)))

    def tell(self, command: Delayed | Clear | Call) -> None:
        self._send(command)

    def _send(self, command: Command) -> None:
        if self._reason is not None:
            raise GroupFailed(self._reason)
        message = encode(command)
        for socket in self._sockets:
            socket.send(message, zmq.NOBLOCK)

    def settle(self, problem: str | None = None, number: int = 0) -> tuple[str | None, int]:
        votes = [Vote(problem, number)]
        for _ in self._children:
            vote = self._votes.get()
            if vote is None:
                assert self._reason is not None
                raise GroupFailed(self._reason)
            votes.append(vote)
        problem = next((vote.problem for vote in votes if vote.problem is not None), None)
        settled = Settle(problem, min(vote.number for vote in votes))
        self._send(settled)
        return settled.problem, settled.least

    def failed(self, error: Exception) -> GroupFailed:
        # mostly a collective has failed here, because another rank has ended
        self._failed.wait(2 * CAUSE_S)
        self._fail(f"rank 0: {told(error)}")
        return GroupFailed(self._reason)

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""
        if self._closing:
            return
        self._closing = True
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        deadline = time.monotonic() + END_S
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._context.destroy(linger=0)
        self._files.close()

    # ---- a thread per rank --------------------------------------------------------------------------------

    def _watch(self, index: int, child: subprocess.Popen[bytes]) -> None:
        """Reads a rank's words until it ends or is silent."""
        reason = self._listen(index, child)
        if not self._closing:
            self._fail(reason)

    def _listen(self, index: int, child: subprocess.Popen[bytes]) -> str:
        """Returns why the rank ended."""
        pipe = child.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            rest, patience = b"", None  # a process that imports torch says nothing yet
            while selector.select(patience):
                patience = SILENT_S
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    return f"rank {index} {how_ended(child.wait())}"
                *lines, rest = (rest + data).split(b"\n")
                for word in map(_decode, lines):
                    if isinstance(word, Vote):
                        problem = word.problem and f"rank {index}: {word.problem}"
                        self._votes.put(Vote(problem, word.number))
                    elif isinstance(word, LastWords):
                        if word.follows:
                            self._failed.wait(CAUSE_S)
                        return f"rank {index}: {word.message}"
        return f"rank {index} has been silent for {SILENT_S:.0f} s: it is stopped, or its machine is overloaded"

    def _fail(self, reason: str) -> None:
        """Only the first reason counts; others follow from it."""
        with self._lock:
            if self._reason is not None or self._closing:
                return
            self._reason = reason
        self._failed.set()
        shutil.rmtree(self._folder, ignore_errors=True)
        for child in self._children:
            child.kill()  # also one that is stopped, or waits for a GPU
        for _ in self._children:
            self._votes.put(None)
        self._on_failure(reason)
