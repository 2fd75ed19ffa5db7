"""The same engine in-process, for offline use."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, overload

import msgspec
import torch
from tokenizers import Tokenizer

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.messages import (
    AbortReq,
    BatchTokenOut,
    FinishReason,
    FromScheduler,
    GenerateReq,
    SamplingParams,
    TokenLogprob,
    TokenOut,
    ToPublisher,
    ToScheduler,
)
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.loader import load_model
from treeline_runtime.scheduler import Scheduler
from treeline_runtime.tokens import IncrementalDetokenizer

Prompt = str | list[int]
Params = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a mapping with some of their fields."""


class GenerationError(RuntimeError):
    """A request ended with an error; `finish` says which."""

    def __init__(self, finish: FinishReason) -> None:
        super().__init__(finish.message or finish.type)
        self.finish = finish


@dataclass
class Output:
    """One answer; while streaming, what is known of it so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    output_token_logprobs: list[TokenLogprob] = field(default_factory=list)
    output_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    input_token_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top_logprobs: list[list[TokenLogprob] | None] = field(default_factory=list)


@dataclass
class _Running:
    output: Output
    text: IncrementalDetokenizer | None
    deltas: deque[str] = field(default_factory=deque)


class _InProcess:
    """Implements `Transport` within this process: an inbox, and a function that takes what comes out."""

    def __init__(self, take: Callable[[TokenOut], None]) -> None:
        self._take = take
        self.inbox: list[ToScheduler] = []

    def receive(self) -> list[ToScheduler]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: list[FromScheduler]) -> None:
        for message in messages:
            if isinstance(message, BatchTokenOut):
                for out in message.outs:
                    self._take(out)

    def publish(self, update: ToPublisher) -> bool:
        return True

    def wait(self) -> None:
        """Nobody waits: `step` is called while there is something to do."""


class Engine:
    """Load a model and generate, without a server.

        with Engine(model="models/tiny") as engine:
            print(engine.generate("Hello", SamplingParams(max_new_tokens=8)).text)

    Method calls become a scheduler's messages, and its answers Output objects. Not for several threads.
    """

    def __init__(self, model: str | Path, **config: Any) -> None:
        """`config`: fields of SchedulerConfig. Raises ModelError, ConfigError."""
        self.config = SchedulerConfig(model=str(model), **config)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self._runs: dict[str, _Running] = {}
        self._rids = map(str, itertools.count())
        path = Path(model) / "tokenizer.json"
        self.tokenizer: Tokenizer | None = Tokenizer.from_file(str(path)) if path.is_file() else None
        self._transport = _InProcess(self._take)
        self.scheduler = Scheduler(self.config, load_model(self.config), self._transport)
        self.scheduler.warm_up()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End whatever is still running."""
        self._transport.inbox.append(AbortReq())
        while self.scheduler.step():
            pass

    # ---- use ----------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: Prompt, sampling_params: Params | None = ..., **options: Any) -> Output: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = ...,
        **options: Any,
    ) -> list[Output]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        **options: Any,
    ) -> Output | list[Output]:
        """Complete one prompt (text or ids), or a list of them in one go, in order.

        `options`: the other fields of GenerateReq. Raises GenerationError if a request is refused or fails; the others
        of the list are ended first. Raises TypeError for sampling parameters that do not exist or have a wrong type.
        """
        if _is_one(prompts):
            if isinstance(sampling_params, Sequence):
                raise ValueError("one prompt takes one SamplingParams, not a list")
            return self._run([prompts], [_checked(sampling_params)], options)[0]
        params = (
            [_checked(one) for one in sampling_params]
            if isinstance(sampling_params, Sequence)
            else [_checked(sampling_params)] * len(prompts)
        )
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} sampling_params")
        return self._run(list(prompts), params, options)  # type: ignore[arg-type]

    def _run(self, prompts: list[Prompt], params: list[SamplingParams], options: dict[str, Any]) -> list[Output]:
        rids = [self._submit(prompt, p, options) for prompt, p in zip(prompts, params, strict=True)]
        outputs = [self._runs[rid].output for rid in rids]
        try:
            while any(output.finish is None for output in outputs):
                self._turn()
                for output in outputs:
                    _raise_if_failed(output)
        finally:
            self._forget(rids)
        return outputs

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, **options: Any
    ) -> Iterator[tuple[str, Output]]:
        """Yield (new text, output so far) as it comes. Leaving the loop early ends the request."""
        rid = self._submit(prompt, _checked(sampling_params), options)
        run = self._runs[rid]
        try:
            while run.output.finish is None:
                self._turn()
                _raise_if_failed(run.output)
                while run.deltas:
                    yield run.deltas.popleft(), run.output
        finally:
            self._forget([rid])

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ModelError(f"{self.config.model} has no tokenizer.json: give prompts as token ids")
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def _submit(self, prompt: Prompt, params: SamplingParams, options: dict[str, Any]) -> str:
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        rid = next(self._rids)
        text = None
        if self.tokenizer is not None:
            tokenizer, skip = self.tokenizer, params.skip_special_tokens
            text = IncrementalDetokenizer(
                lambda ids: tokenizer.decode(ids, skip_special_tokens=skip),
                stop=params.stop,
                no_stop_trim=params.no_stop_trim,
            )
        elif params.stop:
            raise ModelError(f"{self.config.model} has no tokenizer.json: stop strings need one")
        self._transport.inbox.append(GenerateReq(rid, ids, params, **options))
        self._runs[rid] = _Running(Output(prompt_tokens=len(ids)), text)
        return rid

    def _turn(self) -> None:
        if not self.scheduler.step():
            raise AssertionError("the scheduler has nothing to do, yet a request has not ended")

    def _forget(self, rids: list[str]) -> None:
        for rid in rids:
            if self._runs.pop(rid).output.finish is None:
                self._transport.inbox.append(AbortReq(rid))
        if self._transport.inbox:
            self.scheduler.step()

    def _take(self, out: TokenOut) -> None:
        run = self._runs.get(out.rid)
        if run is None or run.output.finish is not None:
            return
        output = run.output
        output.token_ids += out.token_ids
        output.cached_tokens = out.cached_tokens
        output.retractions = out.retractions
        output.output_token_logprobs += out.output_token_logprobs or ()
        output.output_top_logprobs += out.output_top_logprobs or ()
        output.input_token_logprobs += out.input_token_logprobs or ()
        output.input_top_logprobs += out.input_top_logprobs or ()
        output.finish = out.finish
        if run.text is not None:
            delta = run.text.push(out.token_ids, out.finish)
            output.text += delta.text
            if delta.matched is not None:
                if out.finish is None:
                    self._transport.inbox.append(AbortReq(out.rid))
                output.finish = FinishReason("stop", matched=delta.matched)
            run.deltas.append(delta.text)
        else:
            run.deltas.append("")


def _is_one(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _checked(params: Params | None) -> SamplingParams:
    """Structs do not check what they are made with: `stop="end"` would stop at every e, n and d."""
    fields = msgspec.structs.asdict(params) if isinstance(params, SamplingParams) else params or {}
    if not isinstance(fields, Mapping):
        raise TypeError(f"sampling_params: expected SamplingParams or a mapping, got {type(fields).__name__}")
    unknown = fields.keys() - set(SamplingParams.__struct_fields__)
    if unknown:
        raise TypeError(f"sampling_params: there is no {', '.join(sorted(map(repr, unknown)))}")
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise TypeError(f"sampling_params: {error}") from None


def _raise_if_failed(output: Output) -> None:
    if output.finish is not None and output.finish.type in ("abort", "error"):
        raise GenerationError(output.finish)
