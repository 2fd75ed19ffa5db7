"""Splits a model's output into reasoning and answer."""

from __future__ import annotations

from typing import Final, NamedTuple


class Marks(NamedTuple):
    begin: str
    end: str
    opens: bool = False
    """The chat template opens the reasoning, so a text without an opening mark begins with it."""


MARKS: Final[dict[str, Marks]] = {
    "deepseek-r1": Marks("<think>", "</think>", opens=True),
    "deepseek-v3": Marks("<think>", "</think>"),
    "qwen3": Marks("<think>", "</think>"),
    "qwen3-thinking": Marks("<think>", "</think>", opens=True),
    "glm45": Marks("<think>", "</think>"),
    "kimi": Marks("◁think▷", "◁/think▷"),
    "step3": Marks("<think>", "</think>", opens=True),
}
"""Marks by SGLang's names of model types."""


def check_model_type(model_type: str) -> str:
    if model_type not in MARKS:
        raise ValueError(f"model_type is one of {', '.join(MARKS)}, not {model_type!r}")
    return model_type


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """Returns (reasoning, answer) without marks and surrounding space. Unfinished reasoning has no answer."""
    marks = MARKS[model_type]
    opened = text.lstrip().startswith(marks.begin)
    if not opened and not marks.opens:
        return "", text
    body = text.lstrip().removeprefix(marks.begin)
    reasoning, _, answer = body.partition(marks.end)
    return reasoning.strip(), answer.strip()
