"""Turns a message into a request, or says why it is refused."""

from __future__ import annotations

import random

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import (
    LARGEST_PRIORITY,
    MAX_HIDDEN_STATES_BYTES,
    NO_PRIORITY,
    FinishReason,
    GenerateReq,
)
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.sampling import check_sampling
from treeline_runtime.scheduler.media import Intake, Media
from treeline_runtime.scheduler.processors import Processors


class Arrivals:
    """Owns what distinguishes arriving requests: their number, and seeds for those without one."""

    def __init__(
        self,
        config: SchedulerConfig,
        longest_request: int,
        model: Decoder,
        processors: Processors,
    ) -> None:
        """longest_request: tokens of prompt and answer."""
        self._config = config
        self._longest_request = longest_request
        self._model = model.config
        self._pooling = None if model.pooler is None else model.pooler.pooling
        self._intake = Intake(config, model)
        self._processors = processors
        self._count = 0
        self._random = random.Random()

    def new_req(self, message: GenerateReq) -> Req | FinishReason:
        """Returns a reason instead if it can never be served (400)."""
        media = self._intake.media_of(message) if message.items else None
        if (problem := media if isinstance(media, str) else self._problem(message, media)) is not None:
            return FinishReason("error", message=problem, status=400)
        assert not isinstance(media, str)
        processor = self._processors.begin(message.sampling.logit_processor, self._model.vocab_size)
        if isinstance(processor, FinishReason):
            return processor
        self._count += 1
        seed = message.sampling.seed
        req = Req.of(
            message,
            seed=self._random.getrandbits(64) if seed is None else seed,
            eos_ids=self._model.eos_token_ids,
            max_new_tokens=min(message.sampling.max_new_tokens, self._longest_request - len(message.input_ids)),
            arrival=self._count,
            pooling=self._pooling,
            priority=-message.priority if self._config.schedule_low_priority_values_first else message.priority,
            media=media,
        )
        req.processor = processor
        return req

    def _problem(self, message: GenerateReq, media: Media | None) -> str | None:
        """Why it can never be served; None if it can."""
        ids = message.input_ids if media is None else media.shown(message.input_ids)
        length = len(ids)
        answer = min(message.sampling.max_new_tokens, 1)
        pools, longest_request, vocab_size = self._pooling is not None, self._longest_request, self._model.vocab_size
        if message.pools != pools:
            return "this model makes vectors, not text" if pools else "this model makes text, not vectors"
        if message.pools and message.sampling.max_new_tokens:
            return "a request for a vector produces no tokens: max_new_tokens must be 0"
        if message.pools and (message.return_logprob or message.logprob_start_len >= 0 or message.return_hidden_states):
            return "a request for a vector has no log probabilities and no hidden states"
        if length == 0:
            return "the prompt is empty"
        if length + answer > longest_request:
            most = f"{longest_request - 1} fit, with one for the answer" if answer else f"{longest_request} fit"
            return f"the prompt has {length} tokens; at most {most}"
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"the prompt has token ids outside the vocabulary of {vocab_size}"
        if not -1 <= message.logprob_start_len <= length:
            return f"logprob_start_len {message.logprob_start_len} is outside the prompt"
        if message.top_logprobs_num < 0:
            return f"top_logprobs_num is negative: {message.top_logprobs_num}"
        if message.priority and not self._config.uses_priority:
            return NO_PRIORITY
        if abs(message.priority) > LARGEST_PRIORITY:
            return f"priority {message.priority} is out of range: at most {LARGEST_PRIORITY} either way"
        if message.return_hidden_states:
            if not self._config.enable_return_hidden_states:
                return "return_hidden_states needs an engine that was started with enable_return_hidden_states"
            room = MAX_HIDDEN_STATES_BYTES // (4 * self._model.hidden_size)
            tokens = min(length + message.sampling.max_new_tokens, longest_request)
            if tokens > room:
                return (
                    f"hidden states of {tokens} tokens of prompt and output are too large for an answer: at most {room}"
                )
        return check_sampling(message.sampling, vocab_size)
