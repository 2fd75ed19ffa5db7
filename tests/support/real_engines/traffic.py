"""Conversations that grow, several at a time: system prompts that some share, questions, and the engine's own answers.

The order in which turns are sent is shuffled with a fixed seed, round by round, and the same for every policy: in each
round every conversation has one turn. A closed loop of `concurrency` users takes them one after the other; a turn whose
conversation still waits for its last answer waits for it too.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.connection import Connection
from treeline_bench.serving.messages import Record

CHAT = "/v1/chat/completions"
TIMEOUT_S = 120.0

Message = dict[str, str]


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens. `groups` × `talks` conversations; those of a group share a system prompt."""

    groups: int
    talks: int
    turns: int
    system: int
    question: int
    answer: int
    concurrency: int
    seed: int = 1

    @property
    def requests(self) -> int:
        return self.groups * self.talks * self.turns

    @property
    def longest(self) -> int:
        """Return the length of the last prompt of a conversation with its answer, and room for the template."""
        return self.system + self.turns * (self.question + self.answer + 16) + 64


@dataclass
class Exchange:
    """One turn: the request and its outcome."""

    conversation: int
    messages: list[Message]
    record: Record
    answer: str = ""


@dataclass
class _Talk:
    """A conversation in progress."""

    messages: list[Message]
    questions: list[str]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Traffic:
    """Conversations and their order, equal for equal shapes. `run` sends them; it may be run more than once."""

    def __init__(self, shape: Shape, maker: PromptMaker, model: str) -> None:
        rng = random.Random(shape.seed)
        self.shape, self._model = shape, model
        systems = [maker.text(shape.system, rng) for _ in range(shape.groups)]
        self._begun = [
            (systems[group], [maker.text(shape.question, rng) for _ in range(shape.turns)])
            for group in range(shape.groups)
            for _ in range(shape.talks)
        ]
        self._order: list[int] = []
        for _ in range(shape.turns):
            round_ = list(range(len(self._begun)))
            rng.shuffle(round_)
            self._order += round_

    async def run(self, host: str, port: int, progress: Callable[[int], None] = lambda done: None) -> list[Exchange]:
        """Send all turns and return them in order. Errors are in their records; none is raised."""
        talks = [_Talk([{"role": "system", "content": system}], list(asked)) for system, asked in self._begun]
        order, sent = iter(self._order), list[Exchange]()

        async def user() -> None:
            connection = await _connect(host, port)
            try:
                for index in order:
                    if connection.closed:
                        connection = await _connect(host, port)
                    async with talks[index].turn:
                        await self._ask(connection, f"{host}:{port}", index, talks[index], sent)
                    progress(len(sent))
            finally:
                connection.end()

        async with asyncio.TaskGroup() as users:
            for _ in range(self.shape.concurrency):
                users.create_task(user())
        return sent

    async def _ask(self, connection: Connection, host: str, index: int, talk: _Talk, sent: list[Exchange]) -> None:
        talk.messages.append({"role": "user", "content": talk.questions.pop(0).strip()})
        exchange = Exchange(index, list(talk.messages), Record(index, len(talk.messages) // 2, 0, self.shape.answer, 0))
        sent.append(exchange)
        body = json.dumps(
            {
                "model": self._model,
                "messages": exchange.messages,
                "max_tokens": self.shape.answer,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        exchange.answer = await connection.ask(
            head.encode() + b"\r\n\r\n" + body, exchange.record, TIMEOUT_S, keep_text=True
        )
        talk.messages.append({"role": "assistant", "content": exchange.answer})


async def _connect(host: str, port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(lambda chunks: None), host, port)
    return connection
