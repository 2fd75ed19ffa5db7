"""How `select` decides between texts by their likelihood: pure functions of the tokens' logprobs.

The three methods are those of SGLang's language (`sglang/lang/choices.py`), written after its paper's description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final

Logprobs = Sequence[float]
"""Of a choice's tokens, each given all before it."""


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
    """None: the API does not tell."""
    text: str | None


Tokens = Sequence[TokenLogprob]
LOWEST: Final = -9999.0
"""What an impossible token counts: two of -inf could not be compared."""


def _logprobs(tokens: Tokens) -> list[float]:
    """A first token has none: it counts 0."""
    return [0.0 if token.logprob is None else max(token.logprob, LOWEST) for token in tokens]


Decide = Callable[[Sequence[Logprobs], Sequence[Logprobs]], Decision]


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A way to decide. Compared and stored by name."""

    name: str
    decide: Decide = field(compare=False, repr=False)
    """(the logprobs of each choice after the prompt, and without one) → which."""
    unconditional: bool = False
    """It reads the second."""
    custom: Callable[..., Any] | None = None
    """One of a program's own, in SGLang's form, in place of `decide`."""

    @classmethod
    def of(cls, custom: Callable[..., Any]) -> ChoicesMethod:
        name = getattr(custom, "__name__", type(custom).__name__)
        return cls(name, _by_mean, bool(getattr(custom, "requires_unconditional_logprobs", False)), custom)

    def by_tokens(self, choices: Sequence[str], given: Sequence[Tokens], alone: Sequence[Tokens]) -> Decision:
        """`decide`, by the tokens of each choice. Raises ValueError for what `custom` decides that is no choice."""
        means = [_mean(_logprobs(one)) for one in given]
        meta = {"normalized_prompt_logprobs": means, "input_token_logprobs": [list(map(astuple, one)) for one in given]}
        if self.custom is None:
            made = self.decide(list(map(_logprobs, given)), list(map(_logprobs, alone)))
            return replace(made, meta=made.meta | meta)
        unconditional = {"unconditional_token_logprobs": [list(map(astuple, one)) for one in alone] or None}
        said = self.custom(choices=list(choices), **meta, output_token_logprobs=[[] for _ in choices], **unconditional)
        if said.decision not in choices:
            raise ValueError(f"{self.name} chose {said.decision!r}, which is none of the choices")
        index = list(choices).index(said.decision)
        return Decision(index, [float(i == index) for i in range(len(choices))], {**meta, **(said.meta_info or {})})

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


def _mean(logprobs: Logprobs) -> float:
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _best(scores: list[float], **meta: Any) -> Decision:
    """The first of the best."""
    return Decision(max(range(len(scores)), key=scores.__getitem__), scores, meta)


def _by_mean(given: Sequence[Logprobs], _unconditional: Sequence[Logprobs]) -> Decision:
    return _best([_mean(one) for one in given])


def _greedily(given: Sequence[Logprobs], _unconditional: Sequence[Logprobs]) -> Decision:
    """As greedy decoding would go: token by token, those stay that have the best one there. Shorter choices go on with
    their mean."""
    width = max(len(one) for one in given)
    rows = [[*one, *[_mean(one)] * (width - len(one))] for one in given]
    left = list(range(len(rows)))
    for column in range(width):
        top = max(rows[i][column] for i in left)
        left = [i for i in left if rows[i][column] == top]
        if len(left) == 1:
            break
    return Decision(left[0], [1.0 if i == left[0] else 0.0 for i in range(len(rows))], {"rows": rows})


def _over_unconditional(given: Sequence[Logprobs], unconditional: Sequence[Logprobs]) -> Decision:
    """By how much the prompt makes a choice likelier than it is by itself. Aligned at the ends: the first token of a
    choice alone has no logprob and counts 0, and where the prompt's end was healed into it there may be one less."""
    scores = []
    for after, alone in zip(given, unconditional, strict=True):
        aligned = [0.0] * (len(after) - len(alone)) + list(alone)[-len(after) :]
        scores.append(_mean([x - y for x, y in zip(after, aligned, strict=True)]))
    return _best(scores, unconditional=[list(one) for one in unconditional])


token_length_normalized: Final = ChoicesMethod("token_length_normalized", _by_mean)
"""The highest mean logprob of a token: what `select` does unless told otherwise."""
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
