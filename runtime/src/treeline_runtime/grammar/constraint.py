"""A grammar as the constraint of one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from treeline_runtime.grammar.backend import Compiled, GrammarBackend, Matcher
from treeline_runtime.sampling import MAX_DRAFT


class GrammarConstraint:
    """Implements `sampling.Constraint`: a request's position in its grammar.

    If the grammar begins after a marker, any text but an end is allowed before it. The marker is searched in the
    output's bytes, so it need not be a token; the grammar begins with the token after it.
    """

    def __init__(
        self,
        compiled: Compiled,
        filler: GrammarFiller,
        *,
        texts: Sequence[bytes],
        stop_ids: Sequence[int],
        after: str = "",
    ) -> None:
        """texts: all tokens' texts, special ones included."""
        self.compiled = compiled
        self.matcher: Matcher = compiled.matcher(stop_ids)
        self.filler = filler
        self._texts = texts
        self.stop_ids = stop_ids
        self._marker = after.encode()
        self._tail = b""
        self._ended = False
        self._before: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_DRAFT)
        """The marker and the tail before each of the last tokens up to the marker's."""
        self.allows_guesses = True
        self._accepted: list[int] = []
        """The last tokens: the ones that the grammar has accepted."""

    @property
    def reversible(self) -> int:
        """Number of last tokens that a jump can take back."""
        return len(self._accepted)

    @property
    def waits(self) -> bool:
        """Whether the marker has not come yet."""
        return bool(self._marker)

    @property
    def finished(self) -> bool:
        """Whether the output has ended: by a stop token, or, without one in the model, as soon as it may."""
        return self._ended or (not self.stop_ids and not self._marker and self.matcher.completed)

    def accept(self, token: int) -> None:
        """Raises ValueError if the grammar does not allow the token."""
        if not self._marker:
            if not self.matcher.accept(token):
                raise ValueError(f"token {token} is not what the grammar allows")
            self._ended = token in self.stop_ids
            self._accepted.append(token)
        else:
            self._before.append((self._marker, self._tail))
            self._tail += self._texts[token]
            if self._marker in self._tail:
                self._marker = self._tail = b""
            else:
                self._tail = self._tail[-len(self._marker) :]

    def rollback(self, count: int) -> None:
        """Shortens the output by `count` tokens. What took too much work after them is forgotten."""
        of_grammar = min(count, self.reversible)
        if of_grammar or self.gave_up:
            del self._accepted[self.reversible - of_grammar :]
            self._ended = False
            if self.gave_up:  # and would for ever
                self.allows_guesses = False
                self.matcher = self.compiled.matcher(self.stop_ids)
                for token in self._accepted:
                    self.matcher.accept(token)
            else:
                self.matcher.rollback(of_grammar)
        for _ in range(count - of_grammar):
            self._marker, self._tail = self._before.pop()

    @property
    def gave_up(self) -> str:
        """Why nothing is allowed any more, if a step took too much work; else ""."""
        return self.matcher.gave_up

    def forced(self) -> str:
        """The text that must come next, as far as it is certain."""
        return "" if self._marker else self.matcher.forced()


class GrammarFiller:
    """Fills the masks of all constraints of a backend together."""

    def __init__(self, backend: GrammarBackend) -> None:
        self._backend = backend

    def fill(self, constraints: Sequence[GrammarConstraint], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """Overwrites row rows[i] of masks (rows, words; int32, CPU) with what constraints[i] allows next."""
        begun = [(one.matcher, row) for one, row in zip(constraints, rows, strict=True) if not one.waits]
        if begun:
            self._backend.fill([matcher for matcher, _ in begun], masks, [row for _, row in begun])
        for one, row in zip(constraints, rows, strict=True):
            if one.waits:
                masks[row] = -1
                bits = masks[row].numpy().view(np.uint32)
                for id in one.stop_ids:
                    bits[id // 32] &= ~np.uint32(1 << id % 32)
