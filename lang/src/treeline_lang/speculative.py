"""Generating with speculation: which of a stream's gens ask the backend, and which need not."""

from __future__ import annotations

from collections import deque
from typing import Any

from treeline_lang.backends.base import Completion
from treeline_lang.errors import Refused, Unmatched
from treeline_lang.executor import StreamExecutor
from treeline_lang.expressions import Role
from treeline_lang.sampling import Sampling
from treeline_lang.speculation import TRIES, Pattern, Surplus, as_asked, eligible, part_of, pieces_of
from treeline_lang.transcript import Prompt

_NONE = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0}
"""What a gen costs that needs no call. The metas of a run add up to what its calls cost."""


async def generate(stream: StreamExecutor, prompt: Prompt, sampling: Sampling) -> list[Completion]:
    """`backend.generate`, or what is known of it already. With speculation, metas say how many `calls` it took."""
    ahead, run = stream.ahead, stream.run
    surplus, ahead.surplus = ahead.surplus, None
    tokens = run.call.num_api_spec_tokens
    if tokens is None or run.streaming:
        return await run.backend.generate(prompt, sampling, run.call)
    if ahead.foreseen:
        return [ahead.foreseen.popleft()]
    if not run.backend.chats and run.backend.tells_tokens and not ahead.blind and eligible(sampling):
        images = len(prompt.images)
        if surplus is not None and (taken := surplus.part(prompt.text, images, sampling)) is not None:
            part, ahead.surplus = taken
            return [Completion(part.text, {**_NONE, "finish_reason": part.finish})]
        if (made := await _beyond(stream, prompt, sampling, tokens)) is not None:
            return [made]
    completions = await run.backend.generate(prompt, sampling, run.call)
    first, *others = completions
    return [_counted(stream, first, 1), *others]


async def _beyond(stream: StreamExecutor, prompt: Prompt, sampling: Sampling, tokens: int) -> Completion | None:
    """A call beyond the gen's stop, whose surplus the stream keeps. None: what the gen would have made of it is not
    known, and it must be asked as it is."""
    run, ahead = stream.run, stream.ahead
    asked = as_asked(sampling, tokens)
    try:
        [whole] = await run.backend.generate(prompt, asked, run.call)
    except Refused:  # so many tokens, it may be: then the call without speculation is not refused
        return None
    pieces = pieces_of(whole)
    finish = whole.meta.get("finish_reason") or {}
    ended = finish if finish.get("type") == "stop" else None
    part = None if pieces is None else part_of(pieces, sampling, ended)
    if part is None:
        ahead.blind = pieces is None
        ahead.spent += 1
        return None
    ahead.surplus = Surplus(prompt.text + part.text, len(prompt.images), part.rest, asked, ended)
    return _counted(stream, Completion(part.text, {**_without_tokens(whole), "finish_reason": part.finish}), 1)


def foresees(stream: StreamExecutor, role: Role) -> bool:
    """Whether a turn that begins may be made by one call."""
    run = stream.run
    speculates = run.call.num_api_spec_tokens is not None and not run.streaming
    return speculates and run.backend.chats and role == "assistant"


async def foresee(stream: StreamExecutor, pattern: Pattern | None) -> None:
    """Have the turn made that has begun, for its gens to take. Where the replies are not as the program has it, the
    gens ask for themselves; raises Unmatched for a backend that cannot go on with a turn that has begun."""
    run, tokens = stream.run, stream.run.call.num_api_spec_tokens
    continues = await run.backend.continues()
    if tokens is None or pattern is None or not pattern.speculates(continues=continues):
        return
    prompt = stream.transcript.prompt()
    asked = pattern.asked(tokens, tells_tokens=run.backend.tells_tokens)
    tries = TRIES if asked.temperature != 0 else 1  # it would say the same again
    for _ in range(tries):
        try:
            [reply] = await run.backend.generate(prompt, asked, run.call)
        except Refused:  # so many tokens, or to tell them: single gens ask for less
            if not continues:
                raise
            return
        found = pattern.read(reply)
        if found is not None:
            first = Completion(found[0].text, {**_without_tokens(reply), **found[0].meta})
            others = [Completion(one.text, {**_NONE, **one.meta}) for one in found[1:]]
            stream.ahead.foreseen = deque([_counted(stream, first, 1), *others])
            return
        stream.ahead.spent += 1
    if not continues:
        times = "once, at temperature 0" if tries == 1 else f"{tries} times"
        raise Unmatched(f"the model was asked {times} for the whole turn, and its reply is not as the program has it")


def _without_tokens(whole: Completion) -> dict[str, Any]:
    """Its meta without the tokens, which the program has not asked for."""
    return {name: value for name, value in whole.meta.items() if name not in ("output_token_logprobs", "output_ids")}


def _counted(stream: StreamExecutor, completion: Completion, calls: int) -> Completion:
    """With its calls, and those before it that came to nothing."""
    spent, stream.ahead.spent = stream.ahead.spent, 0
    return Completion(completion.text, {**completion.meta, "calls": calls + spent})
