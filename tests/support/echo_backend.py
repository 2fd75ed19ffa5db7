"""A backend of the frontend language without a server: what it writes is a function of what it is asked alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import AsyncGenerator, Sequence

from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.choices import ChoicesMethod, Decision
from treeline_lang.sampling import Sampling
from treeline_lang.transcript import Prompt


def echo(text: str, index: int = 0, length: int = 6) -> str:
    """A short word for a prompt."""
    return hashlib.sha256(f"{index}:{text}".encode()).hexdigest()[:length]


class EchoBackend(Backend):
    """Keeps what it was asked, in order, and what it was told to cache."""

    takes_hints = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: list[str] = []
        self.warmed: list[str] = []
        self.events: list[tuple[str, str]] = []

    def _note(self, kind: str, text: str) -> None:
        with self._lock:
            (self.warmed if kind == "warm" else self.asked).append(text)
            self.events.append((kind, text))

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        self._note("generate", prompt.text)
        length = min(sampling.limit, 12)
        if sampling.dtype is int:
            return [Completion(str(int(echo(prompt.text, one), 16) % 100)) for one in range(sampling.n or 1)]
        return [
            Completion(echo(prompt.text, one, length), {"prompt": prompt.text, "temperature": sampling.temperature})
            for one in range(sampling.n or 1)
        ]

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        whole = (await self.generate(prompt, sampling, call))[0]
        for end in range(1, len(whole.text) + 1):
            yield Completion(whole.text[:end], whole.meta)

    async def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, call: Call) -> Decision:
        self._note("select", prompt.text)
        scores = [int(echo(prompt.text + choice), 16) / 2**24 for choice in choices]
        return Decision(scores.index(max(scores)), scores)

    async def warm(self, prompt: Prompt, call: Call, children: int = 1) -> None:
        self._note("warm", prompt.text)
