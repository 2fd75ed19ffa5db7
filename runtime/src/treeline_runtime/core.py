"""The scheduler's data: Req and Batch (SamplingParams is in messages).

Lengths of a request, in tokens, always in this order:

    0 … tree_len … kv_len … device_len … len(tokens)

    tree_len     kept in the radix tree under this request's lock (whole pages)
    kv_len       keys and values computed, results processed
    device_len   computed, or being computed by launched batches
    tokens       prompt and the output known so far; with overlap, device_len may run ahead of it by a token, and
                 where a step gave several, or after a jump (`scheduler.grammars`), it stays behind by many
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from treeline_wire.namespaces import adapter_of

from treeline_runtime.messages import FinishReason, GenerateReq, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from treeline_runtime.kvcache import Node, Pages
    from treeline_runtime.kvcache.host import Lower
    from treeline_runtime.kvcache.store import Fetch
    from treeline_runtime.models.pooler import Vector
    from treeline_runtime.models.pooling import Pooling
    from treeline_runtime.sampling import Constraint, Processing
    from treeline_runtime.scheduler.drafting import Drafting
    from treeline_runtime.scheduler.media import Media


_PAGES_FROM = re.compile(r"([^;]+)(?:;within=([0-9]{1,6}(?:\.[0-9]{1,3})?))?")
ANSWER_S, MOST_WITHIN_S = 1.0, 60.0
"""Another runtime is given so long to say which pages it has; at most so long, if it is computing them."""


@dataclass(slots=True)
class Remote:
    """Another runtime that may have pages of a prompt."""

    address: str
    within_s: float = 0.0
    """It is computing them, and may take so long for each; 0: it has them, or has them not."""
    until: float = inf
    """When it is asked and waited for no more, by the scheduler's clock; inf: that begins when it is asked next."""
    is_asked: bool = False
    held: frozenset[bytes] = frozenset()
    """The pages that it has."""

    @classmethod
    def of(cls, header: str) -> Remote | None:
        """Reads the header PAGES_FROM; None if it has another form."""
        if (found := _PAGES_FROM.fullmatch(header)) is None:
            return None
        return cls(found[1], min(float(found[2] or 0.0), MOST_WITHIN_S))


