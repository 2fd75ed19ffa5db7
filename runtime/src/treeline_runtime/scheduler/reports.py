"""The scheduler's messages: their transport, its measurements, and the order in which a step reports."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import numpy as np

from treeline_runtime.core import Req
from treeline_runtime.messages import BatchTokenOut, FromScheduler, HiddenStates, Reply, StateReq, TokenOut, ToScheduler
from treeline_runtime.published import CacheUpdate, LoadUpdate, ToPublisher
from treeline_runtime.publisher.client import PublisherClient
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.embeddings import Encoded
from treeline_runtime.scheduler.launched import Sampled
from treeline_runtime.scheduler.step_times import StepTimes

_TOKENS = attrgetter("tokens")
FORGET = 0.9
"""Weight of the past in a moving average."""


class SchedulerStats:
    """Prefill rate over busy time, as seen by a token of a long prompt; duration of a decode step. Times in seconds.

    A step of few tokens takes nearly as long as an empty one, so its rate says little. Steps therefore count, and make
    the past fade, by their tokens. Otherwise an engine with many cache hits would look slow, get no new prompts, and
    never be measured again. For the same reason the rate is told anew only when as many tokens were computed as usually
    are in a step: a picker counts each change as a measurement, and believes an old rate as long as there are new ones.

    The first of each counts only in the totals: it includes one-time work (touching memory, building kernels). A picker
    that believed it would avoid the pod forever.
    """

    def __init__(self) -> None:
        self.total_prefill_tokens = 0
        self.total_prefill_busy_us = 0
        self.total_encoder_queries = 0
        self.total_encoder_hits = 0
        self.total_encoded_tokens = 0
        self.total_encoder_us = 0
        self.total_jumps = 0
        self.total_forced_tokens = 0
        self.prefill_tokens_per_s = 0.0
        self._untold = 0.0  # in usual steps
        self.total_drafts = 0
        self.total_draft_tokens = 0
        self.accepted_per_position: list[int] = []
        self._tokens = 0.0  # sums over steps: tokens,
        self._squares = 0.0  # tokens × tokens,
        self._busy = 0.0  # tokens × seconds
        self.decode_step_ms = self.decode_step_tokens = 0.0
        self.step_times = StepTimes()
        self._prefilled = self._decoded = False

    def on_prefill(self, tokens: int, seconds: float, encoded: Encoded | None = None) -> None:
        if encoded is not None:
            self.total_encoder_queries += encoded.needed
            self.total_encoder_hits += encoded.kept
            self.total_encoded_tokens += encoded.tokens
            self.total_encoder_us += round(encoded.seconds() * 1e6)
        self.total_prefill_tokens += tokens
        self.total_prefill_busy_us += round(seconds * 1e6)
        if not self._prefilled:
            self._prefilled = True
            return
        mean = self._squares / self._tokens if self._tokens else 0.0
        share = min(1.0, tokens / mean if mean else 1.0)
        keep = 1.0 - (1.0 - FORGET) * share
        self._tokens = keep * self._tokens + tokens
        self._squares = keep * self._squares + tokens * tokens
        self._busy = keep * self._busy + tokens * seconds
        self._untold += share
        if self._untold >= 1.0 and self._busy:
            self._untold, self.prefill_tokens_per_s = 0.0, self._squares / self._busy

    def on_jump(self, tokens: int) -> None:
        """A request gained so many tokens without sampling."""
        self.total_jumps += 1
        self.total_forced_tokens += tokens

    def on_draft(self, guesses: int, right: int) -> None:
        """A step verified so many guesses of a request; the first `right` were."""
        self.total_drafts += 1
        self.total_draft_tokens += guesses
        more = [0] * (right - len(self.accepted_per_position))
        self.accepted_per_position = [n + (i < right) for i, n in enumerate(self.accepted_per_position + more)]

    def on_decode(self, tokens: int, results: Sequence[Sampled], seconds: float) -> None:
        """A step computed so many tokens, guesses among them."""
        if not self._decoded:
            self._decoded = True
            return
        self.step_times.take(tokens, seconds)
        known = self.decode_step_ms
        self.decode_step_ms = FORGET * known + (1 - FORGET) * seconds * 1e3 if known else seconds * 1e3
        known, mean = self.decode_step_tokens, sum(map(len, map(_TOKENS, results))) / len(results)
        self.decode_step_tokens = FORGET * known + (1 - FORGET) * mean if known else mean

    def load_fields(self) -> dict[str, Any]:
        """What LoadUpdate has of it."""
        return {
            "total_prefill_uncached_tokens": self.total_prefill_tokens,
            "total_prefill_busy_us": self.total_prefill_busy_us,
            "total_encoder_queries": self.total_encoder_queries,
            "total_encoder_hits": self.total_encoder_hits,
            "total_encoded_tokens": self.total_encoded_tokens,
            "total_encoder_us": self.total_encoder_us,
            "total_jumps": self.total_jumps,
            "total_forced_tokens": self.total_forced_tokens,
            "total_drafts": self.total_drafts,
            "total_draft_tokens": self.total_draft_tokens,
            "accepted_per_position": self.accepted_per_position,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_step_ms": self.decode_step_ms,
            "decode_step_tokens": self.decode_step_tokens,
        }


class Transport(Protocol):
    """Only `wait` may block."""

    def receive(self) -> list[ToScheduler]:
        """Messages since the last call."""

    def send(self, messages: list[FromScheduler]) -> None:
        """To the detokenizer, in order."""

    def publish(self, update: ToPublisher) -> bool:
        """To the publisher; False if there was no room and the update was dropped."""

    def wait(self) -> None:
        """Called when idle: returns when `receive` may have something, or after a while."""

    def fail(self, reason: str) -> None:
        """Called once, in any thread, when another rank has failed: the engine is at its end, and the scheduler may
        wait for that rank for ever."""

    def wake(self) -> None:
        """Ends the current or next `wait`. Called by any thread."""


class Reporter:
    """Sends tokens first, then cache changes, load, and answers: someone who asks for the tree also asks the publisher,
    and must see both at the same moment."""

    def __init__(self, transport: Transport, cache: CacheManager) -> None:
        self._transport = transport
        self._tree = cache.tree
        self._publisher = PublisherClient(transport.publish, cache.tree.blocks)
        self._outs: list[TokenOut] = []
        self._replies: list[Reply] = []
        self._questions: list[StateReq] = []
        self._last_load: LoadUpdate | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self._outs)

    def tell(self, out: TokenOut) -> None:
        self._outs.append(out)

    def reply(self, reply: Reply) -> None:
        self._replies.append(reply)

    def ask(self, question: StateReq) -> None:
        self._questions.append(question)

    def flush(self, load: LoadUpdate) -> None:
        """Sends a step's messages, and `load` if it changed."""
        if self._outs:
            self._transport.send([BatchTokenOut(self._outs)])
            self._outs = []
        if events := self._tree.take_events():
            self._publisher.publish(CacheUpdate(events))
        if load != self._last_load:
            self._last_load = load
            self._publisher.publish(load)
        replies = self._replies + [self._answer(question, load) for question in self._questions]
        if replies:
            self._transport.send([*replies])
            self._replies, self._questions = [], []

    def catch_up(self) -> None:
        """Sends the publisher the updates that it missed. For idle times."""
        self._publisher.catch_up()

    def _answer(self, question: StateReq, load: LoadUpdate) -> Reply:
        if question.what == "load":
            return Reply(question.id, data=msgspec.structs.asdict(load))
        return Reply(question.id, data={"blocks": self.blocks(), "updates": self._publisher.updates})

    def blocks(self) -> list[dict[str, Any]]:
        """All cached pages, parents first; hashes as decimal strings, since JSON readers round large integers."""
        return [
            {
                "hash": str(digest),
                "parent": None if parent is None else str(parent),
                "tokens": tokens,
                "namespace": space,
            }
            for digest, parent, tokens, space in self._tree.blocks()
        ]


