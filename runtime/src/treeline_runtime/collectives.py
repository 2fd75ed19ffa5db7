"""Sums and gathers over the ranks of a group, each of which computes its part of one model; and what the stages of a
pipeline send each other.

All ranks make the same calls in the same order. Between CPUs gloo moves the data; between GPUs of one machine torch's
symmetric memory, whose kernels read the other GPUs' memory directly, without NVLink multicast; where a GPU cannot read
another's memory, NCCL.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch

from treeline_runtime.models.shards import Rank
from treeline_runtime.ops import Ops, obstacle_to_triton
from treeline_runtime.ops.base import MEETINGS, Meeting

c10d: Any = getattr(torch._C, "_distributed_c10d", None)
"""The classes behind torch.distributed. Its functions share one global state, which belongs to the application."""
FOREVER = timedelta(days=365)
"""Collectives have no time limit: the group notices when a rank has ended. For gloo's `recv` each call must say so."""
MEETING = timedelta(minutes=1)
"""Time to connect, once all processes are there."""
BUFFER_BYTES = 64 << 20
"""Bytes of each of three places in a GPU's memory that the others read; more are summed in several parts."""
ONE_SHOT_BYTES = 256 << 10
"""Up to here each GPU reads all parts and adds them; beyond, each adds a slice and reads the others' sums, which is
faster from 512 KiB on (two H200, inside CUDA graphs)."""
SUMMED = (torch.bfloat16, torch.float32)
LOOPBACK = "127.0.0.1"
"""The ranks of one machine are not to be reached from others."""


