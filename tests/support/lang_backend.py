"""A backend without a model: answers are a function of the prompt, and it can be slow, fail or hang."""

from __future__ import annotations

import asyncio
import re
import threading
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from treeline_lang import background
from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.choices import ChoicesMethod, Decision, TokenLogprob
from treeline_lang.sampling import Sampling
from treeline_lang.templates import TEMPLATES, ChatTemplate
from treeline_lang.transcript import Prompt

Kind = Literal["generate", "stream", "select", "warm", "template"]
WORDS = ("oak", "ash", "elm", "fir", "yew", "bay", "fig", "box")
PATIENCE_S = 60.0


def answer(prompt: Prompt, sampling: Sampling, number: int) -> str:
    """Return words that depend on the whole prompt; for a dtype, a text of it. `number`: which of n."""
    seed = zlib.crc32(f"{prompt.text}|{number}".encode())
    if sampling.dtype is not None:
        return {int: str(seed % 1000), float: f"{seed % 97}.5", bool: str(seed % 2 == 0), str: f'"{WORDS[seed % 8]}"'}[
            sampling.dtype
        ]
    return "".join(f" {WORDS[seed >> 3 * i & 7]}" for i in range(min(sampling.limit, 8)))


def logprobs(prompt: str, choice: str) -> list[float]:
    """Return one logprob for each character, by the text before it."""
    return [-1.0 - zlib.crc32((prompt + choice[: i + 1]).encode()) % 1000 / 100 for i in range(len(choice))]


@dataclass(frozen=True)
class Request:
    """A request that the backend got."""

    kind: Kind
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    call: Call = field(default_factory=Call)
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.prompt.text


class FakeBackend(Backend):
    """The backend. `requests` are all that it got, in order. Its behaviour can be changed while it runs."""

    takes_hints = True

    def __init__(
        self,
        answer: Callable[[Prompt, Sampling, int], str] = answer,
        *,
        logprobs: Callable[[str, str], list[float]] = logprobs,
        template: ChatTemplate = TEMPLATES["plain"],
    ) -> None:
        self.answer, self.logprobs = answer, logprobs
        self.requests: list[Request] = []
        self.fails: Callable[[Request], BaseException | None] = lambda _: None
        """The exception that a request raises, if any."""
        self.holds: Callable[[Request], bool] = lambda _: False
        """Whether a request waits for `release`."""
        self.running = 0
        self.most = 0
        """The largest number of requests at a time."""
        self.cancelled = 0
        """Requests that were cancelled."""
        self.closed = 0
        self._template = template
        self._changed = threading.Condition()
        self._held: list[asyncio.Event] = []

    # ---- as a backend -------------------------------------------------------------------------------------------

    async def template(self) -> ChatTemplate:
        return self._template

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        async with self._request(Request("generate", prompt, sampling, call)):
            texts = [self._text(prompt, sampling, number) for number in range(sampling.n or 1)]
        return [_completion(prompt, text) for text in texts]

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        """Stream word by word; each waits if the request is held."""
        request = Request("stream", prompt, sampling, call)
        async with self._request(request, held=False):
            whole = self._text(prompt, sampling, 0)
            ends = [match.end() for match in re.finditer(r"\s*\S+", whole)] or [0]
            ends[-1] = len(whole)
            for end in ends:
                yield _completion(prompt, whole[:end], ended=end == len(whole))
                await self._wait(request)

    async def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, call: Call) -> Decision:
        async with self._request(Request("select", prompt, call=call, choices=tuple(choices))):
            given, alone = (
                [[TokenLogprob(value, None, None) for value in self.logprobs(text, choice)] for choice in choices]
                for text in (prompt.text, "")
            )
            return method.decide(choices, given, alone)

    async def warm(self, prompt: Prompt, call: Call, children: int = 1) -> None:
        async with self._request(Request("warm", prompt, call=call)):
            pass

    async def aclose(self) -> None:
        self.closed += 1

    def flush_cache(self) -> None:
        pass

    # ---- for tests ----------------------------------------------------------------------------------------------

    @contextmanager
    def holding(self, kind: Kind | None = None) -> Iterator[None]:
        """Hold requests (of one kind, if named) during the block; at its end they go on."""
        self.holds = lambda request: kind is None or request.kind == kind
        try:
            yield
        finally:
            self.holds = lambda _: False
            self.release()

    def release(self) -> None:
        """Let all waiting requests go on (streams may wait again)."""

        def wake() -> None:
            held, self._held = self._held, []
            for event in held:
                event.set()

        background.loop().call_soon_threadsafe(wake)

    def wait_for(self, condition: Callable[[FakeBackend], bool]) -> None:
        """Wait until the condition holds; it is checked when a request begins or ends."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE_S), f"not so, with {self.running} running"

    def wait_running(self, count: int) -> None:
        self.wait_for(lambda me: me.running == count)

    def asked(self, kind: Kind) -> list[Request]:
        return [request for request in self.requests if request.kind == kind]

    def texts(self, kind: Kind) -> list[str]:
        """Return the prompts of all requests of a kind."""
        return [request.text for request in self.asked(kind)]

    # ---- inside -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _request(self, request: Request, *, held: bool = True) -> AsyncIterator[None]:
        self._count(+1, request)
        try:
            if error := self.fails(request):
                raise error
            if held:
                await self._wait(request)
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self._count(-1)

    async def _wait(self, request: Request) -> None:
        if self.holds(request):
            event = asyncio.Event()
            self._held.append(event)
            await event.wait()

    def _count(self, change: int, request: Request | None = None) -> None:
        with self._changed:
            self.running += change
            self.most = max(self.most, self.running)
            if request is not None:
                self.requests.append(request)
            self._changed.notify_all()

    def _text(self, prompt: Prompt, sampling: Sampling, number: int) -> str:
        """Return the text up to the first stop."""
        text = self.answer(prompt, sampling, number)
        found = [match.start() for pattern in sampling.stop_regex if (match := re.search(pattern, text))]
        cuts = [at for stop in sampling.stop if (at := text.find(stop)) >= 0] + found
        return text[: min(cuts, default=len(text))]


def _completion(prompt: Prompt, text: str, *, ended: bool = True) -> Completion:
    counts = {"prompt_tokens": len(prompt.text), "completion_tokens": len(text)}  # each character a token
    return Completion(text, {**counts, "finish_reason": {"type": "stop"} if ended else None})
