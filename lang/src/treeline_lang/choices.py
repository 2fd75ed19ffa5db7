"""Methods by which `select` chooses between texts by likelihood. Pure functions of token log probabilities.

The three methods are those of SGLang's language (`sglang/lang/choices.py`), written from its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Decision:
    index: int
    scores: list[float]
    """One per choice; the highest wins."""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The result of a `choices_method` in SGLang's form."""

    decision: str
    meta_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float | None
    """None for the first token of a text."""
    id: int | None
    """None if the API does not report it."""
    text: str | None


Tokens = Sequence[TokenLogprob]
LOWEST: Final = -9999.0
"""The value of an impossible token, since two -inf do not compare."""


def _logprobs(tokens: Tokens) -> list[float]:
    """A first token without log probability counts 0."""
    return [0.0 if token.logprob is None else max(token.logprob, LOWEST) for token in tokens]


Decide = Callable[[Sequence[str], Sequence[Tokens], Sequence[Tokens]], Decision]
"""(choices, tokens of each after the prompt, tokens of each without a prompt) → the decision."""


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A way to choose. Compared and stored by name."""

    name: str
    decide: Decide = field(compare=False, repr=False)
    unconditional: bool = False
    """Needs the tokens of each choice without a prompt."""

    @classmethod
    def of(cls, custom: Callable[..., Any]) -> ChoicesMethod:
        """Wraps a user's own method in SGLang's form. Raises ValueError when it decides for something that is not a
        choice."""
        name = getattr(custom, "__name__", type(custom).__name__)

        def decide(choices: Sequence[str], given: Sequence[Tokens], alone: Sequence[Tokens]) -> Decision:
            unconditional = {"unconditional_token_logprobs": [list(map(astuple, one)) for one in alone] or None}
            outputs: list[list[Any]] = [[] for _ in choices]
            said = custom(choices=list(choices), **_meta(given), output_token_logprobs=outputs, **unconditional)
            if said.decision not in choices:
                raise ValueError(f"{name} chose {said.decision!r}, which is none of the choices")
            return _one(list(choices).index(said.decision), len(choices), said.meta_info or {})

        return cls(name, decide, bool(getattr(custom, "requires_unconditional_logprobs", False)))

    def by_tokens(self, choices: Sequence[str], given: Sequence[Tokens], alone: Sequence[Tokens]) -> Decision:
        """`decide`, with the log probabilities in the meta info."""
        made = self.decide(choices, given, alone)
        return replace(made, meta=_meta(given) | made.meta)

    def __call__(
        self,
        *,
        choices: Sequence[str],
        input_token_logprobs: Sequence[Sequence[Any]],
        unconditional_token_logprobs: Sequence[Sequence[Any]] | None = None,
        **_: Any,
    ) -> ChoicesDecision:
        """Called like SGLang's methods, by a user's own methods."""
        given, alone = (
            [[TokenLogprob(*token) for token in one] for one in tokens or ()]
            for tokens in (input_token_logprobs, unconditional_token_logprobs)
        )
        made = self.by_tokens(choices, given, alone)
        return ChoicesDecision(choices[made.index], made.meta)


def _meta(given: Sequence[Tokens]) -> dict[str, Any]:
    means = [_mean(_logprobs(one)) for one in given]
    return {"normalized_prompt_logprobs": means, "input_token_logprobs": [list(map(astuple, one)) for one in given]}


def _mean(logprobs: Sequence[float]) -> float:
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _best(scores: list[float], **meta: Any) -> Decision:
    """The index of the best; the first of equals."""
    return Decision(max(range(len(scores)), key=scores.__getitem__), scores, meta)


def _one(index: int, count: int, meta: dict[str, Any]) -> Decision:
    """A decision without scores."""
    return Decision(index, [float(i == index) for i in range(count)], meta)


def _by_mean(_choices: Sequence[str], given: Sequence[Tokens], _alone: Sequence[Tokens]) -> Decision:
    return _best([_mean(_logprobs(one)) for one in given])


def _greedily(_choices: Sequence[str], given: Sequence[Tokens], _alone: Sequence[Tokens]) -> Decision:
    """Chooses as greedy decoding would: token by token, only choices with the best next token stay. Shorter choices
    continue with their mean."""
    rows = [_logprobs(one) for one in given]
    width = max(map(len, rows))
    rows = [[*row, *[_mean(row)] * (width - len(row))] for row in rows]
    left = list(range(len(rows)))
    for column in range(width):
        top = max(rows[i][column] for i in left)
        left = [i for i in left if rows[i][column] == top]
    return _one(left[0], len(rows), {"rows": rows})


def _over_unconditional(_choices: Sequence[str], given: Sequence[Tokens], alone: Sequence[Tokens]) -> Decision:
    """Chooses the text that the prompt makes most likely compared with its likelihood alone. Tokens are aligned at the
    end: the first token alone has no log probability and counts 0, and may be missing if it was joined with the
    prompt's end."""
    scores = []
    unconditional = [_logprobs(one) for one in alone]
    for after, without in zip(map(_logprobs, given), unconditional, strict=True):
        aligned = [0.0] * (len(after) - len(without)) + without[-len(after) :]
        scores.append(_mean([x - y for x, y in zip(after, aligned, strict=True)]))
    return _best(scores, unconditional=unconditional)


token_length_normalized: Final = ChoicesMethod("token_length_normalized", _by_mean)
"""The highest mean log probability per token: the default."""
greedy_token_selection: Final = ChoicesMethod("greedy_token_selection", _greedily)
"""Greedy decoding restricted to the choices."""
unconditional_likelihood_normalized: Final = ChoicesMethod(
    "unconditional_likelihood_normalized", _over_unconditional, unconditional=True
)
"""The highest mean log probability minus that without a prompt, for choices that are unlikely by themselves."""

CHOICES_METHODS: Final = {
    method.name: method
    for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)
}


def tokens_of_choice(tokens: Sequence[TokenLogprob], choice: str, before: int) -> Sequence[TokenLogprob]:
    """The tokens of a choice: the last ones of prompt and choice, beginning with the one that contains the choice's
    first character.

    If the tokenizer joins the prompt's end with the choice's beginning ("token healing"), that token belongs to the
    choice. Characters spread over several tokens have no text of their own; then the tokens after the first `before`
    count, which is how many the prompt alone would have.
    """
    texts = [token.text for token in tokens]
    if all(text is not None and "\ufffd" not in text for text in texts):
        missing = len(choice)
        for at in range(len(tokens) - 1, -1, -1):
            missing -= len(texts[at] or "")
            if missing <= 0:
                return tokens[at:]
        return tokens
    return tokens[min(before, max(len(tokens) - 1, 0)) :]
