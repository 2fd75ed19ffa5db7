"""Continuous traffic through the gateway, with a record of every request's fate."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from openai import APIError, AsyncOpenAI

from support.prompts import messages, text


@dataclass
class Fate:
    """One request: its beginning and end (monotonic seconds), its outcome, and its endpoint."""

    number: int
    began: float
    ended: float = 0.0
    error: str | None = None
    endpoint: str | None = None
    finish: str | None = None


@dataclass
class Traffic:
    """Clients that send one request after another until they are stopped."""

    client: AsyncOpenAI
    prefixes: list[str]
    max_tokens: int = 24
    fates: list[Fate] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _stopping: bool = False

    async def one_client(self) -> None:
        while not self._stopping:
            await self.ask()

    async def ask(self) -> None:
        fate = Fate(next(self._numbers), time.monotonic())
        self.fates.append(fate)
        try:
            answer = await self.client.chat.completions.with_raw_response.create(
                model="tiny",
                messages=messages(
                    self.prefixes[fate.number % len(self.prefixes)], f"Count from {fate.number % 40} on."
                ),
                max_tokens=self.max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            fate.endpoint = answer.headers.get("x-treeline-endpoint")
            async for chunk in answer.parse():
                if chunk.choices and chunk.choices[0].finish_reason:
                    fate.finish = chunk.choices[0].finish_reason
            if fate.finish is None:
                fate.error = "the stream ended without a finish reason"
        except (APIError, OSError) as error:
            fate.error = f"{type(error).__name__}: {error}"
        except Exception as error:  # a transport error while the stream is read comes through unwrapped
            fate.error = f"{type(error).__name__}: {error}"
        finally:
            fate.ended = time.monotonic()

    async def at_least(self, more: int, timeout_s: float = 60.0) -> None:
        """Wait until `more` further requests have been answered."""
        target = self.answered() + more
        deadline = time.monotonic() + timeout_s
        while self.answered() < target:
            assert time.monotonic() < deadline, f"{self.answered()} of {target} answered; errors: {self.errors()[-5:]}"
            await asyncio.sleep(0.01)

    def answered(self) -> int:
        return sum(1 for fate in self.fates if fate.finish is not None)

    def errors(self) -> list[Fate]:
        return [fate for fate in self.fates if fate.error is not None]


@asynccontextmanager
async def traffic(client: AsyncOpenAI, clients: int = 6, prefixes: int = 4, **options: int) -> AsyncIterator[Traffic]:
    """Run `clients` clients during the block; at its end they finish their requests."""
    running = Traffic(client, [text(120, seed=900 + index) for index in range(prefixes)], **options)
    tasks = [asyncio.create_task(running.one_client()) for _ in range(clients)]
    try:
        yield running
    finally:
        running._stopping = True
        await asyncio.gather(*tasks)
