"""The pages outside the device, by digest: on the host, and from there on the disk.

The scheduler's thread owns the bookkeeping; a few other threads copy, check and do what may block. Every page that
comes back is checked against its checksum. What fails is a miss: a log line and a counter, never a failed request.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from treeline_runtime.kvcache.disk import BadPage, DiskTier
from treeline_runtime.kvcache.event_log import EventLog
from treeline_runtime.kvcache.host import HostTier, Slab, SlotState
from treeline_runtime.kvcache.page import PageFormat
from treeline_runtime.kvcache.pool import KVPool, Pages
from treeline_runtime.kvcache.remote import Pull

T = TypeVar("T")
Lower = Literal["CPU", "DISK", "PEER"]
"""Where pages outside the device are: the tiers below, and another runtime."""

THREADS = min(4, os.cpu_count() or 1)
PART_BYTES = 16 << 20
"""Pages of so many bytes are read by one thread."""
BATCH_BYTES = 8 << 20
"""Pages of so many bytes are staged on the device at once."""
PEER_THREADS = 8
"""They mostly wait."""
LOG_S = 60.0
"""The shortest time between two lines about failures."""

logger = logging.getLogger(__name__)


class Workers:
    """A few threads for what the scheduler may not wait for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called in any thread when `take` will have something."""
        self._threads = ThreadPoolExecutor(THREADS, "treeline pages")
        self._for_peers = ThreadPoolExecutor(PEER_THREADS, "treeline peers")
        self._done: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._wake = wake
        self.busy = 0

    def start(self, work: Callable[[], T], then: Callable[[T | None], None], *, asks_peer: bool = False) -> None:
        """Runs `work` in a thread, then `then` with its result in a later `take`; None if it raised. `asks_peer`: it
        may wait for another runtime, which delays no other copies."""
        self.busy += 1

        def ended(future: Future[T]) -> None:
            self._done.put((future, then))
            self._wake()

        (self._for_peers if asks_peer else self._threads).submit(work).add_done_callback(ended)

    def take(self, wait_s: float = 0.0) -> bool:
        """Takes the results that are there, or waits so long for one. Returns whether there were any."""
        found = False
        while not self._done.empty() or (wait_s and not found):
            try:
                future, then = self._done.get(timeout=wait_s)
            except queue.Empty:
                break
            found = True
            self.busy -= 1
            if (error := future.exception()) is not None:
                logger.error("pages could not be copied", exc_info=error)
            then(None if error is not None else future.result())
        return found

    def close(self) -> None:
        """Waits for what is being done."""
        for threads in (self._threads, self._for_peers):
            threads.shutdown(cancel_futures=True)


@dataclass(slots=True)
class TierStats:
    """Since the start."""

    loaded_pages: dict[Lower, int] = field(default_factory=lambda: {"CPU": 0, "DISK": 0, "PEER": 0})
    stored_pages: dict[Lower, int] = field(default_factory=lambda: {"CPU": 0, "DISK": 0})
    skipped_pages: int = 0
    """Not stored, because all slots were being copied or too many pages waited for the disk."""
    bad_pages: int = 0
    """With a checksum or header that was not theirs."""
    failures: int = 0
    """Reads and writes of the disk that failed, and reads from peers."""
    sent_pages: int = 0
    """To peers."""


class Outcome(enum.Enum):
    """What became of a page that was to be read."""

    UNREAD = enum.auto()
    GOOD = enum.auto()
    BAD = enum.auto()
    """It is not the page that was stored."""
    FAILED = enum.auto()
    """The disk or the peer did not give it."""


@dataclass(slots=True)
class _Source:
    """A page to read, the slot through which it comes, and the page of the device where it goes. The thread that reads
    it writes here."""

    digest: bytes
    medium: Lower
    slot: int
    target: int
    checksum: int = 0
    outcome: Outcome = Outcome.UNREAD
    seconds: float = 0.0


@dataclass(slots=True)
class Reading:
    """Pages that are being read. Several threads do it; `stop` may be set at any time."""

    wanted: int
    """The pages for which there were slots."""
    progress: int = 0
    """Pages that came so far, about."""
    stop: bool = False
    count: int = 0
    """At the end: good pages, in order; those after them are not to be used."""
    pages: dict[Lower, int] = field(default_factory=dict)
    """At the end: good pages, by where they came from."""
    seconds: dict[Lower, float] = field(default_factory=dict)
    """What reading and checking these took, all threads together."""


class PageStore:
    """Finds, keeps and returns pages. `put` and `get` begin copies; `then` is called by `Workers.take`."""

    def __init__(
        self,
        form: PageFormat,
        host: HostTier,
        slab: Slab,
        disk: DiskTier | None,
        workers: Workers,
        events: EventLog,
    ) -> None:
        self._form = form
        self._batch = max(1, BATCH_BYTES // form.nbytes)
        """Pages that are copied with one kernel."""
        self.host = host
        self._slab = slab
        self.disk = disk
        self._workers = workers
        self._events = events
        self._for_disk = 0
        """Slots with a page that waits for the disk."""
        self._logged_at = float("-inf")
        self.stats = TierStats()

    @property
    def form(self) -> PageFormat:
        return self._form

    @property
    def page_bytes(self) -> int:
        return self._form.nbytes

    def where(self, digest: bytes) -> Lower | None:
        """The fastest tier that a page can be read from now."""
        state = self.host.state(digest)
        if state in (SlotState.READY, SlotState.BEING_READ):
            return "CPU"
        return "DISK" if state is SlotState.FREE and self.disk is not None and self.disk.has(digest) else None

    def touch(self, digests: Sequence[bytes]) -> None:
        """Pages of a sequence, in order, were used on the device."""
        self.host.touch(digests)

    # ---- to the host, to the disk -------------------------------------------------------------------------

    def put(self, pool: KVPool, digests: Sequence[bytes], pages: Pages, then: Callable[[], None]) -> bool:
        """Begins to copy pages of a sequence from the device, those that the host does not have. They may not change
        until `then`. Returns whether there are any; else `then` is not called."""
        if self.disk is not None:
            self._write([digest for digest in digests if self.host.has(digest)])
        copies = list[tuple[bytes, int, int]]()
        for digest, page in zip(digests, pages.tolist(), strict=True):
            if self.host.state(digest) is not SlotState.FREE:
                continue
            slot = self._take_slot(digest)
            if slot is None:
                self.stats.skipped_pages += 1
                continue
            copies.append((digest, page, slot))
        if not copies:
            return False
        after, slab, form, batch = self._slab.now(), self._slab, self._form, self._batch

        def copy() -> list[int]:
            with slab.copying(after):
                for begin in range(0, len(copies), batch):
                    _, of, to = zip(*copies[begin : begin + batch], strict=True)
                    pool.copy_out(of, [slab.page(slot) for slot in to])
            return [form.checksum(digest, slab.page(slot).data) for digest, _, slot in copies]

        def ended(checksums: list[int] | None) -> None:
            there = [digest for digest, *_ in copies]
            if checksums is None:
                for digest in there:
                    self.host.cancel_write(digest)
            else:
                for digest, checksum in zip(there[::-1], checksums[::-1], strict=True):
                    self.host.end_write(digest, checksum)
                self.stats.stored_pages["CPU"] += len(there)
                self._events.copied(there, "CPU")
                self._write(there)
            then()

        self._workers.start(copy, ended)
        return True

    def _take_slot(self, digest: bytes) -> int | None:
        slot, evicted = self.host.begin_write(digest)
        if evicted is not None:
            self._events.removed([evicted], "CPU")
        return slot

    def _write(self, digests: Sequence[bytes]) -> None:
        """Begins to write pages of the host to the disk, those that it does not have."""
        if self.disk is None:
            return
        disk = self.disk
        writes = list[tuple[bytes, int, int]]()
        victims = []
        for digest in digests:
            if 2 * (self._for_disk + len(writes)) >= self.host.num_slots:
                self.stats.skipped_pages += 1
            elif (gone := disk.begin_write(digest)) is not None:
                victims += gone
                self._events.removed([one for family, one in gone if family == self._form.fingerprint], "DISK")
                writes.append((digest, *self.host.begin_read(digest)))
        if not writes:
            return
        self._for_disk += len(writes)

        def write() -> list[bool]:
            disk.delete(victims)
            return [self._try_to_write(digest, checksum, slot) for digest, slot, checksum in writes]

        def ended(written: list[bool] | None) -> None:
            self._for_disk -= len(writes)
            results = list(zip(writes, written or [False] * len(writes), strict=True))
            self._events.copied([digest for (digest, *_), done in results if done], "DISK")
            for (digest, *_), done in reversed(results):
                self.host.end_read(digest)
                disk.end_write(digest, written=done)
                self.stats.stored_pages["DISK"] += done
                self.stats.failures += not done

        self._workers.start(write, ended)

    def _try_to_write(self, digest: bytes, checksum: int, slot: int) -> bool:
        assert self.disk is not None
        try:
            self.disk.write(digest, checksum, self._slab.page(slot))
        except OSError as error:
            self._log("a page could not be written to the disk cache: %s", error)
            return False
        return True

    def _log(self, text: str, error: Exception) -> None:
        if time.monotonic() - self._logged_at >= LOG_S:
            self._logged_at = time.monotonic()
            logger.warning(text, error)

    # ---- back ---------------------------------------------------------------------------------------------

    def get(
        self,
        pool: KVPool,
        digests: Sequence[bytes],
        pages: Pages,
        then: Callable[[Reading], None],
        pull: Callable[[Sequence[bytes]], AbstractContextManager[Pull]] | None = None,
    ) -> Reading | None:
        """Begins to copy pages, each of which is somewhere, to pages of the device, which nobody else may use until
        `then`. Returns None if there is no slot, and then does not call `then`. pull: reads those that are neither on
        the host nor on the disk."""
        sources = self._sources(digests, pages.tolist())
        if not sources:
            return None
        reading, after = Reading(wanted=len(sources)), self._slab.now()
        parts = min(THREADS, 1 + len(sources) * self._form.nbytes // PART_BYTES)
        step = -(-len(sources) // parts)
        running = len(range(0, len(sources), step))

        def ended(_: object) -> None:
            nonlocal running
            running -= 1
            if not running:
                self._release(sources, reading)
                then(reading)
                self._tell(sources)

        for begin in range(0, len(sources), step):
            part = sources[begin : begin + step]
            remote = [source.digest for source in part if source.medium == "PEER"]
            opened = pull(remote) if pull is not None and remote else nullcontext()
            self._workers.start(partial(self._read, pool, part, reading, after, opened), ended, asks_peer=bool(remote))
        return reading

    def _sources(self, digests: Sequence[bytes], targets: Sequence[int]) -> list[_Source]:
        """Takes slots for pages of the disk, after keeping those that have one. Fewer if there are too few."""
        kept = {digest: self.host.begin_read(digest) for digest in digests if self.host.has(digest)}
        sources = list[_Source]()
        for digest, target in zip(digests, targets, strict=True):
            if digest in kept:
                slot, checksum = kept.pop(digest)
                sources.append(_Source(digest, "CPU", slot, target, checksum))
            elif self.host.state(digest) is SlotState.FREE and (free := self._take_slot(digest)) is not None:
                on_disk = self.disk is not None and self.disk.has(digest)
                sources.append(_Source(digest, "DISK" if on_disk else "PEER", free, target))
            else:
                break
        for digest in kept:
            self.host.end_read(digest)
        return sources

    def _read(
        self,
        pool: KVPool,
        sources: Sequence[_Source],
        reading: Reading,
        after: Any,
        opened: AbstractContextManager[Pull | None],
    ) -> None:
        """Reads pages in order, up to one that is not good: those after it are of no use."""
        checked = list[_Source]()
        with opened as pull, self._slab.copying(after):
            for source in sources:
                if reading.stop:
                    break
                began = time.perf_counter()
                try:
                    self._check(source, pull)
                except (BadPage, OSError) as error:
                    self._log("a page could not be read, and is computed: %s", error)
                    source.outcome = Outcome.BAD if isinstance(error, BadPage) else Outcome.FAILED
                    if pull is not None and source.medium == "PEER" and source.outcome is Outcome.BAD:
                        pull.failed()
                    reading.stop = True
                    break
                source.seconds = time.perf_counter() - began
                checked.append(source)
                reading.progress += 1
                if len(checked) % self._batch == 0:
                    self._copy_in(pool, checked[-self._batch :])
            self._copy_in(pool, checked[len(checked) // self._batch * self._batch :])
        for source in checked:  # only now the copies are complete
            source.outcome = Outcome.GOOD

    def _copy_in(self, pool: KVPool, sources: Sequence[_Source]) -> None:
        if sources:
            pool.copy_in([source.target for source in sources], [self._slab.page(source.slot) for source in sources])

    def _check(self, source: _Source, pull: Pull | None) -> None:
        """Makes sure that the page is in its slot. Raises BadPage or OSError."""
        page = self._slab.page(source.slot)
        if source.medium == "DISK":
            assert self.disk is not None
            source.checksum = self.disk.read(source.digest, page)
            return
        if source.medium == "PEER":
            assert pull is not None
            source.checksum = pull.read(source.digest, page)
        if self._form.checksum(source.digest, page.data) != source.checksum:
            raise BadPage(f"a page ({source.medium}) is not what was stored")

    def _release(self, sources: Sequence[_Source], reading: Reading) -> None:
        """Gives back slots; good pages of the disk stay in theirs."""
        good = [source.outcome is Outcome.GOOD for source in sources]
        reading.count = good.index(False) if False in good else len(good)
        for i, source in reversed(list(enumerate(sources))):
            bad = source.outcome is Outcome.BAD
            if source.medium == "CPU":
                self.host.end_read(source.digest)
                if bad and self.host.drop(source.digest):
                    self._events.removed([source.digest], "CPU")
            else:
                self._release_slot(source)
            if i < reading.count:
                reading.pages[source.medium] = reading.pages.get(source.medium, 0) + 1
                reading.seconds[source.medium] = reading.seconds.get(source.medium, 0.0) + source.seconds
            self.stats.bad_pages += bad
            self.stats.failures += source.outcome is Outcome.FAILED
        for medium, pages in reading.pages.items():
            self.stats.loaded_pages[medium] += pages

    def _release_slot(self, source: _Source) -> None:
        """Of a page that was to come from elsewhere than the host."""
        if source.outcome is Outcome.GOOD:
            self.host.end_write(source.digest, source.checksum)
            if self.disk is not None and self.disk.has(source.digest):
                self.disk.touch(source.digest)
        else:
            self.host.cancel_write(source.digest)
            if source.outcome is Outcome.BAD and source.medium == "DISK":
                assert self.disk is not None
                self.disk.forget(source.digest)
                self._events.removed([source.digest], "DISK")

    def _tell(self, sources: Sequence[_Source]) -> None:
        """Good pages are in the tree now, unless the load was given up, and in these tiers too. Readers of events may
        not know: they may be on the disk from an earlier process, or all that was known was cleared."""
        good = [source for source in sources if source.outcome is Outcome.GOOD]
        self._events.copied([source.digest for source in good], "CPU")
        self._events.copied([source.digest for source in good if source.medium == "DISK"], "DISK")

    # ---- to peers -----------------------------------------------------------------------------------------

    def lend(self, digests: Sequence[bytes], then: Callable[[list[int], memoryview], None]) -> None:
        """Begins to copy pages of the host, in order up to one that is not there, into memory that will be `then`'s:
        their checksums, and their bytes one after another."""
        there = list(takewhile(self.host.has, digests))
        held = [self.host.begin_read(digest) for digest in there]
        slab, size = self._slab, self._form.nbytes

        def copy() -> npt.NDArray[np.uint8]:
            data = np.empty((len(held), size), dtype=np.uint8)
            for row, (slot, _) in zip(data, held, strict=True):
                np.copyto(row, slab.page(slot))
            return data

        def ended(data: npt.NDArray[np.uint8] | None) -> None:
            for digest in reversed(there):
                self.host.end_read(digest)
            if data is None:
                then([], memoryview(b""))
                return
            self.stats.sent_pages += len(held)
            then([checksum for _, checksum in held], data.reshape(-1).data)

        self._workers.start(copy, ended)

    # ---- all of it ----------------------------------------------------------------------------------------

    @property
    def is_copying(self) -> bool:
        """Whether a thread reads or writes pages."""
        return self._workers.busy > 0

    def clear(self) -> None:
        """Forgets all pages, and deletes those on the disk. Nothing may be copied."""
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def renew(self, form: PageFormat) -> None:
        """From now on the pages of this format: of another model nothing is found. Nothing may be copied."""
        if form != self._form:
            self._form = form
            self.host.clear()
            if self.disk is not None:
                self.disk.renew(form)

    def close(self) -> None:
        self._workers.close()
        self._slab.close()
        if self.disk is not None:
            self.disk.close()
