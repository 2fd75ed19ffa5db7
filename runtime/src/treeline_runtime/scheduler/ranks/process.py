"""A rank other than 0: its process computes what rank 0 tells it.

Standard input and output are its stream to rank 0, which ends when rank 0 does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch
from treeline_wire.logs import set_up

from treeline_runtime.collectives import Ranks, join, open_store
from treeline_runtime.config import ConfigError
from treeline_runtime.confined.child import end_with_parent
from treeline_runtime.kvcache import KVPool
from treeline_runtime.kvcache.store import BATCH_BYTES
from treeline_runtime.models.shards import Rank
from treeline_runtime.nodes import LastWords
from treeline_runtime.scheduler.administration import Residence
from treeline_runtime.scheduler.launched import Launched
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.ranks import protocol
from treeline_runtime.scheduler.startup import begin

ALIVE_S = 0.25

logger = logging.getLogger(__name__)


class Words:
    """Writes this rank's messages to rank 0. A thread writes that the process is alive."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        threading.Thread(target=self._live, name="alive", daemon=True).start()

    def _live(self) -> None:
        while True:
            self.say(protocol.Alive())
            time.sleep(ALIVE_S)

    def say(self, word: protocol.Word) -> None:
        with self._lock:
            self._out.write(msgspec.json.encode(word) + b"\n")


class Leader:
    """Rank 0, as another rank sees it. Implements `Group`."""

    def __init__(self, orders: protocol.Orders, words: Words) -> None:
        """Meets the group."""
        self.words = words
        self._digests = protocol.Digests()
        self._step: protocol.Step | None = None
        """The one being computed."""
        self.settle()  # all processes are there: the connections take no time now
        config, device = orders.config, torch.device(orders.config.device)
        store, name = open_store(orders.place, config.ranks), Path(orders.place).parent.name
        rank = Rank.of(orders.index, config.tp_size, config.pp_size)
        self.ranks: Ranks = join(rank, store, name, device, orders.host, config.ranks_here)
        self.settle()  # nobody needs the store any more

    def next(self) -> protocol.Command:
        read = sys.stdin.buffer.read
        head = read(protocol.LENGTH.size)
        message = read(*protocol.LENGTH.unpack(head)) if len(head) == protocol.LENGTH.size else b""
        if not message:
            os._exit(0)
        command = protocol.decode(message)
        self._step = command if isinstance(command, protocol.Step) else None
        return command

    # ---- Group --------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, launch: protocol.Launch) -> None:
        assert self._step is not None
        if self._digests.after(self._step.plan, launch) != self._step.digest:
            raise protocol.GroupFailed(protocol.drift(self._step, launch))

    def tell(self, command: protocol.Delayed | protocol.Clear | protocol.Share | protocol.Call) -> None:
        """Rank 0 has told all."""

    def settle(self, problem: str | None = None, number: int = 0) -> tuple[str | None, int]:
        self.words.say(protocol.Vote(problem, number))
        settled = self.next()
        assert isinstance(settled, protocol.Settle), settled
        return settled.problem, settled.least

    def failed(self, error: Exception) -> protocol.GroupFailed:
        return protocol.GroupFailed(protocol.told(error))


class Copier:
    """Copies this rank's part of pages, beside the steps. One thread: the copies of a part are in stream order."""

    def __init__(self, residence: Residence, words: Words, share: protocol.Share) -> None:
        self._residence = residence
        self._words = words
        self._slab = residence.open_slab(share.page_bytes, share.place)
        self._thread = ThreadPoolExecutor(1, "copies")

    def begin(self, copy: protocol.Copy) -> None:
        # what rank 0 has in its tree is computed here, too: its result needed the sums of all ranks
        after = None if copy.to_host else self._slab.now()
        self._thread.submit(self._copy, copy, self._residence.executor.pool, after)

    def _copy(self, copy: protocol.Copy, pool: KVPool, after: torch.cuda.Event | None) -> None:
        problem = None
        try:
            with self._slab.copying(after):
                size = max(1, BATCH_BYTES // pool.page_bytes)
                for at in range(0, len(copy.pages), size):
                    pages, slots = copy.pages[at : at + size], self._slab.runs(copy.slots[at : at + size])
                    (pool.copy_out if copy.to_host else pool.copy_in)(pages, slots)
        except Exception as error:
            problem = protocol.told(error)
        self._words.say(protocol.Copied(copy.number, problem))


def follow(orders: protocol.Orders, leader: Leader) -> None:
    """Computes what rank 0 tells, until it ends. Raises GroupFailed, or Agreed if not all ranks can."""
    residence = begin(orders.config, leader)
    gc.collect()
    gc.freeze()  # objects so far are permanent: later collections skip them
    newest: Launched | None = None
    copier: Copier | None = None
    while True:
        command = leader.next()
        if isinstance(command, protocol.Step):
            newest = residence.executor.launch(protocol.decode_plan(command.plan))
        elif isinstance(command, protocol.Delayed):
            assert newest is not None
            residence.executor.follow_delayed(newest)
        elif isinstance(command, protocol.Clear):
            residence.executor.clear(np.array(command.pages, dtype=np.int64))
        elif isinstance(command, protocol.Share):
            copier, _ = protocol.together(leader, partial(Copier, residence, leader.words, command))
        elif isinstance(command, protocol.Copy):
            assert copier is not None
            copier.begin(command)
        elif isinstance(command, protocol.Call):
            newest = None
            arguments = () if command.argument is None else (command.argument,)
            with contextlib.suppress(protocol.Agreed):  # rank 0 tells the user that it was not possible
                getattr(residence, command.name)(*arguments)
        else:
            raise protocol.GroupFailed(f"{command} was not asked for")


def main() -> int:
    end_with_parent()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no word
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=protocol.Orders)
    threading.Thread(target=_end_with_rank_0, name="lifeline", daemon=True).start()
    set_up(orders.log_level, "treeline_runtime", form=orders.log_format, process=f"rank {orders.index}")
    words = Words(out)
    try:
        follow(orders, Leader(orders, words))
    except protocol.GroupFailed as failure:
        # what failed in a step is mostly a collective, because another rank has ended
        is_own = failure.__cause__ is None or isinstance(failure.__cause__, ConfigError)
        words.say(LastWords(str(failure), follows=not is_own))
    except protocol.Agreed:  # rank 0 ends this process
        threading.Event().wait()
    except Exception as error:
        logger.exception("rank %d failed", orders.index)
        words.say(LastWords(protocol.told(error), follows=False))
    return 1


def _end_with_rank_0() -> None:
    ended = select.poll()
    ended.register(0, select.POLLRDHUP)
    ended.poll()
    os._exit(0)


if __name__ == "__main__":
    os._exit(main())  # without waiting for threads and devices that may wait for a lost rank
