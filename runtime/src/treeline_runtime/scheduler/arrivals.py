"""What a message asks for → a request, or why it is not one."""

from __future__ import annotations

import random

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason, GenerateReq
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.scheduler.processors import Processors
from treeline_runtime.scheduler.refusal import refusal


class Arrivals:
    """Owns what tells requests apart that arrive: their number, and the seeds of those that bring none."""

    def __init__(
        self,
        config: SchedulerConfig,
        longest_request: int,
        model: ModelConfig,
        pooling: Pooling | None,
        processors: Processors,
    ) -> None:
        """longest_request: tokens of a prompt and its answer. pooling: of a model that makes vectors."""
        self._config = config
        self._longest_request = longest_request
        self._model = model
        self._pooling = pooling
        self._processors = processors
        self._count = 0
        self._random = random.Random()

    def urgency(self, message: GenerateReq) -> int:
        """The higher, the sooner."""
        return -message.priority if self._config.schedule_low_priority_values_first else message.priority

    def new_req(self, message: GenerateReq) -> Req | FinishReason:
        """→ why there is none: a 400 for what can never be served."""
        finish = refusal(
            message,
            vocab_size=self._model.vocab_size,
            longest_request=self._longest_request,
            hidden_size=self._model.hidden_size if self._config.enable_return_hidden_states else None,
            uses_priority=self._config.uses_priority,
            pools=self._pooling is not None,
        )
        if finish is not None:
            return finish
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
            priority=self.urgency(message),
        )
        req.processor = processor
        return req
