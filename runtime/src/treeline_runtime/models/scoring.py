"""How a query's scores of the keys are made, in the words that models and attention backends share. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Scoring:
    """A score is q·k x scale; with a cap c it is c x tanh(score / c); then who is not seen is left out."""

    scale: float | None = None
    """None: head_dim ** -0.5."""
    softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    """Of each layer, how many tokens one sees, itself the last of them; None: all before it. (): no layer has one."""
    sinks: bool = False
    """Whether each query head has a sink: the score of a key that every token sees, whose value is zero. The scores
    are weights; `AttentionBackend.forward` is given them."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def oldest(self, length: int, window: int | None) -> int:
        """The first token that the last of so many sees, in a layer with that window."""
        return 0 if window is None else max(length - window, 0)

    def within(self, length: int) -> Scoring:
        """The same of sequences that are no longer: a window that hides none of their tokens is none."""
        windows = tuple(None if window is None or window >= length else window for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The windows that occur, each once."""
        return tuple(dict.fromkeys(self.windows)) or (None,)


PLAIN = Scoring()
"""Scaled by the size of heads; everybody sees all before it."""
