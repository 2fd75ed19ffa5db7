"""Requests and answers of OpenAI's chat completions and completions, and the extensions of other servers. Pure
functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from treeline_lang.backends.base import Completion, GrowingCompletion
from treeline_lang.backends.http import given_up, read
from treeline_lang.errors import BackendError, Unsupported
from treeline_lang.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    extensions: tuple[str, ...] = ()
    """Sampling parameters beyond OpenAI's."""
    regex: tuple[str, ...] = ()
    """The path of the member for a regular expression; () if the API has none."""
    continues: bool = False
    """Supports `continue_final_message`: the answer continues a begun turn of the assistant."""
    echoes: bool = False
    """Completions can return the prompt's log probabilities (`echo`)."""
    chat_limit: str = "max_tokens"


_EXTENSIONS: Final = ("top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos")
_OURS: Final = (*_EXTENSIONS, "stop_regex")
DIALECTS: Final[dict[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (
        Dialect("openai", chat_limit="max_completion_tokens"),
        Dialect("treeline", extensions=_OURS, regex=("regex",), continues=True, echoes=True),
        Dialect("vllm", extensions=_EXTENSIONS, regex=("structured_outputs", "regex"), continues=True, echoes=True),
        Dialect("sglang", extensions=_OURS, regex=("regex",), continues=True, echoes=True),
    )
}


def spoken(models: Any, model: str) -> Dialect:
    """The dialect for `owned_by` in `/models`; `openai` if it is unknown."""
    listed = models.get("data") if isinstance(models, Mapping) else None
    entries = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    for one in sorted(entries, key=lambda one: one.get("id") != model):
        owner = one.get("owned_by")
        if owner in DIALECTS:
            return DIALECTS[owner]
    return DIALECTS["openai"]


FORM: Final = "one of OpenAI's API"
_PLAIN: Final = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "n", "stop")


def sampling_body(sampling: Sampling, dialect: Dialect, *, chat: bool) -> dict[str, Any]:
    """The members of a request, without its prompt. Raises Unsupported."""
    body: dict[str, Any] = {dialect.chat_limit if chat else "max_tokens": sampling.limit}
    body |= sampling.given(_PLAIN)
    extensions = sampling.given(_OURS)
    unknown = [name for name in extensions if name not in dialect.extensions]
    if unknown:
        raise Unsupported(f"OpenAI's API has no {unknown[0]} (dialect {dialect.name}); give the server's dialect")
    return body | extensions | _constraint(sampling, dialect) | _logprobs(sampling, chat=chat)


def _constraint(sampling: Sampling, dialect: Dialect) -> dict[str, Any]:
    if sampling.json_schema is not None:
        schema = {"name": "output", "schema": json.loads(sampling.json_schema), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if sampling.regex is None:
        return {}
    if not dialect.regex:
        raise Unsupported("OpenAI's API supports no regex or dtype: use a json_schema")
    value: Any = sampling.regex
    for name in reversed(dialect.regex):
        value = {name: value}
    return dict(value)


def _logprobs(sampling: Sampling, *, chat: bool) -> dict[str, Any]:
    if sampling.logprob_start_len not in (None, -1):
        raise Unsupported("OpenAI's API reports logprobs of its own tokens, not of the prompt")
    tops = sampling.top_logprobs_num or 0
    if not sampling.return_logprob:
        return {}
    if chat:
        return {"logprobs": True} | ({"top_logprobs": tops} if tops else {})
    return {"logprobs": tops}


def completions_of(answer: Any, count: int, *, chat: bool) -> list[Completion]:
    """The choices of an answer, in order. Raises BackendError if they are malformed or too few."""
    with read(answer, FORM):
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        completions = [_whole(answer, choice, chat=chat, several=len(choices) > 1) for choice in choices]
    if len(completions) != count:
        raise BackendError(f"the server answered with {len(completions)} texts where {count} were asked for")
    return completions


def _whole(answer: Any, choice: Any, *, chat: bool, several: bool) -> Completion:
    growing = Growing(chat=chat)
    growing.take_head(answer)
    text = choice["message"].get("content") if chat else choice["text"]
    if chat and (thought := choice["message"].get("reasoning_content")):
        growing.reasoning = thought
    growing.take_choice({**choice, "delta": {"content": text}, "text": text})
    meta = growing.completion().meta
    if several:  # the server counts them for all choices together
        meta.pop("completion_tokens", None)
    return Completion(growing.text, meta)


@dataclass
class Growing(GrowingCompletion):
    """A choice that is being streamed."""

    chat: bool = False

    def take(self, event: Any) -> Completion:
        """Returns the completion so far. Raises BackendError for a malformed event."""
        with read(event, FORM):
            self.take_head(event)
            for choice in event.get("choices") or ():
                if choice.get("index", 0) == 0:  # a stream is asked for one choice
                    self.take_choice(choice)
        return self.completion()

    def take_head(self, event: Mapping[str, Any]) -> None:
        if event.get("error"):
            raise given_up(event["error"])
        if event.get("id"):
            self.meta["id"] = event["id"]
        if usage := event.get("usage"):
            self.meta |= _counts(usage)

    def take_choice(self, choice: Mapping[str, Any]) -> None:
        delta = (choice.get("delta") or {}) if self.chat else choice
        self.text += delta.get("content" if self.chat else "text") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        if logprobs := choice.get("logprobs"):
            self._take_logprobs(logprobs)
        if choice.get("finish_reason"):
            self.finish = choice["finish_reason"]
            self.matched = choice.get("matched_stop", choice.get("stop_reason"))
            if self.finish == "abort":
                raise BackendError("the server aborted the request")

    def _take_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        if self.chat:
            content = logprobs.get("content") or []
            chosen = [(one["logprob"], None, one["token"]) for one in content]
            listed = [one.get("top_logprobs") for one in content]
            tops = [[(top["logprob"], None, top["token"]) for top in one or ()] for one in listed]
        else:
            chosen = [
                (value, None, token)
                for value, token in zip(logprobs["token_logprobs"], logprobs["tokens"], strict=True)
            ]
            tops = [
                [(value, None, token) for token, value in (one or {}).items()]
                for one in logprobs.get("top_logprobs") or ()
            ]
        self.meta.setdefault("output_token_logprobs", []).extend(chosen)
        if any(tops):
            self.meta.setdefault("output_top_logprobs", []).extend(tops)


def _counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Token counts under the names of `/generate`."""
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if usage.get(name) is not None}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return counts if cached is None else counts | {"cached_tokens": cached}
