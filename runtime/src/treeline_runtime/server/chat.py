"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Response
from msgspec import UNSET
from msgspec.structs import replace

from treeline_runtime.messages import FinishReason, TextOut
from treeline_runtime.parsers import STRAYS
from treeline_runtime.parsers.source import CallArguments, CallBegun, OutputParser, Part, Said, Thought
from treeline_runtime.server import answers, openai, schema
from treeline_runtime.server.dependencies import Call, call_of
from treeline_runtime.server.errors import Header
from treeline_runtime.server.http import DONE, Answer, event
from treeline_runtime.server.jobs import ChatTask, Shown
from treeline_runtime.server.pacing import Pacer, opened
from treeline_runtime.server.prompts import Prompts, SpecialTokens, Unmarked
from treeline_runtime.server.service import AnswerMaker, Service, token_headers, usage

FED_CHARS: Final = 2 << 10
"""Characters of an answer parsed before others run."""
_NOTHING_SPECIAL: Final = SpecialTokens(())
_TURN_ENDS: Final = SpecialTokens(STRAYS)


class Choice:
    """One choice of an answer, parsed so far. `take` its outputs in order."""

    def __init__(
        self, parser: OutputParser | None, shown: Shown, special: SpecialTokens, end_of_thinking: int | None = None
    ) -> None:
        """`parser`: None: all is text. `special`: tokens to remove. `end_of_thinking`: the token."""
        self._parser = parser
        self._shown = shown
        self._said = Unmarked(special)
        self._thought = Unmarked(special)
        self._held = list[str]()
        """Reasoning so far, if it is to be sent in one piece."""
        self._end_of_thinking = end_of_thinking
        self._thinking_tokens = 0
        self._thinks = False
        self._has_thought = False
        self.calls = 0

    async def take(self, out: TextOut, pacer: Pacer) -> list[Part]:
        """The parts of an output that the request wants to see, merged, in order."""
        if self._parser is None:
            return [Said(out.text)] if out.text else []
        self._count(out.token_ids)
        found = list[Part]()
        for start in range(0, len(out.text), FED_CHARS):
            found += self._visible(self._parser.feed(out.text[start : start + FED_CHARS]), over=False)
            await pacer.rest()
        if out.finish is not None:
            found += self._visible(self._parser.end(), over=True)
        return _joined(found)

    def _visible(self, parts: Iterable[Part], *, over: bool) -> Iterator[Part]:
        for part in self._clean(parts, over=over):
            match part:
                case Said(text):
                    shown = bool(text)
                case Thought(text):
                    self._thinks = self._thinks or bool(text)
                    shown = bool(text) and self._shown.reasoning
                case CallBegun(index, _, _):
                    shown = not index or self._shown.several_calls
                    self.calls += shown
                case CallArguments(index, text):
                    shown = bool(text) and index < self.calls
            if shown:
                yield part

    def _clean(self, parts: Iterable[Part], *, over: bool) -> Iterator[Part]:
        """Parts without special tokens. Held text comes before a part of another kind."""
        for part in parts:
            if not isinstance(part, Said) and (rest := self._said.end()):
                yield Said(rest)
            if not isinstance(part, Thought):
                yield from self._end_of_thought()
            match part:
                case Said(text):
                    yield Said(self._said.feed(text))
                case Thought(text) if self._shown.reasoning_at_once:
                    self._held.append(self._thought.feed(text))
                case Thought(text):
                    yield Thought(self._thought.feed(text))
                case _:
                    yield part
        if over:
            yield from self._end_of_thought()
            yield Said(self._said.end())

    def _end_of_thought(self) -> Iterator[Part]:
        text = "".join([*self._held, self._thought.end()])
        self._held.clear()
        if text:
            yield Thought(text)

    def _count(self, ids: list[int]) -> None:
        if self._end_of_thinking is None or self._has_thought:
            return
        self._has_thought = self._end_of_thinking in ids
        self._thinking_tokens += ids.index(self._end_of_thinking) + 1 if self._has_thought else len(ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens so far, markers included; None if unknown."""
        if self._end_of_thinking is None:
            return None
        return self._thinking_tokens if self._thinks else 0

    def finish_reason(self, finish: FinishReason) -> answers.ChatFinishReason:
        """`tool_calls` if the model ended by itself and made calls; a cut output may end inside a call."""
        assert finish.type != "error", "which is not an answer (`Service.check_finish`)"
        if finish.type == "stop" and self.calls and not isinstance(finish.matched, str):
            return "tool_calls"
        return finish.type


def choices(prompts: Prompts, task: ChatTask) -> list[Choice]:
    """The empty choices of an answer."""
    parsing = task.parsing
    if parsing is None:
        return [Choice(None, task.shown, _NOTHING_SPECIAL) for _ in range(task.n)]
    special = _NOTHING_SPECIAL
    if parsing.needs_special_tokens:
        special = _TURN_ENDS if task.shown.special_tokens else prompts.special_tokens
    end = None if parsing.closing is None else prompts.token_of(parsing.closing)
    return [Choice(parsing.parser(), task.shown, special, end) for _ in range(task.n)]


def _joined(parts: Iterable[Part]) -> list[Part]:
    runs = list[tuple[Part, list[str]]]()
    for part in parts:
        before = runs[-1][0] if runs else None
        if isinstance(part, CallBegun):
            runs.append((part, []))
        elif type(before) is type(part) and getattr(before, "index", 0) == getattr(part, "index", 0):
            runs[-1][1].append(part.text)
        else:
            runs.append((part, [part.text]))
    return [msgspec.structs.replace(part, text="".join(texts)) if len(texts) > 1 else part for part, texts in runs]


def deltas(parts: Iterable[Part]) -> list[answers.ChatDelta]:
    """The first delta of a call includes the arguments that came with it."""
    made = list[answers.ChatDelta]()
    begun: answers.ToolCallDelta | None = None
    for part in parts:
        match part:
            case Said(text):
                made.append(answers.ChatDelta(content=text))
            case Thought(text):
                made.append(answers.ChatDelta(reasoning_content=text, reasoning=text))
            case CallBegun(index, name, id):
                begun = answers.ToolCallDelta(index, answers.FunctionDelta("", name), id or call_id(), "function")
                made.append(answers.ChatDelta(tool_calls=[begun]))
                continue
            case CallArguments(index, text):
                if begun is not None and begun.index == index:
                    begun.function.arguments = text
                else:
                    made.append(
                        answers.ChatDelta(tool_calls=[answers.ToolCallDelta(index, answers.FunctionDelta(text))])
                    )
        begun = None
    return made


def call_id() -> str:
    """The id of a call whose format has none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def message(parts: Iterable[Part], *, reasons: bool, echo: str = "") -> answers.ChatMessage:
    """A whole answer's parts as its message. Content is null if there are only calls. `reasons`: includes a member for
    reasoning, even if empty. `echo`: the content's beginning."""
    content, reasoning, calls = list[str](), list[str](), list[answers.ToolCall]()
    for part in parts:
        match part:
            case Said(text):
                content.append(text)
            case Thought(text):
                reasoning.append(text)
            case CallBegun(_, name, id):
                calls.append(answers.ToolCall(id or call_id(), "function", answers.CalledFunction(name, "")))
            case CallArguments(index, text):
                calls[index].function.arguments += text
    thought = ("".join(reasoning) or None) if reasons else UNSET
    return answers.ChatMessage(
        "assistant",
        echo + "".join(content) if echo or content or not calls else None,
        None,
        thought,
        thought,
        calls or UNSET,
    )


router = APIRouter()


@schema.post(
    router,
    "/v1/chat/completions",
    tag=schema.OPENAI,
    summary="Answer a chat",
    body=openai.ChatBody,
    answer=answers.ChatCompletion,
    event=answers.ChatChunk,
)
async def chat(call: Annotated[Call[ChatTask], call_of("chat", "generate")]) -> Response:
    service, asked, task = call
    size = task.n * len(task.echo) + task.ids_bytes
    return await service.answer(asked, task, _Answer(service, task), answer_bytes=size)


class _Answer(AnswerMaker):
    def __init__(self, service: Service, task: ChatTask) -> None:
        self._prompts, self._model = service.prompts, service.name_of(task)
        self._task = task
        self._choices = choices(service.prompts, task)
        self._last: dict[int, TextOut] = {}
        self._head = answers.ChatChunk(
            **openai.envelope(task.rid, "chat.completion.chunk", self._model),
            usage=None if task.usage else UNSET,
            choices=[],
        )

    def _usage(self, outs: Mapping[int, TextOut]) -> answers.Usage:
        counts = [count for choice in self._choices if (count := choice.reasoning_tokens) is not None]
        return usage(self._task, outs, sum(counts) if counts else None)

    async def whole(self, outs: list[TextOut]) -> Answer:
        task = self._task
        reasons = task.parsing is not None and task.parsing.reasoning is not None
        pieces, pacer = list[bytes](), Pacer()
        for index, (choice, out) in enumerate(zip(self._choices, outs, strict=True)):
            assert out.finish is not None, "a whole answer has ended"
            shown = answers.ChatChoice(
                index=index,
                message=message(await choice.take(out, pacer), reasons=reasons, echo=task.echo),
                finish_reason=choice.finish_reason(out.finish),
                matched_stop=out.finish.matched,
                token_ids=out.token_ids if task.token_ids else UNSET,
                logprobs=None,
            )
            pieces += [b"," if index else b"", opened(shown)]
            pieces += [*await openai.chat_logprobs(out, task.logprobs, self._prompts, pacer), b"}"]
        head = answers.ChatCompletion(
            **openai.envelope(task.rid, "chat.completion", self._model),
            usage=self._usage(dict(enumerate(outs))),
            prompt_token_ids=self._prompts.shown_ids(task.prompts[0]) if task.token_ids else UNSET,
            choices=[],
        )
        tail = [b"]"]
        if task.prompt_logprobs is not None:
            tail += [b',"prompt_logprobs":', *await openai.prompt_logprobs(outs[0], task.prompt_logprobs, pacer)]
        return Answer([opened(head), *pieces, *tail, b"}"], headers=self.headers(outs[0]))

    def headers(self, first: TextOut) -> list[Header]:
        return token_headers(self._task.prompt_tokens, first.cached_tokens)

    def opening(self) -> bytes:
        """The role of each choice; the first chunk has the prompt's ids."""
        role, task = answers.ChatDelta("assistant", self._task.echo, None), self._task
        first = self._head
        if task.token_ids:
            first = replace(first, prompt_token_ids=self._prompts.shown_ids(task.prompts[0]))
        return b"".join(
            self._begun(index, role, head=self._head if index else first) + b"null" + _END for index in range(task.n)
        )

    def _begun(
        self, index: int, delta: answers.ChatDelta, *, head: answers.ChatChunk | None = None, **more: Any
    ) -> bytes:
        """A chunk up to its `choices[0].logprobs`."""
        head = head or self._head
        if self._task.continuous_usage and self._last:
            head = replace(head, usage=self._usage(self._last))
        choice = answers.ChatChunkChoice(index=index, delta=delta, logprobs=None, **more)
        return b"data: " + opened(head) + opened(choice)

    async def frames(self, index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        self._last[index] = out
        task, choice, made = self._task, self._choices[index], list[bytes]()
        told = deltas(await choice.take(out, pacer))
        logprobs = openai.NO_LOGPROBS
        if (task.logprobs is not None or task.token_ids) and out.token_ids:
            logprobs = await openai.chat_logprobs(out, task.logprobs, self._prompts, pacer)
            told = told or [answers.ChatDelta()]  # tokens without text, or with held text
        ids: dict[str, Any] = {"token_ids": out.token_ids} if task.token_ids else {}
        for delta in told:
            made += [self._begun(index, delta, **ids), *logprobs, _END]
            logprobs, ids = openai.NO_LOGPROBS, {}
        if out.finish is not None:
            finish = choice.finish_reason(out.finish)
            end = self._begun(index, answers.ChatDelta(), finish_reason=finish, matched_stop=out.finish.matched)
            made += [end, b"null", _END]
        return made

    def closing(self) -> bytes:
        return (event(replace(self._head, usage=self._usage(self._last))) if self._task.usage else b"") + DONE


_END = b"}]}\n\n"
