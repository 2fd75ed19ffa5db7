"""Steps of a stream: appending expressions, forks, joins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treeline_lang import images, speculation
from treeline_lang.backends.base import Completion
from treeline_lang.errors import ProgramError, RoleError, Unsupported, WrongType
from treeline_lang.executor import Step, StreamExecutor
from treeline_lang.expressions import (
    Expr,
    Gen,
    Image,
    OrderBegin,
    OrderEnd,
    Path,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    Text,
    as_expr,
    at_path,
    flatten,
    names_of,
)
from treeline_lang.growing import Variable
from treeline_lang.reasoning import split_reasoning
from treeline_lang.sampling import Sampling
from treeline_lang.speculation import Pattern
from treeline_lang.where import Where


@dataclass(frozen=True, slots=True, eq=False)
class Read(Expr):
    """Appends the value of a variable, or a part of it, as text; waits for it."""

    has_text = True
    variable: Variable
    path: Path = ()
    text: bool = False
    """Whether it must be a text, since it is added to one."""
    where: Where | None = None

    async def value(self) -> str:
        """Raises the variable's failure, or ProgramError if it has no text."""
        whole = await self.variable.read_async()
        try:
            value = at_path(whole, self.path)
            if self.text and not isinstance(value, str):
                raise TypeError(f"it is added to a text, and it is {value!r}")
            text = as_expr(value)
        except (LookupError, TypeError) as error:
            raise ProgramError(f"the variable {self.variable.name!r}: {error}") from None
        if not isinstance(text, Text):
            raise ProgramError(f"the variable {self.variable.name!r} holds an expression, which is not appended later")
        return text.text


class Extend(Step):
    """Appends an expression, part by part."""

    name = "+="

    def __init__(self, expr: Expr, where: Where | None) -> None:
        self.where = where
        self.expr = expr
        self.variables = [Variable(name) for name in names_of(expr)]

    async def do(self, stream: StreamExecutor) -> None:
        variables = iter(self.variables)
        parts = flatten(self.expr)
        for number, part in enumerate(parts, 1):
            stream.step = (getattr(part, "where", None) or self.where, _name(part))
            await _append(stream, part, variables)
            if isinstance(part, RoleBegin) and speculation.foresees(stream, part.role):
                await speculation.foresee(stream, await _pattern(stream, parts[number:]))
            stream.show()


class Assign(Step):
    """`set_var`, in order with the other steps."""

    name = "set_var"

    def __init__(self, name: str, value: Any, where: Where | None) -> None:
        self.where = where
        self.value = value
        self.variables = [Variable(name)]

    async def do(self, stream: StreamExecutor) -> None:
        self.variables[0].set(self.value)

    def do_late(self) -> bool:
        self.variables[0].set(self.value)
        return True


class Fork(Step):
    """Starts other streams with this stream's transcript."""

    name = "fork"

    def __init__(self, children: Sequence[StreamExecutor], where: Where | None) -> None:
        self.where = where
        self.children = children

    async def do(self, stream: StreamExecutor) -> None:
        run, transcript = stream.run, stream.transcript
        if len(self.children) > 1 and transcript.text and run.hints and run.backend.takes_hints:
            await run.send_ahead(transcript.prompt(), len(self.children))
        for child in self.children:
            child.start(transcript.copy())

    def abandon(self, failure: ProgramError) -> None:
        for child in self.children:  # not at once: forks of forks may be deeper than Python's stack
            asyncio.get_running_loop().call_soon(child.fail, failure)


class Arrive(Step):
    """The last step of a branch before a join: hands over its transcript."""

    name = "join"

    def __init__(self, where: Where | None) -> None:
        self.where = where
        self.arrived = Variable("join")

    async def do(self, stream: StreamExecutor) -> None:
        self.arrived.set((stream.forked, stream.transcript))

    def abandon(self, failure: ProgramError) -> None:
        self.arrived.fail(failure)


