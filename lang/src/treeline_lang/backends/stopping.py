"""Stops that servers do not know: the client reads along, and leaves."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from treeline_lang.backends.base import Completion


async def cut_where(stream: AsyncGenerator[Completion], patterns: Sequence[str]) -> AsyncGenerator[Completion]:
    """The stream up to the first match of a pattern, if there is one: what matches is cut off, the request ended."""
    compiled = [re.compile(pattern) for pattern in patterns]
    async with aclosing(stream):
        async for completion in stream:
            cut = _cut(completion, compiled)
            yield cut or completion
            if cut is not None:
                return


async def last_of(stream: AsyncGenerator[Completion]) -> Completion:
    """The whole of what a stream tells."""
    last = Completion("")
    async with aclosing(stream):
        async for completion in stream:
            last = completion
    return last


def _cut(completion: Completion, patterns: Sequence[re.Pattern[str]]) -> Completion | None:
    """Up to the first match, if there is one."""
    found = [match for pattern in patterns if (match := pattern.search(completion.text))]
    if not found:
        return None
    first = min(found, key=lambda match: match.start())
    reason = {"type": "stop", "matched": first.group()}
    return Completion(completion.text[: first.start()], {**completion.meta, "finish_reason": reason})
