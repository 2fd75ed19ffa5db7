"""Pages for other runtimes, on the side that has them. No sockets; see `page_server`.

    asked for ──▶ WAITING ──all on the host, or late──▶ BEING COPIED ──▶ answered

While a request waits, pages that only the device has are copied to slots of the host. Then a thread copies slots into
memory of the answer, and only so long are they kept: a peer that is slow, silent or gone holds no page. What is not
there in the end is missing in the answer, and computed by the peer.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from treeline_wire.pages import Answer, Buffer, GetRequest, HaveRequest, Held, Pages, Request

from treeline_runtime.kvcache import Node, RadixCache
from treeline_runtime.kvcache import Pages as Numbers
from treeline_runtime.kvcache.store import PageStore

LATE_S = 1.0
"""A request waits so long at most: its peer will soon give up."""
MOST_A_STEP = 16
"""Requests taken between two steps of the model."""

Tell = Callable[[Answer, Buffer], None]


@dataclass(slots=True, eq=False)
class Lease:
    """A request that waits for its pages to be on the host."""

    number: int
    digests: Sequence[bytes]
    since: float
    tell: Tell

    def answer(self, checksums: list[int], data: memoryview) -> None:
        self.tell(Pages(self.number, checksums), data)


class Lending:
    """Owns requests from `ask` to their answer. `put` begins to copy pages of a node to the host."""

    def __init__(
        self, tree: RadixCache, store: PageStore, put: Callable[[Node, Sequence[bytes], Numbers], None]
    ) -> None:
        self._tree = tree
        self._store = store
        self._put = put
        self._asked: queue.SimpleQueue[tuple[Request, Tell]] = queue.SimpleQueue()
        self._waiting: list[Lease] = []

    def ask(self, request: Request, tell: Tell) -> None:
        """Takes a request, in any thread; a later `step` answers it. `tell` is called once."""
        self._asked.put((request, tell))

    def step(self, now: float) -> bool:
        """Goes on with all requests. Returns whether there was a new one."""
        new = min(self._asked.qsize(), MOST_A_STEP)
        for _ in range(new):
            self._take(*self._asked.get(), now)
        for lease in [*self._waiting]:
            if now - lease.since >= LATE_S or not self._is_coming(lease):
                self._waiting.remove(lease)
                self._store.lend(lease.digests, lease.answer)
        return new > 0

    def _is_coming(self, lease: Lease) -> bool:
        host = self._store.host
        return any(digest in host and not host.has(digest) for digest in lease.digests)

    def _is_here(self, digest: bytes) -> bool:
        return digest in self._store.host or self._tree.find(digest) is not None

    def _take(self, request: Request, tell: Tell, now: float) -> None:
        form = self._store.form
        here = list(takewhile(self._is_here, request.digests)) if request.fingerprint == form.fingerprint else []
        match request:
            case HaveRequest():
                reason = "" if request.fingerprint == form.fingerprint else "another model or format of pages"
                tell(Held(len(here), reason), b"")
            case GetRequest():
                here = here[: form.chunk_pages]
                self._waiting.append(Lease(request.number, here, now, tell))
                for node, run in groupby(here, self._tree.find):
                    if node is not None:
                        self._put_run(node, list(run))

    def _put_run(self, node: Node, digests: list[bytes]) -> None:
        at = node.digests.index(digests[0])
        end = at + len(digests)
        if node.digests[at:end] == digests:  # a peer might name them in any order
            self._put(node, digests, node.pages[at:end])