class Join(Step):
    """Waits for the branches, then turns their variables into lists in order; with `appends`, appends their texts
    (`join("concate_and_append")`)."""

    name = "join"

    def __init__(
        self, arrivals: Sequence[Arrive], gathered: dict[str, list[Variable]], *, appends: bool, where: Where | None
    ) -> None:
        """gathered: the branches' variables by name."""
        self.where = where
        self.arrivals = arrivals
        self.gathered = gathered
        self.appends = appends
        self.variables = [Variable(name) for name in gathered]

    async def do(self, stream: StreamExecutor) -> None:
        arrived = [await arrival.arrived.read_async() for arrival in self.arrivals]
        if self.appends:
            for forked, transcript in arrived:
                stream.transcript.take(transcript, forked)
            stream.show()
        for variable, parts in zip(self.variables, self.gathered.values(), strict=True):
            variable.set([await part.read_async() for part in parts], meta=[part.meta() for part in parts])


def join(stream: StreamExecutor, children: Sequence[StreamExecutor], *, appends: bool, where: Where | None) -> None:
    """Submits the steps of a join and ends the branches."""
    arrivals = [Arrive(where) for _ in children]
    gathered: dict[str, list[Variable]] = {}
    for child, arrival in zip(children, arrivals, strict=True):
        child.submit(arrival)
        for name, variable in child.variables.items() if not appends else ():
            if stream.variables.get(name) is not variable:
                gathered.setdefault(name, []).append(variable)
    stream.submit(Join(arrivals, gathered, appends=appends, where=where))
    for child in children:
        child.close_alone()


# ---- parts of an expression -------------------------------------------------------------------------------------


def _name(part: Expr) -> str:
    name = getattr(part, "name", None)
    if isinstance(part, RoleBegin | RoleEnd):
        return f"{part.role}()"
    return part.step if not isinstance(name, str) else f"{part.step}({name!r})"


async def _append(stream: StreamExecutor, part: Expr, variables: Iterator[Variable]) -> None:
    match part:
        case Text(text):
            stream.transcript.append(text)
        case Read():
            stream.transcript.append(await part.value())
        case Gen():
            await _generate(stream, part, variables)
        case Select():
            await _select(stream, part, variables)
        case RoleBegin(role):
            stream.transcript.begin(role, await stream.run.backend.template())
        case RoleEnd(role):
            stream.transcript.end(role, await stream.run.backend.template())
        case ScopeBegin(name):
            stream.scopes[name] = (next(variables), len(stream.transcript.text))
        case ScopeEnd(name):
            _end_scope(stream, name)
        case OrderBegin() | OrderEnd():
            pass
        case Image(source):
            await _show(stream, part.step, source)
        case SeparateReasoning(expr, model_type):
            await _separate(stream, expr, model_type, variables)
        case _:
            raise ProgramError(f"{type(part).__name__} cannot be appended here")


async def _generate(stream: StreamExecutor, node: Gen, variables: Iterator[Variable], *, streams: bool = True) -> None:
    run = stream.run
    variable = next(variables) if node.name is not None else Variable("")
    sampling = node.sampling.over(run.defaults)
    looks = sampling.limit == 0 and bool(sampling.top_logprobs_num)  # at what would come: as SGLang, by one token
    if looks:
        sampling, streams = replace(sampling, max_tokens=1), False
    prompt = stream.transcript.prompt()
    count = sampling.n or 1
    if stream.transcript.role is not None:
        stops = (await run.backend.template()).stop
        sampling = sampling.over(Sampling(stop=stops)) if stops else sampling
    if run.streaming and streams and count == 1:
        last = Completion("")
        async for last in run.backend.stream(prompt, sampling, run.call):
            variable.say(last.text, last.meta)
            stream.show(last.text)
        completions = [last]
    else:
        completions = await speculation.generate(stream, prompt, sampling)
    texts = ["" if looks else completion.text for completion in completions]
    stream.transcript.append(texts[0])
    metas = [completion.meta for completion in completions]
    if count == 1:
        variable.set(_value(sampling, texts[0], node.name), texts[0], metas[0])
    else:
        variable.set([_value(sampling, text, node.name) for text in texts], texts[0], metas)


