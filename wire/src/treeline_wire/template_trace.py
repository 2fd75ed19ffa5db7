"""Finds out, by one rendering, how a template's output depends on the texts of the messages.

Each text is replaced by a *watched* one: a mark (a character of a private plane) in a string that may be written and
passed on, and that notices inspection (comparing, searching, slicing, measuring, JSON …). Without inspection the
rendering is the same for all texts: the template writes the same constants between the texts as between the marks.
Some inspections have an answer that holds for most texts:

    stripped     whitespace at the ends, or whether there is text: holds for texts that are neither empty nor padded
    compared     with a constant, or searched for one: holds for texts that do not have the constant in them
    dated        `strftime_now`: holds for as long as its output stays the same

All others raise `DependsOnTextError`. The language is the inline one (`template_inline`), within its bounds. Python's
own functions read a string without calling its methods, so only those named here receive watched texts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextvars import ContextVar
from types import MethodType
from typing import Any, Final, NoReturn, cast

from jinja2 import nodes
from jinja2.runtime import Context, Macro
from msgspec import Struct

from .template_env import Function, words
from .template_inline import GUARD, InlineEnvironment, InlineTemplate

_FIRST_MARK: Final = 0xF0000
MAX_TEXTS: Final = 1024
"""The number of marks."""
_MARK: Final = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + MAX_TEXTS - 1)}]")

# A name that the grammar cannot spell, so that a template cannot use it.
_NEEDLE: Final = "needle!"

_TYPE_TESTS: Final = words("defined undefined none string mapping iterable sequence number boolean true false integer")
_EQUAL_TESTS: Final = words("== != eq equalto ne")
_TEXT_FILTERS: Final = words("d default safe string trim")
"""Filters that may receive a watched text; they inspect it by its methods only."""
_TEXT_METHODS: Final = words("strip lstrip rstrip startswith endswith")


class DependsOnTextError(Exception):
    """The output depends on the texts in an unknown way."""


class Trace(Struct, frozen=True):
    """One rendering: `constants[0] text constants[1] text … constants[-1]`, with the texts at `order`.

    Valid for texts where those at `stripped` are neither empty nor padded, those at `without[c]` do not contain c, and
    each of `dates`, a format, still has the same output.
    """

    constants: tuple[str, ...]
    order: tuple[int, ...]
    stripped: frozenset[int]
    without: dict[str, frozenset[int]]
    dates: dict[str, str]


class _Watch:
    """The inspections of one rendering. `failed`: one of them has an answer that depends on the text."""

    def __init__(self) -> None:
        self.failed = False
        self.stripped: set[int] = set()
        self.without: dict[str, set[int]] = {}
        self.dates: dict[str, str] = {}


_watch: ContextVar[_Watch] = ContextVar("treeline_template_watch")


def mark(number: int) -> str:
    """Returns the mark of this text number, below `MAX_TEXTS`."""
    return chr(_FIRST_MARK + number)


def has_mark(text: str) -> bool:
    """Returns whether a text contains a character that looks like a mark."""
    return _MARK.search(text) is not None


def watched(number: int) -> str:
    """Returns the watched text of this number, for `TracedTemplate.trace`."""
    return _Text(mark(number))


def _fail(*_: Any, **__: Any) -> NoReturn:
    _watch.get().failed = True  # a template's filters and tests may catch exceptions
    raise DependsOnTextError


class _Text(str):
    """A watched text, or a longer one that contains some."""

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return _Text(str(self) + str(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return _Text(str(other) + str(self)) if isinstance(other, str) else NotImplemented

    def __bool__(self) -> bool:
        _watch.get().stripped.update(_marks(self))
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is str and not other:
            return not self
        return isinstance(other, str) and self._has(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, constant: Any) -> bool:
        return self._has(constant)

    def startswith(self, constant: Any, *more: Any) -> bool:
        return self._has(constant, *more)

    endswith = startswith

    def strip(self, *chars: Any) -> str:
        return self._stripped(str.strip, chars)

    def lstrip(self, *chars: Any) -> str:
        return self._stripped(str.lstrip, chars)

    def rstrip(self, *chars: Any) -> str:
        return self._stripped(str.rstrip, chars)

    def _has(self, constant: Any, *more: Any) -> bool:
        """Records a comparison with a constant, or a search for one, which might begin in the text's surroundings."""
        if more or type(constant) is not str or _MARK.fullmatch(self) is None:
            _fail()
        if constant:
            _watch.get().without.setdefault(constant, set()).update(_marks(self))
        return not constant

    def _stripped(self, strip: Callable[..., str], chars: tuple[Any, ...]) -> str:
        if not all(each is None or (type(each) is str and each.isspace()) for each in chars):
            _fail()
        _watch.get().stripped.update(_marks(self))
        return _Text(strip(str(self), *chars))


