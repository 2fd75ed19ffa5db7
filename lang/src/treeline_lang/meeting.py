"""Requests of several streams that go out as one."""

from __future__ import annotations

import asyncio

from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.sampling import Sampling
from treeline_lang.transcript import Prompt


class Meeting:
    """Each of so many streams comes once with its request, or leaves; when the last has, they are sent together. Lives
    on the loop."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._requests: list[tuple[Prompt, Sampling]] = []
        self._answers: list[asyncio.Future[list[Completion]]] = []
        self._task: asyncio.Task[None] | None = None

    async def generate(self, backend: Backend, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        """Raises what befalls this request; the others have their own answers."""
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._requests.append((prompt, sampling))
        self._answers.append(answer)
        self._backend, self._call = backend, call
        self.leave()
        try:
            return await answer
        finally:
            if self._task is not None and all(one.done() for one in self._answers):
                self._task.cancel()  # nothing, where it has answered; else all that waited have been cancelled

    def leave(self) -> None:
        """One that will not come, or has come."""
        self._missing -= 1
        if not self._missing and self._requests:
            self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        try:
            results = await self._backend.generate_batch(self._requests, self._call)
        except Exception as error:
            results = [error] * len(self._answers)
        for answer, result in zip(self._answers, results, strict=True):
            if answer.done():
                continue
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)
