"""The radix cache: which token sequences have keys and values in the pool.

Theory of operation
-------------------
A tree per namespace. An edge is a run of whole pages; a node owns the run that leads to it: `key` (token ids as
little-endian u32, so comparing is memcmp), `place`, `pages` (where their KV is) and `digests` (the hash chain that
names each page in KV events). Children are found by the bytes of their first page: two children of a node differ within
it.

- `match` changes nothing. `lock` splits the last node where the match ends inside it, then counts one lock on every
  node up to the root; a node with locks, or with children, cannot be evicted. When a locked node is split both halves
  keep its locks, and the old object becomes the lower half: its holder still holds the whole path.
- `begin_filling` extends a lock to the rest of a key, on nodes that are being filled; `match` reports how much is.
  Several holders may fill one node. The first that inserts it puts it on the device; without locks it is removed.
- `insert` adds what the device lacks and says how many pages it already had; the caller owns the duplicates.
- `evict` takes pages from the ends of leaves, so the remainder of a leaf stays useful.
- Time is a counter of lock and insert calls, not a clock: replicas of a tree agree, and tests repeat.

A page of the pool is free, in the tree, or held by a request; this class knows only those in the tree. Pages of a node
being filled belong to its fillers until it is inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from treeline_wire.events import block_hash, hash_of, root_digest

from treeline_runtime.kvcache.event_log import EventLog
from treeline_runtime.kvcache.keys import SALT_WORDS, TOKEN_BYTES, common_prefix, tokens_of
from treeline_runtime.kvcache.node import EVICTION_POLICIES, EvictionQueue, Node, Place
from treeline_runtime.kvcache.pool import NO_PAGES, Pages
from treeline_runtime.published import CacheEvent, Stored


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a key. Valid until the tree next changes."""

    node: Node | None
    """The last node reached; None if nothing matched."""
    used_pages: int
    """Pages of `node` that belong to the match."""
    num_pages: int
    """Pages of the whole match."""
    coming: int = 0
    """Pages after the match that are being filled."""


NO_MATCH = Match(None, 0, 0)