_KNOWN: Final = {*vars(_Text), *dir(object), "__getnewargs__"} - {"__ge__", "__gt__", "__le__", "__lt__"}
for _name in {*dir(str), "__hash__", "__repr__"} - (_KNOWN - {"__hash__", "__repr__"}):
    setattr(_Text, _name, _fail)


def _tracked(value: Any) -> Any:
    """Returns a new value, watched if it contains a watched text."""
    return _Text(value) if type(value) is str and has_mark(value) else value


def _marks(text: str) -> list[int]:
    return [ord(found) - _FIRST_MARK for found in _MARK.findall(text)]


class TracedTemplate(InlineTemplate):
    """A template that reports how it uses texts. Raises as `InlineTemplate`; and ValueError if its source has marks."""

    def __init__(self, source: str) -> None:
        if has_mark(source):
            raise ValueError("the template contains reserved characters")
        self._tracing = _TracingEnvironment()
        super().__init__(source, self._tracing)

    def trace(self, variables: dict[str, Any], seconds: float) -> Trace:
        """Renders messages whose texts are `watched`. Raises `DependsOnTextError`, and as `render`."""
        watch = _Watch()
        token = _watch.set(watch)
        try:
            text = self.render(variables, seconds)
        finally:
            _watch.reset(token)
        if watch.failed:
            raise DependsOnTextError
        order = tuple(_marks(text))
        without = {needle: frozenset(at) for needle, at in watch.without.items()}
        return Trace(tuple(_MARK.split(text)), order, frozenset(watch.stripped), without, watch.dates)

    def date(self, format: str) -> str:
        """Returns the current output of `strftime_now`."""
        return self._tracing.today(format)


class _TracingEnvironment(InlineEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.filters = {name: _filter(name, cast(Callable[..., Any], each)) for name, each in self.filters.items()}
        self.filters[_NEEDLE] = _needle
        self.tests = {name: _test(name, cast(Callable[..., Any], each)) for name, each in self.tests.items()}
        self.globals = {**self.globals, "strftime_now": Function(self._dated)}
        self._makers = self.globals["namespace"], self.globals["dict"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for compare in list(tree.find_all(nodes.Compare)):
            # A search in a string does not call methods of the other string.
            if any(operand.op in ("in", "notin") for operand in compare.ops):
                compare.expr = _around(compare.expr, _NEEDLE)
                for operand in compare.ops[:-1]:
                    operand.expr = _around(operand.expr, _NEEDLE)
        for block in tree.find_all(nodes.AssignBlock):
            if block.filter is not None:
                raise ValueError("a block is filtered")
            block.filter = _around(None, GUARD, block.lineno)
        return tree

    def today(self, format: str) -> str:
        return self._strftime_now(format)

    def _dated(self, format: str) -> str:
        return _watch.get().dates.setdefault(format, self._strftime_now(format))

    def _member(self, obj: Any, name: str) -> Any:
        if type(obj) is not _Text:
            return super()._member(obj, name)
        return getattr(obj, name) if name in _TEXT_METHODS else _fail()

    def getitem(self, obj: Any, argument: Any) -> Any:
        if _Text in (type(obj), type(argument)):
            _fail()
        return super().getitem(obj, argument)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(function) is not Macro and function not in self._makers:
            _check_given((*args, *kwargs.values()))
        return _tracked(super().call(context, function, *args, **kwargs))

    def is_safe_callable(self, obj: Any) -> bool:
        return (type(obj) is MethodType and type(obj.__self__) is _Text) or super().is_safe_callable(obj)


def _around(node: Any, name: str, line: int | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line or node.lineno)


def _check_given(values: tuple[Any, ...]) -> None:
    if any(type(value) is _Text for value in values):
        _fail()


def _needle(value: Any) -> Any:
    _check_given((value,))
    return value


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 2 if hasattr(function, "jinja_pass_arg") else 1
    passes = name in _TEXT_FILTERS or name.endswith("!")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name not in ("d", "default"):
            _check_given((*args[first if passes else first - 1 :], *kwargs.values()))
        result = function(*args, **kwargs)
        if name == "tojson" and has_mark(result):
            _fail()
        return _tracked(result)

    return call


def _test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if name in _TYPE_TESTS:
            args = tuple(str(each) if type(each) is _Text else each for each in args)
        elif name not in _EQUAL_TESTS:
            _check_given(args)
        return function(*args)

    return call
