"""`stop_regex`, which servers do not know: the client reads along, and ends the request at the first match."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.sampling import Sampling
from treeline_lang.transcript import Prompt


class StoppingBackend(Backend):
    """A backend whose server is asked by `_generate` and `_stream`, and never for a `stop_regex`."""

    @abstractmethod
    async def _generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        """As `generate`, without `stop_regex`."""

    @abstractmethod
    def _stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        """As `stream`, and `stop_regex` is not looked at."""

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        if not sampling.stop_regex:
            return await self._generate(prompt, sampling, call)
        return [await self._last(prompt, sampling, call) for _ in range(sampling.n or 1)]

    async def _last(self, prompt: Prompt, sampling: Sampling, call: Call) -> Completion:
        last = Completion("")
        async with aclosing(self.stream(prompt, sampling, call)) as stream:
            async for completion in stream:
                last = completion
        return last

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        patterns = [re.compile(pattern) for pattern in sampling.stop_regex]
        async with aclosing(self._stream(prompt, sampling, call)) as stream:
            async for completion in stream:
                cut = _cut(completion, patterns)
                yield cut or completion
                if cut is not None:
                    return


def _cut(completion: Completion, patterns: Sequence[re.Pattern[str]]) -> Completion | None:
    """Up to the first match, if there is one."""
    found = [match for pattern in patterns if (match := pattern.search(completion.text))]
    if not found:
        return None
    first = min(found, key=lambda match: match.start())
    reason = {"type": "stop", "matched": first.group()}
    return Completion(completion.text[: first.start()], {**completion.meta, "finish_reason": reason})
