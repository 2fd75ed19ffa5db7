"""Rank 0's side of a group: it starts the other ranks of its node and awaits those of others (`nodes`), tells all what
to compute, and watches them.

A thread per rank reads what the rank says. The first reason for which a rank ends is the group's: the others are then
killed, and the engine hears of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from treeline_runtime.collectives import LOOPBACK, Ranks, join, open_store, serve_store
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.models.shards import Rank
from treeline_runtime.nodes import RANK_MODULE, LastWords, listen, meet
from treeline_runtime.processes import SocketFolder, how_ended, spawn
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.ranks import protocol

SILENT_S = 15.0
"""A rank that says nothing for so long, while it says that it is alive four times a second, has stopped."""
CAUSE_S = 0.5
"""Time in which the rank that began it says why, after another has lost it."""
END_S = 3.0
"""Time for the ranks to end by themselves."""

logger = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(protocol.Word).decode


def rank_config(config: SchedulerConfig, index: int, device: torch.device) -> SchedulerConfig:
    """One rank's part of its machine. Its GPU is so many after the first; ranks on CPUs share the cores. Raises
    ConfigError if there are too few GPUs here."""
    plain: dict[str, Any] = {name: getattr(config, name) for name in SchedulerConfig.__dataclass_fields__}
    for name in ("model", "speculative_draft_model_path"):
        if plain[name] is not None:
            plain[name] = os.path.abspath(plain[name])  # the working directory may change
    here = config.ranks_here
    if device.type != "cuda":
        threads = config.threads or max(1, torch.get_num_threads() // here)
        return SchedulerConfig(**plain | {"device": "cpu", "threads": threads})
    first, there = device.index or 0, torch.cuda.device_count()
    if first + here > there:
        raise ConfigError(
            f"--tp-size {config.tp_size} and --pp-size {config.pp_size} need the GPUs cuda:{first} to "
            f"cuda:{first + here - 1} of each machine; torch sees {there}"
        )
    return SchedulerConfig(**plain | {"device": f"cuda:{first + index % here}"})


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank."""

    index: int
    stream: socket.socket
    child: subprocess.Popen[bytes] | None
    """None: a process of another node."""
    node: int


@dataclass(slots=True)
class Copies:
    """What the other ranks copy at once."""

    left: int
    """Ranks that have yet to end."""
    problem: str | None = None
    done: Future[None] = field(default_factory=Future)


