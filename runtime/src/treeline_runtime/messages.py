"""What the runtime's processes say to each other: tagged msgspec structs, msgpack on the wire, never pickle.

Direction decides the closed set of types a process accepts, so there is one typed decoder per direction:

    tokenizer manager ──GenerateReq, AbortReq, HeardReq, StateReq, DrainReq, administration──▶ scheduler
    detokenizer ──StopReq──▶ scheduler
    scheduler ──BatchTokenOut, Reply──▶ detokenizer ◀──DetokenizeInit── tokenizer manager
    detokenizer ──BatchTextOut, Reply──▶ tokenizer manager
    scheduler ──CacheUpdate, LoadUpdate──▶ publisher

This module imports neither torch nor anything that does: the HTTP process stays light.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from treeline_wire.load import TreelineLoad

GREEDY_BELOW = 1e-6
"""A temperature below this means greedy decoding."""
LARGEST_PRIORITY = (1 << 31) - 1
"""Of a request, either way."""
NO_PRIORITY = "this server does not go by priority: leave it out, or start the server with --schedule-policy priority"


MAX_STOP_TOKEN_IDS = 128
"""Of one request: the scheduler looks each token up among them."""
MAX_HIDDEN_STATES_BYTES = 128 << 20
"""Of one answer: it is copied from process to process."""
MAX_PROFILE_STEPS = 1000
"""A step leaves hundreds of kilobytes in memory until the trace is written."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output must be, from its first token on or from a marker on. Equal grammars are compiled once."""

    kind: Literal["json", "regex", "ebnf", "structural_tag", "choice"]
    source: str
    """json: a JSON Schema ("{}": any value; of `json_object`, '{"type":"object"}'). regex: a pattern that the whole
    output matches. ebnf: xgrammar's GBNF, whose first rule is `root`. structural_tag: xgrammar's, as JSON. choice: a
    JSON list of texts, one of which is the output."""
    after: str = ""
    """The output is free up to and with the first occurrence of this text (the end of reasoning); "" = none."""


class CustomProcessor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which logit processor a request wants, of those that its engine was started with, and with what."""

    name: str
    params: str = "{}"
    """A JSON object: each request reads its own."""

    @classmethod
    def of(cls, name: str, params: Mapping[str, Any]) -> CustomProcessor:
        """Raises TypeError for params that JSON has no words for, and ValueError for half of a surrogate pair."""
        return cls(name, msgspec.json.encode(params).decode())


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose the tokens of one request. `n` is expanded into n requests before this."""

    max_new_tokens: int = 128
    """0 is legal: prefill only."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 = all."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Stop strings: found by the detokenizer, which answers with StopReq."""
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    """Patterns: the output ends with the token after which its text has a match; nothing of it is left out."""
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """All others are never sampled; () = all are allowed."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last one is never sampled where the output ends with those before it."""
    seed: int | None = None
    grammar: Grammar | None = None
    grammar_param: str | None = None
    """The field of the request that asked for it, for errors."""
    logit_processor: CustomProcessor | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def excludes(self) -> bool:
        """Whether there may be no token left to choose."""
        return bool(self.allowed_token_ids or self.bad_words)


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended."""

    type: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    """The stop token id or stop string, for `stop`."""
    message: str | None = None
    status: int | None = None
    """HTTP status, for `abort` and `error`."""
    param: str | None = None
    """The field of the request that is at fault, where it is known."""


# ---- to the scheduler ------------------------------------------------------------------------------------


class GenerateReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Start one request. Exactly one terminal TokenOut answers it, whatever happens."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    namespace: str | None = None
    """Cache namespace (LoRA adapter, salt): requests of different namespaces never share pages."""
    client: str | None = None
    """Who takes turns with others where requests wait for work on the CPU; None: whom the edge has not named."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    """Logprobs of prompt tokens from this position on; -1 = of sampled tokens only."""
    top_logprobs_num: int = 0
    priority: int = 0
    """Which of two is more urgent is a setting (`schedule_low_priority_values_first`)."""
    pools: bool = False
    """A vector is wanted, and no text: `max_new_tokens` must be 0."""
    return_hidden_states: bool = False
    """The terminal message has them."""


class AbortReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """End `rid` now: one, several, or "" = every request. Idempotent; legal in every state, and for unknown ids."""

    rid: str | list[str] = ""


class FlushReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Empty the prefix cache. Answered by Reply; refused while requests are running or waiting."""

    id: str


class StateReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Ask for a view of the scheduler; answered by Reply with `data`."""

    id: str
    what: Literal["radix", "load"]


class HeardReq(msgspec.Struct, tag=True, frozen=True):
    """Ask whether what was sent before has been taken. Answered by Reply."""

    id: str


class SleepReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Give the device's memory back: the KV cache, which is flushed, and the weights. Answered by Reply; refused while
    requests are running or waiting (`data` says busy). Until WakeReq new requests are refused."""

    id: str
    level: Literal[1, 2] = 1
    """1: weights stay in the host's memory; 2: they are read again."""


class WakeReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """End the sleep. Answered by Reply; where that fails it sleeps on."""

    id: str


class UpdateWeightsReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Serve the weights of another checkpoint of the same architecture, and flush the cache. Answered by Reply; refused
    while requests are running or waiting; where it fails the old weights serve on."""

    id: str
    path: str


class StartProfileReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Trace so many steps into a file in `folder`. Answered by Reply."""

    id: str
    folder: str
    steps: int


class StopProfileReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """End the trace now. Answered by Reply, whose `data` has the file's `path`."""

    id: str


class DrainReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """From now on the load report says draining. Running and new requests go on."""


class StopReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """A stop string was found in the text of `rid`: finish it with reason stop. Idempotent."""

    rid: str
    matched: str | None = None


# ---- to the detokenizer ----------------------------------------------------------------------------------


