"""Loads tensors of safetensors files to a device: read in parallel, uploaded while the next are read.

Threads read pieces into a ring of pinned buffers; the thread that asks for a tensor uploads them on a stream of its
own. So the host holds no more than the ring, the device little more than was asked for. Tensors are read ahead in the
order in which models usually ask; one asked for out of turn is next. The format:
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from treeline_runtime.models.config import ModelError

BUFFER_BYTES = 16 << 20
BUFFERS = 16
THREADS = 8
"""The most reading threads; reading from the page cache is limited by memory bandwidth."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """The location and type of a tensor."""

    path: Path
    begin: int
    size: int
    """Bytes; `begin` counts from the start of the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Entry]:
    """A file's tensors. Raises ModelError; the file's soundness was checked when it was opened."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    entries = {}
    for name, told in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(told["dtype"])
        if dtype is None:
            raise ModelError(f"tensor {name} of {path} is {told['dtype']}, which is not supported")
        begin, end = told["data_offsets"]
        entries[name] = Entry(path, 8 + length + begin, end - begin, dtype, tuple(told["shape"]))
    return entries


def reading_order(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """`first`, then layer after layer, 2 before 10."""
    ranks = {name: i for i, name in enumerate(first)}

    def key(name: str) -> tuple[int, list[tuple[int, int, str]]]:
        parts = re.split(r"(\d+)", name)
        return ranks.get(name, len(ranks)), [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]

    return sorted(names, key=key)


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    offset: int
    """Bytes into the tensor."""
    size: int


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: torch.Tensor
    """(BUFFER_BYTES,) uint8"""
    uploaded: torch.cuda.Event | None = None
    """Once this event has happened, the buffer may be overwritten."""


class Streamed:
    """`entries` in reading order. Used by one thread; `close` ends its own."""

    def __init__(self, entries: dict[str, Entry], device: torch.device) -> None:
        self._entries = entries
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._unread = {name: _pieces(name, entry.size) for name, entry in entries.items() if entry.size}
        """Pieces that no thread has taken."""
        self._next: str | None = None
        self._files = {path: os.open(path, os.O_RDONLY) for path in {entry.path for entry in entries.values()}}
        self._read: queue.SimpleQueue[tuple[_Piece, _Buffer, str | None]] = queue.SimpleQueue()
        """Pieces that were read, each with its error, if any."""
        self._free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        """None ends a thread."""
        pieces = sum(map(len, self._unread.values()))
        for _ in range(min(BUFFERS, pieces)):
            self._free.put(_Buffer(torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None)))
        self._given: set[str] = set()
        self._arriving: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        """Bytes of arriving tensors that are still to come."""
        self._problems: dict[str, str] = {}
        """Tensor → why it could not be read. Raised by `read` of this tensor only, not of those read at the same
        time."""
        count = min(THREADS, os.cpu_count() or 1, max(pieces, 1))
        self._threads = [threading.Thread(target=self._work, name="weights", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the device in its current stream's order; once. Raises ModelError."""
        entry = self._entries[name]
        assert name not in self._given, f"tensor {name} is taken twice"
        self._given.add(name)
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
        with self._lock:
            self._next = name
        while self._missing.get(name) != 0:
            if problem := self._problems.get(name):
                raise ModelError(f"cannot read tensor {name} of {entry.path}: {problem}")
            self._upload(*self._read.get())
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        del self._missing[name]
        return self._arriving.pop(name).view(entry.dtype).view(entry.shape)

    def skip(self, name: str) -> None:
        """Skips the unread parts of a tensor that nobody is going to read."""
        with self._lock:
            self._unread.pop(name, None)

    def _upload(self, piece: _Piece, buffer: _Buffer, problem: str | None) -> None:
        if problem is not None:
            self._problems[piece.name] = problem
            self._free.put(buffer)
            return
        if piece.name not in self._arriving:
            size = self._entries[piece.name].size
            self._arriving[piece.name] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._missing[piece.name] = size
            if self._stream is not None:  # the memory may be what kernels launched before still read
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
        there = self._arriving[piece.name][piece.offset : piece.offset + piece.size]
        if self._stream is None:
            there.copy_(buffer.memory[: piece.size])
        else:
            with torch.cuda.stream(self._stream):
                there.copy_(buffer.memory[: piece.size], non_blocking=True)
            buffer.uploaded = self._stream.record_event(buffer.uploaded)
        self._missing[piece.name] -= piece.size
        self._free.put(buffer)

    def _work(self) -> None:
        """Reads pieces until none is left."""
        while (buffer := self._free.get()) is not None:
            piece = self._take()
            if piece is None:
                self._free.put(buffer)
                return
            problem: str | None = None
            try:
                if buffer.uploaded is not None:
                    buffer.uploaded.synchronize()
                problem = self._fill(piece, buffer)
            except Exception as error:  # raised where the tensor is waited for
                problem = repr(error)
            self._read.put((piece, buffer, problem))

    def _take(self) -> _Piece | None:
        with self._lock:
            name = self._next if self._next in self._unread else next(iter(self._unread), None)
            if name is None:
                return None
            pieces = self._unread[name]
            piece = pieces.pop(0)
            if not pieces:
                del self._unread[name]
            return piece

    def _fill(self, piece: _Piece, buffer: _Buffer) -> str | None:
        """Returns what went wrong."""
        entry = self._entries[piece.name]
        memory = memoryview(buffer.memory.numpy().data)[: piece.size]
        done = 0
        while done < piece.size:
            count = os.preadv(self._files[entry.path], [memory[done:]], entry.begin + piece.offset + done)
            if count == 0:
                return "the file ends before it does"
            done += count
        return None

    def close(self) -> None:
        with self._lock:
            self._unread.clear()
        for _ in self._threads:
            self._free.put(None)
        for thread in self._threads:
            thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        for file in self._files.values():
            os.close(file)
        self._arriving.clear()


def _pieces(name: str, size: int) -> list[_Piece]:
    return [_Piece(name, begin, min(BUFFER_BYTES, size - begin)) for begin in range(0, size, BUFFER_BYTES)]