class RadixCache:
    """Page-granular prefix tree. Lengths are in pages, keys in bytes (see `keys`); n = pages of the key.

    Looking up: match O(n). Keeping: lock, unlock O(depth), begin_filling O(n). Changing: insert O(n), evict O(pages +
    leaves log leaves), reset O(1). Watching: take_events, blocks, check_integrity O(tree).
    """

    def __init__(self, page_size: int, eviction_policy: str = "lru", *, salted: bool = False) -> None:
        """salted: keys are those of `salted_key_of`."""
        self.page_size = page_size
        self.page_bytes = (page_size + SALT_WORDS * salted) * TOKEN_BYTES
        """Of a page's key."""
        self._eviction_key = EVICTION_POLICIES[eviction_policy]
        self.on_evicted: Callable[[list[bytes]], None] = lambda _: None
        """Gets the digests of pages that are evicted."""
        self.events = EventLog()
        """Also of tiers below, whose pages come from here."""
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[str | None, Node] = {}
        self._nodes: dict[bytes, Node] = {}
        """By the digest of each page on the device."""
        self._queue = EvictionQueue(self._eviction_key)
        self._now = 0
        self.evictable_pages = 0
        self.locked_pages = 0
        self.version = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool that are in the tree."""
        return self.evictable_pages + self.locked_pages

    # ---- looking up ---------------------------------------------------------------------------------------

    def match(self, key: bytes, namespace: str | None = None, most: int | None = None) -> Match:
        """The longest cached prefix of `key`, in whole pages of at most so many tokens. Changes nothing, not even
        recency."""
        if most is not None:
            key = key[: most // self.page_size * self.page_bytes]
        node = self._roots.get(namespace)
        if node is None:
            return NO_MATCH
        size = self.page_bytes
        found, used, cached, offset = None, 0, 0, 0
        while (child := node.children.get(key[offset : offset + size])) is not None:
            common = len(child.key)
            if not key.startswith(child.key, offset):
                common = common_prefix(child.key, key[offset : offset + common]) // size * size
            offset += common
            if child.place is Place.DEVICE:
                found, used, cached = child, common // size, offset
            if common < len(child.key):
                break
            node = child
        return Match(found, used, cached // size, (offset - cached) // size)

    def pages_of(self, match: Match) -> Pages:
        """Page numbers of the match, in order."""
        if match.node is None:
            return NO_PAGES
        parts = [match.node.pages[: match.used_pages]]
        node = match.node.parent
        while node is not None and node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]

    def digests_of(self, node: Node | None) -> list[bytes]:
        """Digests from the root to the end of `node`, which is on the device."""
        parts = list[list[bytes]]()
        while node is not None and node.parent is not None:
            parts.append(node.digests)
            node = node.parent
        return [digest for part in reversed(parts) for digest in part]

    def digest_of(self, parent: bytes, words: list[int]) -> bytes:
        """The digest of the page with these words in its key, after the one with digest `parent`."""
        return block_hash(parent, words if any(words[self.page_size :]) else words[: self.page_size])

    def _tokens_of(self, key: bytes) -> list[int]:
        words = np.frombuffer(key, dtype="<u4").reshape(-1, self.page_bytes // TOKEN_BYTES)
        tokens: list[int] = words[:, : self.page_size].ravel().tolist()
        return tokens

    def find(self, digest: bytes) -> Node | None:
        """The node with this page of the device. O(1)."""
        return self._nodes.get(digest)

    def whole(self, node: Node) -> Match:
        """The match that ends with `node`, which is on the device."""
        return Match(node, len(node.pages), self.depth(node))

    def depth(self, node: Node | None) -> int:
        """Pages from the root to the end of `node`, wherever they are."""
        total = 0
        while node is not None:
            total += len(node.key) // self.page_bytes
            node = node.parent
        return total

    def unlocked_pages(self, match: Match) -> int:
        """Pages that `lock(match)` would make unevictable. O(depth)."""
        node = match.node
        if node is None:
            return 0
        total = match.used_pages if node.lock_ref == 0 else 0
        node = node.parent
        while node is not None and node.parent is not None and node.lock_ref == 0:
            total += len(node.pages)
            node = node.parent
        return total

    # ---- keeping ------------------------------------------------------------------------------------------

    def lock(self, match: Match, priority: int = 0) -> Node | None:
        """Keeps the matched pages until the returned handle is unlocked. Counts as a hit of a request of that priority.
        May split a node."""
        node = match.node
        if node is None:
            return None
        if match.used_pages < len(node.pages):
            node = self._split(node, match.used_pages)
        self._now += 1
        step: Node | None = node
        while step is not None:
            step.hit_count += 1
            step = step.parent
        self._touch(node, priority)
        self.lock_node(node)
        return node

    def lock_node(self, node: Node) -> None:
        """Adds a lock on the path to `node` (from insert); not a hit."""
        step = node
        while step.parent is not None:
            if step.lock_ref == 0:
                self.evictable_pages -= len(step.pages)
                self.locked_pages += len(step.pages)
                self._queue.discard(step)
            step.lock_ref += 1
            step = step.parent

    def unlock(self, node: Node | None) -> None:
        """Undoes one lock. None (the handle of an empty match) is allowed."""
        while node is not None and node.parent is not None:
            node = self._unlock_one(node)

    def _unlock_one(self, node: Node) -> Node | None:
        """Returns its parent."""
        assert node.lock_ref > 0, "unlock without lock"
        node.lock_ref -= 1
        parent = node.parent
        if node.lock_ref == 0:
            if node.place is Place.DEVICE:
                self.locked_pages -= len(node.pages)
                self.evictable_pages += len(node.pages)
                if not node.children:
                    self._queue.add(node)
            else:
                self._remove_leaf(node)
                self.version += 1
        return parent

    def begin_filling(self, handle: Node | None, key: bytes, namespace: str | None = None) -> Node | None:
        """Locks the part of `key` after `handle`, a lock from `lock`, as being filled; returns the lock to use instead
        of `handle`. Its holder inserts the pages that it has filled, and calls `end_filling` or `unlock` when it stops.

        If the cache holds more of `key` than `handle`, which the holder chose not to use, nothing more is locked.
        """
        match = self.match(key, namespace)
        at, total = match.num_pages, len(key) // self.page_bytes
        if match.node is not handle or at == total:
            return handle
        node = handle or self._root(namespace)
        while at < total:
            node = self._below(node, key, at, total)
            node.lock_ref += 1
            at += len(node.key) // self.page_bytes
        self.version += 1
        return node

    def end_filling(self, handle: Node | None) -> Node | None:
        """Unlocks the part of `handle` that is being filled; returns the lock on the rest."""
        while handle is not None and handle.place is Place.ON_ITS_WAY:
            handle = self._unlock_one(handle)
        return handle if handle is not None and handle.parent is not None else None

    # ---- changing -----------------------------------------------------------------------------------------

    def insert(
        self,
        key: bytes,
        pages: Pages,
        *,
        prompt_tokens: int,
        namespace: str | None = None,
        priority: int = 0,
    ) -> tuple[int, Node | None]:
        """Adds `key` whose KV is in `pages` (one number per whole page; a partial last page is ignored).

        Returns (number of pages the tree already had, node where the key ends). The tree now owns pages[existing:]; of
        pages[:existing] it keeps its own copies, and differing numbers there are the caller's duplicates. The new run
        is split where prompt meets output (`prompt_tokens`), so that outputs can be evicted first.
        """
        total = len(key) // self.page_bytes
        assert len(pages) >= total, f"{len(pages)} pages for a key of {total}"
        if total == 0:
            return 0, None
        self._now += 1
        match = self.match(key[: total * self.page_bytes], namespace)
        node = match.node or self._root(namespace)
        if match.used_pages < len(node.pages):
            node = self._split(node, match.used_pages)
        at, boundary = match.num_pages, prompt_tokens // self.page_size
        while at < total:
            node = self._below(node, key, at, boundary if at < boundary < total else total)
            self._fill(node, pages, at, prompt_tokens, namespace, priority)
            at += len(node.pages)
        self._touch(node, priority)
        return match.num_pages, node

    def evict(self, num_pages: int) -> Pages:
        """Takes up to `num_pages` unlocked pages out of the tree, from the ends of leaves, in the policy's order.

        Returns the pages, now the caller's; fewer only if no more are evictable.
        """
        taken: list[Pages] = []
        missing = num_pages
        while missing > 0 and (leaf := self._queue.pop()) is not None:
            keep = max(len(leaf.pages) - missing, 0)
            taken.append(leaf.pages[keep:])
            missing -= len(leaf.pages) - keep
            self.events.removed(leaf.digests[keep:][::-1])
            self.on_evicted(leaf.digests[keep:])
            for digest in leaf.digests[keep:]:
                del self._nodes[digest]
            if keep:
                leaf.pages = leaf.pages[:keep].copy()
                leaf.digests = leaf.digests[:keep]
                leaf.key = leaf.key[: keep * self.page_bytes]
                self._queue.add(leaf)
            else:
                self._remove_leaf(leaf)
        if not taken:
            return NO_PAGES
        pages = np.concatenate(taken)
        self.evictable_pages -= len(pages)
        self.version += 1
        return pages

    def reset(self) -> Pages:
        """Empties the tree and returns the pages, now the caller's. No lock may be held."""
        nodes = [node for node, _ in self._walk()]
        assert not any(node.lock_ref for node in nodes), f"reset with {self.locked_pages} locked pages"
        pages = [node.pages for node in nodes]
        self._clear()
        self.events.cleared()
        return np.concatenate(pages) if pages else NO_PAGES

    def _root(self, namespace: str | None) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", self._now, Place.DEVICE)
            root.digests = [root_digest(namespace)]
        return root

    def _below(self, parent: Node, key: bytes, start: int, end: int) -> Node:
        """The child of `parent` for pages start … end of the key, or for the first of them; a new one is marked as
        being filled."""
        size = self.page_bytes
        run = key[start * size : end * size]
        child = parent.children.get(run[:size])
        if child is None:
            child = parent.children[run[:size]] = Node(parent, run, self._now)
        elif (common := common_prefix(child.key, run) // size) < len(child.key) // size:
            child = self._split(child, common)
        return child

    def _fill(
        self, node: Node, pages: Pages, start: int, prompt_tokens: int, namespace: str | None, priority: int
    ) -> None:
        """`node`, which begins with page `start` of a key whose KV is in `pages`, is now on the device."""
        parent, words = node.parent, tokens_of(node.key)
        assert parent is not None
        assert node.place is Place.ON_ITS_WAY
        width, digest = self.page_bytes // TOKEN_BYTES, parent.digests[-1]
        is_plain = width == self.page_size
        tokens = words if is_plain else self._tokens_of(node.key)
        for i in range(0, len(words), width):
            page = words[i : i + width]
            digest = block_hash(digest, page) if is_plain else self.digest_of(digest, page)
            node.digests.append(digest)
            self._nodes[digest] = node
        node.place = Place.DEVICE
        node.pages = pages[start : start + len(node.digests)].copy()
        node.last_access, node.priority = self._now, priority
        self._queue.discard(parent)
        if node.lock_ref:
            self.locked_pages += len(node.pages)
        else:
            self.evictable_pages += len(node.pages)
            self._queue.add(node)
        self.version += 1
        parent_hash = hash_of(parent.digests[-1]) if parent.parent is not None else None
        output_from = min(max(prompt_tokens - start * self.page_size, 0), len(tokens))
        hashes = [hash_of(digest) for digest in node.digests]
        self.events.stored(Stored(hashes, parent_hash, tokens, namespace, output_from))

    def _split(self, node: Node, at: int) -> Node:
        """Cuts `node` after `at` pages. Returns the new upper half; `node` becomes the lower half."""
        parent, size = node.parent, self.page_bytes
        assert parent is not None
        assert 0 < at < len(node.key) // size
        upper = Node(parent, node.key[: at * size], self._now, node.place)
        upper.pages, upper.digests = node.pages[:at], node.digests[:at]
        self._nodes.update(dict.fromkeys(upper.digests, upper))
        upper.lock_ref, upper.hit_count = node.lock_ref, node.hit_count
        upper.last_access, upper.priority = node.last_access, node.priority
        parent.children[upper.key[:size]] = upper
        node.key = node.key[at * size :]
        node.pages = node.pages[at:]
        node.digests = node.digests[at:]
        node.parent = upper
        upper.children[node.key[:size]] = node
        self.version += 1
        return upper

    def _remove_leaf(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self.page_bytes]]
        if parent.children:
            return
        if parent.parent is not None:
            if parent.lock_ref == 0:
                self._queue.add(parent)
        else:
            self._roots = {name: root for name, root in self._roots.items() if root is not parent}

    def _touch(self, node: Node | None, priority: int) -> None:
        while node is not None:
            node.last_access = self._now
            node.priority = max(node.priority, priority)
            self._queue.touch(node)
            node = node.parent

    # ---- watching -----------------------------------------------------------------------------------------

    def take_events(self) -> list[CacheEvent]:
        """Changes since the last call, in order, merged."""
        return self.events.take()

    def blocks(self) -> Iterator[tuple[int, int | None, list[int], str | None]]:
        """(hash, parent hash, tokens, namespace) of every page, parents first."""
        for node, namespace in self._walk():
            assert node.parent is not None
            if node.place is not Place.DEVICE:
                continue
            parent = hash_of(node.parent.digests[-1]) if node.parent.parent is not None else None
            tokens = self._tokens_of(node.key)
            for i, digest in enumerate(node.digests):
                yield (
                    hash_of(digest),
                    parent,
                    tokens[i * self.page_size : (i + 1) * self.page_size],
                    namespace,
                )
                parent = hash_of(digest)

    def _walk(self) -> Iterator[tuple[Node, str | None]]:
        """Every node except roots, parents first."""
        for namespace, root in self._roots.items():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield node, namespace
                stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Asserts every invariant stated in the theory of operation."""
        evictable = locked = leaves = 0
        seen: set[int] = set()
        for node, _ in self._walk():
            parent, size = node.parent, self.page_bytes
            assert parent is not None
            assert parent.children[node.key[:size]] is node, f"{node} is not where its first page says"
            assert len(node.key) > 0 == len(node.key) % size, f"{node} has part of a page"
            assert node.lock_ref >= sum(c.lock_ref for c in node.children.values()), f"locks leak below {node}"
            if node.place is Place.ON_ITS_WAY:
                assert node.lock_ref > 0, f"nobody fills {node}"
                assert len(node.pages) == len(node.digests) == 0, f"{node} is on the device"
                continue
            assert parent.place is Place.DEVICE, f"{node} is on the device, and what is before it is not"
            assert len(node.pages) == len(node.digests) == len(node.key) // size, f"lengths differ in {node}"
            numbers = {int(p) for p in node.pages}
            assert len(numbers) == len(node.pages), f"a page is twice in {node}"
            assert not numbers & seen, f"pages {numbers & seen} are in two nodes"
            seen |= numbers
            digest = parent.digests[-1]
            for i, expected in enumerate(node.digests):
                digest = self.digest_of(digest, tokens_of(node.key[i * size : (i + 1) * size]))
                assert digest == expected, f"digest chain broken at page {i} of {node}"
                assert self._nodes[digest] is node, f"page {i} of {node} is not found by its digest"
            if node.lock_ref:
                locked += len(node.pages)
            else:
                evictable += len(node.pages)
            may_go = node.lock_ref == 0 and not node.children
            leaves += may_go
            assert (node in self._queue) == may_go, f"{node} and the eviction queue disagree"
        assert len(self._nodes) == evictable + locked, "pages that left the tree are found by their digests"
        assert leaves == len(self._queue), "the eviction queue has nodes that left the tree"
        assert (evictable, locked) == (self.evictable_pages, self.locked_pages), "page counts differ from the tree"
        assert all(root.children for root in self._roots.values()), "an empty namespace was kept"
