"""The cache without a tree, beside a plain table of prompts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from treeline_runtime.kvcache import Match, WholePrompts, key_of


class Table:
    """A WholePrompts with fresh page numbers for every insert."""

    def __init__(self, page_size: int = 2) -> None:
        self.cache = WholePrompts(page_size)
        self._next = 0

    def insert(self, tokens: list[int], prompt: int | None = None, namespace: str | None = None) -> None:
        pages = np.arange(self._next, self._next + len(tokens) // self.cache.page_size)
        self._next += len(pages)
        prompt = len(tokens) if prompt is None else prompt
        self.cache.insert(key_of(tokens), pages, prompt_tokens=prompt, namespace=namespace)
        self.cache.check_integrity()

    def match(self, tokens: list[int], namespace: str | None = None) -> Match:
        match = self.cache.match(key_of(tokens), namespace)
        assert len(self.cache.pages_of(match)) == match.num_pages
        return match

    def pages(self, tokens: list[int]) -> int:
        return self.match(tokens).num_pages


def test_a_prompt_is_found_whole_or_not_at_all() -> None:
    table = Table()
    table.insert([1, 2, 3, 4, 5])
    assert table.pages([1, 2, 3, 4, 5, 6, 7]) == 2
    assert table.pages([1, 2, 3, 9, 5, 6]) == 0, "a part of a prompt is no prompt"
    assert table.match([1, 2, 3, 4, 5, 6], "tenant").num_pages == 0


def test_an_answer_is_not_found_and_the_longest_prompt_counts() -> None:
    table = Table()
    table.insert([1, 2, 3, 4, 5, 6, 7, 8], prompt=5)
    assert table.pages([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 2
    table.insert([1, 2, 3, 4, 5, 6, 7], prompt=7)
    assert table.pages([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 3
    assert table.pages([1, 2, 3, 4, 5, 0, 7, 8]) == 2


def test_a_prompt_is_found_whole_and_used_as_far_as_one_may() -> None:
    table = Table()
    table.insert([1, 2, 3, 4, 5, 6])
    key = key_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert [table.cache.match(key, None, most).num_pages for most in range(9)] == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert table.cache.match(key_of([1, 2, 3, 4, 5, 9]), None, 4).num_pages == 0


def test_what_was_evicted_ends_no_prompt() -> None:
    table = Table()
    table.insert([1, 2, 3, 4, 5])
    table.cache.evict(1)
    table.cache.check_integrity()
    table.insert([1, 2, 3, 4, 8, 9, 7])
    assert table.pages([1, 2, 3, 4, 5]) == 0
    table.cache.reset()
    table.cache.check_integrity()
    assert table.pages([1, 2, 3, 4, 8, 9, 7]) == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_it_finds_what_a_table_of_prompts_would(page_size: int) -> None:
    rng = random.Random(page_size)
    table, ends = Table(page_size), set[tuple[int, ...]]()
    for _ in range(150):
        tokens = rng.choices((1, 2), k=rng.randint(1, 24))
        usable = len(tokens) // page_size * page_size
        best = max((len(end) for end in ends if tuple(tokens[:usable][: len(end)]) == end), default=0)
        assert table.pages(tokens) == best // page_size
        prompt = rng.randint(1, len(tokens))
        table.insert(tokens, prompt)
        if end := prompt // page_size * page_size:
            ends.add(tuple(tokens[:end]))
