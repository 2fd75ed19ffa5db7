"""Traffic of users: streams through the gateway with the openai client, and the fate of each.

A driver runs in a thread with an event loop of its own, so that a journey reads as a sequence. Nothing is tried again:
a retry would hide what the journeys look for.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import openai

from e2e.kit.answers import Known
from e2e.kit.kube import PATIENCE_S

Fate = Literal["served", "refused", "truncated", "failed"]
"""Complete; an HTTP error before the first token; begun and not ended; no answer at all."""

_COUNTRIES: Final = ("France", "Japan", "Peru", "Kenya", "Norway", "Egypt", "Chile", "India", "Spain", "Cuba")
_RULES: Final = "You are a helpful assistant. Answer in one short sentence and nothing else. " * 8


@dataclass
class Stream:
    """One request. Times are of ``time.monotonic``."""

    kind: str
    model: str
    begun: float
    first: float | None = None
    ended: float | None = None
    fate: Fate = "failed"
    status: int = 0
    endpoint: str = ""
    cached: int = 0
    tokens: int = 0
    why: str = ""
    text: str = ""
    answer: str = ""
    """The right one, if it is known."""

    @property
    def wrong(self) -> bool:
        """Return whether its text is not the right answer or, if it broke off, the beginning of that."""
        right = self.answer if self.fate == "served" else self.answer[: len(self.text)]
        return bool(self.answer) and self.text != right

    @property
    def host(self) -> str:
        """Return the address of the pod that answered; empty if it is unknown."""
        return self.endpoint.rpartition(":")[0]


@dataclass(frozen=True)
class Mix:
    """The mix of requests: models by name, shares of long and new ones, and the tokens of a long answer.

    With ``known`` only these questions are asked, those of ``long`` for long answers and those of ``short`` for others.
    """

    models: tuple[str, ...] = ("tiny",)
    workers: int = 4
    long_share: float = 0.3
    new_share: float = 0.3
    """The share of requests with a cache of their own, for which no cached beginning favours a pod."""
    long_tokens: int = 300
    pause_s: float = 0.05
    key: str = "none"
    seed: int = 7
    """Two drivers at once need different seeds, or their new prompts are equal."""
    known: Mapping[str, Sequence[Known]] = field(default_factory=dict)


@dataclass
class Report:
    """The streams of a period."""

    streams: list[Stream] = field(default_factory=list)

    def of(self, *fates: Fate) -> list[Stream]:
        return [stream for stream in self.streams if stream.fate in fates]

    @property
    def dropped(self) -> list[Stream]:
        """Return the streams that a user would see fail: cut off, never answered, or a server error."""
        refused = [s for s in self.of("refused") if s.status >= 500]
        return [*self.of("truncated", "failed"), *refused]

    def since(self, moment: float) -> Report:
        """Return the streams that began later."""
        return Report([stream for stream in self.streams if stream.begun >= moment])

    def hosts(self) -> set[str]:
        """Return the pods that served."""
        return {stream.host for stream in self.of("served")}

    def __str__(self) -> str:
        counts = Counter((s.fate, s.status) for s in self.streams)
        lines = [f"{number:5} {fate} {status or ''}" for (fate, status), number in sorted(counts.items())]
        zero = self.streams[0].begun if self.streams else 0.0
        for stream in self.dropped[:12]:
            spent = (stream.ended or stream.begun) - stream.begun
            lines.append(
                f"  {stream.fate} at +{stream.begun - zero:.2f} s after {spent:.2f} s: {stream.kind} {stream.model} "
                f"{stream.endpoint} {stream.tokens} tokens {stream.why}"
            )
        return "\n".join(lines)


class Traffic:
    """Streams without end, from ``start`` until ``stop``."""

    def __init__(self, url: str, mix: Mix | None = None) -> None:
        self.url = url
        self.mix = mix or Mix()
        self._random = random.Random(self.mix.seed)
        self._streams: list[Stream] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._drive()), name="traffic", daemon=True)
        self._broke: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def begin_no_more(self) -> None:
        """Send no more requests. Streams that have begun go on."""
        self._stopping.set()

    def stop(self) -> Report:
        """Send no more requests, wait for those in flight, and report all of them."""
        self.begin_no_more()
        self._thread.join(120.0)
        if self._broke is not None:
            raise self._broke
        assert not self._thread.is_alive(), "streams hang"
        return Report(self._streams)

    def report(self) -> Report:
        """Report the streams that have ended."""
        return Report([stream for stream in self._streams if stream.ended is not None])

    def under_way(self, seconds: float) -> list[Stream]:
        """List unfinished streams whose first token came at most ``seconds`` ago."""
        late = time.monotonic() - seconds
        return [s for s in self._streams if s.ended is None and s.first is not None and s.first > late]

    def await_served(self, count: int, seconds: float = PATIENCE_S) -> None:
        """Wait until ``count`` more streams have been served."""
        goal = len(self.report().of("served")) + count
        deadline = time.monotonic() + seconds
        while len(self.report().of("served")) < goal:
            assert time.monotonic() < deadline, f"{count} streams in {seconds:g} s were asked for\n{self.report()}"
            time.sleep(0.05)

    async def _drive(self) -> None:
        try:
            client = openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key=self.mix.key, max_retries=0,
                timeout=openai.Timeout(90.0, connect=5.0),
            )  # fmt: skip
            async with client, asyncio.TaskGroup() as group:
                for number in range(self.mix.workers):
                    group.create_task(self._work(client, number))
        except BaseException as exc:
            self._broke = exc

    async def _work(self, client: openai.AsyncOpenAI, number: int) -> None:
        turn = number
        while not self._stopping.is_set():
            turn += 1
            long = self._random.random() < self.mix.long_share
            stream = Stream("long" if long else "short", self._random.choice(self.mix.models), time.monotonic())
            self._streams.append(stream)
            await self._ask(client, stream, turn)
            stream.ended = time.monotonic()
            await asyncio.sleep(self.mix.pause_s if stream.fate == "served" else 0.25)

    def _messages(self, stream: Stream, turn: int) -> Any:
        """Return the request's messages. If their answer is known, the stream learns it."""
        if self.mix.known:
            chosen = self._random.choice(self.mix.known[stream.kind])
            stream.answer = chosen.answer
            return chosen.messages
        question = f"What is the capital of {_COUNTRIES[turn % len(_COUNTRIES)]}?"
        return [{"role": "system", "content": _RULES}, {"role": "user", "content": question}]

    async def _ask(self, client: openai.AsyncOpenAI, stream: Stream, turn: int) -> None:
        length = self.mix.long_tokens if stream.kind == "long" else 24
        more: dict[str, Any] = {}
        if stream.kind == "long" and not self.mix.known:
            more["min_tokens"] = length
        if self._random.random() < self.mix.new_share:
            more["cache_salt"] = f"{self._random.getrandbits(60):x}"
        finish = None
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model=stream.model,
                messages=self._messages(stream, turn),
                max_tokens=length,
                stream=True,
                stream_options={"include_usage": True},
                temperature=0.0,
                extra_body=more,
            )
            stream.status = raw.status_code
            stream.endpoint = raw.headers.get("x-treeline-endpoint", "")
            async for chunk in raw.parse():
                if stream.first is None:
                    stream.first = time.monotonic()
                if chunk.usage is not None:
                    stream.tokens = chunk.usage.completion_tokens
                    details = chunk.usage.prompt_tokens_details
                    stream.cached = (details.cached_tokens if details else 0) or 0
                for choice in chunk.choices:
                    stream.text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        except openai.APIStatusError as exc:
            stream.fate, stream.status, stream.why = "refused", exc.status_code, f"{exc.code}: {exc}"[:200]
        except (openai.APIError, httpx.HTTPError) as exc:
            stream.fate = "truncated" if stream.first is not None else "failed"
            stream.why = f"{type(exc).__name__}: {exc.__cause__ or exc}"[:200]
        else:
            whole = finish is not None and stream.tokens >= more.get("min_tokens", 1)
            stream.fate = "served" if whole else "truncated"
            stream.why = "" if whole else f"ended with {finish}, {stream.tokens} tokens"


@contextmanager
def traffic(url: str, mix: Mix | None = None, kept: Path | None = None) -> Iterator[Traffic]:
    """Send traffic during a block, from before it begins. All streams are written to ``kept``."""
    driver = Traffic(url, mix)
    driver.start()
    try:
        driver.await_served(2)
        yield driver
    finally:
        report = driver.stop()
        if kept is not None:
            kept.write_text("".join(json.dumps(vars(stream)) + "\n" for stream in report.streams))