class DetokenizeInit(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Sent before the GenerateReq of the same rid goes to the scheduler.

    The two travel on different connections, so tokens may overtake it: the detokenizer keeps tokens of an unknown
    rid until it is there.
    """

    rid: str
    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    return_logprob_text: bool = False
    """Decode each token of the logprob lists on its own (TextOut's triples carry the text)."""
    min_new_tokens: int = 0
    """Stop strings that are complete within so many tokens do not count."""
    waits_for_end: bool = False
    """A stop string ends the text, but the request only with the scheduler's terminal message, which has more."""
    stop_regex: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: GenerateReq, rid: str) -> DetokenizeInit:
        """rid: what the scheduler calls the request."""
        sampling = request.sampling
        return cls(
            rid,
            sampling.stop,
            sampling.no_stop_trim,
            sampling.skip_special_tokens,
            request.return_logprob,
            sampling.min_new_tokens,
            request.return_hidden_states,
            sampling.stop_regex,
        )


TokenLogprob = tuple[float | None, int]
"""(log probability, token id). The first prompt token has no probability: None."""


class HiddenStates(msgspec.Struct, frozen=True, gc=False):
    """The last layer's output, normalised, at consecutive positions: what the logits of the next token came from.

    Of each position that was computed for this request: not of those that the cache supplied, which come first, nor of
    the last token that was sampled, which nothing was computed from.
    """

    first: int
    """The position of the first row: as many prompt tokens were cached when the request was first admitted."""
    size: int
    """Of a row."""
    data: bytes
    """(rows x size,) float32, little-endian."""


class TokenOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to one request in one step. `finish` set = terminal: nothing follows for this rid."""

    rid: str
    token_ids: list[int]
    """New since the last message."""
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the cache supplied when the request was first admitted."""
    completion_tokens: int = 0
    """So far, these included."""
    retractions: int = 0
    queued_s: float = 0.0
    """What the request waited for its turn, in its first message."""
    output_token_logprobs: list[TokenLogprob] | None = None
    """One per entry of `token_ids`, when asked for."""
    output_top_logprobs: list[list[TokenLogprob]] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    """Prompt tokens from `logprob_start_len` on; only in the first message."""
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None
    vector: bytes | None = None
    """float32 numbers: what a request that pools asked for, in its last message."""
    hidden_states: HiddenStates | None = None
    """With `finish`, when asked for."""
    withdrawn: int = 0
    """So many of the last ids sent before are not part of the output: `token_ids` stand in their place, too, and begin
    with their text."""


class BatchTokenOut(msgspec.Struct, tag=True, frozen=True):
    outs: list[TokenOut]


class Reply(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Answer to a message with an `id`; the detokenizer passes it on unread, so it overtakes no tokens there."""

    id: str
    ok: bool = True
    message: str | None = None
    data: dict[str, Any] | None = None


# ---- to the tokenizer manager ----------------------------------------------------------------------------

TextLogprob = tuple[float | None, int, str | None]
"""(log probability, token id, text of that token alone)."""


class Logprobs(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """TokenOut's log probabilities with the texts of the tokens; None for what was not asked for."""

    output_tokens: list[TextLogprob] | None = None
    output_tops: list[list[TextLogprob]] | None = None
    input_tokens: list[TextLogprob] | None = None
    input_tops: list[list[TextLogprob] | None] | None = None


class TextOut(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """TokenOut with text. Concatenated `text` of a request = its full text, trimmed at the stop string."""

    rid: str
    text: str
    token_ids: list[int]
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    retractions: int = 0
    queued_s: float = 0.0
    """As in TokenOut."""
    logprobs: list[msgspec.Raw] = []
    """`Logprobs`, encoded, in order: an answer may have millions, which become objects only where they are shown."""
    vector: bytes | None = None
    hidden_states: HiddenStates | None = None
    withdrawn: int = 0
    """As in TokenOut; the text is new in any case."""


class BatchTextOut(msgspec.Struct, tag=True, frozen=True):
    outs: list[TextOut]


# ---- to the publisher ------------------------------------------------------------------------------------


class Stored(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """A run of consecutive pages entered the cache."""

    block_hashes: list[int]
    """Unsigned 64-bit, one per page, of the digest chain (treeline_wire.events)."""
    parent_hash: int | None
    """The page before the run; None = the run starts a sequence."""
    token_ids: list[int]
    """len(block_hashes) x page_size."""
    namespace: str | None = None
    output_from: int = 0
    """Index into `token_ids` from which tokens were sampled; len(token_ids) if none were."""


class Removed(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Pages left the cache, leaves first."""

    block_hashes: list[int]


class Cleared(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """The cache is empty."""


CacheEvent = Stored | Removed | Cleared


class CacheUpdate(msgspec.Struct, tag=True, frozen=True):
    """What one step did to the cache, in order."""

    events: list[CacheEvent]


class LoadUpdate(TreelineLoad, tag=True, frozen=True, omit_defaults=True):
    """The scheduler's load after a step that changed it: our report to routers, but for what the publisher puts on it
    (`epoch`, `seq`, `in_flight`), and what SGLang's report has besides."""

    tokens_used: int = 0
    total_prefill_uncached_tokens: int = 0
    """Computed since start."""
    total_prefill_busy_us: int = 0
    total_jumps: int = 0
    total_forced_tokens: int = 0
    """By which jumps made outputs longer, since start."""
    asleep: int = 0
    """Its level (SleepReq); 0 = awake. Routers are sent that it drains."""

    @property
    def used_share(self) -> float:
        """Of the KV cache, held by running requests: 0 to 1."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0

    @property
    def tokens_total(self) -> int:
        """The KV cache's size."""
        return self.pages_total * self.page_size


# ---- encoding --------------------------------------------------------------------------------------------

AdminReq = FlushReq | SleepReq | WakeReq | UpdateWeightsReq | StartProfileReq | StopProfileReq
ToScheduler = GenerateReq | AbortReq | HeardReq | StateReq | DrainReq | StopReq | AdminReq
ToDetokenizer = DetokenizeInit | BatchTokenOut | Reply
ToTokenizer = BatchTextOut | Reply
ToPublisher = CacheUpdate | LoadUpdate
FromScheduler = BatchTokenOut | Reply

encode = msgspec.msgpack.Encoder().encode
"""Any message → bytes."""

# What a process accepts beside these, about the processes themselves, is in `ipc`.
decode_to_scheduler = msgspec.msgpack.Decoder(ToScheduler).decode
decode_to_detokenizer = msgspec.msgpack.Decoder(ToDetokenizer).decode
decode_logprobs = msgspec.msgpack.Decoder(Logprobs).decode
