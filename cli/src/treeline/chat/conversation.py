"""A conversation: questions and answers, and the messages that the server gets. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass
class Conversation:
    """The turns of a chat. A question is kept only with its answer: a failure would leave two questions in a row, which
    many chat templates refuse."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    """(question, answer)"""
    question: str = ""
    """The last question."""
    _is_answered: bool = False

    def ask(self, question: str) -> list[dict[str, str]]:
        """Returns the messages of the request for a question."""
        self.question, self._is_answered = question, False
        return [*self._remembered(), {"role": "user", "content": question}]

    def answered(self, text: str) -> None:
        """Adds the answer to the question, or its beginning if the answer was stopped."""
        if text:
            self.turns.append((self.question, text))
            self._is_answered = True

    def take_back(self) -> str:
        """Forgets the last question and its answer. Returns the question, to be asked once more; empty if there was
        none."""
        if self._is_answered:
            self.turns.pop()
            self._is_answered = False
        return self.question

    def clear(self) -> None:
        self.turns.clear()
        self.question, self._is_answered = "", False

    def as_json(self) -> str:
        """The messages in the form of a request to the API."""
        return json.dumps(self._remembered(), indent=2, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        """The messages as a text for people."""
        return "\n\n".join(f"## {role['role']}\n\n{role['content']}" for role in self._remembered()) + "\n"

    def _remembered(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
