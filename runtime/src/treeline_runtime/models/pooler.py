"""Hidden states → vectors by a `Pooling`. Sums on the device, small steps on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.models.config import ModelConfig, ModelError
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.models.weights import EMBEDDING, HEAD, Weights
from treeline_runtime.transfer import upload

Vector = npt.NDArray[np.float32]

SCORE = "score.weight"
"""Name of a classification head's weight; transformers' architectures have no bias there."""
_SHORTEST = 1e-12
"""The smallest divisor, as in torch's `normalize`."""


class Pooler:
    """`select` runs on the device for each step, `finish` on the host once per text."""

    def __init__(self, pooling: Pooling, weights: Weights, config: ModelConfig) -> None:
        """Takes the head's tensors. Raises ModelError."""
        self.pooling = pooling
        self._cap = config.logit_softcap if pooling.answers else None
        self._head: torch.Tensor | None = None
        """(outputs, hidden) float32: a few rows, whose sums are worth the exactness."""
        if pooling.labels:
            self._head = weights.take(SCORE, len(pooling.labels), config.hidden_size).float()
        elif pooling.answers:
            if max(pooling.answers) >= config.vocab_size:
                raise ModelError(
                    f"LogitScore names token {max(pooling.answers)}; the vocabulary has {config.vocab_size}"
                )
            # transformers' rule, too: an existing head counts, even if config.json ties it
            name = EMBEDDING if config.tie_word_embeddings and not weights.has(HEAD) else HEAD
            self._head = weights.take(name, config.vocab_size, config.hidden_size)[list(pooling.answers)].float()

    def select(self, hidden: torch.Tensor, starts: list[int], ends: list[int], whole: list[bool]) -> torch.Tensor:
        """hidden (tokens, hidden) of several texts, text i at rows starts[i] … ends[i] → float32, in order. `mean`: the
        sum of each text's rows (texts, hidden). `last`: the last row's result, of `whole` texts (whole texts, hidden or
        outputs)."""
        if self.pooling.method == "mean":
            return torch.stack(
                [hidden[start:end].sum(0, dtype=torch.float32) for start, end in zip(starts, ends, strict=True)]
            )
        lasts = [end - 1 for end, is_whole in zip(ends, whole, strict=True) if is_whole]
        rows = hidden[upload(np.array(lasts), hidden.device)].float()
        if self._head is None:
            return rows
        outputs = rows @ self._head.t()
        return outputs if self._cap is None else torch.tanh(outputs / self._cap) * self._cap

    def finish(self, pooled: Vector | None, tokens: int) -> bytes:
        """A text's sum of `select` over its steps, and its number of tokens → its vector."""
        assert pooled is not None, "a text is never empty"
        if self.pooling.method == "mean":
            pooled = pooled / np.float32(tokens)
        if len(self.pooling.answers) > 1:
            pooled = pooled[:1] - pooled[1:]
        return (normalized(pooled) if self.pooling.normalize else pooled).tobytes()


def normalized(vector: Vector) -> Vector:
    return vector / max(np.linalg.norm(vector), np.float32(_SHORTEST))
