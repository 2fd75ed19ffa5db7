"""Hints: what many requests will begin with is sent ahead, so that it is cached before they come.

A hint is a favour: one that is refused, or takes too long, costs a program time and nothing else.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from treeline_lang.executor import Run
from treeline_lang.transcript import Prompt

MOST_S: Final = 30.0
"""For so long requests wait for their hint. It is given up then, and they compute what they share themselves."""


async def send(run: Run, prompt: Prompt, children: int = 1) -> None:
    """Returns once the prompt is cached, for so many requests that begin with it, or once that has failed."""
    with suppress(Exception):
        async with asyncio.timeout(MOST_S):
            await run.backend.warm(prompt, run.call, children)
