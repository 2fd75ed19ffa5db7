"""What a request asks for, once its body has been read: prompts as token ids, and how to answer them.

These go from the process that reads a large body to the one that answers it, as msgpack.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from treeline_runtime.messages import GenerateReq, SamplingParams, encode
from treeline_runtime.server.errors import ApiError, UnknownModel
from treeline_runtime.server.formats import Parsing
from treeline_runtime.server.limits import BYTES_PER_TOKEN, GENERATION_BYTES, MAX_COPIED_BYTES

Kind = Literal[
    "chat",
    "completion",
    "generate",
    "tokenize",
    "detokenize",
    "embedding",
    "pooling",
    "classify",
    "score",
    "rerank",
    "responses",
    "messages",
    "count_tokens",
    "input_tokens",
]
"""What a body is: one for each endpoint that reads one."""


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the edge said of the client; see `http.ApiRequest`."""

    tenant: str | None = None
    """The client whose cache the request uses; None is the common one."""
    shares_cache: bool = False
    """How much was cached is not reported."""


class _Read(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    ignored: tuple[str, ...] = ()
    """Fields of the request that had no effect (`fields.ignore`)."""


class Answered(_Read, tag="answered", frozen=True):
    """The answer itself, as JSON."""

    body: bytes


class Generations(_Read, frozen=True, kw_only=True):
    """A request to the scheduler, whichever API it came through: every prompt is answered `n` times."""

    rid: str
    """Names all of it: `/abort_request` takes it."""
    prompts: list[GenerateReq]
    """What is scheduled for each, without `rid` and `client`."""
    n: int = 1
    rids: list[str] | None = None
    """Ids of the generations, where the client chose them."""
    hides_cache: bool = False
    """The answer's body does not tell what was cached."""
    stream: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.input_ids) for prompt in self.prompts)

    @property
    def generations(self) -> int:
        return len(self.prompts) * self.n

    @property
    def names(self) -> list[str]:
        """Of the generations."""
        if self.generations == 1:
            return self.rids or [self.rid]
        return self.rids or [f"{self.rid}:{index}" for index in range(self.generations)]

    def check_copies(self) -> None:
        """Raises ApiError 400 where what its generations carry besides their prompts is too much: each has a copy of
        its own in every process."""
        size = 0
        for prompt in self.prompts:
            size += self.n * len(encode(prompt.sampling))
            if size > MAX_COPIED_BYTES:
                raise ApiError(
                    400,
                    f"What is said of the output (grammar, stop strings, biases) is too large for {self.generations} "
                    f"generations at once: together they may carry {MAX_COPIED_BYTES} bytes of it",
                    param=prompt.sampling.grammar_param,
                )

    def requests(self, client: str | None = None, *, uses_priority: bool = True) -> list[GenerateReq]:
        """One per choice, prompt by prompt. A seed gives each of a prompt's choices its own, reproducible one."""
        choices = [(prompt, choice) for prompt in self.prompts for choice in range(self.n)]
        return [
            msgspec.structs.replace(
                prompt,
                rid=rid,
                client=client,
                sampling=_for_choice(prompt.sampling, choice),
                priority=prompt.priority if uses_priority else 0,
            )
            for rid, (prompt, choice) in zip(self.names, choices, strict=True)
        ]


def size_of(request: GenerateReq) -> int:
    """Bytes that a generation takes: what goes to the scheduler, but for the prompt, which is counted as a list."""
    carried = len(encode(msgspec.structs.replace(request, input_ids=[])))
    return GENERATION_BYTES + carried + BYTES_PER_TOKEN * len(request.input_ids)


def _for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    if not choice or sampling.seed is None:
        return sampling
    seed = (sampling.seed + choice) & ((1 << 63) - 1)
    return msgspec.structs.replace(sampling, seed=seed)


class Shown(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of a chat's output is sent, and how."""

    reasoning: bool = True
    reasoning_at_once: bool = False
    """In one piece, when it is over."""
    several_calls: bool = True
    """If not, the first alone."""
    special_tokens: bool = False
    """Those of the output too."""


ID_CHARS = 8
"""Of a token's id in JSON, with its comma."""


class TextTask(Generations, frozen=True, kw_only=True):
    """What OpenAI's answers have besides the text."""

    usage: bool = False
    """A stream ends with a chunk that has the usage."""
    continuous_usage: bool = False
    """Every chunk has the usage so far."""
    logprobs: int | None = None
    """Of the output: the chosen ones, and of how many of the likeliest; None = nothing."""
    prompt_logprobs: int | None = None
    token_ids: bool = False
    """Of prompt and output."""

    @property
    def ids_bytes(self) -> int:
        """Bytes of an answer that the prompts' ids take."""
        return ID_CHARS * self.n * self.prompt_tokens if self.token_ids else 0


class ChatTask(TextTask, tag="chat", frozen=True, kw_only=True):
    """A chat, by any of the three APIs."""

    parsing: Parsing | None = None
    """How thoughts and calls are found in the output; None: it is all said."""
    shown: Shown = Shown()
    echo: str = ""
    """What each choice's content begins with."""
    repeated: bytes = b""
    """What an answer of `/v1/responses` repeats of the request: a JSON object."""
    fills_context: bool = False
    """Of `/v1/messages`: the end of the context comes before that of the tokens that were asked for."""


class CompletionTask(TextTask, tag="completion", frozen=True, kw_only=True):
    echoes: list[str]
    """One per prompt: its text if it is to come first, or ""."""


class GenerateTask(Generations, tag="generate", frozen=True, kw_only=True):
    batched: bool
    with_text: bool
    """Each logprob comes with its token's text."""


class PoolingTask(Generations, tag="pooling", frozen=True, kw_only=True):
    """Vectors, or numbers that are made of them."""

    base64: bool = False
    dimensions: int | None = None
    """Those of a vector that are wanted; None = all."""
    activation: bool = True
    """Probabilities are wanted, not the head's own outputs."""
    top_n: int | None = None
    """The most relevant documents alone; None = all."""
    documents: list[str] | None = None
    """To be shown in the answer; None = they are not."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """An ApiError."""

    status: int
    message: str
    kind: str
    """What the API calls its type."""
    param: str | None = None
    code: str | None = None
    unknown_model: tuple[str, str] | None = None
    """The name, where it is that, and the one that is served."""

    @classmethod
    def of(cls, error: ApiError) -> Refused:
        told = error.body["error"]
        name = (error.name, error.served) if isinstance(error, UnknownModel) else None
        return cls(error.status, told["message"], told["type"], told["param"], told["code"], name)

    def error(self) -> ApiError:
        """The same, but for its headers."""
        if self.unknown_model is not None:
            return UnknownModel(*self.unknown_model)
        return ApiError(self.status, self.message, type=self.kind, param=self.param, code=self.code)


Task = ChatTask | CompletionTask | GenerateTask | PoolingTask | Answered
