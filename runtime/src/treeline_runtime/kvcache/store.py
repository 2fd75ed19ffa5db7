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
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import TypeVar, get_args

import numpy as np

from treeline_runtime.kvcache.disk import DiskTier
from treeline_runtime.kvcache.event_log import EventLog
from treeline_runtime.kvcache.host import Entry, HostTier, Lower, Slab
from treeline_runtime.kvcache.page import BadPage, PageFormat
from treeline_runtime.kvcache.pool import KVPool, Pages
from treeline_runtime.kvcache.remote import Pull, RemotePages
from treeline_runtime.kvcache.workers import LOG_S, THREADS, Workers

T = TypeVar("T")

PART_BYTES = 16 << 20
"""Pages of at least so many bytes are worth a thread."""
BATCH_BYTES = 32 << 20
"""Pages of so many bytes are staged on the device at once, by each thread. Less has the threads wait for each other
where they call torch: 16 MiB take 87 ms for 2.2 GB on an H200, 32 MiB 69."""
FETCH_BYTES = 128 << 20
"""Pages of so many bytes are fetched from the disk or a peer at once for a client, so that others wait for no more."""
RACE_S = 0.1
"""A pull has so long to show how fast it is."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moved:
    """Pages that came from a tier."""

    pages: int
    """Good ones; of a `get`, those before the first that is not."""
    seconds: float
    """What a thread spent on them, waiting for threads not included."""
    source: Lower
    """The furthest place from which some of them came."""


Elsewhere = Callable[[bool, Sequence[int], Sequence[int]], Future[None]]
"""Begins to copy the parts of pages that other ranks have, to slots of the host (True) or back: numbers of pages and
slots."""


def nowhere(_to_host: bool, _pages: Sequence[int], _slots: Sequence[int]) -> Future[None]:
    """There are no other ranks."""
    done = Future[None]()
    done.set_result(None)
    return done


@dataclass(slots=True, eq=False)
class Fetch:
    """A piece of a sequence on its way to the host."""

    digests: dict[bytes, None]
    """In order."""
    client: str | None
    began_at: float
    limit_s: float
    """The longest that requests wait for it."""
    peer: str | None = None
    """HOST:PORT of the runtime from which it comes; None: it comes from the disk."""
    page_s: float = inf
    """Seconds by which computing a page is slower than loading it from the host. Pages that take longer to come are not
    worth it: no further one is begun."""
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
        elsewhere: Elsewhere = nowhere,
    ) -> None:
        self._elsewhere = elsewhere
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
        self.failures = Counter[str](bad_page=0, copy=0, disk=0, peer=0)
        """Pages with a checksum or header that was not theirs; those that a rank could not copy between device and
        host; reads and writes of the disk, and reads from peers, that failed."""

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
        form, slab = self.form, self._slab
        others = self._elsewhere(True, [page for _, page, _ in copies], [slot for *_, slot in copies])

        def copy(part: Sequence[tuple[bytes, int, int]]) -> list[int]:
            with _beside(others), slab.copying():  # what is in the tree is known to be computed
                for batch in self._batches(part):
                    pool.copy_out([page for _, page, _ in batch], slab.runs([slot for *_, slot in batch]))
            return [form.checksum(digest, slab.page(slot).data) for digest, _, slot in part]

        def ended(checksums: list[int | None], _seconds: float) -> None:
            there = list[bytes]()
            for (digest, *_), checksum in zip(copies, checksums, strict=True):
                if checksum is None:
                    self.host.cancel_write(digest)
                else:
                    self.host.end_write(digest, checksum)
                    there.append(digest)
            self.host.touch(there)
            self.stored_pages["CPU"] += len(there)
            self.failures["copy"] += len(copies) - len(there)
            self._events.copied(there, "CPU")
            self._write(there)
            then()

        self._workers.start("copy", self._shares(copies), copy, ended)
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

        def write(part: Sequence[tuple[bytes, Entry]]) -> list[bool]:
            disk.delete(victims)
            return [self._try_to_write(disk, digest, entry) for digest, entry in part]

        def ended(written: list[bool | None], _seconds: float) -> None:
            self._for_disk -= len(writes)
            there = [digest for (digest, _), done in zip(writes, written, strict=True) if done]
            self._events.copied(there, "DISK")
            for (digest, _), done in reversed(list(zip(writes, written, strict=True))):
                self.host.end_read(digest)
                disk.end_write(digest, written=bool(done))
            self.stored_pages["DISK"] += len(there)
            self.failures["disk"] += len(writes) - len(there)

        self._workers.start("write", [writes], write, ended)

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
        parts = self._shares(reads) if fetch.peer is None else _cut(reads, len(reads))  # who hangs keeps one thread

        def read(part: Sequence[tuple[bytes, int]]) -> list[int | Exception]:
            """Checksums, up to a page that did not come."""
            found, began = list[int | Exception](), time.monotonic()
            try:
                with self._open(fetch, [digest for digest, _ in part]) as place:
                    for digest, slot in part:
                        late = found and time.monotonic() - began > max(RACE_S, len(found) * fetch.page_s)
                        if fetch.over or (late and not place.has(digest)):
                            break
                        found.append(place.read(digest, self._slab.page(slot)))
            except (BadPage, OSError) as error:
                self._log(f"a page ({source}) could not be read, and is computed: %s", error)
                found.append(error)
            return found

        def ended(found: list[int | Exception | None], seconds: float) -> None:
            came = list[bytes]()
            for (digest, _), one in zip(reads, found, strict=True):
                if isinstance(one, int):
                    self.host.end_write(digest, one, source)
                    came.append(digest)
                else:
                    self.host.cancel_write(digest)
                if isinstance(one, Exception):
                    self.failures["bad_page" if isinstance(one, BadPage) else source.lower()] += 1
                    if disk is not None and source == "DISK":
                        disk.forget(digest)
                        self._events.removed([digest], "DISK")
            self.host.touch(came)
            if disk is not None:
                disk.touch(came)
            self.loaded_pages[source] += len(came)
            self._events.copied(came, "CPU")
            then(Moved(len(came), seconds, source))

        self._workers.start("read" if source == "DISK" else "ask", parts, read, ended)
        return True

    def _open(self, fetch: Fetch, digests: Sequence[bytes]) -> AbstractContextManager[DiskTier | Pull]:
        if fetch.peer is None:
            assert self.disk is not None
            return nullcontext(self.disk)
        assert self.remote is not None
        return self.remote.pull(fetch.peer, self.form, digests, lambda: not fetch.over)

    def get(self, pool: KVPool, digests: Sequence[bytes], pages: Pages, then: Callable[[Moved], None]) -> None:
        """Begins to copy pages, all of which the host has, to pages of the device, which nobody else may use until
        `then`."""
        after, slab, form = self._slab.now(), self._slab, self.form
        reads = [(digest, self.host.begin_read(digest), to) for digest, to in zip(digests, pages.tolist(), strict=True)]
        others = self._elsewhere(False, pages.tolist(), [of.slot for _, of, _ in reads])  # what is bad is not used

        def read(part: Sequence[tuple[bytes, Entry, int]]) -> list[bool]:
            """Whether pages are good, up to one that is not: those after it are of no use."""
            found = list[bool]()
            with _beside(others), slab.copying(after):
                for batch in self._batches(part):
                    sound = [form.checksum(one, slab.page(of.slot).data) == of.checksum for one, of, _ in batch]
                    good = batch[: sound.index(False)] if False in sound else batch
                    if good:
                        pool.copy_in([to for *_, to in good], slab.runs([of.slot for _, of, _ in good]))
                    found += sound[: len(good) + 1]
                    if len(good) < len(batch):
                        break
            return found

        def ended(found: list[bool | None], seconds: float) -> None:
            good = [of for of, _ in takewhile(lambda pair: pair[1], zip(reads, found, strict=True))]
            for digest in reversed(digests):
                self.host.end_read(digest)
            self.failures["copy"] += 0 if False in found else found.count(None)
            for (digest, *_), sound in zip(reads, found, strict=True):
                self.failures["bad_page"] += sound is False
                if sound is False and self.host.drop(digest):
                    self._events.removed([digest], "CPU")
            self.loaded_pages["CPU"] += len(good)
            source: Lower = max((of.source for _, of, _ in good), key=get_args(Lower).index, default="CPU")
            then(Moved(len(good), seconds, source))
            self._tell([digest for digest, *_ in good])

        self._workers.start("copy", self._shares(reads), read, ended)

    def _tell(self, digests: Sequence[bytes]) -> None:
        """Pages are in the tree now, and in these tiers too. Readers of events may not know: they may be on the disk
        from an earlier process, or all that was known was cleared."""
        self._events.copied([digest for digest in digests if self.host.has(digest)], "CPU")
        if self.disk is not None:
            self._events.copied([digest for digest in digests if self.disk.has(digest)], "DISK")

    # ---- to peers -----------------------------------------------------------------------------------------

    def lend(self, digests: Sequence[bytes], then: Callable[[list[int], memoryview], None]) -> None:
        """Begins to copy pages of the host, in order up to one that is not there, into memory that will be `then`'s:
        their checksums, and their bytes one after another. `then` is called in any thread, as soon as that is done."""
        if not (there := list(takewhile(self.host.has, digests))):
            then([], memoryview(b""))
            return
        held = [self.host.begin_read(digest) for digest in there]
        slab, data = self._slab, np.empty((len(held), self.form.nbytes), dtype=np.uint8)

        def copy(part: Sequence[Entry]) -> list[int]:
            for row, entry in zip(data, part, strict=True):
                np.copyto(row, slab.page(entry.slot))
            checksums = [entry.checksum for entry in part if entry.checksum is not None]
            then(checksums, data.reshape(-1).data)
            return checksums

        def ended(found: list[int | None], _seconds: float) -> None:
            for digest in reversed(there):
                self.host.end_read(digest)
            if None in found:
                then([], memoryview(b""))
            else:
                self.sent_pages += len(found)

        self._workers.start("copy", [held], copy, ended)

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


@contextmanager
def _beside(others: Future[None]) -> Iterator[None]:
    """A context manager for this rank's part of copies, which ends when the other ranks' have, also at an error: until
    then their pages and slots are taken. Raises what another rank could not do."""
    try:
        yield
    finally:
        others.result()


def _cut(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]
