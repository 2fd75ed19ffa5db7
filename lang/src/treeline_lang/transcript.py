"""The text of a state, and the same as chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treeline_lang.errors import RoleError
from treeline_lang.expressions import Role
from treeline_lang.templates import ChatTemplate

Part = dict[str, Any]
"""A part of a turn in OpenAI's format. An image's or video's URL has its bytes (`data:`), or the backend fetches it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A state as a backend sees it."""

    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    """Finished turns in OpenAI's format."""
    role: Role | None = None
    """The role of the open turn."""
    turn: str = ""
    """The open turn's text so far."""
    images: tuple[Part, ...] = ()
    """The open turn's images and videos."""
    all_images: tuple[Part, ...] = ()
    """Those of the whole text."""


@dataclass(slots=True)
class Transcript:
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[Part] = field(default_factory=list)
    """Also videos."""
    role: Role | None = None
    _turn_at: int = 0
    """Index in the text where the open turn's content begins."""
    _turn_images: int = 0
    """Number of images before the open turn."""

    def append(self, text: str) -> None:
        self.text += text

    def begin(self, role: Role, template: ChatTemplate) -> None:
        if self.role is not None:
            raise RoleError(f"a turn of the {role} begins within one of the {self.role}: turns are not nested")
        self.text += template.begin(role, not self.messages)
        self.role, self._turn_at, self._turn_images = role, len(self.text), len(self.images)

    def end(self, role: Role, template: ChatTemplate) -> None:
        if self.role != role:
            raise RoleError(
                f"a turn of the {role} ends, but " + (f"the {self.role}'s is open" if self.role else "none is open")
            )
        self.messages.append({"role": role, "content": self._content()})
        self.text += template.end(role)
        self.role = None

    def take(self, other: Transcript, since: Transcript) -> None:
        """Appends what another transcript has gained. Raises RoleError unless it is back in the same turn."""
        turns = other.messages[len(since.messages) :]
        if other.role != since.role or (turns and since.role is not None):
            raise RoleError("a branch that is appended ends in the turn in which it began")
        self.images += other.images[len(since.images) :]
        self.text += other.text[len(since.text) :]
        self.messages += turns

    def prompt(self) -> Prompt:
        return Prompt(
            self.text,
            tuple(self.messages),
            self.role,
            self.text[self._turn_at :] if self.role else "",
            tuple(self.images[self._turn_images :]) if self.role else (),
            tuple(self.images),
        )

    def copy(self) -> Transcript:
        return Transcript(
            self.text, list(self.messages), list(self.images), self.role, self._turn_at, self._turn_images
        )

    def _content(self) -> str | list[Part]:
        """A text, or a list of parts if there are images."""
        return content_of(self.text[self._turn_at :], self.images[self._turn_images :])


def content_of(text: str, images: Sequence[Part]) -> str | list[Part]:
    """A turn's content in OpenAI's format: images first, as models are trained."""
    return [*images, {"type": "text", "text": text}] if images else text