@dataclass(slots=True, eq=False)
class Req:
    """One sequence, from arrival to its final message. Compared by identity."""

    rid: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    """The user's, or drawn on arrival. A sampled token depends only on logits, this, and its index."""
    stop_ids: frozenset[int]
    max_new_tokens: int
    """The user's limit, or less where the context ends."""
    namespace: str | None = None
    adapter: str | None = None
    """The digest of its LoRA adapter, which its namespace contains; None: the model itself."""
    client: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    priority: int = 0
    """Higher is more urgent."""
    needs_all: bool = False
    """A vector needs every position's hidden state, so the cache supplies none."""
    return_hidden_states: bool = False
    media: Media | None = None
    """The images and videos in its prompt. None: it has none."""
    constraint: Constraint | None = None
    """The constraint on its output, which it has accepted so far. None: no constraint."""
    processor: Processing | None = None
    """Changes its logits, once per output token. None: no processor."""
    drafting: Drafting | None = None
    """What guesses its next tokens. None: nothing does, or it has no output yet."""
    draft: list[int] = field(default_factory=list)
    """Guesses after its known tokens, for the next step or being verified by the launched one."""

    # waiting: filled by PrefillManager
    key: bytes = b""
    """The cache key of `tokens` at the time of queueing."""
    digests: list[bytes] = field(default_factory=list)
    """The digests of its first pages, as far as they were needed."""
    remote: Remote | None = None
    """Another runtime that may have its pages; None once it is not to be asked."""
    loaded: bool = False
    """Whether pages of the host were loaded for it, or were not to be, since it was queued."""
    fetched: int = 0
    """Pages of its sequence up to which the disk or a peer was asked since it was queued."""
    fetch: Fetch | None = None
    """What it waits for, or has waited for: pages on their way to the host."""
    loaded_from: Lower | None = None
    """The furthest place from which pages were loaded for it."""
    arrival: int = 0
    waiting_since: float = 0.0
    """When it was last queued, by the scheduler's clock."""
    waited_s: float = 0.0
    """Total time in the queue until it was last admitted."""
    uncached_tokens: int = 0
    """Tokens still to prefill; an estimate while waiting."""

    # admitted: filled by PrefillManager and CacheManager
    row: int = -1
    slot: int = -1
    """Of its adapter on the device; -1: it has none."""
    num_pages: int = 0
    handle: Node | None = None
    """Its lock on the tree."""
    tree_len: int = 0
    kv_len: int = 0
    device_len: int = 0
    cached_tokens: int = -1
    """Tokens from the cache when first admitted; -1 before."""
    launched_tokens: int = 0
    """Output tokens sampled by launched batches, at least output_len."""
    in_flight: int = 0
    """Launched, unprocessed batches with this request; its pages may not be released meanwhile."""
    overtaken: int = -1
    """Set when the request is rolled back while a batch with it is launched: results of that batch count only up to
    this position, and its sampled token does not. -1 otherwise."""
    jumps_from: int = 0
    """No jump before the output has this many tokens."""
    deferred: list[tuple[int, Pages]] = field(default_factory=list)
    """Duplicate pages to free after this many more of its launched batches are processed."""
    retractions: int = 0
    finish: FinishReason | None = None
    """Set once; the final message has been queued."""
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top_logprobs: list[list[TokenLogprob] | None] = field(default_factory=list)
    input_logprobs_sent: bool = False
    told: int = 0
    """Output tokens that messages have reported and that still stand."""
    withdrawn: int = 0
    """Reported output tokens that were replaced since the last message."""
    pooled: Vector | None = None
    """The sum of chunks so far for the requested vector; None before, and for text."""
    hidden_from: int = 0
    """The position of the first row of `hidden`."""
    hidden: list[npt.NDArray[np.float32]] = field(default_factory=list)
    """Hidden states of consecutive positions, in parts; kept across a retraction."""
    hidden_end: int = 0
    """The position after the last row of `hidden`."""
    vector: bytes | None = None
    """The vector, once its prompt is computed."""

    @classmethod
    def of(
        cls,
        message: GenerateReq,
        *,
        seed: int,
        eos_ids: tuple[int, ...],
        max_new_tokens: int,
        arrival: int,
        pooling: Pooling | None = None,
        priority: int = 0,
        media: Media | None = None,
    ) -> Req:
        sampling = message.sampling
        ids = message.input_ids if pooling is None else pooling.trimmed(message.input_ids)
        endless = sampling.ignore_eos and sampling.grammar is None  # a grammar's end is an end
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if endless else frozenset(eos_ids))
        return cls(
            rid=message.rid,
            tokens=list(ids),
            prompt_len=len(ids),
            sampling=sampling,
            seed=seed,
            stop_ids=stop_ids,
            max_new_tokens=max_new_tokens,
            namespace=message.namespace,
            adapter=adapter_of(message.namespace),
            client=message.client,
            return_logprob=message.return_logprob,
            logprob_start_len=message.logprob_start_len,
            top_logprobs_num=message.top_logprobs_num,
            needs_all=pooling is not None and pooling.needs_all,
            return_hidden_states=message.return_hidden_states,
            remote=None if message.pages_from is None else Remote.of(message.pages_from),
            arrival=arrival,
            priority=priority,
            media=media,
        )

    def awaits_pages(self, now: float) -> bool:
        """Whether pages are on their way to the host for it, or are asked for."""
        fetching = self.fetch is not None and not self.fetch.over
        return fetching or (self.remote is not None and self.remote.is_asked and now < self.remote.until)

    @property
    def begun(self) -> bool:
        """Whether it was ever admitted."""
        return self.cached_tokens >= 0

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def take_tokens(self, tokens: Iterable[int]) -> FinishReason | None:
        """Appends tokens to the output, up to one that ends it. Returns why it ends, or None. Raises what the
        constraint raises; the output is then as before that token."""
        finish: FinishReason | None = None
        for token in tokens:
            done = False
            if self.constraint is not None:
                self.constraint.accept(token)
                done = self.constraint.finished
            self.tokens.append(token)
            if token in self.stop_ids and (done or self.output_len > self.sampling.min_new_tokens):
                finish = FinishReason("stop", matched=token)
            elif done:
                finish = FinishReason("stop")
            elif self.output_len >= self.max_new_tokens:
                finish = FinishReason("length")
            if finish is not None:
                break
        return finish

    def replace_tokens(self, kept: int, append: list[int]) -> None:
        """Keeps the first `kept` tokens (at least the prompt) and appends these."""
        self.tokens[kept:] = append
        if (standing := min(self.told, kept - self.prompt_len)) < self.told:
            self.withdrawn += self.told - standing
            self.told = standing
        self.roll_back(kept)

    def roll_back(self, kept: int) -> None:
        """Lets the next step begin after the first `kept` tokens. Later results, also of the launched batch, do not
        count."""
        self.kv_len = min(self.kv_len, kept)
        self.device_len = min(self.device_len, kept)
        self.launched_tokens = self.output_len
        if self.in_flight:
            assert self.in_flight == 1, f"rolled back with more than one batch in flight: {self}"
            self.overtaken = kept

    @property
    def delays(self) -> bool:
        """Whether its next token depends on earlier ones in a way that only the CPU knows."""
        return self.constraint is not None or self.processor is not None

    @property
    def wants_input_logprobs(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0 and not self.input_logprobs_sent

    def take_hidden(self, rows: npt.NDArray[np.float32], end: int) -> None:
        """Adds hidden states; rows (positions, hidden), the last one of position end - 1. Known positions are
        skipped."""
        start = end - len(rows)
        if not self.hidden:
            self.hidden_from = self.hidden_end = start
        elif start < self.hidden_end:
            rows = rows[self.hidden_end - start :]
        if len(rows):
            self.hidden.append(rows)
            self.hidden_end += len(rows)

    @property
    def cacheable_len(self) -> int:
        """Tokens that the cache may supply: not the last one, and none whose logits or hidden states are requested."""
        if self.needs_all:
            return 0
        limit = len(self.tokens) - 1
        if self.hidden:  # retracted: the next rows must follow the ones that are kept
            limit = min(limit, self.hidden_end)
        return min(limit, max(self.logprob_start_len - 1, 0)) if self.wants_input_logprobs else limit

    def __repr__(self) -> str:
        return (
            f"Req({self.rid!r}, prompt={self.prompt_len}, output={self.output_len}, tree={self.tree_len}, "
            f"kv={self.kv_len}, device={self.device_len}, in_flight={self.in_flight}, finish={self.finish})"
        )


class Phase(enum.Enum):
    PREFILL = enum.auto()
    DECODE = enum.auto()
    """Requests that decode, one token each or what a jump appended."""


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of one launch, which computes request i from position starts[i] to ends[i]."""

    phase: Phase
    reqs: list[Req]
    starts: list[int]
    ends: list[int]
    samples: list[bool]
    """Whether a token is sampled after ends[i]: only at the end of a prompt or a long jump. If the request has a draft,
    that ends there, and a token is sampled before and after each of its tokens."""
    riding: int = 0
    """Number of last requests that decode in a mixed batch, along with prefill."""
    has_items: bool = False
    """Whether a prompt in it has images or videos."""

    @property
    def sampling(self) -> list[int]:
        """The index of the request of each token that is sampled."""
        return [i for i, samples in enumerate(self.samples) if samples for _ in range(1 + len(self.reqs[i].draft))]

    @property
    def num_tokens(self) -> int:
        return sum(self.ends) - sum(self.starts)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, of requests that do not decode."""
        alone = 0 if self.phase is Phase.DECODE else len(self.reqs) - self.riding
        return sum(self.ends[:alone]) - sum(self.starts[:alone])

    def phase_of(self, i: int) -> Phase:
        """The phase of request i: a mixed batch has both."""
        return Phase.DECODE if i >= len(self.reqs) - self.riding else self.phase

    def take_along(self, decoding: Batch) -> None:
        """Adds `decoding` to the same step."""
        assert self.phase is Phase.PREFILL
        assert decoding.phase is Phase.DECODE
        self.reqs += decoding.reqs
        self.starts += decoding.starts
        self.ends += decoding.ends
        self.samples += decoding.samples
        self.riding += len(decoding.reqs)

    def apart(self) -> list[Batch]:
        """Each request in a batch of its own."""
        return [
            Batch(
                self.phase_of(i),
                [req],
                [self.starts[i]],
                [self.ends[i]],
                [self.samples[i]],
                has_items=req.media is not None,
            )
            for i, req in enumerate(self.reqs)
        ]
