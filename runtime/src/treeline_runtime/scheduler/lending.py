"""Pages for other runtimes, on the side that has them. No sockets; see `page_server`.

    asked for ──▶ WAITING ──all on the host, or late──▶ BEING COPIED ──▶ answered
    asked about ──▶ WAITING ──the first one is there, or late──▶ answered

While a request waits, pages that only the device has are copied to slots of the host. Then a thread copies slots into
memory of the answer, and only so long are they kept: a peer that is slow, silent or gone holds no page. What is not
there in the end is missing in the answer, and computed by the peer.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from itertools import groupby, takewhile

from treeline_wire.pages import Answer, Buffer, GetRequest, HaveRequest, Held, Pages, Request

from treeline_runtime.kvcache import Node, RadixCache
from treeline_runtime.kvcache import Pages as Numbers
from treeline_runtime.kvcache.store import FETCH_BYTES, PageStore

LATE_S = 0.5
"""A request waits so long at most: its peer may ask again."""
MOST_A_STEP = 16
"""Requests taken between two steps of the model; one that names many pages counts for one more each 512."""

Tell = Callable[[Answer, Buffer], None]


class Lending:
    """Owns requests from `ask` to their answer. `put` begins to copy pages of a node to the host."""

    def __init__(
        self, tree: RadixCache, store: PageStore, put: Callable[[Node, Sequence[bytes], Numbers], None]
    ) -> None:
        self._tree = tree
        self._store = store
        self._put = put
        self._asked: queue.SimpleQueue[tuple[Request, Tell]] = queue.SimpleQueue()
        self._waiting: list[tuple[Request, Tell, float]] = []
        """Requests for pages that are soon on the host, or about one that is soon anywhere, and since when."""

    def ask(self, request: Request, tell: Tell) -> None:
        """Takes a request, in any thread; a later `step` answers it. `tell` is called once, in any thread."""
        self._asked.put((request, tell))

    def step(self, now: float) -> bool:
        """Goes on with all requests. Returns whether there was a new one."""
        new = 0
        while new < MOST_A_STEP and not self._asked.empty():
            request, tell = self._asked.get()
            new += 1 + len(request.digests) // 512
            self._waiting.append((request, tell, now))
            if isinstance(request, GetRequest):
                self._put_all(self._here(request))
        for waiting in [*self._waiting]:
            request, tell, since = waiting
            if now - since >= LATE_S or not self._is_coming(request):
                self._waiting.remove(waiting)
                self._answer(request, tell)
        return new > 0

    def _named(self, request: Request) -> Sequence[bytes]:
        """The pages that are asked for, as many as fit into an answer; none if they are not of this model."""
        form = self._store.form
        if request.fingerprint != form.fingerprint:
            return ()
        return request.digests if isinstance(request, HaveRequest) else request.digests[: form.chunk_pages]

    def _here(self, request: Request) -> list[bytes]:
        return list(takewhile(self._is_here, self._named(request)))

    def _is_coming(self, request: Request) -> bool:
        named, host = self._named(request), self._store.host
        if isinstance(request, HaveRequest):
            return request.coming and bool(named) and not self._is_here(named[0])
        return any(digest in host and not host.has(digest) for digest in named)

    def _answer(self, request: Request, tell: Tell) -> None:
        match request:
            case HaveRequest():
                here = self._here(request)
                if request.coming:  # they will be asked for
                    self._put_all(here[: max(1, FETCH_BYTES // self._store.form.nbytes)])
                tell(Held(len(here)), b"")
            case GetRequest():
                self._store.lend(self._named(request), lambda sums, data: tell(Pages(request.number, sums), data))

    def _is_here(self, digest: bytes) -> bool:
        return digest in self._store.host or self._tree.find(digest) is not None

    def _put_all(self, digests: Sequence[bytes]) -> None:
        """Begins to copy those to the host that are there on the device."""
        at = None
        for node, run in groupby(digests, self._tree.find):
            if node is not None:
                named = list(run)
                at = node.digests.index(named[0]) if at is None else 0
                end = at + len(named)
                if node.digests[at:end] != named:  # a peer might name them in any order, and pays for one search
                    return
                self._put(node, named, node.pages[at:end])
