"""How the time of a decode step grows with its tokens: what is measured decides whether guesses pay."""

from __future__ import annotations

FEW = 8
"""For fewer requests a step mostly reads weights, whatever its tokens."""
STEPS = 64
"""The averages are mostly of so many last steps."""
MOST_TIMES = 3.0
"""A step counts for at most so many times the average, or the average of as many tokens: a pause of the machine says
nothing of tokens."""
DOUBT = 0.05
"""Steps whose tokens differ by this share of their number say as little as nothing. So where all have become equal,
what was measured fades, guesses are free again, and are measured again."""


class StepTimes:
    """A line through the steps' tokens and seconds, by averages that fade."""

    def __init__(self) -> None:
        self._steps = 0
        self._tokens = self._seconds = self._variance = self._covariance = 0.0

    def take(self, tokens: int, seconds: float) -> None:
        """A decode step computed so many tokens."""
        self._steps = min(self._steps + 1, STEPS)
        new = 1 / self._steps
        if new < 1:
            seconds = min(seconds, MOST_TIMES * self._seconds * max(tokens / self._tokens, 1.0))
        more, longer = tokens - self._tokens, seconds - self._seconds
        self._tokens += new * more
        self._seconds += new * longer
        self._variance = (1 - new) * (self._variance + new * more * more)
        self._covariance = (1 - new) * (self._covariance + new * more * longer)

    def cost(self, batch: int) -> float:
        """Of a token more for each of so many requests, as a share of a step without: 0 (free, or not known yet) to 1
        (it takes as long as a step of its own)."""
        if batch < FEW or self._covariance <= 0:
            return 0.0
        each = self._covariance / (self._variance + (DOUBT * self._tokens) ** 2)
        step = self._seconds + each * (batch - self._tokens)
        return min(each * batch / step, 1.0) if step > 0 else 1.0
