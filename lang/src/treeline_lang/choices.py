"""How `select` decides between texts by their likelihood: pure functions of the tokens' logprobs.

The three methods are those of SGLang's language (`sglang/lang/choices.py`), written after its paper's description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Decision:
    index: int
    scores: list[float]
    """One for each choice: the highest was taken."""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """What a method of SGLang's form returns."""

    decision: str
    meta_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float | None
    """None: the first token of a text has none."""
    id: int | None
    """None: the API does not say."""
    text: str | None


Tokens = Sequence[TokenLogprob]
LOWEST: Final = -9999.0
"""What an impossible token counts: two of -inf could not be compared."""


def _logprobs(tokens: Tokens) -> list[float]:
    """A first token has none: it counts 0."""
    return [0.0 if token.logprob is None else max(token.logprob, LOWEST) for token in tokens]


Decide = Callable[[Sequence[str], Sequence[Tokens], Sequence[Tokens]], Decision]
"""(choices, the tokens of each after the prompt, those of each without a prompt) → which."""


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A way to decide. Compared and stored by name."""

    name: str
    decide: Decide = field(compare=False, repr=False)
    unconditional: bool = False
    """It reads the tokens of each choice without a prompt."""

    @classmethod
    def of(cls, custom: Callable[..., Any]) -> ChoicesMethod:
        """One of a program's own, in SGLang's form. Deciding raises ValueError for what is none of the choices."""
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
        """`decide`, with the logprobs in the meta."""
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
        """As SGLang's methods are called, by others of a program's own."""
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
    """The first of the best."""
    return Decision(max(range(len(scores)), key=scores.__getitem__), scores, meta)


def _one(index: int, count: int, meta: dict[str, Any]) -> Decision:
    """One of so many, by a way that gives no scores."""
    return Decision(index, [float(i == index) for i in range(count)], meta)


def _by_mean(_choices: Sequence[str], given: Sequence[Tokens], _alone: Sequence[Tokens]) -> Decision:
    return _best([_mean(_logprobs(one)) for one in given])


def _greedily(_choices: Sequence[str], given: Sequence[Tokens], _alone: Sequence[Tokens]) -> Decision:
    """As greedy decoding would go: token by token, those stay that have the best one there. Shorter choices go on with
    their mean."""
    rows = [_logprobs(one) for one in given]
    width = max(map(len, rows))
    rows = [[*row, *[_mean(row)] * (width - len(row))] for row in rows]
    left = list(range(len(rows)))
    for column in range(width):
        top = max(rows[i][column] for i in left)
        left = [i for i in left if rows[i][column] == top]
    return _one(left[0], len(rows), {"rows": rows})


def _over_unconditional(_choices: Sequence[str], given: Sequence[Tokens], alone: Sequence[Tokens]) -> Decision:
    """By how much the prompt makes a choice likelier than it is by itself. Aligned at the ends: the first token of a
    choice alone has no logprob and counts 0, and where the prompt's end was healed into it there may be one less."""
    scores = []
    unconditional = [_logprobs(one) for one in alone]
    for after, without in zip(map(_logprobs, given), unconditional, strict=True):
        aligned = [0.0] * (len(after) - len(without)) + without[-len(after) :]
        scores.append(_mean([x - y for x, y in zip(after, aligned, strict=True)]))
    return _best(scores, unconditional=unconditional)


token_length_normalized: Final = ChoicesMethod("token_length_normalized", _by_mean)
"""The highest mean logprob of a token: what `select` does by default."""
greedy_token_selection: Final = ChoicesMethod("greedy_token_selection", _greedily)
"""What greedy decoding held to the choices would write."""
unconditional_likelihood_normalized: Final = ChoicesMethod(
    "unconditional_likelihood_normalized", _over_unconditional, unconditional=True
)
"""The highest mean of logprobs less those that the choice's tokens have without a prompt: for choices that are
unlikely by themselves."""

CHOICES_METHODS: Final = {
    method.name: method
    for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)
}


def tokens_of_choice(tokens: Sequence[TokenLogprob], choice: str, before: int) -> Sequence[TokenLogprob]:
    """The last tokens of a prompt with a choice behind it, from the one on that holds the choice's first character.

    Where the tokenizer joins the prompt's end with the choice's beginning ("token healing"), that token is of the
    choice. Characters that are spread over several tokens have no text of their own: then, those after the first
    `before`, which is how many the prompt alone would have here.
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
