"""What a program asks of a backend, and the default backend."""

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
    """All of it so far, without the stop that ended it."""
    meta: dict[str, Any] = field(default_factory=dict)
    """As SGLang's `meta_info`: `finish_reason`, `prompt_tokens`, `completion_tokens`, …, where the backend tells."""


@dataclass
class GrowingCompletion:
    """A completion that is put together from the events of a stream, or from a whole answer."""

    text: str = ""
    reasoning: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    """Why it has ended: `stop`, `length` or another word; None while it has not."""
    matched: Any = None
    """The stop that ended it."""

    def completion(self) -> Completion:
        """All so far."""
        reason: dict[str, Any] | None = None if self.finish is None else {"type": self.finish}
        if self.finish == "stop":
            reason = {"type": "stop", "matched": self.matched}
        elif self.finish == "length":
            reason = {"type": "length", "length": self.meta.get("completion_tokens")}
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return Completion(self.text, {**self.meta, "finish_reason": reason, **thought})


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a request besides its text."""

    session: str | None = None
    """Requests of one program: better served where the earlier ones were."""
    num_api_spec_tokens: int | None = None
    """What the program asks for with each call, at least (`treeline_lang.speculation`)."""


class Backend(ABC):
    """All methods with `async` run on the loop of `treeline_lang.background`, many at a time; they raise BackendError,
    Unsupported and TemplateError. A backend keeps nothing of a program: two runs never see each other."""

    reads_images = False
    takes_hints = False
    """`warm` makes later requests with the same beginning faster."""
    chats = False
    """It is sent the turns of a chat, not a text."""
    tells_tokens = False
    """With `return_logprob` it says where the tokens of an answer begin and end."""

    async def continues(self) -> bool:
        """It goes on with an assistant's turn that has begun."""
        return True

    async def template(self) -> ChatTemplate:
        """How the model's turns are written. Asked before the first of a program."""
        return TEMPLATES["plain"]

    @abstractmethod
    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        """`sampling.n` completions."""

    @abstractmethod
    def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        """One completion as it grows, at least one time."""

    async def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, call: Call) -> Decision:
        """By the logprobs of the tokens of each choice."""
        return await select_by_logprobs(self, prompt.text, choices, method, call)

    async def count(self, text: str, call: Call) -> int:
        """Tokens of a text, which is cached from then on. Raises Unsupported where it does not tell logprobs."""
        raise Unsupported(f"{type(self).__name__} does not tell how likely a given text is, so it cannot select")

    async def score(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], start: int, call: Call
    ) -> list[list[TokenLogprob]]:
        """The tokens of each prompt, a text or the ids of its tokens, from number `start` on. Raises as `count`."""
        raise Unsupported(f"{type(self).__name__} does not tell how likely a given text is, so it cannot select")

    async def warm(self, prompt: Prompt, call: Call, children: int = 1) -> None:  # noqa: B027
        """Have the prompt cached, for so many requests that begin with it."""

    async def aclose(self) -> None:  # noqa: B027
        """Give back what it holds. Idempotent."""

    # ---- for callers without an event loop ----------------------------------------------------------------------

    def close(self) -> None:
        background.call(self.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        raise Unsupported(f"{type(self).__name__} has no cache to flush")

    def get_server_info(self) -> dict[str, Any]:
        raise Unsupported(f"{type(self).__name__} has no server that tells about itself")


async def select_by_logprobs(
    backend: Backend, text: str, choices: Sequence[str], method: ChoicesMethod, call: Call
) -> Decision:
    """The prompt is sent once, then with each choice behind it, all in one batch. Two tokens of the prompt's end are
    read too, as the tokenizer may join it with the choice's beginning."""
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
    """As servers have said it, for comparing: what is not a number is neither more nor less likely than another. Raises
    BackendError."""
    if len(scored) != count:
        raise BackendError(f"the server gave the logprobs of {len(scored)} texts where {count} were asked for")
    for token in (token for one in scored for token in one):
        fits = (
            (token.logprob is None or _is_logprob(token.logprob))
            and (token.id is None or type(token.id) is int)
            and (token.text is None or isinstance(token.text, str))
        )
        if not fits:
            raise BackendError(f"the server gave a logprob that is none: {str(token)[:200]}")
    return scored


def _is_logprob(value: Any) -> bool:
    """Not above 0, but for rounding; -inf is one, NaN is not."""
    return type(value) in (int, float) and value <= 1


class GlobalConfig:
    """As SGLang's: programs may set what else it has, and nothing reads that."""

    default_backend: Backend | None = None


global_config = GlobalConfig()


def set_default_backend(backend: Backend | None) -> None:
    """Which backend runs programs that name none."""
    global_config.default_backend = backend


def default_backend() -> Backend:
    if global_config.default_backend is None:
        raise Unsupported(
            "no backend: give run() one, as backend=RuntimeEndpoint('http://127.0.0.1:30000'), or set_default_backend()"
        )
    return global_config.default_backend


def flush_cache(backend: Backend | None = None) -> None:
    """Empty the prefix cache of a backend, or of the default one. Raises Unsupported, BackendError."""
    (backend or default_backend()).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """What the server of a backend, or of the default one, tells about itself. Raises Unsupported, BackendError."""
    return (backend or default_backend()).get_server_info()
