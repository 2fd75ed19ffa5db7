"""A stop string among accepted guesses ends an answer where it does without guesses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from treeline_runtime import Engine, SamplingParams

TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.mark.parametrize("most", [96, 40])
def test_an_answer_has_nothing_after_a_stop_string(most: int) -> None:
    free = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)
    options = {"return_logprob": True, "top_logprobs_num": 2, "return_hidden_states": True}
    with Engine(str(TINY), enable_return_hidden_states=True) as plain:
        known = plain.generate("The capital of France is", free).text
        prompt = "The capital of France is" + known  # says the same again from here on
        again = plain.generate(prompt, free).text
        stops = {again[at : at + 4] for at in range(8, 80, 3)}
        with Engine(str(TINY), enable_return_hidden_states=True, speculative_algorithm="NGRAM") as guessing:
            for stop in sorted(stops):
                params = SamplingParams(max_new_tokens=most, temperature=0, ignore_eos=True, stop=(stop,))
                one, other = (engine.generate(prompt, params, **options) for engine in (guessing, plain))
                assert (one.text, one.token_ids, one.finish) == (other.text, other.token_ids, other.finish)
                assert [id for _, id in one.output_token_logprobs] == one.token_ids
                assert len(one.output_top_logprobs) == len(one.token_ids)
                assert one.hidden_states is not None
                assert other.hidden_states is not None
                first = len(other.hidden_states) - len(one.hidden_states)  # less may be cached
                np.testing.assert_allclose(
                    one.hidden_states[max(-first, 0) :], other.hidden_states[max(first, 0) :], atol=1e-2
                )
                assert one.speculated is None or one.speculated.right < len(one.token_ids)
