"""The pages outside the device, by digest: on the host, and from there on the disk.

The scheduler's thread owns the bookkeeping; a few other threads copy, check and do what may block. Every page that
comes back is checked against its checksum. What fails is a miss: a log line and a counter, never a failed request.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from treeline_runtime.kvcache.disk import BadPage, DiskTier
from treeline_runtime.kvcache.host import HostTier, Slab, SlotState
from treeline_runtime.kvcache.page import PageFormat
from treeline_runtime.kvcache.pool import KVPool, Pages

T = TypeVar("T")
Medium = Literal["CPU", "DISK"]
"""Below the device's own, which events call GPU."""

THREADS = min(4, os.cpu_count() or 1)
LOG_S = 60.0
"""The shortest time between two lines about failures."""

logger = logging.getLogger(__name__)


class Workers:
    """A few threads for what the scheduler may not wait for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called in any thread when `take` will have something."""
        self._threads = ThreadPoolExecutor(THREADS, "treeline pages")
        self._done: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._wake = wake
        self.busy = 0

    def start(self, work: Callable[[], T], then: Callable[[T | None], None]) -> None:
        """Runs `work` in a thread, then `then` with its result in a later `take`; None if it raised."""
        self.busy += 1

        def ended(future: Future[T]) -> None:
            self._done.put((future, then))
            self._wake()

        self._threads.submit(work).add_done_callback(ended)

    def take(self) -> bool:
        """Takes the results that are there. Returns whether there were any."""
        found = False
        while not self._done.empty():
            found = True
            future, then = self._done.get()
            self.busy -= 1
            if (error := future.exception()) is not None:
                logger.error("pages could not be copied", exc_info=error)
            then(None if error is not None else future.result())
        return found

    def close(self) -> None:
        """Waits for what is being done."""
        self._threads.shutdown(cancel_futures=True)


@dataclass(slots=True)
class TierStats:
    """Since the start."""

    loaded_pages: dict[Medium, int] = field(default_factory=lambda: {"CPU": 0, "DISK": 0})
    stored_pages: dict[Medium, int] = field(default_factory=lambda: {"CPU": 0, "DISK": 0})
    skipped_pages: int = 0
    """Not stored, because all slots were being copied or too many pages waited for the disk."""
    bad_pages: int = 0
    """With a checksum or header that was not theirs."""
    failures: int = 0
    """Reads and writes of the disk that failed."""


@dataclass(slots=True)
class _Source:
    """A page to read, and the slot through which it comes."""

    digest: bytes
    slot: int
    checksum: int | None
    """None: it comes from the disk."""

    @property
    def medium(self) -> Medium:
        return "DISK" if self.checksum is None else "CPU"


@dataclass(slots=True)
class Reading:
    """What a thread has read so far. `stop` may be set at any time."""

    wanted: int
    """The pages for which there were slots."""
    count: int = 0
    """Good pages, in order: those after them are not to be used."""
    checksums: dict[int, int] = field(default_factory=dict)
    """Number → the checksum of a page from the disk."""
    stop: bool = False
    is_bad: bool = False
    """The page after the good ones is bad."""
    has_failed: bool = False
    """The disk failed at it."""
    pages: dict[Medium, int] = field(default_factory=lambda: {"CPU": 0, "DISK": 0})
    """Good ones, by where they came from."""
    seconds: dict[Medium, float] = field(default_factory=lambda: {"CPU": 0.0, "DISK": 0.0})
    """What reading and checking them took."""


