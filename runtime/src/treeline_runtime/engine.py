"""The in-process engine for scripts and notebooks, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard, overload

import msgspec
from tokenizers import Tokenizer
from treeline_wire.chat import ChatTemplate, TemplateError
from treeline_wire.namespaces import join_namespace
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.messages import (
    AbortReq,
    FlushReq,
    GenerateReq,
    LoadAdapterReq,
    Reply,
    SamplingParams,
    SleepReq,
    StartProfileReq,
    StopProfileReq,
    ToScheduler,
    UnloadAdapterReq,
    UpdateWeightsReq,
    WakeReq,
)
from treeline_runtime.models.config import ModelError
from treeline_runtime.outputs import Call, GenerationError, Output, Outputs, Running
from treeline_runtime.sampling import Factory
from treeline_runtime.scheduler import Scheduler
from treeline_runtime.scheduler.processors import Processors
from treeline_runtime.scheduler_thread import EngineDead, SchedulerThread
from treeline_runtime.templates.pool import TemplatePool
from treeline_runtime.tokens import IncrementalDetokenizer

__all__ = ["Engine", "EngineDead", "GenerationError", "Output", "Params", "Prompt"]

Prompt = str | list[int]
Params = SamplingParams | Mapping[str, Any]

SETTLE_S = 0.1


class Engine:
    """Loads a model and generates without a server.

        with Engine(model="models/tiny") as engine:
            print(engine.generate("Hello", SamplingParams(max_new_tokens=8)).text)

    The scheduler runs in a thread (`scheduler_thread`), so scripts need no `__main__` guard. A Ctrl-C ends only the
    requests of the interrupted call. Methods may be called from any thread, `async_…` ones from any event loop. Raises
    EngineDead once it is closed or the scheduler has failed.
    """

    def __init__(
        self, model: str | Path, *, logit_processors: Mapping[str, str | Factory] | None = None, **config: Any
    ) -> None:
        """`config`: fields of SchedulerConfig. Raises ModelError, ConfigError.

        `logit_processors`: name → a class or function (see `sampling.processor`), or its place (`module:attribute`, or
        a built-in's name). A request selects one by the sampling parameter `logit_processor=CustomProcessor.of(name,
        params)`.
        """
        given = dict(logit_processors or {})
        named = tuple(f"{name}={place}" for name, place in given.items() if isinstance(place, str))
        config["logit_processor"] = (*config.get("logit_processor", ()), *named)
        self.config = SchedulerConfig(model=str(model), **config)
        self._ids = map(str, itertools.count())
        self.tokenizer = _tokenizer(Path(model) / "tokenizer.json")
        outputs = self._outputs = Outputs(stop=lambda stop: thread.tell(stop))
        processors = Processors({name: one for name, one in given.items() if not isinstance(one, str)})
        thread = self._thread = SchedulerThread(self.config, outputs.take, outputs.on_death, processors)
        self._chats: _Chats | None = None
        self._chats_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, thread.close)  # forgotten engines end too, at the latest at exit

    @property
    def scheduler(self) -> Scheduler:
        """For inspection while nothing runs. Raises EngineDead."""
        scheduler = self._thread.scheduler
        if scheduler is None:
            raise self._thread.dead()
        return scheduler

    def close(self) -> None:
        """Ends running requests and frees the memory. Idempotent."""
        self._finalizer()
        if self._chats is not None:
            self._chats.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- prompts → answers ----------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: Prompt, sampling_params: Params | None = ..., **options: Any) -> Output: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling_params: Params | Sequence[Params] | None = ..., **options: Any
    ) -> list[Output]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        **options: Any,
    ) -> Output | list[Output]:
        """Completes one prompt (text or ids), or a list of them at once, in order.

        `options`: other fields of GenerateReq, and `lora_path`, the name of a LoRA adapter. Raises GenerationError if a
        request is refused or fails, after ending the others of the list. Raises TypeError for unknown parameters and
        options, and wrong types; ValueError for an adapter that is not loaded.
        """
        requests = self._requests(prompts, sampling_params, options)
        woken = threading.Event()
        with self._call(requests, woken.set, streams=False) as call:
            try:
                while call.open and call.failure is None:
                    woken.wait()
                    woken.clear()
                    self._check_alive(call)
            finally:
                self._settle(call, woken)
        return _answer(call, prompts)

    async def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        **options: Any,
    ) -> Any:
        """`generate` for an event loop; cancelling it ends its requests."""
        requests = await asyncio.to_thread(self._requests, prompts, sampling_params, options)
        woken, wake = _loops_event()
        with self._call(requests, wake, streams=False) as call:
            while call.open and call.failure is None:
                await woken.wait()
                woken.clear()
                self._check_alive(call)
        return _answer(call, prompts)

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, **options: Any
    ) -> Iterator[tuple[str, Output]]:
        """Yields (new text, output so far) as it comes. Leaving the loop early ends the request."""
        requests = self._requests(_single(prompt), sampling_params, options)
        woken = threading.Event()
        with self._call(requests, woken.set, streams=True) as call:
            try:
                while call.open:
                    woken.wait()
                    woken.clear()
                    yield from self._news(call)
                    self._check_alive(call)
                yield from self._news(call)
            finally:
                self._settle(call, woken)

    async def async_stream(
        self, prompt: Prompt, sampling_params: Params | None = None, **options: Any
    ) -> AsyncGenerator[tuple[str, Output], None]:
        """`stream` for `async for`. If you leave the loop early, close the iterator (`contextlib.aclosing`), or the
        request continues until Python closes it."""
        requests = await asyncio.to_thread(self._requests, _single(prompt), sampling_params, options)
        woken, wake = _loops_event()
        with self._call(requests, wake, streams=True) as call:
            while call.open:
                await woken.wait()
                woken.clear()
                for news in self._news(call):
                    yield news
                self._check_alive(call)
            for news in self._news(call):
                yield news

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ModelError without a tokenizer."""
        return self._encode([text])[0]

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """A chat rendered by the model's chat template. Raises ModelError for a model without one, and
        `treeline_wire.chat.TemplateError` for messages that it refuses."""
        with self._chats_lock:
            if self._chats is None:
                self._chats = _Chats(self.config.model)
        return self._chats.render(messages, add_generation_prompt=add_generation_prompt)

    # ---- administration -------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Empties the prefix cache. Raises RuntimeError while requests run."""
        self._ask(FlushReq)

    def sleep(self, level: int = 1) -> None:
        """Frees the device's memory: KV cache and weights (level 1: kept in host memory; 2: read again). Requests are
        refused until `wake_up`. Raises RuntimeError while requests run."""
        if level not in (1, 2):
            raise ValueError(f"level is 1 or 2, not {level!r}")
        self._ask(SleepReq, level=level)

    def wake_up(self) -> None:
        """Raises RuntimeError if that fails, for example for lack of memory; the engine then stays asleep."""
        self._ask(WakeReq)

    def update_weights(self, path: str | Path) -> None:
        """Loads another checkpoint of the same architecture and empties the cache. Raises RuntimeError while requests
        run or if it fails; the old weights then stay."""
        self._ask(UpdateWeightsReq, path=str(path))

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """Loads a LoRA adapter from a folder below `lora_root` or relative to it: `generate(…, lora_path=lora_name)`
        uses it. Raises RuntimeError if it cannot be served."""
        self._ask(LoadAdapterReq, name=lora_name, path=str(lora_path))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Raises RuntimeError while requests use it."""
        self._ask(UnloadAdapterReq, name=lora_name)

    def start_profile(self, folder: str | Path, steps: int = 100) -> None:
        """Traces the next steps, at most MAX_PROFILE_STEPS, into a file in `folder`. RuntimeError if a trace runs."""
        self._ask(StartProfileReq, folder=str(folder), steps=steps)

    def stop_profile(self) -> Path:
        """Ends the trace early and returns its file. Raises RuntimeError if none runs."""
        return Path(self._ask(StopProfileReq)["path"])

    def _ask(self, question: Callable[..., ToScheduler], **fields: Any) -> dict[str, Any]:
        """Sends a request to the scheduler. Raises RuntimeError with its words if it refuses."""
        answered = threading.Event()
        replies: list[Reply | None] = []

        def take(reply: Reply | None) -> None:
            replies.append(reply)
            answered.set()

        id = next(self._ids)
        self._outputs.asked[id] = take
        try:
            self._thread.tell(question(id, **fields))
            answered.wait()
        finally:
            self._outputs.asked.pop(id, None)
        if replies[0] is None:
            raise self._thread.dead()
        if not replies[0].ok:
            raise RuntimeError(replies[0].message)
        return replies[0].data or {}

    # ---- pieces ---------------------------------------------------------------------------------------------

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None, options: dict[str, Any]
    ) -> list[GenerateReq]:
        if isinstance(prompts, str) or _is_one(prompts):
            if isinstance(params, Sequence):
                raise ValueError("one prompt takes one SamplingParams, not a list")
            prompts = [prompts]
        each = [_checked(one) for one in params] if isinstance(params, Sequence) else [_checked(params)] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling_params")
        if self.tokenizer is None and any(one.stop for one in each):
            raise ModelError(f"{self.config.model} has no tokenizer.json: stop strings need one")
        if "lora_path" in options:
            options = self._with_adapter(**options)
        encoded = iter(self._encode([prompt for prompt in prompts if isinstance(prompt, str)]))
        return [
            _request(next(self._ids), next(encoded) if isinstance(prompt, str) else prompt, one, options)
            for prompt, one in zip(prompts, each, strict=True)
        ]

    def _with_adapter(self, lora_path: str, namespace: str | None = None, **options: Any) -> dict[str, Any]:
        digest = self.scheduler.adapters.names.get(lora_path)
        if digest is None:
            raise ValueError(f"no LoRA adapter is loaded as {lora_path!r}")
        return {**options, "namespace": join_namespace(digest, namespace)}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.tokenizer is None:
            raise ModelError(f"{self.config.model} has no tokenizer.json: give prompts as token ids")
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]

    @contextmanager
    def _call(self, requests: list[GenerateReq], wake: Callable[[], None], *, streams: bool) -> Iterator[Call]:
        """A context manager for the requests of a call; at the end aborts unfinished ones. Raises GenerationError."""
        call = Call(wake, streams=streams)
        call.open = len(requests)
        try:
            for request in requests:
                output = Output(prompt_tokens=len(request.input_ids))
                run = Running(request.rid, call, output, self._detokenizer(request))
                call.runs.append(run)
                self._outputs.running[run.rid] = run
                self._thread.tell(request)
            yield call
            if call.failure is not None:
                raise GenerationError(call.failure)
        finally:
            self._abort(call)
            for run in call.runs:
                self._outputs.running.pop(run.rid, None)

    def _abort(self, call: Call) -> None:
        with suppress(EngineDead):
            for run in call.runs:
                if not run.ended:
                    self._thread.tell(AbortReq(run.rid))

    def _settle(self, call: Call, woken: threading.Event) -> None:
        """Ends the rest of the call and waits, so that its memory is free when the caller continues."""
        self._abort(call)
        while call.open and not self._thread.ended:
            woken.wait(SETTLE_S)
            woken.clear()

    def _news(self, call: Call) -> Iterator[tuple[str, Output]]:
        run = call.runs[0]
        while run.outs:
            goes_on = run.output.finish is None
            text = self._outputs.add(run, run.outs.popleft())
            if goes_on and call.failure is None:
                yield text, run.output

    def _check_alive(self, call: Call) -> None:
        if call.open and self._thread.ended:
            raise self._thread.dead()

    def _detokenizer(self, request: GenerateReq) -> IncrementalDetokenizer | None:
        if (tokenizer := self.tokenizer) is None:
            return None
        return IncrementalDetokenizer.of(
            request.sampling, lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip))
        )


class _Chats:
    """Renders chats. Templates that are not trusted run in another process, from their first use to `close`."""

    def __init__(self, model: str) -> None:
        """Raises ModelError for a model without a chat template."""
        try:
            bundle = TokenizerBundle.from_dir(model)
            self._pool = TemplatePool()
            template = ChatTemplate.from_bundle(bundle, self._pool)
        except (BundleError, TemplateError) as error:
            raise ModelError(f"{model}: {error}") from None
        if template is None:
            raise ModelError(f"{model} has no chat template")
        self._template = template

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Also works on an event loop's thread, and blocks it. Raises TemplateError."""
        with ThreadPoolExecutor(max_workers=1) as thread:  # where a loop runs, the template would refuse to wait
            rendered = thread.submit(self._template.render, messages, add_generation_prompt=add_generation_prompt)
            return rendered.result()

    def close(self) -> None:
        self._pool.close()


def _tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer, or None; without truncation and padding, which are for training. Raises ModelError."""
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _loops_event() -> tuple[asyncio.Event, Callable[[], None]]:
    """An event of the running loop, and a function that sets it from any thread."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # a loop that was closed waits for nothing
            loop.call_soon_threadsafe(event.set)

    return event, wake


def _answer(call: Call, prompts: Prompt | Sequence[Prompt]) -> Any:
    outputs = [run.output for run in call.runs]
    return outputs[0] if _is_one(prompts) else outputs


def _is_one(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _single(prompt: Prompt) -> Prompt:
    if not _is_one(prompt):
        raise ValueError("a stream has one prompt: a text, or its token ids")
    return prompt


def _checked(params: Params | None) -> SamplingParams:
    """Checks field types, which structs do not: `stop="end"` would stop at every e, n and d."""
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


def _request(rid: str, ids: Any, params: SamplingParams, options: dict[str, Any]) -> GenerateReq:
    taken = {"rid", "input_ids", "sampling"}
    if unknown := options.keys() - (set(GenerateReq.__struct_fields__) - taken):
        raise TypeError(f"there is no option {', '.join(sorted(map(repr, unknown)))}")
    try:
        return msgspec.convert({"rid": rid, "input_ids": ids, "sampling": params, **options}, GenerateReq)
    except msgspec.ValidationError as error:
        raise TypeError(f"a prompt or an option: {error}") from None
