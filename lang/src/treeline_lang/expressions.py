"""Expressions that a program appends: texts, model calls, roles, images, and sums of them.

Nodes are plain immutable data, used by the interpreter and the tracer. Each except sums has the program line that made
it (`where`, ignored by equality).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal, Never

from treeline_lang.choices import CHOICES_METHODS, ChoicesMethod, token_length_normalized
from treeline_lang.errors import Unsupported
from treeline_lang.reasoning import check_model_type
from treeline_lang.sampling import Sampling, check_sampling
from treeline_lang.where import Where, caller

Role = Literal["system", "user", "assistant"]
ROLES: Final[tuple[Role, ...]] = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Expr:
    step: ClassVar[str] = "+="
    """The expression's name in errors."""
    has_text: ClassVar[bool] = False
    """Has a text without calling a model."""

    def __add__(self, other: Piece) -> Sum:
        return Sum((*_parts(self), *_parts(as_expr(other))))

    def __radd__(self, other: Piece) -> Sum:
        return Sum((*_parts(as_expr(other)), *_parts(self)))

    def __str__(self) -> str:
        """Raises TypeError: a prompt would contain this object's description, and no call would happen."""
        return self._no_text()

    def __format__(self, spec: str) -> str:
        return self._no_text()

    def _no_text(self) -> Never:
        name = type(self).__name__.lower()
        raise TypeError(f'{name}(…) in an f-string or str(): it has no text yet; add it to texts: "…" + {name}(…)')


Piece = Expr | str | int | float
"""A value that may be appended; numbers become their text."""
Path = tuple[str | int, ...]
"""Keys and indices into a value, outermost first."""


def at_path(value: Any, path: Path) -> Any:
    """A part of a value. Raises LookupError and TypeError like indexing."""
    for key in path:
        value = value[key]
    return value


@dataclass(frozen=True, slots=True)
class Located(Expr):
    """A node with the program line that made it."""

    where: Where | None = field(default_factory=caller, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Text(Located):
    has_text = True
    text: str


@dataclass(frozen=True, slots=True)
class Sum(Expr):
    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Gen(Located):
    """Generates text. `name`: the variable for it, or None."""

    step = "gen"
    name: str | None
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Select(Located):
    """Chooses one of several texts by likelihood."""

    step = "select"
    name: str | None
    choices: tuple[str | Expr, ...]
    """Choices have a text without calling a model."""
    method: ChoicesMethod = token_length_normalized


@dataclass(frozen=True, slots=True)
class RoleBegin(Located):
    step = "role"
    role: Role


@dataclass(frozen=True, slots=True)
class RoleEnd(Located):
    step = "role"
    role: Role


@dataclass(frozen=True, slots=True)
class ScopeBegin(Located):
    step = "var_scope"
    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Located):
    step = "var_scope"
    name: str


@dataclass(frozen=True, slots=True)
class OrderBegin(Located):
    """Begins a region whose contents may be appended in any order; the compiler puts constants first."""

    step = "any_order"


@dataclass(frozen=True, slots=True)
class OrderEnd(Located):
    step = "any_order"


@dataclass(frozen=True, slots=True)
class Image(Located):
    """A picture: a path, a URL, or its bytes."""

    step = "image"
    source: str | bytes


@dataclass(frozen=True, slots=True)
class Video(Image):
    step = "video"


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Located):
    """Moves the reasoning of each variable that `expr` generates to `<name>_reasoning_content`."""

    step = "separate_reasoning"
    expr: Expr
    model_type: str


def characters_of(piece: object) -> str:
    """The characters that `+` would append, also for subclasses of str such as enum members."""
    return str.__str__(piece) if isinstance(piece, str) else str(piece)


def as_expr(piece: object) -> Expr:
    """Converts what may be appended. Raises TypeError."""
    if isinstance(piece, Expr):
        return piece
    if isinstance(piece, str | numbers.Number):  # NumPy's numbers, too
        return Text(characters_of(piece))
    if piece is None:
        raise TypeError("None was appended: a function without a return, or a variable that was never set?")
    raise TypeError(f"{type(piece).__name__} cannot be appended: a program appends texts, numbers and expressions")


def _parts(expr: Expr) -> tuple[Expr, ...]:
    return expr.parts if isinstance(expr, Sum) else (expr,)


def flatten(expr: Expr) -> tuple[Expr, ...]:
    """The parts of a sum in order; anything else is its own only part."""
    return _parts(expr)


def names_of(expr: Expr) -> tuple[str, ...]:
    """The variables that an expression sets, in order."""
    names: list[str] = []
    for part in _parts(expr):
        if isinstance(part, SeparateReasoning):
            inner = names_of(part.expr)
            names += [*inner, *(reasoning_name(name) for name in inner)]
        elif isinstance(part, Gen | Select | ScopeBegin) and part.name is not None:
            names.append(part.name)
    return tuple(names)


def reasoning_name(name: str) -> str:
    return f"{name}_reasoning_content"