def token_out(req: Req, result: Sampled | None) -> TokenOut:
    """Makes the message about a step of `req`: its new tokens, and its end with its vector, if any."""
    first = req.return_logprob and not req.input_logprobs_sent
    untold, withdrawn = req.tokens[req.prompt_len + req.told :], req.withdrawn
    queued_s = 0.0 if req.told else req.waited_s
    req.told, req.withdrawn = req.output_len, 0
    out = TokenOut(
        rid=req.rid,
        token_ids=untold,
        withdrawn=withdrawn,
        finish=req.finish,
        prompt_tokens=req.prompt_len,
        cached_tokens=max(req.cached_tokens, 0),
        completion_tokens=req.output_len,
        retractions=req.retractions,
        speculated=None if req.drafting is None else req.drafting.counts,
        queued_s=queued_s,
        vector=req.vector,
    )
    extra: dict[str, Any] = {}
    if req.hidden and req.finish is not None and req.finish.type != "error":
        rows = np.concatenate(req.hidden)
        data = rows.astype("<f4", copy=False).tobytes()
        extra["hidden_states"] = HiddenStates(req.hidden_from, rows.shape[1], data)
    if not req.return_logprob:
        return msgspec.structs.replace(out, **extra) if extra else out
    if result is not None and result.logprobs:
        taken = len(untold)  # fewer than the step gave, where one of them ends the output
        extra["output_token_logprobs"] = result.logprobs[:taken]
        extra["output_top_logprobs"] = result.top_logprobs[:taken]
    if first and req.logprob_start_len >= 0:
        known = req.input_logprobs
        if req.logprob_start_len == 0:
            first_id = req.tokens[0] if req.media is None else req.media.shown(req.tokens)[0]
            known = [(None, first_id), *known]
            extra["input_top_logprobs"] = [None, *req.input_top_logprobs]
        else:
            extra["input_top_logprobs"] = list(req.input_top_logprobs)
        extra["input_token_logprobs"] = list(known)
    req.input_logprobs_sent = True
    return msgspec.structs.replace(out, **extra)
