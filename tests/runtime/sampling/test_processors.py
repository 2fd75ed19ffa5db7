"""One logit processor at a time: the built-in ones, beside a model that looks at the whole output each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.sampling.processor import BUILT_IN, Processing, told

VOCAB = 6
TOKENS = st.integers(0, VOCAB - 1)


def forbidden(processor: Any, output: list[int]) -> set[int]:
    logits = torch.arange(VOCAB, dtype=torch.float32)
    assert processor(output, logits) is None
    for token, value in enumerate(logits.tolist()):
        assert value in (token, -torch.inf)
    return {token for token, value in enumerate(logits.tolist()) if value == -torch.inf}


@given(st.lists(TOKENS, max_size=12), st.sets(TOKENS))
def test_disallowed_tokens_never_come(output: list[int], ids: set[int]) -> None:
    processor = BUILT_IN["disallowed_tokens"]({"token_ids": [*ids, *ids]}, VOCAB)
    for length in range(len(output) + 1):
        assert forbidden(processor, output[:length]) == ids


START, END = 1, 2


@given(st.lists(TOKENS, max_size=16), st.integers(0, 6), st.booleans())
def test_thinking_ends_when_its_budget_is_spent(said: list[int], budget: int, opened: bool) -> None:
    params = {"thinking_budget": budget, "end_token_id": END} | ({} if opened else {"start_token_id": START})
    processor = BUILT_IN["thinking_budget"](params, VOCAB)
    output = list[int]()
    for token in said:
        logits = torch.zeros(VOCAB)
        processor(output, logits)
        begun = 0 if opened else output.index(START) + 1 if START in output else None
        thoughts = [] if begun is None else output[begun:]
        forced = begun is not None and END not in thoughts and len(thoughts) >= budget
        assert logits.isfinite().tolist() == [not forced or id == END for id in range(VOCAB)]
        output.append(END if forced else token)
    if opened and len(output) > budget:
        assert END in output[: budget + 1]


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("disallowed_tokens", {}, "token_ids"),
        ("disallowed_tokens", {"token_ids": [VOCAB]}, f"token id {VOCAB} is not below {VOCAB}"),
        ("disallowed_tokens", {"token_ids": [-1]}, ">= 0"),
        ("disallowed_tokens", {"token_ids": ["1"]}, "int"),
        ("disallowed_tokens", {"token_ids": [10**30]}, "token"),
        ("disallowed_tokens", {"token_ids": [1], "tokens": []}, "tokens"),
        ("thinking_budget", {"thinking_budget": 5}, "end_token_id"),
        ("thinking_budget", {"thinking_budget": -1, "end_token_id": 1}, ">= 0"),
        ("thinking_budget", {"thinking_budget": 1, "end_token_id": VOCAB}, "not below"),
    ],
)
def test_wrong_params_are_refused_with_a_message(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BUILT_IN[name](params, VOCAB)


def test_logits_stay_unchanged_and_output_arrives_incrementally() -> None:
    seen = list[list[int]]()

    def halves(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(output_ids))
        return logits.div_(2)

    work = Processing("halves", halves)
    logits = torch.tensor([2.0, 4.0], dtype=torch.bfloat16)
    for new in ([], [1], [0, 1]):
        made = work.apply(new, logits)
        assert isinstance(made, torch.Tensor)
        assert (made.dtype, made.tolist()) == (torch.float32, [1.0, 2.0])
    assert logits.tolist() == [2.0, 4.0]
    assert (seen, work.seen) == ([[], [1], [1, 0, 1]], 3)


def test_a_processors_changes_to_output_ids_have_no_effect() -> None:
    lengths = list[int]()

    def clears(output_ids: Any, logits: torch.Tensor) -> None:
        lengths.append(len(output_ids))
        output_ids.clear()

    work = Processing("clears", clears)
    for new in ([], [5], [6]):
        work.apply(new, torch.zeros(2))
    assert (lengths, work.seen) == ([0, 1, 1], 2)


def test_a_processors_error_is_reported_briefly() -> None:
    def raises(output_ids: Any, logits: torch.Tensor) -> None:
        raise ValueError("x" * 5000)

    failed = Processing("raises", raises).apply([], torch.zeros(2))
    assert isinstance(failed, str)
    assert failed.startswith("logit processor 'raises' failed: xxx")
    assert len(failed) == 500


def test_a_processors_error_may_have_any_text() -> None:
    class Odd(RuntimeError):
        def __repr__(self) -> str:
            raise NotImplementedError

    assert told("it failed:", Odd()) == "it failed: Odd"
    assert told("it failed:", ValueError("\udcff")) == "it failed: ?"