class PageStore:
    """Finds, keeps and returns pages. `put` and `get` begin copies; `then` is called by `Workers.take`."""

    def __init__(self, form: PageFormat, host: HostTier, slab: Slab, disk: DiskTier | None, workers: Workers) -> None:
        self._form = form
        self.host = host
        self._slab = slab
        self.disk = disk
        self._workers = workers
        self._for_disk = 0
        """Slots with a page that waits for the disk."""
        self._logged_at = float("-inf")
        self.stats = TierStats()

    def where(self, digest: bytes) -> Medium | None:
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
        after, slab, form = self._slab.now(), self._slab, self._form

        def copy() -> list[int]:
            with slab.copying(after):
                for _, page, slot in copies:
                    pool.copy_out(page, slab.page(slot))
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
                self._write(there)
            then()

        self._workers.start(copy, ended)
        return True

    def _take_slot(self, digest: bytes) -> int | None:
        slot, _ = self.host.begin_write(digest)
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
                writes.append((digest, *self.host.begin_read(digest)))
        if not writes:
            return
        self._for_disk += len(writes)

        def write() -> list[bool]:
            disk.delete(victims)
            return [self._try_to_write(digest, checksum, slot) for digest, slot, checksum in writes]

        def ended(written: list[bool] | None) -> None:
            self._for_disk -= len(writes)
            for (digest, *_), done in reversed(list(zip(writes, written or [False] * len(writes), strict=True))):
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
        self, pool: KVPool, digests: Sequence[bytes], pages: Pages, then: Callable[[Reading], None]
    ) -> Reading | None:
        """Begins to copy pages, each of which is somewhere, to pages of the device, which nobody else may use until
        `then`. Returns None if there is no slot, and then does not call `then`."""
        sources = self._sources(digests)
        if not sources:
            return None
        reading, after = Reading(wanted=len(sources)), self._slab.now()
        targets = pages[: len(sources)].tolist()

        def ended(result: Reading | None) -> None:
            if result is None:  # it may have failed at any of them
                reading.count, reading.pages = 0, {}
            self._release(sources, reading)
            then(reading)

        self._workers.start(lambda: self._read(pool, sources, targets, reading, after), ended)
        return reading

    def _sources(self, digests: Sequence[bytes]) -> list[_Source]:
        """Takes slots for pages of the disk, after keeping those that have one. Fewer if there are too few."""
        kept = {digest: self.host.begin_read(digest) for digest in digests if self.host.has(digest)}
        sources = list[_Source]()
        for digest in digests:
            if digest in kept:
                sources.append(_Source(digest, *kept.pop(digest)))
            elif (slot := self._take_slot(digest)) is not None:
                sources.append(_Source(digest, slot, None))
            else:
                break
        for digest in kept:
            self.host.end_read(digest)
        return sources

    def _read(
        self, pool: KVPool, sources: Sequence[_Source], targets: Sequence[int], reading: Reading, after: Any
    ) -> Reading:
        with self._slab.copying(after):
            for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
                began, data = time.perf_counter(), self._slab.page(source.slot)
                if reading.stop:
                    break
                try:
                    self._check(i, source, reading)
                except (BadPage, OSError) as error:
                    self._log("a page could not be read, and is computed: %s", error)
                    reading.is_bad, reading.has_failed = isinstance(error, BadPage), isinstance(error, OSError)
                    break
                pool.copy_in(target, data)
                reading.count = i + 1
                reading.pages[source.medium] += 1
                reading.seconds[source.medium] += time.perf_counter() - began
        return reading

    def _check(self, number: int, source: _Source, reading: Reading) -> None:
        """Makes sure that the page is in its slot. Raises BadPage or OSError."""
        page = self._slab.page(source.slot)
        if source.checksum is None:
            assert self.disk is not None
            reading.checksums[number] = self.disk.read(source.digest, page)
        elif self._form.checksum(source.digest, page.data) != source.checksum:
            raise BadPage("a page on the host is not what was stored")

    def _release(self, sources: Sequence[_Source], reading: Reading) -> None:
        """Gives back slots; good pages of the disk stay in theirs."""
        for i, source in reversed(list(enumerate(sources))):
            bad = i == reading.count and reading.is_bad
            if source.checksum is not None:
                self.host.end_read(source.digest)
                if bad:
                    self.host.drop(source.digest)
            elif i < reading.count:
                self.host.end_write(source.digest, reading.checksums[i])
                if self.disk is not None and self.disk.has(source.digest):
                    self.disk.touch(source.digest)
            else:
                self.host.cancel_write(source.digest)
                if bad and self.disk is not None:
                    self.disk.forget(source.digest)
        for medium, pages in reading.pages.items():
            self.stats.loaded_pages[medium] += pages
        self.stats.bad_pages += reading.is_bad
        self.stats.failures += reading.has_failed

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
