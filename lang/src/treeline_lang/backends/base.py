"""The interface that a program expects of a backend, and the default backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from treeline_lang import background
from treeline_lang.choices import ChoicesMethod, Decision, TokenLogprob, tokens_of_choice
from treeline_lang.errors import BackendError, Unsupported
from treeline_lang.sampling import Sampling
from treeline_lang.templates import TEMPLATES, ChatTemplate
from treeline_lang.transcript import Prompt


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    """The text so far, without the stop that ended it."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Like SGLang's `meta_info`: `finish_reason`, `prompt_tokens`, `completion_tokens`, …, as far as the backend
    reports them."""


@dataclass
class GrowingCompletion:
    """A completion assembled from the events of a stream, or from a whole answer."""

    text: str = ""
    reasoning: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    """The finish reason: `stop`, `length` or another word; None while it is still growing."""
    matched: Any = None
    """The stop that ended it."""

    def completion(self) -> Completion:
        """The completion so far."""
        reason: dict[str, Any] | None = None if self.finish is None else {"type": self.finish}
        if self.finish == "stop":
            reason = {"type": "stop", "matched": self.matched}
        elif self.finish == "length":
            reason = {"type": "length", "length": self.meta.get("completion_tokens")}
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return Completion(self.text, {**self.meta, "finish_reason": reason, **thought})


@dataclass(frozen=True, slots=True)
class Call:
    """The facts about a request that a backend gets besides its text."""

    session: str | None = None
    """Requests of one program; a gateway may send them to the same replica."""
    num_api_spec_tokens: int | None = None
    """The minimum number of tokens that each call asks for (`treeline_lang.speculation`)."""


class Backend(ABC):
    """All `async` methods run on the loop of `treeline_lang.background`, many at a time; they raise BackendError,
    Unsupported and TemplateError. A backend keeps no state of a program, so runs are independent."""

    reads_images = reads_videos = False
    takes_hints = False
    """Whether `warm` makes later requests with the same beginning faster."""
    chats = False
    """Whether it receives the turns of a chat instead of a text."""
    tells_tokens = False
    """Whether it reports, with `return_logprob`, where the answer's tokens begin and end."""

    async def continues(self) -> bool:
        """Whether it continues a begun turn of the assistant."""
        return True

    async def template(self) -> ChatTemplate:
        """The chat template of the model. Called before a program's first request."""
        return TEMPLATES["plain"]

    async def item_text(self, kind: str) -> str:
        """The text that stands for an image or video in a prompt; "" where these are parts of turns. Raises
        Unsupported."""
        return ""

    @abstractmethod
    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        """Generates `sampling.n` completions."""

    @abstractmethod
    def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        """Yields one completion as it grows, at least once."""

    async def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, call: Call) -> Decision:
        """Scores each choice by the log probabilities of its tokens."""
        return await select_by_logprobs(self, prompt.text, choices, method, call)

    async def count(self, text: str, call: Call) -> int:
        """Number of tokens of a text, which is then cached. Raises Unsupported for a backend without log
        probabilities."""
        raise Unsupported(f"{type(self).__name__} reports no log probabilities of given texts, so it cannot select")

    async def score(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], start: int, call: Call
    ) -> list[list[TokenLogprob]]:
        """The tokens of each prompt (a text or token ids) from index `start` on. Raises as `count`."""
        raise Unsupported(f"{type(self).__name__} reports no log probabilities of given texts, so it cannot select")

    async def warm(self, prompt: Prompt, call: Call, children: int = 1) -> None:  # noqa: B027
        """Caches the prompt for this many requests that begin with it."""

    async def aclose(self) -> None:  # noqa: B027
        """Releases its resources. Idempotent."""

    # ---- for callers without an event loop ----------------------------------------------------------------------

    def close(self) -> None:
        background.call(self.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush_cache(self) -> None:
        """Empties the prefix cache."""
        raise Unsupported(f"{type(self).__name__} has no cache to flush")

    def get_server_info(self) -> dict[str, Any]:
        raise Unsupported(f"{type(self).__name__} has no server to ask")


async def select_by_logprobs(
    backend: Backend, text: str, choices: Sequence[str], method: ChoicesMethod, call: Call
) -> Decision:
    """Sends the prompt once, then with each choice, in one batch. The last two tokens of the prompt are scored too,
    since the tokenizer may join them with the choice."""
    start = max(await backend.count(text, call) - 2, 0) if text else 0
    before = 2 if start else 0
    scored = _checked(await backend.score([text + choice for choice in choices], start, call), len(choices))
    tokens = [tokens_of_choice(one, choice, before) for one, choice in zip(scored, choices, strict=True)]
    if not all(tokens):
        raise BackendError("the server gave no logprobs of the choices")
    alone: list[list[TokenLogprob]] = []
    if method.unconditional:
        ids = [[token.id for token in one if token.id is not None] for one in tokens]
        alone = _checked(await backend.score(ids, 0, call), len(choices))
    return method.by_tokens(choices, tokens, alone)


def _checked(scored: list[list[TokenLogprob]], count: int) -> list[list[TokenLogprob]]:
    """Checks the number of texts and the types of their tokens. Raises BackendError."""
    if len(scored) != count:
        raise BackendError(f"the server gave the logprobs of {len(scored)} texts where {count} were asked for")
    for token in (token for one in scored for token in one):
        fits = (
            (token.logprob is None or _is_logprob(token.logprob))
            and (token.id is None or type(token.id) is int)
            and (token.text is None or isinstance(token.text, str))
        )
        if not fits:
            raise BackendError(f"the server gave an invalid logprob: {str(token)[:200]}")
    return scored


def _is_logprob(value: Any) -> bool:
    """At most 0, apart from rounding; -inf counts, NaN does not."""
    return type(value) in (int, float) and value <= 1


class GlobalConfig:
    """Global settings, as in SGLang. Programs may set other attributes; they have no effect."""

    default_backend: Backend | None = None


global_config = GlobalConfig()


def set_default_backend(backend: Backend | None) -> None:
    """Sets the backend for programs that name none."""
    global_config.default_backend = backend


def default_backend() -> Backend:
    if global_config.default_backend is None:
        raise Unsupported(
            "no backend: give run() one, as backend=RuntimeEndpoint('http://127.0.0.1:30000'), or set_default_backend()"
        )
    return global_config.default_backend


def flush_cache(backend: Backend | None = None) -> None:
    """Empties the prefix cache of a backend, or of the default one. Raises Unsupported, BackendError."""
    (backend or default_backend()).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Returns the information that a backend's server (default: the default backend's) reports about itself. Raises
    Unsupported, BackendError."""
    return (backend or default_backend()).get_server_info()
