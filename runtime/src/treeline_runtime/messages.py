"""Messages between the runtime's processes: tagged msgspec structs as msgpack, never pickle.

Each direction has a closed set of types and so one typed decoder:

    tokenizer manager ──GenerateReq, AbortReq, HeardReq, StateReq, DrainReq, administration──▶ scheduler
    detokenizer ──StopReq──▶ scheduler
    scheduler ──BatchTokenOut, Reply──▶ detokenizer ◀──DetokenizeInit── tokenizer manager
    detokenizer ──BatchTextOut, Reply──▶ tokenizer manager

What the publisher gets is in `published`. Both import neither torch nor anything that does, so that the HTTP process
stays small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from treeline_wire.media import Kind

GREEDY_BELOW = 1e-6
"""Lower temperatures mean greedy decoding."""
LARGEST_PRIORITY = (1 << 31) - 1
"""Bounds of a request's priority."""
NO_PRIORITY = "this server ignores priorities: leave it out, or start the server with --schedule-policy priority"


MAX_STOP_TOKEN_IDS = 128
"""Stop token ids of a request: the scheduler compares every token with them."""
MAX_HIDDEN_STATES_BYTES = 128 << 20
"""The largest hidden states of one answer, in bytes: they are copied from process to process."""
MAX_PROFILE_STEPS = 1000
"""The most steps of a trace: each keeps hundreds of kilobytes in memory until it is written."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that an output must have, from its first token or from a marker on. Equal grammars are compiled once."""

    kind: Literal["json", "regex", "ebnf", "structural_tag", "choice"]
    source: str
    """json: a JSON Schema ("{}": any value; `json_object`: '{"type":"object"}'). regex: a pattern for the whole output.
    ebnf: xgrammar's GBNF with first rule `root`. structural_tag: xgrammar's, as JSON. choice: a JSON list of texts."""
    after: str = ""
    """The output is free up to and including the first occurrence of this text (the end of reasoning); "" = none."""


class CustomProcessor(msgspec.Struct, frozen=True, omit_defaults=True):
    """The logit processor of a request, one of those given at start, with its parameters."""

    name: str
    params: str = "{}"
    """A JSON object, which each request parses."""

    @classmethod
    def of(cls, name: str, params: Mapping[str, Any]) -> CustomProcessor:
        """Raises TypeError for params that JSON cannot express, and ValueError for lone surrogates."""
        return cls(name, msgspec.json.encode(params).decode())


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rules for choosing a request's tokens. Clients' `n` has become n requests by then."""

    max_new_tokens: int = 128
    """0 means prefill only."""
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
    """Stop strings, found by the detokenizer, which answers with StopReq."""
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    """Patterns: the output ends with the token that completes a match; nothing is cut off."""
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """All others are never sampled; () = all are allowed."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences: the last one is never sampled after those before it."""
    seed: int | None = None
    grammar: Grammar | None = None
    grammar_param: str | None = None
    """The field of the request with the grammar, for errors."""
    logit_processor: CustomProcessor | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def excludes(self) -> bool:
        """Whether all tokens may be excluded."""
        return bool(self.allowed_token_ids or self.bad_words)


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended."""

    type: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    """The stop token id or stop string that ended it."""
    message: str | None = None
    status: int | None = None
    """HTTP status, for `abort` and `error`."""
    param: str | None = None
    """The field of the request at fault, if known."""


# ---- to the scheduler ------------------------------------------------------------------------------------


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image, video or sound in a prompt: where its tokens are, and the input of the encoder."""

    kind: Kind
    start: int
    """Its first token's index in `input_ids`, which has `treeline_wire.media.item_ids` there."""
    count: int
    """Its tokens."""
    digest: bytes
    grid: tuple[int, int, int]
    """Frames, rows and columns of patches, before any are merged. Of a spectrogram: frames with sound, 1, 1."""
    shape: tuple[int, ...]
    """Of the processor's output."""
    path: str
    """A file in shared memory with that output, float32. It stays while the request lives; others may read it, too."""
    offset: int = 0
    """Where the output begins in the file, in bytes."""
    seconds: float = 1.0
    """From a frame to the next."""


class GenerateReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Starts a request. Exactly one final TokenOut answers it."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    namespace: str | None = None
    """Cache namespace (LoRA adapter, salt): different ones never share pages. The digest in it selects the adapter."""
    client: str | None = None
    """The client for taking turns; None if the edge has not named one."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    """Logprobs of prompt tokens from this position on; -1 = of sampled tokens only."""
    top_logprobs_num: int = 0
    priority: int = 0
    """Whether higher or lower is more urgent is a setting (`schedule_low_priority_values_first`)."""
    pools: bool = False
    """A vector is requested, not text: `max_new_tokens` must be 0."""
    return_hidden_states: bool = False
    """The final message has them."""
    items: tuple[MediaItem, ...] = ()
    """By their place in the prompt."""
    pages_from: str | None = None
    """Another runtime that may have pages of the prompt, as in the header PAGES_FROM."""


class AbortReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Ends `rid` now: one, several, or "" = every request. Idempotent; allowed in every state and for unknown ids."""

    rid: str | list[str] = ""


class FlushReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Empties the prefix cache. Answered by Reply; refused while requests are running or waiting."""

    id: str


class StateReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Asks for a view of the scheduler; answered by Reply with `data`."""

    id: str
    what: Literal["radix", "load"]


class HeardReq(msgspec.Struct, tag=True, frozen=True):
    """Asks whether earlier messages have been taken. Answered by Reply."""

    id: str


class SleepReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Frees the device's memory: the KV cache, which is flushed, and the weights. Answered by Reply; refused while
    requests are running or waiting (`data` says busy). New requests are refused until WakeReq."""

    id: str
    level: Literal[1, 2] = 1
    """1: weights stay in host memory; 2: they are read again."""


class WakeReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Ends the sleep. Answered by Reply; if it fails, the engine stays asleep."""

    id: str


class UpdateWeightsReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Loads weights of the same architecture and flushes the cache; as FlushReq. If it fails, the old ones stay."""

    id: str
    path: str


class LoadAdapterReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Loads a LoRA adapter from below `lora_root`, if its digest begins so. Answered by Reply, with it in `data`."""

    id: str
    name: str
    path: str
    digest: str = ""


class UnloadAdapterReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Forgets the adapter of this name. Answered by Reply; refused while requests use it (`data` says busy)."""

    id: str
    name: str


class StartProfileReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Traces so many steps into a file in `folder`. Answered by Reply."""

    id: str
    folder: str
    steps: int


class StopProfileReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Ends the trace now. Answered by Reply, with the file's `path` in `data`."""

    id: str


class DrainReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """The load report now says draining. Running and new requests continue."""