async def _pattern(stream: StreamExecutor, parts: Sequence[Expr]) -> Pattern | None:
    """The begun turn as a pattern, if these parts contain its end and it consists of texts and gens."""
    pattern: list[str | Sampling] = []
    for part in parts:
        if isinstance(part, RoleEnd):
            return Pattern(tuple(pattern))
        if isinstance(part, Gen):
            pattern.append(part.sampling.over(stream.run.defaults))
        elif isinstance(part, Text | Read):
            pattern.append(await text_of(part))
        else:
            return None
    return None


def _value(sampling: Sampling, text: str, name: str | None) -> Any:
    try:
        return sampling.value_of(text)
    except ValueError:
        kind = sampling.dtype.__name__ if sampling.dtype else ""
        raise WrongType(
            f"{name!r} is to be of type {kind}, and the model wrote {text!r}: max_tokens may be low"
        ) from None


async def _select(stream: StreamExecutor, node: Select, variables: Iterator[Variable]) -> None:
    variable = next(variables) if node.name is not None else Variable("")
    choices = [await text_of(choice) for choice in node.choices]
    if "" in choices:
        raise ProgramError("a choice is empty")
    run = stream.run
    decision = await run.backend.select(stream.transcript.prompt(), choices, node.method, run.call)
    chosen = choices[decision.index]
    stream.transcript.append(chosen)
    scores = dict(zip(choices, decision.scores, strict=True))
    variable.set(chosen, meta={**decision.meta, "choices_method": node.method.name, "scores": scores})


async def text_of(choice: str | Expr) -> str:
    """The text of an expression that needs no model."""
    if isinstance(choice, str):
        return choice
    texts = []
    for part in flatten(choice):
        if isinstance(part, Text):
            texts.append(part.text)
        elif isinstance(part, Read):
            texts.append(await part.value())
        else:
            raise ProgramError(f"a choice is a text, and {type(part).__name__} has none before generation")
    return "".join(texts)


def _end_scope(stream: StreamExecutor, name: str) -> None:
    if name not in stream.scopes:
        raise RoleError(f"the scope {name!r} ends without having begun")
    variable, start = stream.scopes.pop(name)
    variable.set(stream.transcript.text[start:])


async def _show(stream: StreamExecutor, kind: str, source: str | bytes) -> None:
    """kind: `image` or `video`."""
    backend = stream.run.backend
    if not (backend.reads_images if kind == "image" else backend.reads_videos):
        raise Unsupported(f"{type(backend).__name__} reads only text, no {kind}s")
    try:
        url = await asyncio.to_thread(images.url_of, source, kind)
    except (OSError, ValueError) as error:
        raise ProgramError(f"no {kind}: {error}") from error
    text = await backend.item_text(kind)
    stream.transcript.images.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
    stream.transcript.append(text)


async def _separate(stream: StreamExecutor, expr: Expr, model_type: str, variables: Iterator[Variable]) -> None:
    """Generates everything, then splits reasoning from answers; only answers stay in the text."""
    names = names_of(expr)
    answers = [next(variables) for _ in names]
    reasonings = iter([next(variables) for _ in names])
    rest = iter(answers)
    for part in flatten(expr):
        if not isinstance(part, Gen):
            await _append(stream, part, rest)
            continue
        at = len(stream.transcript.text)
        generated = Variable("")
        await _generate(stream, replace(part, name=""), iter([generated]), streams=False)
        whole = stream.transcript.text[at:]
        stream.transcript.text = stream.transcript.text[:at] + split_reasoning(whole, model_type)[1]
        if part.name is not None:
            value = generated.read()
            several = isinstance(value, list)
            parts = [split_reasoning(str(text), model_type) for text in (value if several else [value])]
            thoughts, said = zip(*parts, strict=True)
            next(rest).set(list(said) if several else said[0], meta=generated.meta())
            next(reasonings).set(list(thoughts) if several else thoughts[0])
