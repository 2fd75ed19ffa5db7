"""Renders plain templates and short requests in this process, within a few milliseconds.

So a process with an event loop and secrets needs no worker for them. A template qualifies if it uses only constructs
that `_Inline` knows; its work is then bounded:

    growth   no value passes MAX_CHARS: results of calls, filters, `+`, `~`, slices and literals are measured where
             they arise, and operations that could pass it in one step are checked before (`*`, replace, join, split)
    output   MAX_OUTPUT characters in all, literal text included
    time     5 ms of the processor: the clock is read in each round of a loop, each macro, call, filter and computed
             comparison, for each member that is read (a path like `a.b.c` reads three), and for each item that a
             filter yields; between two readings there are only steps of a constant cost and at most one operation
             on MAX_CHARS

Anything outside these bounds, or not certainly within, raises `NotInlineError`, and a worker renders it from the start.
So checks may be too strict, but never change the result.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import BuiltinMethodType, GeneratorType
from typing import Any, Final, cast

from jinja2 import nodes
from jinja2.ext import loopcontrols as _loopcontrols  # noqa: F401  (registers Break and Continue)
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from .template_env import Function, TemplateEnvironment, compile_template, words

MAX_SOURCE_CHARS: Final = 32 << 10
"""The longest source compiled in this process, in characters. Known templates have up to 20 thousand."""
MAX_INPUT_CHARS: Final = 384 << 10
"""The most characters and members of the values rendered inline."""
MAX_INPUT_ITEMS: Final = 9000
MAX_CHARS: Final = 256 << 10
"""The longest value in characters; a member of a list or dict counts as _MEMBER_CHARS."""
MAX_OUTPUT: Final = 1 << 20
MAX_SECONDS: Final = 0.005
"""The most seconds of a rendering."""
_MEMBER_CHARS: Final = 16
_MAX_PIECES: Final = MAX_CHARS // _MEMBER_CHARS
_MAX_NODES: Final = 4000
_MAX_OPERANDS: Final = 32
_MAX_RANGE: Final = 10_000
_MAX_ARGUMENT: Final = 256
_MAX_SEPARATOR: Final = 16
_MAX_INDENT: Final = 8
_MAX_NUMBER: Final = 1 << 63

# Names that the grammar cannot spell, so that a template cannot use them.
GUARD: Final = "guard!"
_KEEP: Final = "keep!"
_TICK: Final = "tick!"

_NODES: Final = words(
    "Template Output TemplateData Const Name NSRef Getattr Getitem Slice For If Assign AssignBlock Macro Call "
    "Keyword Filter Test CondExpr And Or Not Compare Operand Add Sub Mul Mod Neg Pos Concat List Tuple Dict "
    "Pair Scope Break Continue"
)
_FUNCTIONS: Final = frozenset({"range", "namespace", "dict", "raise_exception", "strftime_now"})
_METHODS: Final = words(
    "capitalize count endswith find get isdigit isspace items join keys lower lstrip removeprefix removesuffix "
    "replace rstrip split splitlines startswith strip title upper values"
)
_FILTERS: Final = words(
    "abs capitalize count d default dictsort first float int items join last length list lower map reject rejectattr "
    "replace reverse safe select selectattr sort string title tojson trim truncate upper"
)
_CONTAINERS: Final = frozenset({dict, list, tuple})
_CHEAP_OPERATORS: Final = frozenset({"eq", "ne", "lt", "gt", "lteq", "gteq"})
_READING: Final = words("== != < <= > >= eq equalto ge greaterthan gt in le lessthan lower lt ne sameas upper")
"""Tests that read a whole value; the others look at a type or a number."""
_UNLIMITED: Final = words("d default replace")
"""Filters with long arguments, which they pass on, or check themselves."""


class NotInlineError(Exception):
    """A worker must render this."""


class _RenderBudget:
    """The remaining budget of one rendering."""

    __slots__ = ("_began", "_seconds", "deadline", "output_chars")

    def __init__(self, seconds: float) -> None:
        self._began = time.thread_time()
        self._seconds = seconds
        self.deadline = time.perf_counter() + seconds
        self.output_chars = MAX_OUTPUT

    def consume(self, chars: int) -> None:
        """Counts printed text."""
        self.output_chars -= chars
        if self.output_chars < 0:
            raise NotInlineError("it prints too much")
        if time.perf_counter() > self.deadline:
            self.check_time()

    def check_time(self) -> None:
        """Checks after the deadline whether this rendering used the time, or others on this machine."""
        left = self._seconds - (time.thread_time() - self._began)
        if left <= 0:
            raise NotInlineError("it takes too long")
        self.deadline = time.perf_counter() + left


_budget: ContextVar[_RenderBudget] = ContextVar("treeline_inline_budget")


class InlineTemplate:
    """A template that may be rendered in this process. Raises `NotInlineError` otherwise, and Jinja's errors."""

    def __init__(self, source: str, environment: InlineEnvironment | None = None) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise NotInlineError("its source is too long")
        self._template, self.raised_texts = compile_template(environment or _environment(), source)

    def render(self, variables: dict[str, Any], seconds: float = MAX_SECONDS) -> str:
        """Returns the text, within `seconds` of CPU time. Raises `NotInlineError`, `RaisedError`, and any fault of the
        template or its values.
        """
        token = _budget.set(_RenderBudget(seconds))
        try:
            return self._template.render(variables)
        except (RecursionError, MemoryError, OverflowError) as error:
            raise NotInlineError(type(error).__name__) from error
        finally:
            _budget.reset(token)


