"""An engine in this process as a backend, for notebooks and scripts without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.choices import TokenLogprob
from treeline_lang.errors import BackendError, ProgramError, Refused, TemplateError
from treeline_lang.sampling import Sampling
from treeline_lang.templates import TEMPLATES, ChatTemplate, Message, derive, named
from treeline_lang.transcript import Prompt

_OPTIONS: Final = ("return_logprob", "logprob_start_len", "top_logprobs_num")
_NOTHING: Final = {"max_new_tokens": 0, "temperature": 0.0}


class EngineBackend(Backend):
    """Runs programs on an engine that the caller opens and closes.

    with Engine(model="models/tiny") as engine:
        state = program.run(topic="trees", backend=EngineBackend(engine))
    """

    takes_hints = True
    tells_tokens = True

    def __init__(self, engine: Any, *, chat_template: str | ChatTemplate | None = None) -> None:
        """engine: a `treeline_runtime.Engine`. chat_template: one of `treeline_lang.templates.TEMPLATES`, or your own
        pieces (None: the model's). Raises ValueError for an unknown one."""
        self._engine = engine
        self._template = named(chat_template)

    async def template(self) -> ChatTemplate:
        if self._template is None:
            self._template = await derive(self._render, await asyncio.to_thread(self._beginning))
        return self._template

    async def _render(self, messages: list[Message], opened: bool) -> str:
        def render() -> str:
            return str(self._engine.render(messages, add_generation_prompt=opened))

        try:
            return await asyncio.to_thread(render)
        except Exception as error:
            raise TemplateError(f"{error}; give EngineBackend a chat_template ({', '.join(TEMPLATES)})") from error

    def _beginning(self) -> str:
        """The text that the tokenizer puts before every prompt."""
        return self._decode(self._engine.encode(""))

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "texts were encoded"
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    # ---- generating ---------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        count = sampling.n or 1
        params, options = _asks(sampling)
        outputs = await _asked(self._engine.async_generate([prompt.text] * count, params, **options))
        return [self._completion(output, sampling) for output in outputs]

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        params, options = _asks(sampling)
        try:
            async with aclosing(self._engine.async_stream(prompt.text, params, **options)) as stream:
                async for _, output in stream:
                    yield self._completion(output, sampling)
        except Exception as error:
            raise _failure(error) from error

    async def warm(self, prompt: Prompt, call: Call, children: int = 1) -> None:
        await _asked(self._engine.async_generate(prompt.text, _NOTHING))

    def _completion(self, output: Any, sampling: Sampling) -> Completion:
        """A completion with the names of the runtime's `/generate`."""
        meta: dict[str, Any] = {
            "finish_reason": _finish_reason(output.finish, len(output.token_ids)),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.cached_tokens,
        }
        if sampling.return_logprob:
            shown = self._shower(sampling)
            meta["output_token_logprobs"] = [shown(one) for one in output.output_token_logprobs]
            if output.input_token_logprobs:
                meta["input_token_logprobs"] = [shown(one) for one in output.input_token_logprobs]
            if sampling.top_logprobs_num:
                meta["output_top_logprobs"] = [[shown(one) for one in top] for top in output.output_top_logprobs]
        return Completion(output.text, meta)

    def _shower(self, sampling: Sampling) -> Callable[[tuple[float | None, int]], tuple[float | None, int, str | None]]:
        with_text = bool(sampling.return_text_in_logprobs)
        return lambda one: (one[0], one[1], self._decode([one[1]]) if with_text else None)

    # ---- choosing -----------------------------------------------------------------------------------------------

    async def count(self, text: str, call: Call) -> int:
        output = await _asked(self._engine.async_generate(text, _NOTHING))
        return int(output.prompt_tokens)

    async def score(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], start: int, call: Call
    ) -> list[list[TokenLogprob]]:
        asked = {"return_logprob": True, "logprob_start_len": start}
        outputs = await _asked(self._engine.async_generate(list(prompts), _NOTHING, **asked))
        return [
            [TokenLogprob(value, id, self._decode([id])) for value, id in output.input_token_logprobs]
            for output in outputs
        ]

    # ---- the engine ---------------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        try:
            self._engine.flush_cache()
        except RuntimeError as error:
            raise BackendError(f"the cache is in use: {error}") from error


def _asks(sampling: Sampling) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (sampling parameters, options) of an engine's request."""
    params = sampling.native()
    if sampling.constrained:
        kind, source = ("json", sampling.json_schema) if sampling.regex is None else ("regex", sampling.regex)
        params["grammar"] = {"kind": kind, "source": source}
        params.pop("ignore_eos", None)  # nothing follows where a grammar has ended
    return params, sampling.given(_OPTIONS)


def _finish_reason(finish: Any, tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "length":
        return {"type": "length", "length": tokens}
    return {"type": finish.type, "matched": finish.matched}


async def _asked(work: Any) -> Any:
    """Maps engine errors: Refused for wrong requests, else BackendError."""
    try:
        return await work
    except Exception as error:
        raise _failure(error) from error


def _failure(error: Exception) -> ProgramError:
    if isinstance(error, ProgramError):
        return error
    status = getattr(getattr(error, "finish", None), "status", None)
    refused = isinstance(error, TypeError | ValueError) or (status is not None and 400 <= status < 500)
    return (Refused if refused else BackendError)(f"the engine: {error}")