class StopReq(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """A stop string was found in the text of `rid`: finish it with reason stop. Idempotent."""

    rid: str
    matched: str | None = None


class StepRow(msgspec.Struct, tag=True, frozen=True):
    """From another data-parallel rank that shares experts: what it would compute in the next step."""

    step: int
    rank: int
    tokens: int
    """0: it has no work."""
    mode: Literal["decode graph", "prompt graph", "eager"]
    bucket: int
    """As in `Launch`."""


# ---- to the detokenizer ----------------------------------------------------------------------------------


class DetokenizeInit(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Sent before the GenerateReq of the same rid.

    The two take different connections, so tokens may come first: the detokenizer keeps tokens of an unknown rid.
    """

    rid: str
    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    return_logprob_text: bool = False
    """Decode each token of the logprob lists on its own (TextOut's triples carry the text)."""
    min_new_tokens: int = 0
    """Stop strings completed within so many tokens do not count."""
    waits_for_end: bool = False
    """A stop string ends the text, but the request waits for the scheduler's final message."""
    stop_regex: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: GenerateReq, rid: str) -> DetokenizeInit:
        """rid: the scheduler's name for the request."""
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
"""(log probability, token id). The first prompt token has None."""


class HiddenStates(msgspec.Struct, frozen=True, gc=False):
    """The last layer's normalised output at consecutive positions, from which the next token's logits are computed.

    For each position computed for this request: not those from the cache, which come first, nor the last sampled token.
    """

    first: int
    """The first row's position: the number of prompt tokens cached when it was first admitted."""
    size: int
    """Elements of a row."""
    data: bytes
    """(rows x size,) float32, little-endian."""


class Speculated(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What became of the guesses of a request's next tokens."""

    steps: int = 0
    """Steps that verified some."""
    guesses: int = 0
    right: int = 0


class RequestState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request's state after one step."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens from the cache when the request was first admitted."""
    completion_tokens: int = 0
    """Output tokens so far, including these."""
    retractions: int = 0
    queued_s: float = 0.0
    """The request's time in the queue, in its first message."""
    vector: bytes | None = None
    """float32 numbers of a vector request, in its last message."""
    hidden_states: HiddenStates | None = None
    """With `finish`, if requested."""
    speculated: Speculated | None = None
    """None: nothing was guessed."""
    withdrawn: int = 0
    """Number of the last ids sent before that these replace: `token_ids` begin with their text."""


class TokenOut(RequestState, frozen=True, omit_defaults=True):
    """The new tokens and the state of a request after one step. With `finish` it is the request's last message."""

    rid: str
    token_ids: list[int]
    """New since the last message."""
    finish: FinishReason | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    """One per entry of `token_ids`, if requested."""
    output_top_logprobs: list[list[TokenLogprob]] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    """Prompt tokens from `logprob_start_len` on; only in the first message."""
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None

    def without(self, last: int) -> TokenOut:
        """Without its last tokens, at least one, and what belongs to them: a stop string is before them."""
        states, speculated = self.hidden_states, self.speculated
        if states is not None:
            states = msgspec.structs.replace(states, data=states.data[: -4 * states.size * last])
        if speculated is not None:  # the very last token was sampled after all guesses
            speculated = msgspec.structs.replace(speculated, right=max(speculated.right - last + 1, 0))
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:-last],
            output_token_logprobs=self.output_token_logprobs and self.output_token_logprobs[:-last],
            output_top_logprobs=self.output_top_logprobs and self.output_top_logprobs[:-last],
            completion_tokens=self.completion_tokens - last,
            hidden_states=states,
            speculated=speculated,
        )


class BatchTokenOut(msgspec.Struct, tag=True, frozen=True):
    outs: list[TokenOut]


class Reply(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Answers a message with an `id`. The detokenizer passes it on unread, so it overtakes no tokens there."""

    id: str
    ok: bool = True
    message: str | None = None
    data: dict[str, Any] | None = None


# ---- to the tokenizer manager ----------------------------------------------------------------------------

TextLogprob = tuple[float | None, int, str | None]
"""(log probability, token id, that token's text)."""


class Logprobs(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """TokenOut's log probabilities with token texts; None if not requested."""

    output_tokens: list[TextLogprob] | None = None
    output_tops: list[list[TextLogprob]] | None = None
    input_tokens: list[TextLogprob] | None = None
    input_tops: list[list[TextLogprob] | None] | None = None


class TextOut(RequestState, frozen=True, omit_defaults=True, gc=False):
    """TokenOut with text, which is new even where ids are withdrawn. A request's joined `text` is its whole text, cut
    at the stop string."""

    rid: str
    text: str
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[msgspec.Raw] = []
    """`Logprobs`, encoded, in order: an answer may have millions, decoded only where they are shown."""


class BatchTextOut(msgspec.Struct, tag=True, frozen=True):
    outs: list[TextOut]


# ---- encoding --------------------------------------------------------------------------------------------

AdapterReq = LoadAdapterReq | UnloadAdapterReq
AdminReq = FlushReq | SleepReq | WakeReq | UpdateWeightsReq | AdapterReq | StartProfileReq | StopProfileReq
ToScheduler = GenerateReq | AbortReq | HeardReq | StateReq | DrainReq | StopReq | StepRow | AdminReq
ToDetokenizer = DetokenizeInit | BatchTokenOut | Reply
ToTokenizer = BatchTextOut | Reply
FromScheduler = BatchTokenOut | Reply

encode = msgspec.msgpack.Encoder().encode
"""Any message → bytes."""

# What a process accepts beside these, about the processes themselves, is in `ipc`.
decode_to_scheduler = msgspec.msgpack.Decoder(ToScheduler).decode
decode_to_detokenizer = msgspec.msgpack.Decoder(ToDetokenizer).decode
decode_logprobs = msgspec.msgpack.Decoder(Logprobs).decode
