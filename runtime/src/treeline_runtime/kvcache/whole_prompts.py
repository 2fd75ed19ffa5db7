"""A prefix cache without a tree, to tell what the tree is worth: a table of prompts."""

from __future__ import annotations

from treeline_runtime.kvcache.node import Node
from treeline_runtime.kvcache.pool import Pages
from treeline_runtime.kvcache.radix import NO_MATCH, Match, RadixCache


class WholePrompts(RadixCache):
    """A request hits where a prompt that was computed before, all of it, is a prefix of its own: neither a part of
    such a prompt nor what was answered to it is found. The longest such prompt counts.

    Pages are kept as in the tree, so equal ones are there once and what is evicted is the same: the two differ in what
    they find and in nothing else. A prompt ends, here, with its last whole page.
    """

    def _clear(self) -> None:
        super()._clear()
        self._ends: set[bytes] = set()
        """Digests of the pages with which prompts end; a digest names a page and all before it."""

    def match(self, key: bytes, namespace: str | None = None, most: int | None = None) -> Match:
        """O(pages of the key)."""
        longest = self._longest(key, namespace)
        node, used = longest.node, longest.used_pages
        start, end = longest.num_pages - used, -1
        while node is not None and node.parent is not None:
            if end < 0:
                end = next((start + at for at in range(used, 0, -1) if node.digests[at - 1] in self._ends), -1)
                end = end if most is None else min(end, most // self.page_size)
            if end > start:
                return Match(node, end - start, end)
            node = node.parent
            used = len(node.pages)
            start -= used
        return NO_MATCH

    def insert(
        self, key: bytes, pages: Pages, *, prompt_tokens: int, namespace: str | None = None, priority: int = 0
    ) -> tuple[int, Node | None]:
        existing, node = super().insert(key, pages, prompt_tokens=prompt_tokens, namespace=namespace, priority=priority)
        end, total = prompt_tokens // self.page_size, len(key) // self._page_bytes
        if 0 < end <= total:
            step = node
            assert step is not None
            while total - len(step.pages) >= end:
                total -= len(step.pages)
                assert step.parent is not None
                step = step.parent
            self._ends.add(step.digests[end - 1 - (total - len(step.pages))])
        return existing, node

    def _forget(self, digests: list[bytes]) -> None:
        super()._forget(digests)
        self._ends.difference_update(digests)

    def check_integrity(self) -> None:
        super().check_integrity()
        there = {digest for node, _ in self._walk() for digest in node.digests}
        assert self._ends <= there, "a prompt ends with a page that left the tree"