class Followers:
    """The other ranks, as rank 0 sees them. Implements `Group`."""

    ranks: Ranks

    def __init__(self, config: SchedulerConfig, device: torch.device, on_failure: Callable[[str], None]) -> None:
        """Starts the processes and meets them. on_failure: called once, in any thread, with the reason for which the
        group ends; not after `close`. Raises ConfigError."""
        self._on_failure = on_failure
        self._digests = protocol.Digests()
        self._reason: str | None = None
        self._failed = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._votes: queue.SimpleQueue[protocol.Vote | None] = queue.SimpleQueue()
        """None: there will be no more."""
        self._copies: dict[int, Copies] = {}
        """By number, those under way."""
        self._numbers = itertools.count()
        self._peers: list[Peer] = []
        own = rank_config(config, 0, device)
        try:
            with SocketFolder() as self._folder, contextlib.ExitStack() as files:
                listener = files.enter_context(listen(config)) if config.nnodes > 1 else None
                host, place = LOOPBACK, str(self._folder / "ranks")
                if listener is None:
                    store = open_store(place, config.ranks)
                else:
                    host = listener.getsockname()[0]
                    store, place = serve_store(host, config.ranks)
                level, form = getattr(config, "log_level", "warning"), getattr(config, "log_format", None)
                orders = protocol.Orders(own, 0, place, host, level, form)
                for index in range(1, config.ranks_here):
                    stream, other = socket.socketpair()
                    with other:
                        child = spawn(RANK_MODULE, other)
                    self._add(Peer(index, stream, child, 0), orders, rank_config(config, index, device))
                for hello, stream, address in meet(config, listener, self._check) if listener is not None else ():
                    index = hello.node * config.ranks_here + hello.slot
                    there = dataclasses.replace(rank_config(config, index, device), model=hello.model)
                    reached = msgspec.structs.replace(orders, host=address)
                    self._add(Peer(index, stream, None, hello.node), reached, there)
                self.settle()
                rank, used = Rank.of(0, config.tp_size, config.pp_size), torch.device(own.device)
                self.ranks = join(rank, store, self._folder.name, used, host, config.ranks_here)
                self.settle()  # all are connected
        except BaseException:
            self.close()
            raise
        self.config = own

    def _add(self, peer: Peer, orders: protocol.Orders, config: SchedulerConfig) -> None:
        self._peers.append(peer)
        threading.Thread(target=self._watch, args=(peer,), name=f"rank {peer.index}", daemon=True).start()
        with contextlib.suppress(OSError):  # it has ended; its thread says why
            found = msgspec.structs.replace(orders, config=config, index=peer.index)
            peer.stream.sendall(msgspec.json.encode(found) + b"\n")

    def _check(self) -> None:
        if self._reason is not None:
            raise protocol.GroupFailed(self._reason)

    # ---- Group --------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, launch: protocol.Launch) -> None:
        encoded = protocol.encode(plan)
        self.tell(protocol.Step(msgspec.Raw(encoded), launch, self._digests.after(encoded, launch)))

    def tell(self, command: protocol.Command) -> None:
        self._check()
        message = protocol.encode(command)
        message = protocol.LENGTH.pack(len(message)) + message
        try:
            for peer in self._peers:
                peer.stream.sendall(message)
        except OSError as error:  # that rank has ended
            raise self.failed(error) from error

    def copy(self, to_host: bool, pages: Sequence[int], slots: Sequence[int]) -> Future[None]:
        """All others copy their parts of pages (see `Elsewhere`)."""
        number, copies = next(self._numbers), Copies(len(self._peers))
        with self._lock:
            self._copies[number] = copies
        self.tell(protocol.Copy(number, to_host, [*pages], [*slots]))
        return copies.done

    def settle(self, problem: str | None = None, number: int = 0) -> tuple[str | None, int]:
        votes = [protocol.Vote(problem, number)]
        for _ in self._peers:
            vote = self._votes.get()
            if vote is None:
                assert self._reason is not None
                raise protocol.GroupFailed(self._reason)
            votes.append(vote)
        problem = next((vote.problem for vote in votes if vote.problem is not None), None)
        settled = protocol.Settle(problem, min(vote.number for vote in votes))
        self.tell(settled)
        return settled.problem, settled.least

    def failed(self, error: Exception) -> protocol.GroupFailed:
        # mostly a collective has failed here, because another rank has ended
        self._failed.wait(2 * CAUSE_S)
        self._fail(f"rank 0: {protocol.told(error)}")
        return protocol.GroupFailed(self._reason)

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""
        if self._closing:
            return
        self._closing = True
        for peer in self._peers:
            _end(peer.stream, socket.SHUT_WR)
        deadline = time.monotonic() + END_S
        for peer in self._peers:
            if peer.child is None:
                continue
            try:
                peer.child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                peer.child.kill()
                peer.child.wait()

    # ---- a thread per rank --------------------------------------------------------------------------------

    def _watch(self, peer: Peer) -> None:
        try:
            reason = self._listen(peer)
        except msgspec.MsgspecError as error:
            reason = f"rank {peer.index} says what no rank says: {error}"
        if not self._closing:
            self._fail(reason)
        peer.stream.close()

    def _listen(self, peer: Peer) -> str:
        """Returns why the rank ended."""
        name = f"rank {peer.index}"
        with selectors.DefaultSelector() as selector:
            selector.register(peer.stream, selectors.EVENT_READ)
            rest, patience = b"", None  # a process that imports torch says nothing yet
            while selector.select(patience):
                patience = SILENT_S
                how = "has closed its connection"
                try:
                    data = peer.stream.recv(1 << 16)
                except OSError as error:
                    data, how = b"", f"is lost: {error}"
                if not data:
                    if peer.child is None:
                        return f"{name} (node {peer.node}) {how}"
                    return f"{name} {how_ended(peer.child.wait())}"
                *lines, rest = (rest + data).split(b"\n")
                for word in map(_decode, lines):
                    if isinstance(word, protocol.Vote):
                        problem = word.problem and f"{name}: {word.problem}"
                        self._votes.put(protocol.Vote(problem, word.number))
                    elif isinstance(word, protocol.Copied):
                        self._copied(word, name)
                    elif isinstance(word, LastWords):
                        if word.follows:
                            self._failed.wait(CAUSE_S)
                        return f"{name}: {word.message}"
        return f"{name} has been silent for {SILENT_S:.0f} s: it is stopped, or its machine is overloaded"

    def _copied(self, word: protocol.Copied, name: str) -> None:
        with self._lock:
            copies = self._copies.get(word.number)
            if copies is None:  # the group is at its end
                return
            copies.left -= 1
            if word.problem is not None:
                copies.problem = f"{name}: {word.problem}"
            if copies.left:
                return
            del self._copies[word.number]
        if copies.problem is None:
            copies.done.set_result(None)
        else:
            copies.done.set_exception(RuntimeError(copies.problem))

    def _fail(self, reason: str) -> None:
        """Only the first reason counts; others follow from it."""
        with self._lock:
            if self._reason is not None or self._closing:
                return
            self._reason = reason
            lost, self._copies = self._copies, {}
        for copies in lost.values():
            copies.done.set_exception(RuntimeError(reason))
        self._failed.set()
        shutil.rmtree(self._folder, ignore_errors=True)  # the scheduler may still wait for a lost rank there
        for peer in self._peers:
            _end(peer.stream, socket.SHUT_RDWR)
            if peer.child is not None:
                peer.child.kill()  # also one that is stopped, or waits for a GPU
            self._votes.put(None)
        self._on_failure(reason)


def _end(stream: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the other side has ended it
        stream.shutdown(how)
