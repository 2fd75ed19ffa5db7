"""A small model with the vocabulary of the served one, which guesses what that one says next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from treeline_runtime.context import Context
from treeline_runtime.models.config import read_config
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.model_config import PLAIN, ModelConfig
from treeline_runtime.models.settings import ModelError, read_object


class DraftModel:
    """Keeps tokens as any model does; of other models it needs nothing but the tokens."""

    joins = False
    """It reads nothing of the served model."""

    def __init__(self, model: Decoder) -> None:
        self.layer, self.rope = model.config, model.rope
        self._model = model

    def keep(self, ids: torch.Tensor, context: Context) -> torch.Tensor:
        """ids (tokens,) → normed hidden states (tokens, hidden)."""
        return self._model.forward(self._model.embed(ids), context)

    def guess(self, ids: torch.Tensor, hidden: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """`EagleHead.guess`, whatever `hidden` is."""
        return self._model.logits(self.keep(ids, context)).argmax(-1), hidden


def check_draft_model(path: str, of: str, model: ModelConfig, context_length: int) -> None:
    """Raises ModelError unless the draft model in folder `path` can guess for the one in folder `of`."""
    draft = read_config(path)
    files = [Path(folder) / "tokenizer.json" for folder in (path, of)]
    problem: str | None = None
    if draft.vocab_size != model.vocab_size:
        problem = f"its vocabulary has {draft.vocab_size} tokens, the model's {model.vocab_size}"
    elif all(file.exists() for file in files) and _tokens(files[0]) != _tokens(files[1]):
        problem = "its tokenizer has other tokens than the model's"
    elif draft.longest_context < context_length:
        problem = f"it has {draft.longest_context} positions: set --context-length to these, not {context_length}"
    elif draft.scoring != PLAIN:
        problem = "windows, sinks and scores of another scale are not supported"
    if problem is not None:
        raise ModelError(problem)


def _tokens(file: Path) -> tuple[Any, Sequence[Any]]:
    content = read_object(file)
    try:
        return content["model"].get("vocab"), [(one["id"], one["content"]) for one in content.get("added_tokens", ())]
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is no tokenizer: {error!r}") from None
