"""The pages outside the device, by digest: on the host, from there on the disk, and those of other runtimes.

    device ──put──▶ host ──────▶ disk,  host ──lend─▶ peer
    device ◀──get── host ◀─fetch─ disk or peer

The scheduler's thread owns the bookkeeping; other threads copy, check and do what may block. What waits for the disk or
a peer has threads of its own, and holds slots of the host, but nothing of the device: `put` and `get`, which do, only
copy memory, and so end soon, whatever the others do. Every page that comes back is checked against its checksum. What
fails is a miss: a log line and a counter, never a failed request.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from treeline_runtime.kvcache.disk import DiskTier
from treeline_runtime.kvcache.event_log import EventLog
from treeline_runtime.kvcache.host import Entry, HostTier, Lower, Slab
from treeline_runtime.kvcache.page import BadPage, PageFormat
from treeline_runtime.kvcache.pool import KVPool, Pages
from treeline_runtime.kvcache.remote import Pull, RemotePages

T = TypeVar("T")
Work = Literal["copy", "read", "write", "ask"]
"""Copies of memory; reads and writes of the disk; what asks peers."""

THREADS = min(8, os.cpu_count() or 1)
"""For each kind of work, but …"""
ASK_THREADS = 32
"""… these, which mostly wait."""
PART_BYTES = 16 << 20
"""Pages of at least so many bytes are worth a thread."""
BATCH_BYTES = 32 << 20
"""Pages of so many bytes are staged on the device at once, by each thread. Less has the threads wait for each other
where they call torch: 16 MiB take 87 ms for 2.2 GB on an H200, 32 MiB 69."""
FETCH_BYTES = 128 << 20
"""Pages of so many bytes are fetched from the disk or a peer at once for a client, so that others wait for no more."""
LOG_S = 60.0
"""The shortest time between two lines about failures."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """What some threads do together."""

    kind: Work
    then: Callable[[list[Any]], None]
    futures: list[Future[Any]]
    running: int


class Workers:
    """A few threads for what the scheduler may not wait for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called in any thread when `take` will have something."""
        kinds: tuple[Work, ...] = get_args(Work)
        self._threads = {
            kind: ThreadPoolExecutor(ASK_THREADS if kind == "ask" else THREADS, f"treeline {kind}") for kind in kinds
        }
        self._ended: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._wake = wake
        self.busy = Counter[Work]()

    def start(self, kind: Work, parts: Sequence[Callable[[], T]], then: Callable[[list[T | None]], None]) -> None:
        """Runs these in threads, then `then` with their results in a later `take`; None for one that raised."""
        self.busy[kind] += 1
        job = _Job(kind, then, [], len(parts))

        def ended(_: Future[T]) -> None:
            self._ended.put(job)
            self._wake()

        for part in parts:
            future = self._threads[kind].submit(part)
            job.futures.append(future)
            future.add_done_callback(ended)

    def take(self, wait_s: float = 0.0) -> bool:
        """Takes the results that are there, or waits so long for one. Returns whether there were any."""
        found = False
        while not self._ended.empty() or (wait_s and not found):
            try:
                job = self._ended.get(timeout=wait_s)
            except queue.Empty:
                break
            found = True
            job.running -= 1
            if not job.running:
                self.busy[job.kind] -= 1
                job.then([self._result(future) for future in job.futures])
        return found

    def _result(self, future: Future[T]) -> T | None:
        if (error := future.exception()) is not None:
            logger.error("pages could not be copied", exc_info=error)
            return None
        return future.result()

    def close(self) -> None:
        """Waits for what is being done."""
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Moved:
    """Pages that came from a tier."""

    pages: int
    """Good ones; of a `get`, those before the first that is not."""
    seconds: float
    """What a thread spent on them, waiting for threads not included."""
    source: Lower
    """The furthest place from which some of them came."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A piece of a sequence on its way to the host."""

    digests: dict[bytes, None]
    """In order."""
    client: str | None
    began_at: float
    peer: str | None = None
    """HOST:PORT of the runtime from which it comes; None: it comes from the disk."""
    over: bool = False
    """Nobody waits for it any more: it has come, or takes too long. Then no further page is begun."""

    @property
    def source(self) -> Lower:
        return "DISK" if self.peer is None else "PEER"


