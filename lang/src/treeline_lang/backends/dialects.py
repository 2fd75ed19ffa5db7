"""What servers of OpenAI's API take beyond it, and how they call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    extends: bool = False
    """Sampling beyond OpenAI's: `top_k`, `min_p`, `min_tokens`, `stop_token_ids`, `ignore_eos`."""
    regex: tuple[str, ...] = ()
    """The path of the member that holds a regular expression; (): there is none."""
    continues: bool = False
    """`continue_final_message`: the answer goes on with an assistant's turn that has begun."""
    echoes: bool = False
    """Completions tell the log probabilities of the prompt (`echo`)."""
    chat_limit: str = "max_tokens"


DIALECTS: Final[dict[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (
        Dialect("openai", chat_limit="max_completion_tokens"),
        Dialect("treeline", extends=True, regex=("regex",), continues=True, echoes=True),
        Dialect("vllm", extends=True, regex=("structured_outputs", "regex"), continues=True, echoes=True),
        Dialect("sglang", extends=True, regex=("regex",), continues=True, echoes=True),
    )
}


def spoken(models: Any, model: str) -> Dialect:
    """By what `/models` says of the model; OpenAI's own where that is nothing we know."""
    listed = models.get("data") if isinstance(models, Mapping) else None
    entries = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    for one in sorted(entries, key=lambda one: one.get("id") != model):
        owner = one.get("owned_by")
        if owner in DIALECTS:
            return DIALECTS[owner]
    return DIALECTS["openai"]
