"""Taking a model's reasoning and its answer apart, where its text marks the reasoning."""

from __future__ import annotations

from typing import Final, NamedTuple


class Marks(NamedTuple):
    begin: str
    end: str
    opens: bool = False
    """The chat template has begun the reasoning, so a text without a beginning is reasoning up to its end."""


MARKS: Final[dict[str, Marks]] = {
    "deepseek-r1": Marks("<think>", "</think>", opens=True),
    "deepseek-v3": Marks("<think>", "</think>"),
    "qwen3": Marks("<think>", "</think>"),
    "qwen3-thinking": Marks("<think>", "</think>", opens=True),
    "glm45": Marks("<think>", "</think>"),
    "kimi": Marks("◁think▷", "◁/think▷"),
    "step3": Marks("<think>", "</think>", opens=True),
}
"""By model type, as SGLang names them."""


def check_model_type(model_type: str) -> str:
    if model_type not in MARKS:
        raise ValueError(f"model_type is one of {', '.join(MARKS)}, not {model_type!r}")
    return model_type


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """→ (reasoning, answer), both without the marks and the white space around. Reasoning that does not end has no
    answer."""
    marks = MARKS[model_type]
    opened = text.lstrip().startswith(marks.begin)
    if not opened and not marks.opens:
        return "", text
    body = text.lstrip().removeprefix(marks.begin)
    reasoning, _, answer = body.partition(marks.end)
    return reasoning.strip(), answer.strip()
