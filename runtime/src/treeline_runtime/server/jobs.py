"""What a request asks for, once it has been read: prompts as token ids, and how to answer them.

These go from the process that reads a large body to the one that answers it, as msgpack.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from treeline_runtime.messages import GenerateReq, SamplingParams, encode
from treeline_runtime.server.errors import ApiError
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


class GenerationJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation request, whichever API it came through: every prompt is answered `n` times."""

    rid: str
    """Names all of it: `/abort_request` takes it."""
    prompts: list[GenerateReq]
    """What is wanted for each, alike but for the prompt and what is said of it alone; without `rid` and `client`."""
    n: int = 1
    tenant: str | None = None
    """Whose names `rid` and `rids` are."""
    rids: list[str] | None = None
    """Ids of the generations, where the client chose them."""
    hides_cache: bool = False
    """The answer's body does not tell what was cached."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.input_ids) for prompt in self.prompts)

    @property
    def generations(self) -> int:
        return len(self.prompts) * self.n

    def check_copies(self) -> GenerationJob:
        """The job. Raises ApiError 400 where what its generations carry besides their prompts is too much: each has a
        copy of its own in every process."""
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
        return self

    def requests(self, client: str | None = None, *, uses_priority: bool = True) -> list[GenerateReq]:
        """One per choice, prompt by prompt. A seed gives each of a prompt's choices its own, reproducible one."""
        single = self.generations == 1
        rids = self.rids or [self.rid if single else f"{self.rid}:{index}" for index in range(self.generations)]
        choices = [(prompt, choice) for prompt in self.prompts for choice in range(self.n)]
        return [
            msgspec.structs.replace(
                prompt,
                rid=rid,
                client=client,
                sampling=_for_choice(prompt.sampling, choice),
                priority=prompt.priority if uses_priority else 0,
            )
            for rid, (prompt, choice) in zip(rids, choices, strict=True)
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


class Streaming(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an answer is to be sent."""

    on: bool = False
    usage: bool = False
    """A last chunk with the usage."""
    continuous_usage: bool = False
    """The usage so far in every chunk."""


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


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of the tokens an answer tells, besides their text."""

    logprobs: int | None = None
    """Of the output: the chosen ones, and of how many of the likeliest; None = nothing."""
    prompt_logprobs: int | None = None
    token_ids: bool = False
    """Of prompt and output."""

    @classmethod
    def checked(
        cls, logprobs: int | None, prompt_logprobs: int | None, token_ids: bool | None, streaming: bool | None
    ) -> Told:
        """Raises ApiError 400."""
        if streaming and prompt_logprobs is not None:
            raise ApiError(400, "'prompt_logprobs' come with whole answers, not with streams", param="prompt_logprobs")
        return cls(logprobs, prompt_logprobs, bool(token_ids))

    def request(
        self,
        ids: list[int],
        sampling: SamplingParams,
        namespace: str | None,
        priority: int | None,
        *,
        echo: bool = False,
    ) -> GenerateReq:
        """With the log probabilities that are sent; they also keep ids that have been sent from being withdrawn."""
        tops = [top for top in (self.logprobs, self.prompt_logprobs) if top is not None]
        start = 0 if (echo and self.logprobs is not None) or self.prompt_logprobs is not None else -1
        kept = self.token_ids and sampling.grammar is not None
        return GenerateReq(
            "",
            ids,
            sampling,
            namespace,
            return_logprob=bool(tops) or kept,
            logprob_start_len=start,
            top_logprobs_num=max(tops, default=0),
            priority=priority or 0,
        )

    def size(self, job: GenerationJob) -> int:
        """Bytes of an answer that the prompts' ids take."""
        return ID_CHARS * job.n * job.prompt_tokens if self.token_ids else 0


class _Read(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    ignored: tuple[str, ...] = ()
    """What the request says for nothing (`fields.ignore`)."""


class ChatTask(_Read, tag="chat", frozen=True):
    job: GenerationJob
    streaming: Streaming
    parsing: Parsing | None = None
    """How thoughts and calls are found in the output; None: it is all said."""
    shown: Shown = Shown()
    echo: str = ""
    """What each choice's content begins with."""
    told: Told = Told()


class CompletionTask(_Read, tag="completion", frozen=True):
    job: GenerationJob
    streaming: Streaming
    echoes: list[str]
    """One per prompt: its text if it is to come first, or ""."""
    told: Told = Told()


class GenerateTask(_Read, tag="generate", frozen=True):
    job: GenerationJob
    streaming: Streaming
    batched: bool
    with_text: bool
    """Each logprob comes with its token's text."""


class VectorsTask(_Read, tag="vectors", frozen=True):
    """Of `/v1/embeddings` and `/pooling`."""

    job: GenerationJob
    base64: bool
    dimensions: int | None = None
    """Those that are wanted; None = all."""


class ClassifyTask(_Read, tag="classify", frozen=True):
    job: GenerationJob
    activation: bool
    """Probabilities are wanted, not the head's own outputs."""


class ScoreTask(_Read, tag="score", frozen=True):
    job: GenerationJob
    activation: bool


class RerankTask(_Read, tag="rerank", frozen=True):
    job: GenerationJob
    activation: bool
    top_n: int | None
    """Results that are wanted, the most relevant ones; None = all."""
    documents: list[str] | None
    """To be shown in the answer; None = they are not."""


class ResponsesTask(_Read, tag="responses", frozen=True):
    """Of `/v1/responses`."""

    chat: ChatTask
    shown: bytes
    """What the answer repeats of the request: a JSON object."""


class MessagesTask(_Read, tag="messages", frozen=True):
    """Of `/v1/messages`."""

    chat: ChatTask
    fills_context: bool
    """The end of the context comes before that of the tokens that were asked for."""


class Answered(_Read, tag="answered", frozen=True):
    """The answer itself, as JSON."""

    body: bytes


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """An ApiError."""

    status: int
    message: str
    kind: str
    """What the API calls its type."""
    param: str | None = None
    code: str | None = None
    unknown_model: str | None = None
    """The name, where it is that."""


Task = (
    ChatTask
    | CompletionTask
    | GenerateTask
    | VectorsTask
    | ClassifyTask
    | ScoreTask
    | RerankTask
    | ResponsesTask
    | MessagesTask
    | Answered
)
