"""Loads tensors of safetensors files to a device: read in parallel, uploaded while the next are read.

Threads read pieces into a ring of pinned buffers; the thread that asks for a tensor uploads them on a stream of its
own. So the host holds no more than the ring, the device little more than was asked for. Tensors are read ahead in the
order in which models usually ask; one asked for out of turn is next. A rank reads only its part of a tensor. It is
known when the tensor is asked for; from then on the same tensor of other layers, which is cut alike, is read ahead. The
format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path

import torch

from treeline_runtime.models.config import ModelError
from treeline_runtime.models.shards import Cut

BUFFER_BYTES = 16 << 20
BUFFERS = 16
THREADS = 8
"""The most reading threads; reading from the page cache is limited by memory bandwidth."""
SHORT_BYTES = 32 << 10
"""Shorter gaps between a part's runs are read, too, and cut off on the device: a call for each run would take longer,
and a disk gives whole pages."""
_LAYER = re.compile(r"\.\d+(?=\.)")
"""The number of a layer or expert in a tensor's name."""
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


def cut_from(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Copies the part, so that the rest can be given back."""
    return torch.cat([whole.narrow(cut.dim, begin, end - begin) for begin, end in cut.ranges], cut.dim)


@dataclass(slots=True)
class _Piece:
    """Some of the bytes that are read of a tensor."""

    name: str
    offset: int
    """The bytes of the tensor's earlier pieces."""
    size: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Begin in the file and size of each."""


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: torch.Tensor
    """(BUFFER_BYTES,) uint8"""
    uploaded: torch.cuda.Event | None = None
    """Once this event has happened, the buffer may be overwritten."""


class Streamed:
    """`entries` in reading order, for one thread; `close` ends its own. in_parts: parts may be asked for."""

    def __init__(self, entries: dict[str, Entry], device: torch.device, *, in_parts: bool = False) -> None:
        self._entries = entries
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._changed = threading.Condition()
        self._unread: dict[str, Iterator[_Piece] | None] = {
            name: None if in_parts else _pieces(name, entry, None) for name, entry in entries.items() if entry.size
        }
        """Pieces that no thread has taken. None: it is not known yet which."""
        self._cuts: dict[str, Cut | None] = {} if in_parts else dict.fromkeys(entries)
        self._next: str | None = None
        self._files = {path: os.open(path, os.O_RDONLY) for path in {entry.path for entry in entries.values()}}
        self._read: queue.SimpleQueue[tuple[_Piece, _Buffer, str | None]] = queue.SimpleQueue()
        """Pieces that were read, each with its error, if any."""
        self._free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        """None ends a thread."""
        pieces = sum(-(-entry.size // BUFFER_BYTES) for entry in entries.values())
        for _ in range(min(BUFFERS, pieces)):
            self._free.put(_Buffer(torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None)))
        self._given: set[str] = set()
        self._arriving: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        """Bytes of arriving tensors that are still to come."""
        self._problems: dict[str, str] = {}
        """Tensor → why it could not be read: raised by `read` of this tensor only."""
        count = min(THREADS, os.cpu_count() or 1, max(pieces, 1))
        self._threads = [threading.Thread(target=self._work, name="weights", daemon=True) for _ in range(count)]

    def read(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """The tensor, or a part, on the device in its current stream's order; once. Raises ModelError."""
        entry = self._entries[name]
        assert name not in self._given, f"tensor {name} is taken twice"
        if not self._given:  # until now some may be skipped
            for thread in self._threads:
                thread.start()
        self._given.add(name)
        shape = entry.shape if cut is None else cut.shape(entry.shape)
        if prod(shape) == 0:
            self.skip(name)
            return torch.empty(shape, dtype=entry.dtype, device=self._device)
        with self._changed:
            self._next = name
            if self._unread.get(name, ()) is None:
                self._plan(name, cut)
        assert self._cuts[name] == cut, f"tensor {name} is cut in another way than in other layers"
        while self._missing.get(name) != 0:
            if problem := self._problems.get(name):
                raise ModelError(f"cannot read tensor {name} of {entry.path}: {problem}")
            self._upload(*self._read.get())
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        del self._missing[name]
        read = self._arriving.pop(name).view(entry.dtype)
        if cut is None or read.numel() == prod(shape):
            return read.view(shape)
        return cut_from(read.view(entry.shape), cut)

    def _plan(self, name: str, cut: Cut | None) -> None:
        """Layers are alike: what has the same name but for numbers, and the same shape, is going to be cut alike."""
        pattern, shape = _LAYER.sub("", name), self._entries[name].shape
        for other, pieces in self._unread.items():
            if pieces is None and _LAYER.sub("", other) == pattern and self._entries[other].shape == shape:
                self._unread[other], self._cuts[other] = _pieces(other, self._entries[other], cut), cut
        self._changed.notify_all()

    def skip(self, name: str) -> None:
        with self._changed:
            self._unread.pop(name, None)

    def _upload(self, piece: _Piece, buffer: _Buffer, problem: str | None) -> None:
        if problem is not None:
            self._problems[piece.name] = problem
            self._free.put(buffer)
            return
        if piece.name not in self._arriving:
            size = sum(size for _, size in _runs(self._entries[piece.name], self._cuts[piece.name]))
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
        """Reads pieces until none is left or `close` is called."""
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
        with self._changed:
            while self._unread:
                wanted = self._next if self._next and self._unread.get(self._next) else None
                name = wanted or next((name for name, pieces in self._unread.items() if pieces is not None), None)
                if name is None:
                    self._changed.wait()
                elif piece := next(self._unread[name] or iter(()), None):
                    return piece
                else:
                    del self._unread[name]
            self._changed.notify_all()
            return None

    def _fill(self, piece: _Piece, buffer: _Buffer) -> str | None:
        """Returns what went wrong."""
        file = self._files[self._entries[piece.name].path]
        memory = memoryview(buffer.memory.numpy().data)[: piece.size]
        for begin, size in piece.runs:
            done = 0
            while done < size:
                count = os.preadv(file, [memory[done:size]], begin + done)
                if count == 0:
                    return "the file ends before it does"
                done += count
            memory = memory[size:]
        return None

    def close(self) -> None:
        with self._changed:
            self._unread.clear()
            self._changed.notify_all()
        for _ in self._threads:
            self._free.put(None)
        for thread in self._threads if self._given else ():
            thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        for file in self._files.values():
            os.close(file)
        self._arriving.clear()


def _runs(entry: Entry, cut: Cut | None) -> Iterable[tuple[int, int]]:
    """The bytes of a tensor that are read for a part of it, begin and size of each run: all where the gaps between the
    part's runs are short."""
    if cut is not None:
        first, *others = islice(cut.runs(entry.shape, entry.dtype.itemsize), 2)
        if not others or others[0][0] - sum(first) >= SHORT_BYTES:
            return cut.runs(entry.shape, entry.dtype.itemsize)
    return [(0, entry.size)]


def _pieces(name: str, entry: Entry, cut: Cut | None) -> Iterator[_Piece]:
    """A tensor or a part of it in pieces, each as large as a buffer but for the last."""
    piece = _Piece(name, 0)
    for begin, size in _runs(entry, cut):
        while size:
            if piece.size == BUFFER_BYTES:
                yield piece
                piece = _Piece(name, piece.offset + piece.size)
            fits = min(size, BUFFER_BYTES - piece.size)
            piece.runs.append((entry.begin + begin, fits))
            piece.size += fits
            begin, size = begin + fits, size - fits
    yield piece
