"""The same requests with the tree, and with nothing kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runtime_engine import Harness, prompt

INSTRUCTION = prompt(1, 64)
FIRST, SECOND = INSTRUCTION + prompt(2, 40), INSTRUCTION + prompt(3, 40)


@pytest.mark.parametrize(("prefix_cache", "hits"), [("radix", [0, 64, 108]), ("off", [0, 0, 0])])
def test_requests_hit_the_expected_prefix_and_answer_the_same(tiny: Path, prefix_cache: str, hits: list[int]) -> None:
    engine = Harness(tiny, prefix_cache=prefix_cache)
    answers = [engine.generate("first", FIRST), engine.generate("second", SECOND)]
    following = FIRST + answers[0] + prompt(4, 20)
    answers.append(engine.generate("following", following))
    assert [engine.last(rid).cached_tokens for rid in ("first", "second", "following")] == hits
    assert answers == [Harness(tiny).generate("alone", ids) for ids in (FIRST, SECOND, following)]


@pytest.mark.parametrize(("prefix_cache", "prefills"), [("radix", 2), ("off", 1)])
def test_a_request_waits_for_a_prefix_only_if_it_could_use_it(tiny: Path, prefix_cache: str, prefills: int) -> None:
    engine = Harness(tiny, prefix_cache=prefix_cache)
    for rid, ids in (("a", FIRST), ("b", SECOND)):
        engine.submit(rid, ids, max_new_tokens=1)
    engine.run()
    assert engine.steps == prefills + 1, "the last step finds nothing to do"