# ---- what a program calls ---------------------------------------------------------------------------------------


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str | Expr] | None = None,
    choices_method: ChoicesMethod | Callable[..., Any] | str | None = None,
    regex: str | None = None,
    json_schema: Any = None,
) -> Expr:
    """Generates text and stores it as `s[name]`.

    Parameters that are not given come from the run, then from the backend. n: number of answers; `s[name]` is their
    list and the text continues with the first. dtype: int, float, bool or str, the type of output and variable.
    choices: same as `select`. regex. json_schema: a mapping, JSON, or a pydantic model. stop_regex: the text ends where
    it matches. Raises TypeError and ValueError for arguments that no backend accepts.
    """
    given = dict(locals())
    if given.pop("name") is not None:
        check_name(name)
    choices, method = given.pop("choices"), given.pop("choices_method")
    if choices is not None:
        if any(given[key] is not None for key in ("regex", "json_schema", "dtype")):
            raise ValueError("choices and a constraint are two constraints: give one")
        return select(name, choices, temperature=0.0, choices_method=method)
    if method is not None:
        raise ValueError("choices_method is for choices, and there are none")
    return Gen(name, check_sampling(**given))


def gen_int(name: str | None = None, max_tokens: int | None = None, n: int | None = None, **options: Any) -> Expr:
    """`gen` with an integer as result."""
    return gen(name, max_tokens, n=n, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, n: int | None = None, **options: Any) -> Expr:
    """`gen` with a quoted text as result; `s[name]` has no quotes."""
    return gen(name, max_tokens, n=n, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str | Expr] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | Callable[..., Any] | str | None = None,
) -> Expr:
    """The most likely of several texts, by `choices_method` (`treeline_lang.choices`)."""
    if name is not None:
        check_name(name)
    if not isinstance(choices, list | tuple) or not choices:
        raise TypeError(f"choices is a list of one text or more, not {choices!r}")
    for choice in choices:
        if not isinstance(choice, str | Expr) or (isinstance(choice, str) and not choice):
            raise TypeError(f"a choice is a text that is not empty, not {choice!r}")
    if temperature > 1e-5:
        raise ValueError("select takes the likeliest choice; there is no temperature but 0")
    plain = tuple(characters_of(choice) if isinstance(choice, str) else choice for choice in choices)
    return Select(name, plain, method_named(choices_method))


def method_named(method: ChoicesMethod | Callable[..., Any] | str | None) -> ChoicesMethod:
    if method is None:
        return token_length_normalized
    if isinstance(method, ChoicesMethod):
        return method
    if callable(method):
        return ChoicesMethod.of(method)
    if method not in CHOICES_METHODS:
        raise ValueError(f"choices_method is one of {', '.join(CHOICES_METHODS)}, not {method!r}")
    return CHOICES_METHODS[method]


def check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a variable is a text, not {name!r}")


def image(source: str | bytes) -> Expr:
    """A picture by path, URL (http:, https:, data:) or bytes. Text-only backends refuse it."""
    return Image(source)


def video(source: str | bytes, num_frames: int | None = None) -> Expr:
    """A video by path, URL or bytes. Raises Unsupported for a number of frames: the model's processor takes them."""
    if num_frames is not None:
        why = "the model's processor takes the frames of videos: leave num_frames out"
        raise Unsupported(why, where=caller(), step="video")
    return Video(source)


def separate_reasoning(expr: Expr, model_type: str = "deepseek-r1") -> Expr:
    """`s[name]` of what `expr` generates becomes the answer without the model's reasoning, which goes to
    `s["<name>_reasoning_content"]`. model_type: how the model marks reasoning (`treeline_lang.reasoning.MARKS`)."""
    expr = as_expr(expr)
    for part in flatten(expr):
        if not (part.has_text or isinstance(part, Gen)) or (isinstance(part, Gen) and part.sampling.dtype is not None):
            raise TypeError("separate_reasoning takes texts and gens without a dtype: only these can contain reasoning")
    return SeparateReasoning(expr, check_model_type(model_type))


def _turn(role: Role, content: Piece | None) -> Expr:
    if content is None:
        raise TypeError(f"{role}() needs its content; to open it for several steps: with s.{role}(): …")
    return RoleBegin(role) + as_expr(content) + RoleEnd(role)


def system(content: Piece | None = None) -> Expr:
    """A system turn."""
    return _turn("system", content)


def user(content: Piece | None = None) -> Expr:
    """A user turn."""
    return _turn("user", content)


def assistant(content: Piece | None = None) -> Expr:
    """An assistant turn: where a chat model generates."""
    return _turn("assistant", content)


system_begin, system_end = partial(RoleBegin, "system"), partial(RoleEnd, "system")
user_begin, user_end = partial(RoleBegin, "user"), partial(RoleEnd, "user")
assistant_begin, assistant_end = partial(RoleBegin, "assistant"), partial(RoleEnd, "assistant")
"""Turns of several steps where `with s.user():` does not fit."""
