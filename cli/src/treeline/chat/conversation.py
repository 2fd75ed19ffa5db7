"""A conversation: what was asked and answered, and what the server is sent of it. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass
class Conversation:
    """A question is remembered only with its answer: two questions in a row, as a failure would leave them, are refused
    by many chat templates."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    """(question, answer)"""
    question: str = ""
    """The last one."""
    _is_answered: bool = False

    def ask(self, question: str) -> list[dict[str, str]]:
        """→ the messages of the request."""
        self.question, self._is_answered = question, False
        return [*self._remembered(), {"role": "user", "content": question}]

    def answered(self, text: str) -> None:
        """What came of the question, or a part of it where it was stopped."""
        if text:
            self.turns.append((self.question, text))
            self._is_answered = True

    def take_back(self) -> str:
        """Forget the last question with its answer. → the question, to be asked once more; empty: there was none."""
        if self._is_answered:
            self.turns.pop()
            self._is_answered = False
        return self.question

    def clear(self) -> None:
        self.turns.clear()
        self.question, self._is_answered = "", False

    def as_json(self) -> str:
        """The messages, as a request to the API has them."""
        return json.dumps(self._remembered(), indent=2, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        """For people."""
        return "\n\n".join(f"## {role['role']}\n\n{role['content']}" for role in self._remembered()) + "\n"

    def _remembered(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
