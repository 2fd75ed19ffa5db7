"""Servers with OpenAI's API (OpenAI, vLLM, SGLang, Treeline), by chats or by completions."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from treeline_lang.backends import openai_format as form
from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.backends.http import HttpClient, read
from treeline_lang.backends.openai_format import DIALECTS, Dialect, spoken
from treeline_lang.backends.turns import turns_of
from treeline_lang.choices import ChoicesMethod, Decision, TokenLogprob
from treeline_lang.errors import Refused, Unreachable, Unsupported
from treeline_lang.sampling import Sampling
from treeline_lang.templates import TEMPLATES, ChatTemplate, named
from treeline_lang.transcript import Prompt

URL: Final = "https://api.openai.com/v1"


@dataclass(slots=True)
class TokenUsage:
    """Token counts of all requests of a backend, as the server reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0

    def add(self, usage: Any) -> None:
        """usage: a mapping that may have both counts."""
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name) if isinstance(usage, Mapping) else None
            setattr(self, name, getattr(self, name) + (count if type(count) is int else 0))


class OpenAI(Backend):
    """A model behind OpenAI's API. As chats it receives turns and answers as the assistant; as completions it receives
    the text."""

    tells_tokens = True

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str,
        api_key: str | None = None,
        completions: bool = False,
        chat_template: str | ChatTemplate | None = None,
        dialect: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """url: the address before `/chat/completions` and `/completions` (None: the variable OPENAI_BASE_URL, or
        OpenAI's own). api_key: a bearer token (None: the variable OPENAI_API_KEY). completions: use `/completions`,
        with turns written by `chat_template` (one of `treeline_lang.templates.TEMPLATES`, or your own pieces; None:
        plain).

        dialect: extensions of OpenAI's API: `openai`, `treeline`, `vllm` or `sglang` (None: from the server's
        `/models`). Raises ValueError for a wrong URL, template or dialect.
        """
        key = api_key or os.environ.get("OPENAI_API_KEY")
        url = url or os.environ.get("OPENAI_BASE_URL") or URL
        self._http = HttpClient(url, {"authorization": f"Bearer {key}"} if key else {}, timeout_s=timeout_s)
        self._model = model
        self.chats = self.reads_images = self.reads_videos = not completions
        template = named(chat_template) or TEMPLATES["plain"]
        self._template = template if completions else replace(template, stop=())
        if dialect is not None and dialect not in DIALECTS:
            raise ValueError(f"dialect is one of {', '.join(DIALECTS)}, not {dialect!r}")
        is_openai = self._http.url.startswith("https://api.openai.com/")
        self._known = DIALECTS["openai"] if dialect is None and is_openai else DIALECTS.get(dialect or "")
        self.token_usage = TokenUsage()

    async def template(self) -> ChatTemplate:
        return self._template

    async def continues(self) -> bool:
        return not self.chats or (await self._dialect()).continues

    async def _dialect(self) -> Dialect:
        if self._known is None:
            try:
                models = await self._http.get("/models")
            except Refused:
                models = None
            self._known = spoken(models, self._model)
        return self._known

    # ---- generating ---------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        answer = await self._ask(self._path, await self._body(prompt, sampling))
        return form.completions_of(answer, sampling.n or 1, chat=self.chats)

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        body = await self._body(prompt, sampling) | asked
        growing = form.Growing(chat=self.chats)
        async with aclosing(self._http.events(self._path, body)) as events:
            async for event in events:
                yield growing.take(event)
        self.token_usage.add(growing.meta)
        if growing.finish is None:
            raise Unreachable(f"the server at {self._http.url} broke off: its stream ended before the text did")

    @property
    def _path(self) -> str:
        return "/chat/completions" if self.chats else "/completions"

    async def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        dialect = await self._dialect()
        body = {"model": self._model} | form.sampling_body(sampling, dialect, chat=self.chats)
        if not self.chats:
            return body | {"prompt": prompt.text}
        turns = turns_of(prompt, self._template, "OpenAI")
        if len(turns) > len(prompt.messages):
            if not dialect.continues:
                raise Unsupported(
                    "OpenAI's API does not continue a begun turn of the assistant: let the turn begin with "
                    "gen(…), say dialect='vllm' (or another) if the server can, or use @function(num_api_spec_tokens=…)"
                )
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body | {"messages": turns}

    # ---- choosing -----------------------------------------------------------------------------------------------

    async def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, call: Call) -> Decision:
        if self.chats:
            raise Unsupported(
                "a chat API reports no log probabilities of given texts: select with OpenAI(…, completions=True), or "
                "gen(regex=…) where the server takes it"
            )
        if method.unconditional:
            raise Unsupported(f"{method.name} needs token ids, which OpenAI's API does not report")
        if not (await self._dialect()).echoes:
            raise Unsupported("OpenAI's API reports no log probabilities of given texts, so it cannot select")
        return await super().select(prompt, choices, method, call)

    async def count(self, text: str, call: Call) -> int:
        answer = await self._echo(text)
        with read(answer, form.FORM):
            return int(answer["usage"]["prompt_tokens"])

    async def score(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], start: int, call: Call
    ) -> list[list[TokenLogprob]]:
        answer = await self._echo(prompts, logprobs=1)
        with read(answer, form.FORM):
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            return [_tokens(choice["logprobs"])[start:] for choice in choices]

    async def _echo(self, prompt: Any, **more: Any) -> Any:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 0, "temperature": 0, "echo": True, **more}
        return await self._ask("/completions", body)

    async def _ask(self, path: str, body: Any) -> Any:
        answer = await self._http.post(path, body)
        self.token_usage.add(answer.get("usage") if isinstance(answer, dict) else None)
        return answer

    async def aclose(self) -> None:
        await self._http.close()


def _tokens(logprobs: Any) -> list[TokenLogprob]:
    return [
        TokenLogprob(value, None, token)
        for value, token in zip(logprobs["token_logprobs"], logprobs["tokens"], strict=True)
    ]
