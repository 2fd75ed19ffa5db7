"""Treeline's runtime, or any server with SGLang's `/generate`, alone or behind a gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from treeline_wire.headers import FORK, SESSION_ID

from treeline_lang import background
from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.backends.http import HttpClient, given_up, read
from treeline_lang.choices import ChoicesMethod, Decision, TokenLogprob
from treeline_lang.errors import BackendError, Refused, Unreachable, Unsupported
from treeline_lang.sampling import Sampling
from treeline_lang.templates import TEMPLATES, ChatTemplate, Message, derive, named
from treeline_lang.transcript import Prompt

_TOP_LEVEL: Final = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_NOTHING: Final = {"max_new_tokens": 0, "temperature": 0.0}


class RuntimeEndpoint(Backend):
    """A runtime behind a URL, or a gateway in front of many."""

    reads_images = reads_videos = True
    takes_hints = True
    tells_tokens = True

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        chat_template: str | ChatTemplate | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """api_key: a bearer token (None: the variable TREELINE_API_KEY). model: needed where a URL serves several.
        chat_template: one of `treeline_lang.templates.TEMPLATES`, or your own pieces (None: the model's). Raises
        ValueError for a wrong URL or template.
        """
        key = api_key or os.environ.get("TREELINE_API_KEY")
        self._http = HttpClient(url, {"authorization": f"Bearer {key}"} if key else {}, timeout_s=timeout_s)
        self._model = {} if model is None else {"model": model}
        self._template: ChatTemplate | None = named(chat_template)
        self._deriving: asyncio.Task[ChatTemplate] | None = None
        self._item_texts: dict[str, str] | None = None

    # ---- generating ---------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        answer = await self._post(self._body(prompt, sampling), call)
        completions = [_completion(one) for one in (answer if isinstance(answer, list) else [answer])]
        if len(completions) != (sampling.n or 1):
            raise BackendError(
                f"the server answered with {len(completions)} texts where {sampling.n or 1} were asked for"
            )
        return completions

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        body = {**self._body(prompt, sampling), "stream": True}
        ended = False
        async with aclosing(self._http.events("/generate", body, self._headers(call))) as events:
            async for data in events:
                if isinstance(data, dict) and "error" in data:
                    raise given_up(data["error"])
                completion = _completion(data)
                yield completion
                ended = bool(completion.meta.get("finish_reason"))
        if not ended:
            raise Unreachable(f"the server at {self._http.url} broke off: its stream ended before the text did")

    async def warm(self, prompt: Prompt, call: Call, children: int = 1) -> None:
        body = {**_shown(prompt), "sampling_params": _NOTHING} | self._model
        headers = self._headers(call) | ({FORK: str(children)} if children > 1 else {})
        await self._http.post("/generate", body, headers)

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        constraints = sampling.given(("regex", "json_schema", "n"))
        body = {**_shown(prompt), "sampling_params": sampling.native() | constraints}
        return body | sampling.given(_TOP_LEVEL)

    async def item_text(self, kind: str) -> str:
        if self._item_texts is None:
            self._item_texts = (await self._about("/get_model_info")).get("placeholders") or {}
        with read(self._item_texts, "one of /get_model_info"):
            if text := self._item_texts.get(kind):
                return str(text)
        raise Unsupported(f"the model behind this RuntimeEndpoint reads only text, no {kind}s")

    # ---- choosing -----------------------------------------------------------------------------------------------

    async def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, call: Call) -> Decision:
        if prompt.all_images:
            raise Unsupported("log probabilities of a prompt with images are unknown: choose with gen(regex=…)")
        return await super().select(prompt, choices, method, call)

    async def count(self, text: str, call: Call) -> int:
        answer = await self._post({"text": text, "sampling_params": _NOTHING}, call)
        with read(answer, "one of /generate"):
            return int(answer["meta_info"]["prompt_tokens"])

    async def score(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], start: int, call: Call
    ) -> list[list[TokenLogprob]]:
        inputs = {"text" if isinstance(prompts[0], str) else "input_ids": prompts}
        asked = {"return_logprob": True, "logprob_start_len": start, "return_text_in_logprobs": True}
        answers = await self._post({**inputs, **asked, "sampling_params": _NOTHING}, call)
        with read(answers, "one of /generate"):
            return [[TokenLogprob(*entry) for entry in one["meta_info"]["input_token_logprobs"]] for one in answers]

    # ---- the server ---------------------------------------------------------------------------------------------

    async def template(self) -> ChatTemplate:
        if self._template is None:
            if (
                self._deriving is None or self._deriving.get_loop() is not asyncio.get_running_loop()
            ):  # a process forked
                self._deriving = asyncio.ensure_future(self._derive())
            try:
                self._template = await asyncio.shield(self._deriving)
            finally:
                if self._deriving is not None and self._deriving.done():
                    self._deriving = None
        return self._template

    async def _derive(self) -> ChatTemplate:
        async def render(messages: list[Message], opened: bool) -> str:
            tokens = await self._tokens({"messages": messages, "add_generation_prompt": opened})
            return await self._text(tokens)

        start = await self._text(await self._tokens({"prompt": ""}))
        return await derive(render, start)

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        try:
            answer = await self._http.post("/tokenize", body | self._model)
        except Refused as error:
            choices = ", ".join(TEMPLATES)
            raise Refused(f"{error.reason} (a server that renders no chats needs a chat_template: {choices})") from None
        with read(answer, "one of /tokenize"):
            return list(answer["tokens"])

    async def _text(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        body = {"tokens": tokens, "skip_special_tokens": False} | self._model
        answer = await self._http.post("/detokenize", body)
        with read(answer, "one of /detokenize"):
            return str(answer["text"])

    async def _post(self, body: dict[str, Any], call: Call) -> Any:
        return await self._http.post("/generate", body | self._model, self._headers(call))

    def _headers(self, call: Call) -> dict[str, str]:
        return {} if call.session is None else {SESSION_ID: call.session}

    def get_server_info(self) -> dict[str, Any]:
        return background.call(self._about("/get_server_info"))

    def get_model_name(self) -> str:
        return str(self.get_model_info()["model_path"])

    def get_model_info(self) -> dict[str, Any]:
        return background.call(self._about("/get_model_info"))

    async def _about(self, path: str) -> dict[str, Any]:
        info = await self._http.get(path)
        if not isinstance(info, dict):
            raise BackendError(f"the server's answer is not one of {path}: {str(info)[:200]}")
        return info

    def flush_cache(self) -> None:
        """If the server hides this from users, its administration on this machine is asked; else raises Unsupported."""
        background.call(self._flush())

    async def _flush(self) -> None:
        try:
            await self._http.post_text("/flush_cache")
            return
        except Refused as error:
            refusal = error
        try:
            info = await self._about("/get_server_info")
        except Refused:
            info = {}  # a gateway, which has many behind it
        host, port = info.get("admin_host"), info.get("admin_port")
        here = urlsplit(self._http.url)
        local = ("127.0.0.1", "localhost", "::1")
        if host not in local or here.hostname not in local or type(port) is not int:
            raise Unsupported(f"the cache cannot be flushed from here: {refusal.reason}") from None
        admin = HttpClient(urlunsplit((here.scheme, f"{here.hostname}:{port}", "", "", "")))
        try:
            await admin.post_text("/flush_cache?timeout=5")
        finally:
            await admin.close()

    async def aclose(self) -> None:
        await self._http.close()


def _shown(prompt: Prompt) -> dict[str, Any]:
    """A prompt's members of a body."""
    body: dict[str, Any] = {"text": prompt.text}
    for kind in ("image", "video"):
        if urls := [part[name]["url"] for part in prompt.all_images if (name := f"{kind}_url") in part]:
            body[f"{kind}_data"] = urls
    return body


def _completion(answer: Any) -> Completion:
    with read(answer, "one of /generate"):
        text, meta = answer["text"], answer["meta_info"]
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":
            raise BackendError(f"the server aborted the request: {finish.get('message', '')}")
        if not isinstance(text, str):
            raise TypeError
        return Completion(text, meta)
