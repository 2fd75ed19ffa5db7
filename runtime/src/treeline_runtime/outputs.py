"""Answers of an in-process engine: the scheduler's messages become Output objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from treeline_runtime.messages import (
    BatchTokenOut,
    FinishReason,
    FromScheduler,
    Reply,
    Speculated,
    StopReq,
    TokenLogprob,
    TokenOut,
)
from treeline_runtime.tokens import IncrementalDetokenizer


class GenerationError(RuntimeError):
    """A request ended with an error; `finish` says which."""

    def __init__(self, finish: FinishReason) -> None:
        super().__init__(finish.message or finish.type)
        self.finish = finish


@dataclass
class Output:
    """An answer; while streaming, its state so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    speculated: Speculated | None = None
    """None: nothing was guessed."""
    output_token_logprobs: list[TokenLogprob] = field(default_factory=list)
    output_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    input_token_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top_logprobs: list[list[TokenLogprob] | None] = field(default_factory=list)
    hidden_states: npt.NDArray[np.float32] | None = None
    """(positions, hidden), if requested: of computed positions, so not of the first `cached_tokens` nor of the last
    sampled token (`messages.HiddenStates`)."""


class Call:
    """Requests that a caller waits for together."""

    def __init__(self, wake: Callable[[], None], *, streams: bool) -> None:
        """wake: called in the scheduler's thread when all have ended, one fails or, if it `streams`, an output came."""
        self.wake = wake
        self.streams = streams
        self.runs: list[Running] = []
        self.open = 0
        """Requests that the scheduler has not ended."""
        self.failure: FinishReason | None = None
        """The end of the first request that failed."""


@dataclass
class Running:
    """One request of a call."""

    rid: str
    call: Call
    output: Output
    text: IncrementalDetokenizer | None
    outs: deque[TokenOut] = field(default_factory=deque)
    """A stream's outputs that its reader has not taken."""
    ended: bool = False


class Outputs:
    """Receives the scheduler's messages in its thread. Others may read: dictionaries change by single operations."""

    def __init__(self, stop: Callable[[StopReq], None]) -> None:
        """stop: tells the scheduler that a stop string was found."""
        self._stop = stop
        self.running: dict[str, Running] = {}
        self.asked: dict[str, Callable[[Reply | None], None]] = {}
        """Question → what takes its answer; None: there will be none."""

    def take(self, message: FromScheduler) -> None:
        if isinstance(message, Reply):
            if (answer := self.asked.pop(message.id, None)) is not None:
                answer(message)
            return
        assert isinstance(message, BatchTokenOut)
        woken: dict[Call, None] = {}
        for out in message.outs:
            run = self.running.get(out.rid)
            if run is None:
                continue
            call = run.call
            if call.streams:
                run.outs.append(out)
            else:
                self.add(run, out)
            if out.finish is not None:
                run.ended = True
                call.open -= 1
            if call.streams or call.open == 0 or call.failure is not None:
                woken[call] = None
        for call in woken:
            call.wake()

    def on_death(self) -> None:
        """The scheduler has ended: wakes everybody who waits."""
        for rid in list(self.asked):
            if (answer := self.asked.pop(rid, None)) is not None:
                answer(None)
        for call in {run.call: None for run in list(self.running.values())}:
            call.wake()

    def add(self, run: Running, out: TokenOut) -> str:
        """Adds to a request's output, in its owner's thread: a stream's reader, or else the scheduler's. Returns the
        new text."""
        output = run.output
        ended, delta = output.finish is not None, None
        if run.text is not None and not ended:
            delta = run.text.push(out.token_ids, out.finish, withdrawn=out.withdrawn)
            if delta.unused:
                out = out.without(delta.unused)
        if (states := out.hidden_states) is not None:
            known = len(output.token_ids) + (0 if ended else len(out.token_ids))
            rows = np.frombuffer(states.data, dtype="<f4").reshape(-1, states.size)
            output.hidden_states = rows[: output.prompt_tokens + max(known - 1, 0) - states.first]
        if ended:
            return ""
        if out.withdrawn:
            del output.token_ids[-out.withdrawn :]
        output.token_ids += out.token_ids
        output.cached_tokens = out.cached_tokens
        output.retractions = out.retractions
        output.speculated = out.speculated
        output.output_token_logprobs += out.output_token_logprobs or ()
        output.output_top_logprobs += out.output_top_logprobs or ()
        output.input_token_logprobs += out.input_token_logprobs or ()
        output.input_top_logprobs += out.input_top_logprobs or ()
        output.finish = out.finish
        if output.finish is not None and output.finish.type in ("abort", "error") and run.call.failure is None:
            run.call.failure = output.finish
        if delta is None:
            return ""
        output.text += delta.text
        if delta.matched is not None:
            output.finish = FinishReason("stop", matched=delta.matched)
            if out.finish is None:  # the scheduler does not know yet
                self._stop(StopReq(out.rid, delta.matched))
        return delta.text
