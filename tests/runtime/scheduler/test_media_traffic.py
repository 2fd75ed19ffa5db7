"""Images among everything that the scheduler does: any chunks, cached prefixes, sampling, guesses, retractions, aborts.

Every answer is the one that the request gets alone, in one piece, without a cache.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.media_engine import MediaHarness, Part, Picture
from support.runtime_engine import prompt
from treeline_runtime.core import Batch
from treeline_runtime.scheduler import drafting, ngrams
from treeline_runtime.scheduler.launched import Launched

pytestmark = pytest.mark.deep

SIZES = ((3, 4, 1), (5, 7, 1), (5, 7, 1), (1, 1, 1), (2, 3, 3), (7, 2, 1))
"""Rows, columns and frames of items."""
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"logprob_start_len": 0},
    {"return_hidden_states": True},
    {"max_new_tokens": 0},
)


class Watched(MediaHarness):
    """Checks that the encoder gets only items with tokens that a step computes, and none that it has."""

    def _compute(self, batch: Batch) -> Launched:
        needed, spans = set[bytes](), zip(batch.reqs, batch.starts, batch.ends, strict=True)
        for req, start, end in spans:
            for item in () if req.media is None else req.media.items:
                if item.start < end and start < item.start + item.count:
                    needed.add(item.digest)
        assert self.executor.embeddings is not None
        kept, calls = set(self.executor.embeddings._rows), len(self.encoder.calls)
        launched = super()._compute(batch)
        new = self.encoder.calls[calls:]
        assert len(new) <= 1
        assert sorted(itertools.chain.from_iterable(new)) == sorted(needed - kept)
        return launched


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Picture]:
    folder = tmp_path_factory.mktemp("items")
    return [Picture(folder, seed, *size) for seed, size in enumerate(SIZES)]


@pytest.fixture(autouse=True)
def guesses() -> Iterator[None]:
    """Make many guesses, most of them wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "LENGTHS", (2, 1))
        patch.setattr(drafting, "DEPTHS", ((1, ((0.0, 3),)),))
        patch.setattr(drafting, "WAIT", -1.0)
        yield


def scores(engine: MediaHarness, rid: str) -> list[tuple[float | None, int]]:
    """Return the log probabilities of prompt and output, with their tokens."""
    of_prompt = [pair for out in engine.outs[rid] for pair in out.input_token_logprobs or ()]
    return of_prompt + engine.logprobs(rid)


ENGINES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4, 16]),
        "chunked_prefill_size": st.sampled_from([16, 48, 512]),
        "overlap_depth": st.sampled_from([0, 1]),
        "mixed_chunk": st.booleans(),
        "max_total_tokens": st.sampled_from([256, 1024]),
        "speculative_algorithm": st.sampled_from(["off", "NGRAM"]),
        "prefix_cache": st.sampled_from(["radix", "radix", "off"]),
    }
)
PARTS = st.lists(
    st.one_of(st.integers(0, len(SIZES) - 1), st.tuples(st.integers(0, 3), st.integers(1, 20))), min_size=1, max_size=5
)
"""Numbers of items, and texts by seed and length: many prompts begin alike."""
ACTS = st.lists(
    st.one_of(
        st.tuples(PARTS, st.sampled_from(PARAMS)),
        st.integers(1, 4).map(lambda steps: "step " * steps),
        st.sampled_from(["retract", "abort", "forget"]),
    ),
    min_size=3,
    max_size=24,
)


@pytest.mark.parametrize("kept", [40, 10_000])
@settings(max_examples=60)
@given(engine=ENGINES, acts=ACTS)
def test_answers_are_those_of_one_computation_without_a_cache(
    tiny: Path, pictures: list[Picture], kept: int, engine: dict[str, Any], acts: list[Any]
) -> None:
    """kept: tokens of items whose embeddings are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treeline_runtime.scheduler.embeddings.EMBEDDINGS_BYTES", kept * 4 * 3 * 32)
        busy = Watched(tiny, enable_return_hidden_states=True, **engine)
    rng, asked = random.Random(0), dict[str, tuple[list[Part], dict[str, Any]]]()
    aborted = set[str]()
    for act in acts:
        if isinstance(act, tuple):
            parts = [pictures[part] if isinstance(part, int) else prompt(*part) for part in act[0]]
            rid = str(len(asked))
            asked[rid] = parts, act[1]
            busy.ask(rid, parts, return_logprob=True, **act[1])
        elif act == "retract":
            busy.retract_one(rng)
        elif act == "abort" and asked:
            aborted.add(rid := rng.choice(list(asked)))
            busy.abort(rid)
        elif act == "forget" and busy.executor.embeddings is not None:
            busy.executor.embeddings._rows.clear()
        for _ in range(act.count("step") if isinstance(act, str) else 0):
            busy.step()
    busy.run()
    alone = MediaHarness(tiny, chunked_prefill_size=1024, prefix_cache="off", enable_return_hidden_states=True)
    for rid, (parts, params) in asked.items():
        expected = alone.answer(rid, parts, return_logprob=True, **params)
        found = busy.tokens(rid)
        assert found == expected[: len(found)] if rid in aborted else found == expected, (rid, busy.finish(rid))
        ours, theirs = scores(busy, rid), scores(alone, rid)
        assert len(ours) == len(theirs) or rid in aborted
        for mine, other in zip(ours, theirs, strict=False):
            assert mine == pytest.approx(other, abs=1e-4)
