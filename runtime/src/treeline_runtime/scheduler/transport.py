"""How a scheduler hears and speaks: what carries its messages, whether to other processes or to method calls."""

from __future__ import annotations

from typing import Protocol

from treeline_runtime.messages import FromScheduler, ToPublisher, ToScheduler


class Transport(Protocol):
    """Nothing but `wait` may block."""

    def receive(self) -> list[ToScheduler]:
        """Messages that arrived since the last call."""

    def send(self, messages: list[FromScheduler]) -> None:
        """To the detokenizer, in order."""

    def publish(self, update: ToPublisher) -> bool:
        """To the publisher; False where there was no room, and the update was dropped."""

    def wait(self) -> None:
        """Called when there is nothing to do: return when `receive` may have something, or after a while."""

    def wake(self) -> None:
        """End a `wait`, or the next one. Called by any thread."""