class InlineEnvironment(TemplateEnvironment):
    """Jinja with the guards."""

    intercepted_binops = frozenset({"*", "%"})

    def __init__(self) -> None:
        super().__init__(finalize=_finalize)
        bounded: dict[str, Callable[..., Any]] = {
            name: _bounded(name, cast(Callable[..., Any], function))
            for name, function in self.filters.items()
            if name in _FILTERS
        }
        self.filters = {**bounded, GUARD: _guard, _KEEP: _keep, _TICK: _tick}
        self.tests = {
            name: _guarded(cast(Callable[..., Any], function)) if name in _READING else function
            for name, function in self.tests.items()
        }
        self.globals = {**self.globals, "range": Function(_range)}
        self.binop_table = {**self.binop_table, "*": _multiply, "%": _modulo}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, _Inline().visit(super()._parse(source, name, filename)))

    def getattr(self, obj: Any, attribute: str) -> Any:
        _look_at_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _look_at_clock()
        return super().getitem(obj, argument)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(function) is BuiltinMethodType and type(function.__self__) is str:
            check_method(function.__name__, function.__self__, args)
        return _guard(super().call(context, function, *args, **kwargs))


@functools.cache
def _environment() -> InlineEnvironment:
    return InlineEnvironment()


class _Inline(NodeTransformer):
    """Adds guards to a parsed template, or raises `NotInlineError`."""

    def __init__(self) -> None:
        self._count = 0
        self._macros: frozenset[str] = frozenset()

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._count += 1
        kind = type(node).__name__
        if kind not in _NODES or self._count > _MAX_NODES:
            raise NotInlineError(f"it contains a {kind}" if kind not in _NODES else "it is too long")
        return super().visit(node, *args, **kwargs)

    def visit_Template(self, node: nodes.Template) -> nodes.Node:
        self._macros = frozenset(macro.name for macro in node.find_all(nodes.Macro))
        return self.generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise NotInlineError("it has a recursive loop")
        self.generic_visit(node)
        if node.test is not None:
            node.test = _filtered(node.test, GUARD)
        node.body.insert(0, _tick_of(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_of(node))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Leaves the output unguarded: `_finalize` measures it."""
        node.nodes = [self._visit_unguarded(child) for child in node.nodes]
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):
            node.node = _filtered(node.node, _KEEP)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        called = node.node
        if isinstance(called, nodes.Name):
            known = called.name in _FUNCTIONS or called.name in self._macros
        else:
            known = isinstance(called, nodes.Getattr) and called.attr in _METHODS
        if not known or node.dyn_args is not None or node.dyn_kwargs is not None:
            raise NotInlineError("it contains a computed call")
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name not in _FILTERS or node.node is None or node.dyn_args or node.dyn_kwargs:
            raise NotInlineError(f"it uses the filter {node.name}")
        return self.generic_visit(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        return _filtered(self._visit_unguarded(node), GUARD)

    visit_Concat = visit_Add

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        operands = (node.expr, *(operand.expr for operand in node.ops))
        constant = any(isinstance(operand, nodes.Const) for operand in operands)
        cheap = constant and all(operand.op in _CHEAP_OPERATORS for operand in node.ops)
        self.generic_visit(node)
        return node if cheap and len(node.ops) == 1 else _filtered(node, GUARD)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        sliced = isinstance(node.arg, nodes.Slice)
        self.generic_visit(node)
        return _filtered(node, GUARD) if sliced else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, GUARD)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, GUARD) if node.ctx == "load" else node

    def _visit_unguarded(self, node: Any) -> Any:
        """Visits a sum or concatenation whose result is measured elsewhere. Its operands are measured, so it is at most
        `_MAX_OPERANDS` times the largest value."""
        if not isinstance(node, nodes.Add | nodes.Concat):
            return self.visit(node)
        operands = _operands(node)
        if len(operands) > _MAX_OPERANDS:
            raise NotInlineError("it adds too much at once")
        self._count += len(operands)
        replaced = {id(operand): self.visit(operand) for operand in operands}
        return _rebuilt(node, replaced)


def _operands(node: nodes.Node) -> list[nodes.Node]:
    if isinstance(node, nodes.Add):
        return [*_operands(node.left), *_operands(node.right)]
    if isinstance(node, nodes.Concat):
        return [operand for child in node.nodes for operand in _operands(child)]
    return [node]


def _rebuilt(node: nodes.Node, replaced: dict[int, Any]) -> Any:
    if isinstance(node, nodes.Add):
        node.left, node.right = _rebuilt(node.left, replaced), _rebuilt(node.right, replaced)
        return node
    if isinstance(node, nodes.Concat):
        node.nodes = [_rebuilt(child, replaced) for child in node.nodes]
        return node
    return replaced[id(node)]


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _tick_of(node: nodes.Node) -> nodes.Node:
    """Returns the statement at the start of a repeated body; it counts the body's literal text."""
    chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    tick = _filtered(nodes.Const(chars, lineno=node.lineno), _TICK)
    return nodes.ExprStmt(tick, lineno=node.lineno)


# ---- functions that run while a template renders --------------------------------------------------------------------


def _guard(value: Any) -> Any:
    """Checks the size of a new value, and the time."""
    kind = type(value)
    if kind is str:
        if len(value) > MAX_CHARS:
            raise NotInlineError("a text is too long")
    elif kind is int:
        if not -_MAX_NUMBER < value < _MAX_NUMBER:
            raise NotInlineError("a number is too large")
    elif kind in _CONTAINERS:
        _measure(value, MAX_CHARS)
    elif kind is GeneratorType:
        value = _measured(value)
    _look_at_clock()
    return value


def _look_at_clock() -> None:
    budget = _budget.get()
    if time.perf_counter() > budget.deadline:
        budget.check_time()


def _measured(items: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a filter: measured as they come, until the time is over."""
    left = MAX_CHARS
    for item in items:
        left = _measure((item,), left)
        _look_at_clock()
        yield item


def _keep(value: Any) -> Any:
    """Checks a value that outlives a round of a loop. Nested generators would grow with each round."""
    if type(value) is GeneratorType:
        raise NotInlineError("it keeps a generator")
    return value


def _measure(value: Any, left: int) -> int:
    """Returns the rest of `left` after all members and characters of a value, counted as often as they occur."""
    if len(value) > _MAX_PIECES:
        raise NotInlineError("a value is too large")
    children: Iterable[Any] = value
    if type(value) is dict:
        children = (*value, *value.values())
    for child in children:
        kind = type(child)
        left -= _MEMBER_CHARS + len(child) if kind is str else _MEMBER_CHARS
        if kind in _CONTAINERS:
            left = _measure(child, left)
        if left < 0:
            raise NotInlineError("a value is too large")
    return left


def _tick(chars: int) -> None:
    _budget.get().consume(chars)


def _finalize(value: Any) -> str:
    text = value if type(value) is str else str(value)
    _budget.get().consume(len(text))
    return text


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _guard(function(*args, **kwargs))

    return call


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a filter's arguments (without Jinja's own) before it runs, and its result after.

    An attribute may be a path of thousands of parts, walked for each item.
    """
    first = 2 if hasattr(function, "jinja_pass_arg") else 1
    check = _FILTER_CHECKS.get(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name not in _UNLIMITED:
            _check_arguments((*args[first:], *kwargs.values()))
        if check is not None:
            check(*args[first - 1 :], **kwargs)
        return _guard(function(*args, **kwargs))

    return call


def _check_arguments(args: Iterable[Any]) -> None:
    if any(type(arg) is str and len(arg) > _MAX_ARGUMENT for arg in args):
        raise NotInlineError("an argument is too long")


def check_method(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Guards methods that are quadratic in Python (searching from the right, stripping) or unbounded (replace,
    join)."""
    if name == "join":
        _check_join(args[0] if args else None, text)
    elif name == "replace":
        _check_replace(text, *args)
    else:
        _check_arguments(args)
        if name in ("split", "splitlines") and len(text) > _MAX_PIECES:
            _check_split(text, *args)


def _check_split(text: str, separator: Any = None, *_: Any) -> None:
    if type(separator) is not str or not separator or text.count(separator) > _MAX_PIECES:
        raise NotInlineError("it makes too many pieces")


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **named: Any) -> None:
    if named or type(text) is not str or type(old) is not str or type(new) is not str:
        raise NotInlineError("it replaces what is not text")
    if len(text) + text.count(old) * len(new) > MAX_CHARS:
        raise NotInlineError("a replacement is too long")


def _check_join(items: Any, d: Any = "", attribute: Any = None) -> None:
    del attribute
    _check_pieces(items)
    if type(d) is not str or len(d) > _MAX_SEPARATOR:
        raise NotInlineError("a separator is too long")


def _check_pieces(value: Any) -> None:
    """Refuses a text that would split into too many characters or words."""
    if type(value) is str and len(value) > _MAX_PIECES:
        raise NotInlineError("it makes too many pieces")


def _check_sort(value: Any, *_: Any, **_named: Any) -> None:
    _check_pieces(value)


def _check_trim(_value: Any, chars: Any = None) -> None:
    if chars is not None and len(str(chars)) > _MAX_ARGUMENT:
        raise NotInlineError("an argument is too long")


def _check_tojson(
    _x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> None:
    del ensure_ascii, sort_keys
    if indent is not None and (type(indent) is not int or indent > _MAX_INDENT):
        raise NotInlineError("it indents too much")
    if any(len(str(separator)) > _MAX_SEPARATOR for separator in separators or ()):
        raise NotInlineError("a separator is too long")


_FILTER_CHECKS: Final[dict[str, Callable[..., None]]] = {
    "replace": _check_replace,
    "join": _check_join,
    "trim": _check_trim,
    "tojson": _check_tojson,
    "list": _check_pieces,
    "sort": _check_sort,
    "title": _check_pieces,
}


def _range(*args: int) -> range:
    made = range(*args)
    if len(made) > _MAX_RANGE:
        raise NotInlineError("it counts too far")
    return made


def _multiply(left: Any, right: Any) -> Any:
    for text, times in ((left, right), (right, left)):
        if type(text) is str and type(times) is int and len(text) * times <= MAX_CHARS:
            return text * times
    return _guard(_number(left) * _number(right))


def _modulo(left: Any, right: Any) -> Any:
    return _number(left) % _number(right)


def _number(value: Any) -> Any:
    if type(value) not in (int, float, bool):
        raise NotInlineError("it multiplies or formats what is not a number")
    return value
