"""How an answer of another API leaves, whole or as events: one output's parts, in the words of that API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fastapi import Response

from treeline_runtime.messages import TextOut
from treeline_runtime.parsers.parts import CallArguments, CallBegun, Part, Said, Thought
from treeline_runtime.server.chat import choices
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.http import Answer, ApiRequest, named_event
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.pacing import Pacer, encode_json
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.service import Service, token_headers
from treeline_runtime.tokenizer_manager import InflightRequest

Event = dict[str, Any]
"""With its `type`. Parts of it may change afterwards: it is written before the next is asked for."""


class Events(Protocol):
    """One answer's. No IO."""

    @property
    def answer(self) -> Any:
        """As it is by now; becomes JSON."""

    def begin(self, out: TextOut) -> Iterator[Event]:
        """The first output has come."""

    def take(self, part: Part) -> Iterator[Event]:
        """The output goes on."""

    def end(self, out: TextOut, reasoning_tokens: int | None) -> Iterator[Event]:
        """That was the last. `reasoning_tokens`: how many of all were reasoning; None = not known. Raises ApiError for
        an end that the API has no word for."""


async def answer(
    asked: ApiRequest,
    chat: ChatTask,
    inflight: InflightRequest,
    events: Events,
    failed: Callable[[ApiError], bytes],
) -> Response:
    """The answer, whole or as it comes. `failed`: the last event of one that fails on its way."""
    if not chat.streaming.on:
        return await _whole(asked.service, chat, inflight, events)
    return await _stream(asked, chat, inflight, events, failed)


async def _whole(service: Service, chat: ChatTask, inflight: InflightRequest, events: Events) -> Answer:
    (out,) = await service.collect(inflight)
    parts = _Parts(service.prompts, chat)
    _drain(events.begin(out))
    for part in await parts.take(out, Pacer()):
        _drain(events.take(part))
    _drain(events.end(out, parts.reasoning_tokens))
    headers = token_headers(chat.job.prompt_tokens, out.cached_tokens)
    return Answer(encode_json(events.answer), headers=headers)


async def _stream(
    asked: ApiRequest,
    chat: ChatTask,
    inflight: InflightRequest,
    events: Events,
    failed: Callable[[ApiError], bytes],
) -> Response:
    parts = _Parts(asked.service.prompts, chat)

    async def frames(_index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        made = [] if asked.streaming else _written(events.begin(out))
        for part in await parts.take(out, pacer):
            made += _written(events.take(part))
        return made if out.finish is None else made + _written(events.end(out, parts.reasoning_tokens))

    return await asked.service.stream(
        asked,
        inflight,
        frames,
        headers_of=lambda out: token_headers(chat.job.prompt_tokens, out.cached_tokens),
        closing=lambda: b"",
        failed=failed,
    )


def _written(events: Iterator[Event]) -> list[bytes]:
    return [named_event(event) for event in events]


def _drain(events: Iterator[Event]) -> None:
    for _ in events:
        pass


class _Parts:
    """The outputs of one answer → its parts, as a chat tells them: `take` the outputs in order."""

    def __init__(self, prompts: Prompts, task: ChatTask) -> None:
        (self._choice,) = choices(prompts, task)

    async def take(self, out: TextOut, pacer: Pacer) -> list[Part]:
        """What an output adds: only what the request wants to see."""
        return [part for delta in await self._choice.take(out, pacer) for part in _parts_of(delta)]

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of the tokens so far were reasoning; None = not known."""
        return self._choice.reasoning_tokens


def _parts_of(delta: dict[str, Any]) -> Iterator[Part]:
    match delta:
        case {"content": text}:
            yield Said(text)
        case {"reasoning_content": text}:
            yield Thought(text)
        case {"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": text}}]}:
            yield CallBegun(index, name, id)
            yield CallArguments(index, text)
        case {"tool_calls": [{"index": index, "function": {"arguments": text}}]}:
            yield CallArguments(index, text)
        case _:
            raise AssertionError(f"a delta of an unknown kind: {sorted(delta)}")