class Ranks(Protocol):
    """A rank's connection to its group."""

    rank: Rank

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        """The sum of x over the ranks of the stage, the same bits on each, until the next call. May overwrite x."""

    def room(self, like: torch.Tensor, turn: int, /) -> torch.Tensor | None:
        """Memory of this shape and type for this rank's summand in `add_norm`, if that saves a copy. turn: 0 or 1,
        which alternate from call to call."""
        return None

    def add_norm(
        self,
        ops: Ops,
        x: torch.Tensor,
        room: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        after: torch.Tensor | None,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Ops.add_norm` of the `sum` of x. room: what `room` returned for it."""
        return ops.add_norm(self.sum(x), residual, weight, eps, after)

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        """x (rows, n) → on the stage's rank 0 a new tensor (rows, ranks x n), the ranks' parts in order; on the others
        one of this shape with any content."""

    def first(self, x: torch.Tensor, /) -> torch.Tensor:
        """Rank 0's x on every rank of every stage. May overwrite x."""

    # ---- between the stages of a pipeline: by default there is one -------------------------------------------

    def receive(self, x: torch.Tensor, /) -> torch.Tensor:
        """Fills x with what the same rank of the stage before has sent, and returns it; the first stage keeps x."""
        return x

    def send(self, x: torch.Tensor, /) -> None:
        """Gives x to the same rank of the next stage, if any, without waiting; x must stay until `everywhere`."""
        return

    def home(self, x: torch.Tensor, /) -> torch.Tensor:
        """The last stage's x on rank 0; any content elsewhere."""
        return x

    def everywhere(self, x: torch.Tensor, /) -> torch.Tensor:
        """x (n,) bool → whether it is true on all stages. Ends what `send` began."""
        return x


class Stage(Ranks, Protocol):
    """The ranks of one stage can do more."""

    def all_gather(self, x: torch.Tensor, /) -> torch.Tensor:
        """x (rows, n) → a new tensor (ranks x rows, n), the ranks' rows in order."""

    def reduce_scatter(self, x: torch.Tensor, /) -> torch.Tensor:
        """x (ranks x rows, n) → the rank's rows (rows, n) of all ranks' sum, until the next call. May overwrite x."""


def open_store(place: str, count: int) -> Any:
    """Where `count` ranks meet: the path of a file that only they use, or HOST:PORT of rank 0's `serve_store`."""
    if place.startswith("/"):
        return c10d.FileStore(place, count)
    host, _, port = place.rpartition(":")
    return c10d.TCPStore(host, int(port), count, False, MEETING)


def serve_store(host: str, count: int) -> tuple[Any, str]:
    """A store at this address of this machine, on any free port, and its place. It ends with the object."""
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = c10d.TCPStore(
        host, port, count, True, MEETING, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store, f"{host}:{port}"


def join(rank: Rank, store: Any, name: str, device: torch.device, host: str, here: int) -> Stage | Pipeline:
    """Meets the other ranks; waits until all are there.

    name: of the group, unique in this process. host: the address at which other ranks reach this one. here: ranks of
    each machine.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank.stages == 1:
        return _join_stage(rank, store, name, device, host, here)
    stage: Stage | None = None
    if rank.count > 1:
        own = f"stage-{rank.stage}"
        stage = _join_stage(rank, c10d.PrefixStore(own, store), f"{name}-{own}", device, host, here)
    all_store = c10d.PrefixStore("all", store)
    return Pipeline(rank, stage, _process_group(all_store, rank.number, rank.count * rank.stages, device, host), device)


def _join_stage(rank: Rank, store: Any, name: str, device: torch.device, host: str, here: int) -> Stage:
    if device.type == "cuda" and here % rank.count == 0:
        first = device.index - rank.index
        others = [first + index for index in range(rank.count) if index != rank.index]
        if all(torch.cuda.can_device_access_peer(device, other) for other in others):
            return SymmetricMemory(rank, name, store, device)
    return Processes(rank, _process_group(store, rank.index, rank.count, device, host), device)


def _process_group(store: Any, index: int, count: int, device: torch.device, host: str) -> Any:
    """gloo or NCCL."""
    if device.type == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # of the store, which is gone when all have met
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return c10d.ProcessGroupNCCL(store, index, count, options)
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = MEETING
    group = c10d.ProcessGroupGloo(store, index, count, options)
    group._set_default_timeout(FOREVER)
    return group


class Pipeline(Ranks):
    """Several stages. `stage` adds within one, None: it has one rank; a process group of torch connects all."""

    def __init__(self, rank: Rank, stage: Ranks | None, group: Any, device: torch.device) -> None:
        self.rank = rank
        self._stage, self._group = stage, group
        self._sent: list[tuple[Any, torch.Tensor]] = []
        # connected now, while the others' addresses are known
        self.send(self.receive(torch.ones(1, device=device)))
        self.everywhere(self.home(self.first(torch.ones(1, device=device))))

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        return x if self._stage is None else self._stage.sum(x)

    def room(self, like: torch.Tensor, turn: int, /) -> torch.Tensor | None:
        return None if self._stage is None else self._stage.room(like, turn)

    def add_norm(self, ops: Ops, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().add_norm(ops, *args) if self._stage is None else self._stage.add_norm(ops, *args)

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        return x if self._stage is None else self._stage.gather(x)

    def first(self, x: torch.Tensor, /) -> torch.Tensor:
        x = x.contiguous()
        self._group.broadcast([x]).wait()
        return x

    def receive(self, x: torch.Tensor, /) -> torch.Tensor:
        if not self.rank.is_first_stage:
            self._group.recv([x], self.rank.number - self.rank.count, 0).wait(FOREVER)
        return x

    def send(self, x: torch.Tensor, /) -> None:
        if not self.rank.is_last_stage:
            self._sent.append((self._group.send([x], self.rank.number + self.rank.count, 0), x))

    def home(self, x: torch.Tensor, /) -> torch.Tensor:
        rank = self.rank
        if rank.number == 0:
            x = torch.empty_like(x, memory_format=torch.contiguous_format)  # the given one may be on its way
            self._group.recv([x], (rank.stages - 1) * rank.count, 0).wait(FOREVER)
        elif rank.is_last_stage and rank.index == 0:
            self._group.send([x.contiguous()], 0, 0).wait(FOREVER)
        return x

    def everywhere(self, x: torch.Tensor, /) -> torch.Tensor:
        total = x.float()
        self._group.allreduce([total]).wait()
        for work, _ in self._sent:
            work.wait(FOREVER)
        self._sent.clear()
        return total == self.rank.stages * self.rank.count


class Processes(Stage):
    """A process group of torch: gloo or NCCL."""

    def __init__(self, rank: Rank, group: Any, device: torch.device) -> None:
        self.rank = rank
        self._group = group
        self.first(self.sum(torch.zeros(1, device=device)))  # connected now, not within a capture

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        return torch.cat(self._parts(x), dim=1)

    def first(self, x: torch.Tensor, /) -> torch.Tensor:
        x = x.contiguous()
        self._group.broadcast([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, /) -> torch.Tensor:
        return torch.cat(self._parts(x))

    def reduce_scatter(self, x: torch.Tensor, /) -> torch.Tensor:
        return self.sum(x).chunk(self.rank.count)[self.rank.index]  # gloo has nothing better

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.rank.count)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts


class SymmetricMemory(Stage):
    """Memory of each GPU that all GPUs of the group read and write. Every call can be captured.

    The kernels are torch's (`torch.ops.symm_mem`). Multicast stays off: some machines forbid it.
    """

    def __init__(self, rank: Rank, name: str, store: Any, device: torch.device) -> None:
        """name: of the group, unique in this process."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.rank = rank
        self._name = name
        group = c10d.ProcessGroup(store, rank.index, rank.count)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        c10d._SymmetricMemory.set_group_info(name, rank.index, rank.count, store)
        flags = 4 * MEETINGS * rank.count
        size = 3 * BUFFER_BYTES + flags
        self._memory = c10d._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
        self._buffer, *self._rooms = self._memory[:-flags].split(BUFFER_BYTES)
        self._handle = c10d._SymmetricMemory.rendezvous(self._memory, name)
        self._memory[-flags:].zero_()
        self._handle.barrier()
        self._fuses = obstacle_to_triton(device) is None
        bases = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._meeting = Meeting(rank.index, bases, size - flags)

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        if x.dtype not in SUMMED:
            return self.sum(x.float()).to(x.dtype)
        if x.nbytes > BUFFER_BYTES:
            x = x.contiguous()
            for part in x.view(-1).split(BUFFER_BYTES // x.element_size()):
                part.copy_(self.sum(part))
            return x
        mine = self._put(x)
        if x.nbytes <= ONE_SHOT_BYTES:
            added: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", self._name)
            return added
        torch.ops.symm_mem.two_shot_all_reduce_(mine, "sum", self._name)
        return mine

    def room(self, like: torch.Tensor, turn: int, /) -> torch.Tensor | None:
        largest = BUFFER_BYTES if self.rank.count == 2 else ONE_SHOT_BYTES
        if not self._fuses or like.dtype not in SUMMED or like.nbytes > largest:
            return None
        return self._rooms[turn][: like.nbytes].view(like.dtype).view(like.shape)

    def add_norm(
        self,
        ops: Ops,
        x: torch.Tensor,
        room: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        after: torch.Tensor | None,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if room is None:
            return super().add_norm(ops, x, room, residual, weight, eps, after)
        from treeline_runtime.ops import rank_kernels

        if x.data_ptr() != room.data_ptr():
            room.copy_(x)
        place = room.data_ptr() - self._memory.data_ptr()
        return rank_kernels.add_norm(self._meeting, place, residual, weight, eps, after)

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        whole = x.new_empty(len(x), self.rank.count * x.shape[1])
        for theirs, out in self._exchanged(x, whole):
            if self.rank.index == 0:
                torch.cat(theirs, 1, out=out)
        return whole

    def first(self, x: torch.Tensor, /) -> torch.Tensor:
        for theirs, out in self._exchanged(x, x):
            if self.rank.index:
                out.copy_(theirs[0])
        return x

    def all_gather(self, x: torch.Tensor, /) -> torch.Tensor:
        whole = x.new_empty(self.rank.count, *x.shape)
        for theirs, out in self._exchanged(x, whole, out_dim=1):
            for part, there in zip(theirs, out, strict=True):
                there.copy_(part)
        return whole.flatten(0, 1)

    def reduce_scatter(self, x: torch.Tensor, /) -> torch.Tensor:
        parts = x.unflatten(0, (self.rank.count, -1))
        mine = torch.empty_like(parts[0])
        for theirs, out in self._exchanged(parts, mine, dim=1):
            torch.sum(torch.stack([their[self.rank.index] for their in theirs]), 0, out=out)
        return mine

    def _exchanged(
        self, x: torch.Tensor, out: torch.Tensor, dim: int = 0, out_dim: int = 0
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Yields all ranks' parts of x, and the same part of out: as many rows at once as the memory has room for."""
        rows = max(1, BUFFER_BYTES * x.shape[dim] // x.nbytes)
        for part, there in zip(x.split(rows, dim), out.split(rows, out_dim), strict=True):
            self._put(part)
            self._handle.barrier()
            yield [self._handle.get_buffer(index, part.shape, part.dtype) for index in range(self.rank.count)], there
            self._handle.barrier()  # all have read: it may be written again

    def _put(self, x: torch.Tensor) -> torch.Tensor:
        """Copies x to where the other ranks read it; returns the copy."""
        return self._buffer.view(x.dtype)[: x.numel()].view(x.shape).copy_(x)
