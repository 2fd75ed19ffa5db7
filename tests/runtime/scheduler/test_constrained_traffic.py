"""Random traffic of constrained and free requests: the books balance after every step, survivors are right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.runtime_constraints import Constrained, Rule, Toy, alternating, follows, only
from support.runtime_engine import prompt
from treeline_runtime.messages import FlushReq

pytestmark = pytest.mark.deep


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_depth": 0, "page_size": 4, "max_total_tokens": 100},
        {"overlap_depth": 1, "page_size": 4, "max_total_tokens": 100, "prefills_in_a_row": 2},
        {"overlap_depth": 1, "page_size": 1, "max_total_tokens": 100, "mixed_chunk": True, "chunked_prefill_size": 16},
        {"overlap_depth": 2, "page_size": 1, "max_total_tokens": 100, "max_running_requests": 4},
    ],
)
def test_random_traffic_keeps_every_invariant(tiny: Path, settings: dict[str, Any]) -> None:
    """Surviving requests get the tokens that they get alone, although others come, fail, leave and are retracted."""
    rng = random.Random(1)
    engine, calm = Constrained(tiny, **settings), Constrained(tiny)
    families = [prompt(seed, 12) for seed in range(3)]
    asked: dict[str, tuple[list[int], Rule | None, dict[str, Any]]] = {}
    for _ in range(100):
        action = rng.random()
        if action < 0.4:
            rid, ids = str(len(asked)), rng.choice(families)[: rng.randint(1, 12)] + prompt(rng.randint(0, 9), 3)
            rule = rng.choice([None, alternating, follows, only(90, 3, 3, 64, 31, 32, 0, 95)])
            options = {
                "max_new_tokens": rng.choice([0, 1, 12, 40, 40]),
                "temperature": rng.choice([0.0, 1.2]),
                "seed": 5,
            }
            asked[rid] = ids, rule, options
            fails, after = rng.choice(["", "", "", "", "fill", "accept"]), rng.randint(0, 9)
            engine.ask(rid, ids, Toy(rule, fails=fails, after=after) if rule else None, **options)
        elif action < 0.5 and asked:
            engine.abort(rng.choice(list(asked)[-8:]))
        elif action < 0.53:
            engine.inbox.append(FlushReq("f"))
        engine.ratio.value = 0.0  # optimistic: retractions happen
        engine.step()
    engine.run()
    kinds = set()
    for rid, (ids, rule, options) in asked.items():
        calm.ask(rid, ids, Toy(rule) if rule else None, **options)
        calm.run()
        found, finish = engine.tokens(rid), engine.last(rid).finish
        assert finish is not None
        kinds.add(finish.type)
        expected = calm.tokens(rid)
        assert found == (expected if finish.type in ("length", "stop") else expected[: len(found)]), rid
    assert kinds == {"length", "stop", "abort", "error"}
    assert any(engine.last(rid).retractions for rid in engine.toys)
