"""Thousands of generations of one client and one of another, from the HTTP process through the scheduler's inbox."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runtime_engine import Harness
from treeline_runtime.gate import MAX_GENERATIONS_OF_CLIENT
from treeline_runtime.ipc import READ_AT_ONCE
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.tokenizer_manager import DpRank, InflightRequest, TokenizerManager

STEPS = 8
"""Two steps in which the inbox is emptied of earlier messages, and some for the scheduler's answer, the prompt, and the
delivery of its token."""


class Line(deque[Any]):
    def send(self, message: msgspec.Struct) -> bool:
        self.append(message)
        return True


class World:
    """An engine and a manager as in two processes: a limited number of messages each step, and answers after it."""

    def __init__(self, model: Path) -> None:
        self.engine = Harness(model, max_running_requests=8)
        self.engine.check_integrity = lambda: None  # type: ignore[method-assign]  # of thousands, in each step
        self.line = Line()
        self.manager = TokenizerManager(Metrics("m"), [DpRank(self.line, Line())])

    def open(self, client: str, name: str, count: int, tokens: int) -> InflightRequest:
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        return self.manager.open([GenerateReq(f"{name}:{i}", [7], sampling, client=client) for i in range(count)])

    def step(self) -> None:
        self.engine.inbox.extend(self.line.popleft() for _ in range(min(READ_AT_ONCE, len(self.line))))
        self.engine.step()
        for reply in self.engine.replies:
            self.manager.on_reply(reply)
        self.engine.replies.clear()

    def steps_until_told(self, inflight: InflightRequest) -> int:
        """Count the steps until the request's first token."""
        (id,) = inflight.ids
        for steps in range(1, 200):
            self.step()
            if any(out.token_ids for out in self.engine.outs.get(id, ())):
                return steps
        raise AssertionError(f"it waits: {len(self.line)} in the inbox, {len(self.engine.prefill.waiting)} waiting")


@pytest.mark.parametrize("closing", [False, True], ids=["as they come", "as they leave"])
def test_a_single_request_gets_its_token_within_a_few_steps(tiny: Path, closing: bool) -> None:
    world = World(tiny)
    hostile = [world.open("hostile", str(i), 1024, 100) for i in range(MAX_GENERATIONS_OF_CLIENT // 1024)]
    for _ in range(16 if closing else 3):
        world.step()
    if closing:
        for inflight in hostile:
            inflight.close()
        hostile = [world.open("hostile", f"again {i}", 1024, 100) for i in range(4)]
    for name in ("one", "two"):
        other = world.open("other", name, 1, 1)
        assert world.steps_until_told(other) <= STEPS
        other.close()
    for inflight in hostile:
        inflight.close()