class PageStore:
    """Finds, keeps and returns pages. `put`, `get` and `fetch` begin copies; `then` is called by `Workers.take`."""

    def __init__(
        self,
        form: PageFormat,
        host: HostTier,
        slab: Slab,
        disk: DiskTier | None,
        workers: Workers,
        events: EventLog,
    ) -> None:
        self.form = form
        self.host = host
        self._slab = slab
        self.disk = disk
        self.remote: RemotePages | None = None
        """Other runtimes; None: they are not asked."""
        self._workers = workers
        self._events = events
        self.off: set[Lower] = set()
        """What is not used, because an audit has found wrong pages there. Without the host nothing is."""
        self._for_disk = 0
        """Slots with a page that waits for the disk."""
        self._logged_at = float("-inf")
        self.stored_pages = Counter[Lower](CPU=0, DISK=0)
        """Since the start, as the next ones."""
        self.loaded_pages = Counter[Lower](CPU=0, DISK=0, PEER=0)
        """Copied from the host to the device; from the others to the host."""
        self.sent_pages = 0
        """To peers."""
        self.failures = Counter[str](bad_page=0, disk=0, peer=0)
        """Pages with a checksum or header that was not theirs; reads and writes of the disk, and reads from peers, that
        failed."""

    def uses(self, place: Lower) -> bool:
        return not self.off & {"CPU", place}

    def _batches(self, items: Sequence[T]) -> list[Sequence[T]]:
        return _cut(items, max(1, BATCH_BYTES // self.form.nbytes))

    def _shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        """One for each thread, at most."""
        return _cut(items, -(-len(items) // min(THREADS, 1 + len(items) * self.form.nbytes // PART_BYTES)))

    # ---- to the host, to the disk -------------------------------------------------------------------------

    def put(self, pool: KVPool, digests: Sequence[bytes], pages: Pages, then: Callable[[], None]) -> bool:
        """Begins to copy pages of a sequence from the device, those that the host does not have. They may not change
        until `then`. Returns whether there are any; else `then` is not called."""
        if "CPU" in self.off:
            return False
        self._write([digest for digest in digests if self.host.has(digest)])
        copies = list[tuple[bytes, int, int]]()
        for digest, page in zip(digests, pages.tolist(), strict=True):
            if digest not in self.host and (slot := self._take_slot(digest)) is not None:
                copies.append((digest, page, slot))
        if not copies:
            return False
        there, after, form, slab = [digest for digest, *_ in copies], self._slab.now(), self.form, self._slab

        def copy() -> list[int]:
            with slab.copying(after):
                for part in self._batches(copies):
                    pool.copy_out([page for _, page, _ in part], slab.runs([slot for *_, slot in part]))
            return [form.checksum(digest, slab.page(slot).data) for digest, _, slot in copies]

        def ended(results: list[list[int] | None]) -> None:
            (checksums,) = results
            if checksums is None:
                for digest in there:
                    self.host.cancel_write(digest)
            else:
                for digest, checksum in zip(there[::-1], checksums[::-1], strict=True):
                    self.host.end_write(digest, checksum)
                self.stored_pages["CPU"] += len(there)
                self._events.copied(there, "CPU")
                self._write(there)
            then()

        self._workers.start("copy", [copy], ended)
        return True

    def _take_slot(self, digest: bytes) -> int | None:
        slot, evicted = self.host.begin_write(digest)
        if evicted is not None:
            self._events.removed([evicted], "CPU")
        return slot

    def _write(self, digests: Sequence[bytes]) -> None:
        """Begins to write pages of the host to the disk, those that it does not have, up to half of the host: a slow
        disk gets fewer."""
        disk = self.disk
        if disk is None or not self.uses("DISK"):
            return
        writes, victims = list[tuple[bytes, Entry]](), []
        for digest in digests:
            if 2 * (self._for_disk + len(writes)) >= self.host.num_slots:
                break
            if (gone := disk.begin_write(digest)) is not None:
                victims += gone
                writes.append((digest, self.host.begin_read(digest)))
        if not writes:
            return
        self._for_disk += len(writes)
        self._events.removed([digest for family, digest in victims if family == self.form.fingerprint], "DISK")

        def write() -> list[bool]:
            disk.delete(victims)
            return [self._try_to_write(disk, digest, entry) for digest, entry in writes]

        def ended(results: list[list[bool] | None]) -> None:
            (written,) = results
            self._for_disk -= len(writes)
            pairs = list(zip(writes, written or [False] * len(writes), strict=True))
            self._events.copied([digest for (digest, _), done in pairs if done], "DISK")
            for (digest, _), done in reversed(pairs):
                self.host.end_read(digest)
                disk.end_write(digest, written=done)
                self.stored_pages["DISK"] += done
                self.failures["disk"] += not done

        self._workers.start("write", [write], ended)

    def _try_to_write(self, disk: DiskTier, digest: bytes, entry: Entry) -> bool:
        assert entry.checksum is not None
        try:
            disk.write(digest, entry.checksum, self._slab.page(entry.slot))
        except OSError as error:
            self._log("a page could not be written to the disk cache: %s", error)
            return False
        return True

    def _log(self, text: str, error: Exception) -> None:
        if time.monotonic() - self._logged_at >= LOG_S:
            self._logged_at = time.monotonic()
            logger.warning(text, error)

    # ---- back ---------------------------------------------------------------------------------------------

    def fetch(self, fetch: Fetch, after: Sequence[bytes], then: Callable[[Moved], None]) -> bool:
        """Begins to copy pages to the host, as many as have room beside `after`, the host's pages before them. Returns
        False if there is no room; then `then` is not called."""
        disk, source, reads = self.disk, fetch.source, list[tuple[bytes, int]]()
        for digest in after:
            self.host.begin_read(digest)
        for digest in fetch.digests:
            if (slot := self._take_slot(digest)) is None:
                break
            reads.append((digest, slot))
        for digest in reversed(after):
            self.host.end_read(digest)
        if not reads:
            return False
        parts = self._shares(reads) if source == "DISK" else [reads]  # a peer that hangs keeps one thread

        def ended(results: list[tuple[list[int], Exception | None, float] | None]) -> None:
            came, total = list[bytes](), 0.0
            for part, result in reversed(list(zip(parts, results, strict=True))):
                checksums, error, seconds = result or ([], None, 0.0)
                total += seconds
                for digest, _ in reversed(part[len(checksums) :]):
                    self.host.cancel_write(digest)
                for (digest, _), checksum in reversed(list(zip(part, checksums, strict=False))):
                    self.host.end_write(digest, checksum, source)
                    came.append(digest)
                if error is not None:
                    bad, _ = part[len(checksums)]
                    self._failed(bad, source, error)
            for digest in came:
                if disk is not None and disk.has(digest):
                    disk.touch(digest)
            self.loaded_pages[source] += len(came)
            self._events.copied(came[::-1], "CPU")
            then(Moved(len(came), total / len(parts), source))

        kind: Work = "read" if source == "DISK" else "ask"
        self._workers.start(kind, [partial(self._read, fetch, part) for part in parts], ended)
        return True

    def _read(self, fetch: Fetch, part: Sequence[tuple[bytes, int]]) -> tuple[list[int], Exception | None, float]:
        """Reads pages into their slots. Returns the checksums of those that came, why the next one did not, and the
        seconds."""
        began, checksums, problem = time.perf_counter(), list[int](), None
        try:
            with self._open(fetch, [digest for digest, _ in part]) as place:
                for digest, slot in part:
                    if fetch.over:
                        break
                    checksums.append(place.read(digest, self._slab.page(slot)))
        except (BadPage, OSError) as error:
            self._log(f"a page ({fetch.source}) could not be read, and is computed: %s", error)
            problem = error
        return checksums, problem, time.perf_counter() - began

    def _open(self, fetch: Fetch, digests: Sequence[bytes]) -> AbstractContextManager[DiskTier | Pull]:
        if fetch.peer is None:
            assert self.disk is not None
            return nullcontext(self.disk)
        assert self.remote is not None
        return self.remote.pull(fetch.peer, self.form, digests)

    def _failed(self, digest: bytes, source: Lower, error: Exception) -> None:
        """A page could not be read."""
        if source == "DISK":
            assert self.disk is not None
            self.disk.forget(digest)
            self._events.removed([digest], "DISK")
        self.failures["bad_page" if isinstance(error, BadPage) else source.lower()] += 1

    def get(self, pool: KVPool, digests: Sequence[bytes], pages: Pages, then: Callable[[Moved], None]) -> None:
        """Begins to copy pages, all of which the host has, to pages of the device, which nobody else may use until
        `then`."""
        after, slab, form = self._slab.now(), self._slab, self.form
        reads = [(digest, self.host.begin_read(digest), to) for digest, to in zip(digests, pages.tolist(), strict=True)]
        parts = self._shares(reads)

        def read(part: Sequence[tuple[bytes, Entry, int]]) -> tuple[int, float]:
            """Up to a page that is not good: those after it are of no use."""
            began, count = time.perf_counter(), 0
            with slab.copying(after):
                for batch in self._batches(part):
                    sound = [form.checksum(one, slab.page(of.slot).data) == of.checksum for one, of, _ in batch]
                    good = batch[: sound.index(False)] if False in sound else batch
                    if good:
                        pool.copy_in([to for *_, to in good], slab.runs([of.slot for _, of, _ in good]))
                    count += len(good)
                    if len(good) < len(batch):
                        break
            return count, time.perf_counter() - began

        def ended(results: list[tuple[int, float] | None]) -> None:
            counts = [result[0] if result is not None else 0 for result in results]
            for digest, *_ in reversed(reads):
                self.host.end_read(digest)
            for part, count, result in zip(parts, counts, results, strict=True):
                if result is not None and count < len(part):
                    self._drop(part[count][0])
            whole = next((i for i, part in enumerate(parts) if counts[i] < len(part)), len(parts))
            good = reads[: sum(counts[: whole + 1])]
            self.loaded_pages["CPU"] += len(good)
            source: Lower = max((of.source for _, of, _ in good), key=get_args(Lower).index, default="CPU")
            then(Moved(len(good), sum(result[1] for result in results if result) / len(parts), source))
            self._tell([digest for digest, *_ in good])

        self._workers.start("copy", [partial(read, part) for part in parts], ended)

    def _drop(self, digest: bytes) -> None:
        """A page of the host is not what was stored."""
        self.failures["bad_page"] += 1
        if self.host.drop(digest):
            self._events.removed([digest], "CPU")

    def _tell(self, digests: Sequence[bytes]) -> None:
        """Pages are in the tree now, and in these tiers too. Readers of events may not know: they may be on the disk
        from an earlier process, or all that was known was cleared."""
        self._events.copied([digest for digest in digests if self.host.has(digest)], "CPU")
        if self.disk is not None:
            self._events.copied([digest for digest in digests if self.disk.has(digest)], "DISK")

    # ---- to peers -----------------------------------------------------------------------------------------

    def lend(self, digests: Sequence[bytes], then: Callable[[list[int], memoryview], None]) -> None:
        """Begins to copy pages of the host, in order up to one that is not there, into memory that will be `then`'s:
        their checksums, and their bytes one after another."""
        there = list(takewhile(self.host.has, digests))
        held = [self.host.begin_read(digest) for digest in there]
        slab, size = self._slab, self.form.nbytes

        def copy() -> npt.NDArray[np.uint8]:
            data = np.empty((len(held), size), dtype=np.uint8)
            for row, entry in zip(data, held, strict=True):
                np.copyto(row, slab.page(entry.slot))
            return data

        def ended(results: list[npt.NDArray[np.uint8] | None]) -> None:
            (data,) = results
            for digest in reversed(there):
                self.host.end_read(digest)
            if data is None:
                then([], memoryview(b""))
                return
            self.sent_pages += len(held)
            then([entry.checksum for entry in held if entry.checksum is not None], data.reshape(-1).data)

        self._workers.start("copy", [copy], ended)

    # ---- all of it ----------------------------------------------------------------------------------------

    def forget(self, tier: Lower) -> None:
        """Removes all pages of a tier. Nothing may be copied."""
        if tier == "CPU":
            self._events.removed(self.host.clear()[::-1], "CPU")
        elif self.disk is not None:
            self._events.removed(self.disk.clear()[::-1], "DISK")

    def renew(self, form: PageFormat) -> None:
        """From now on the pages of this format: of another model nothing is found. Nothing may be copied."""
        if form != self.form:
            self.form = form
            self.forget("CPU")
            if self.disk is not None:
                self.disk.renew(form)

    def close(self) -> None:
        self._workers.close()
        self._slab.close()
        if self.disk is not None:
            self.disk.close()


def _cut(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]
