"""A small model with the vocabulary of the served one, which guesses what that one says next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from treeline_runtime.context import Context
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.model_config import PLAIN
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


def check_draft_model(path: str, of: str, draft: Decoder, model: Decoder) -> None:
    """Raises ModelError unless the draft model in folder `path` can guess for the one in folder `of`."""
    theirs, ours = draft.config.vocab_size, model.config.vocab_size
    if theirs != ours:
        raise ModelError(f"draft model {path}: its vocabulary has {theirs} tokens, the model's {ours}")
    files = [Path(folder) / "tokenizer.json" for folder in (path, of)]
    if all(file.exists() for file in files) and _tokens(files[0]) != _tokens(files[1]):
        raise ModelError(f"draft model {path}: its tokenizer has other tokens than the model's")
    if draft.pooler is not None or draft.config.scoring != PLAIN:
        raise ModelError(f"draft model {path}: models for vectors, windows, sinks and capped scores are not supported")


def _tokens(file: Path) -> tuple[Any, Sequence[Any]]:
    content = read_object(file)
    return content["model"].get("vocab"), [(one["id"], one["content"]) for one in content.get("added_tokens", ())]
