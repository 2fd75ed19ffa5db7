"""The tasks that bodies become: prompts as token ids, and how to answer.

The process that read a large body sends its task as msgpack to the one that answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from treeline_runtime.media.sources import PromptMedia
from treeline_runtime.messages import GenerateReq, SamplingParams, encode
from treeline_runtime.server.errors import ApiError, UnknownModel, wrong
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
    "ollama_chat",
    "ollama_generate",
    "transcription",
]


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client, as the edge reports it; see `http.ApiRequest`."""

    tenant: str | None = None
    """The client whose cache the request uses; None means the shared cache."""
    shares_cache: bool = False
    """Cached counts are not reported."""
    adapters: dict[str, str] = {}
    """The LoRA adapters that it may ask for: name → digest, "" while it is being unloaded."""
    adapter: str | None = None
    """The digest of the one that it asks for."""
    picked: bool = False
    """It comes through our edge, where the picker alone names a data-parallel rank."""


class _Read(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    ignored: tuple[str, ...] = ()
    """Ignored fields of the request (`fields.ignore`)."""


class Answered(_Read, tag="answered", frozen=True):
    """The answer itself, as JSON."""

    body: bytes


class Generations(_Read, frozen=True, kw_only=True):
    """Generations of a request, of any API: every prompt is answered `n` times."""

    rid: str
    model: str | None = None
    """The adapter's name, if it asks for one."""
    prompts: list[GenerateReq]
    """The request for each, without `rid`, `client` and `pages_from`."""
    n: int = 1
    rids: list[str] | None = None
    """Ids of the generations, if the client chose them."""
    hides_cache: bool = False
    """The answer's body hides cached counts."""
    stream: bool = False
    rank: int | None = None
    """The data-parallel rank that the body names."""
    media: list[PromptMedia] = []
    """The images of each prompt, until they have been read; [] = none has any."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.input_ids) for prompt in self.prompts)

    @property
    def generations(self) -> int:
        return len(self.prompts) * self.n

    @property
    def names(self) -> list[str]:
        if self.generations == 1:
            return self.rids or [self.rid]
        return self.rids or [f"{self.rid}:{index}" for index in range(self.generations)]

    def check_copies(self) -> None:
        """Raises ApiError 400 if its generations carry too many bytes besides prompts: processes copy them."""
        size = 0
        for prompt in self.prompts:
            size += self.n * len(encode(prompt.sampling))
            if size > MAX_COPIED_BYTES:
                raise wrong(
                    prompt.sampling.grammar_param,
                    f"The output's settings (grammar, stop strings, biases) are too large for {self.generations} "
                    f"generations at once: together they may have {MAX_COPIED_BYTES} bytes of settings",
                )

    def requests(
        self, client: str | None = None, pages_from: str | None = None, *, uses_priority: bool = True
    ) -> list[GenerateReq]:
        """One per choice, prompt by prompt. A seed gives each choice its own, reproducible seed."""
        choices = [(prompt, choice) for prompt in self.prompts for choice in range(self.n)]
        return [
            msgspec.structs.replace(
                prompt,
                rid=rid,
                client=client,
                pages_from=pages_from,
                sampling=_for_choice(prompt.sampling, choice),
                priority=prompt.priority if uses_priority else 0,
            )
            for rid, (prompt, choice) in zip(self.names, choices, strict=True)
        ]


def size_of(request: GenerateReq) -> int:
    """Bytes of a generation: its message, with the prompt counted as a list."""
    carried = len(encode(msgspec.structs.replace(request, input_ids=[])))
    return GENERATION_BYTES + carried + BYTES_PER_TOKEN * len(request.input_ids)


def _for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    if not choice or sampling.seed is None:
        return sampling
    seed = (sampling.seed + choice) & ((1 << 63) - 1)
    return msgspec.structs.replace(sampling, seed=seed)


class Shown(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of a chat's output that are sent, and their form."""

    reasoning: bool = True
    reasoning_at_once: bool = False
    """Send the reasoning in one piece, at its end."""
    several_calls: bool = True
    """Otherwise only the first call is sent."""
    special_tokens: bool = False
    """Keep the output's special tokens."""


ID_CHARS = 8
"""Bytes of a token id in JSON, with its comma."""


class TextTask(Generations, frozen=True, kw_only=True):
    """A task whose answer has OpenAI's form; the fields say what the answer has besides text."""

    usage: bool = False
    """A stream ends with a usage chunk."""
    continuous_usage: bool = False
    """Every chunk has the usage so far."""
    logprobs: int | None = None
    """Log probabilities of the output: of the chosen tokens and of this many most likely ones; None = none."""
    prompt_logprobs: int | None = None
    token_ids: bool = False
    """The answer has the token ids of prompt and output."""

    @property
    def ids_bytes(self) -> int:
        """Bytes of the prompts' ids in an answer."""
        return ID_CHARS * self.n * self.prompt_tokens if self.token_ids else 0


class ChatTask(TextTask, tag="chat", frozen=True, kw_only=True):
    """A chat in any of the APIs, or a text of Ollama's."""

    parsing: Parsing | None = None
    """How to find thoughts and calls in the output; None: all of it is text."""
    shown: Shown = Shown()
    echo: str = ""
    """The beginning of each choice's content."""
    repeated: bytes = b""
    """The fields that an answer of `/v1/responses` repeats of the request, as a JSON object."""
    fills_context: bool = False
    """For `/v1/messages`: the context ends before the requested tokens."""

    def sampled(self, **changed: Any) -> ChatTask:
        """The task with other settings of its only prompt's output."""
        (prompt,) = self.prompts
        sampling = msgspec.structs.replace(prompt.sampling, **changed)
        return msgspec.structs.replace(self, prompts=[msgspec.structs.replace(prompt, sampling=sampling)])


class TranscriptTask(ChatTask, tag="transcript", frozen=True, kw_only=True):
    """A chat about a recording, which is answered with its text."""

    format: Literal["json", "text"] = "json"
    knows_language: bool = False
    """The answer is the text alone."""


class CompletionTask(TextTask, tag="completion", frozen=True, kw_only=True):
    echoes: list[str]
    """Per prompt: its text to be echoed, or ""."""


class GenerateTask(Generations, tag="generate", frozen=True, kw_only=True):
    batched: bool
    with_text: bool
    """Each logprob has its token's text."""


class PoolingTask(Generations, tag="pooling", frozen=True, kw_only=True):
    """Vectors, or numbers made of them."""

    base64: bool = False
    dimensions: int | None = None
    """Requested dimensions of a vector; None = all."""
    activation: bool = True
    """Probabilities instead of the head's outputs."""
    top_n: int | None = None
    """Only the most relevant documents; None = all."""
    documents: list[str] | None = None
    """Documents to repeat in the answer; None = do not repeat them."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """An ApiError."""

    status: int
    told: dict[str, Any]
    """Message, type, param and code."""
    unknown_model: tuple[str, ...] | None = None
    """The name and the served names, if the error is an unknown model."""

    @classmethod
    def of(cls, error: ApiError) -> Refused:
        name = (error.name, *error.served) if isinstance(error, UnknownModel) else None
        return cls(error.status, error.told, name)

    def error(self) -> ApiError:
        """The error without its headers."""
        if self.unknown_model is not None:
            return UnknownModel(*self.unknown_model)
        return ApiError(self.status, **self.told)


Task = ChatTask | TranscriptTask | CompletionTask | GenerateTask | PoolingTask | Answered
