"""What of a chat template's output depends on the texts of the messages, and how: found out by rendering it once.

The texts of a chat are replaced by marks, one character of a private plane each, and the template is rendered under
watch: wherever a value is *looked at* instead of being written or passed on (compared, searched, sliced, measured,
counted, turned into JSON …), a filter that the template cannot spell is put around it and sees whether the value
carries a mark. If nothing that carries one is ever looked at, the rendering is the same for all texts, and what stands
between the marks is what the template writes between the texts. Some looks have an answer that holds for most texts:

    stripped     whitespace at the ends, or whether there is text: holds for texts that are neither empty nor padded
    compared     with a constant, or searched for one: holds for texts that do not have the constant in them
    dated        `strftime_now`: holds for as long as it says the same

Everything else raises `DependsOnTextError`. Watched is the inline language (`template_inline`), within its bounds.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any, Final, cast

from jinja2 import nodes
from jinja2.runtime import Undefined
from jinja2.visitor import NodeTransformer
from msgspec import Struct

from .template_env import Function, words
from .template_inline import PASSED_ON, InlineEnvironment, InlineTemplate, check_method

_FIRST_MARK: Final = 0xF0000
MAX_TEXTS: Final = 1024
"""Marks that there are."""
_MARK: Final = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + MAX_TEXTS - 1)}]")

# Names that the grammar cannot spell, so that a template cannot use them.
_DEEP: Final = "deep!"
_SHALLOW: Final = "shallow!"
_EACH: Final = "each!"
_WRITTEN: Final = "written!"
_TRUTH: Final = "truth!"
_AGAINST: Final = "against!"
_STRIP: Final = "strip!"

_TYPE_TESTS: Final = words("defined undefined none string mapping iterable sequence number boolean true false integer")
_STRUCTURE: Final = words("length count list first last reverse")
"""Filters that look at a list, and not at what is in it."""
_BY_ATTRIBUTE: Final = words("selectattr rejectattr")
_TEXTS: Final = words("content text")
_STRIPS: Final = words("strip lstrip rstrip")
_ENDS: Final = words("startswith endswith")
_MAKERS: Final = words("namespace dict")
_SCALARS: Final = (bool, int, float, type(None))


class DependsOnTextError(Exception):
    """What the template writes depends on the texts in a way that is not known here."""


class Trace(Struct, frozen=True):
    """One rendering: `constants[0] text constants[1] text … constants[-1]`, where the texts are those at `order`.

    It holds for texts such that those at `stripped` are not empty and have no whitespace at their ends, those at
    `without[c]` do not contain c, and each of `dates`, a format, is still written so.
    """

    constants: tuple[str, ...]
    order: tuple[int, ...]
    stripped: frozenset[int]
    without: dict[str, frozenset[int]]
    dates: dict[str, str]


class _Watch:
    """What was looked at in one rendering."""

    def __init__(self) -> None:
        self.stripped: set[int] = set()
        self.without: dict[str, set[int]] = {}
        self.dates: dict[str, str] = {}


_watch: ContextVar[_Watch] = ContextVar("treeline_template_watch")


def mark(number: int) -> str:
    """What stands for the text of this number, below `MAX_TEXTS`."""
    return chr(_FIRST_MARK + number)


def has_mark(text: str) -> bool:
    """Whether a text has a character that could be taken for a mark."""
    return _MARK.search(text) is not None


class TracedTemplate(InlineTemplate):
    """A template that tells what it does with texts. Raises as `InlineTemplate`; and ValueError if its source has
    marks."""

    def __init__(self, source: str) -> None:
        if has_mark(source):
            raise ValueError("the template has characters of our own")
        self._tracing = _TracingEnvironment()
        super().__init__(source, self._tracing)

    def trace(self, variables: dict[str, Any], seconds: float) -> Trace:
        """Render messages whose texts are marks. Raises `DependsOnTextError`, and as `render`."""
        watch = _Watch()
        token = _watch.set(watch)
        try:
            text = self.render(variables, seconds)
        finally:
            _watch.reset(token)
        order = tuple(ord(found) - _FIRST_MARK for found in _MARK.findall(text))
        without = {needle: frozenset(at) for needle, at in watch.without.items()}
        return Trace(tuple(_MARK.split(text)), order, frozenset(watch.stripped), without, watch.dates)

    def date(self, format: str) -> str:
        """What `strftime_now` says now."""
        return self._tracing.today(format)


class _TracingEnvironment(InlineEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.filters = {
            **self.filters,
            _DEEP: _deep,
            _SHALLOW: _shallow,
            _EACH: _each,
            _WRITTEN: _written,
            _TRUTH: _truth,
            _AGAINST: _against,
            _STRIP: _strip,
        }
        self.globals = {**self.globals, "strftime_now": Function(self._dated)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, _Watcher().visit(super()._parse(source, name, filename)))

    def today(self, format: str) -> str:
        return self._strftime_now(format)

    def _dated(self, format: str) -> str:
        return _watch.get().dates.setdefault(format, self._strftime_now(format))


class _Watcher(NodeTransformer):
    """Puts watches around what is looked at; what a node only passes on is left alone."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.BinExpr | nodes.UnaryExpr | nodes.Slice):
            for field, child in list(node.iter_fields()):
                if isinstance(child, nodes.Expr):
                    setattr(node, field, _around(child, _DEEP))
        return node

    def _passes_on(self, node: nodes.Node) -> nodes.Node:
        return super().generic_visit(node)

    visit_Add = _passes_on

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self._passes_on(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else _around(child, _WRITTEN) for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self._passes_on(node)
        node.nodes = [_around(child, _WRITTEN) for child in node.nodes]
        return node

    def visit_And(self, node: nodes.BinExpr) -> nodes.Node:
        self._passes_on(node)
        node.left, node.right = _around(node.left, _TRUTH), _around(node.right, _TRUTH)
        return node

    visit_Or = visit_And

    def visit_Not(self, node: nodes.Not) -> nodes.Node:
        self._passes_on(node)
        node.node = _around(node.node, _TRUTH)
        return node

    def visit_If(self, node: nodes.If) -> nodes.Node:
        self._passes_on(node)
        node.test = _around(node.test, _TRUTH)
        return node

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node:
        self._passes_on(node)
        node.test = _around(node.test, _TRUTH)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._passes_on(node)
        node.iter = _around(node.iter, _DEEP if isinstance(node.target, nodes.Tuple) else _EACH)
        if node.test is not None:
            node.test = _around(node.test, _TRUTH)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self._passes_on(node)
        if isinstance(node.target, nodes.Tuple) and not isinstance(node.node, nodes.Tuple):
            node.node = _around(node.node, _DEEP)  # a text would fall into characters
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self._passes_on(node)
        node.key = _around(node.key, _DEEP)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        if node.filter is not None:
            raise ValueError("a block is filtered")
        return self._passes_on(node)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        self._passes_on(node)
        node.node = _around(node.node, _SHALLOW)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self._passes_on(node)
        node.node = _around(node.node, _SHALLOW)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _around(node.arg, _DEEP)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self._passes_on(node)
        operand = node.ops[0]
        if len(node.ops) == 1 and operand.op in ("eq", "ne") and isinstance(operand.expr, nodes.Const):
            node.expr = _around(node.expr, _AGAINST, operand.expr)
        elif len(node.ops) == 1 and operand.op in ("eq", "ne", "in", "notin") and isinstance(node.expr, nodes.Const):
            operand.expr = _around(operand.expr, _AGAINST, node.expr)
        else:
            node.expr = _around(node.expr, _DEEP)
            for each in node.ops:
                each.expr = _around(each.expr, _DEEP)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self._passes_on(node)
        if node.name not in _TYPE_TESTS:
            node.node = _around(node.node, _DEEP)
            _watch_arguments(node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self._passes_on(node)
        assert node.node is not None
        if node.name in PASSED_ON:
            return node
        if node.name == "trim" and not node.kwargs:
            return nodes.Filter(
                node.node, _STRIP, [nodes.Const("trim"), *node.args], [], None, None, lineno=node.lineno
            )
        by = node.args[0] if node.args else None
        by_other = node.name in _BY_ATTRIBUTE and isinstance(by, nodes.Const) and by.value not in _TEXTS
        if node.name in _STRUCTURE or by_other:
            node.node = _around(node.node, _EACH)
        elif node.name in ("string", "safe"):
            node.node = _around(node.node, _WRITTEN)
        elif not (node.name in ("default", "d") and len(node.args) <= 1 and not node.kwargs):
            node.node = _around(node.node, _DEEP)
        if node.name not in ("default", "d"):
            _watch_arguments(node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        called = node.node
        if isinstance(called, nodes.Name):
            self._passes_on(node)
            if called.name in ("range", "raise_exception", "strftime_now"):
                _watch_arguments(node)
            return node
        assert isinstance(called, nodes.Getattr)
        called.node = self.visit(called.node)
        node.args = [self.visit(argument) for argument in node.args]
        node.kwargs = [self.visit(argument) for argument in node.kwargs]
        if called.attr in _STRIPS and not node.kwargs:
            arguments = [nodes.Const(called.attr), *(_around(argument, _DEEP) for argument in node.args)]
            return nodes.Filter(called.node, _STRIP, arguments, [], None, None, lineno=node.lineno)
        only = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if called.attr in _ENDS and isinstance(only, nodes.Const):
            called.node = _around(called.node, _AGAINST, only)
            return node
        if called.attr == "get" and node.args and not node.kwargs:
            called.node = _around(called.node, _SHALLOW)
            node.args[0] = _around(node.args[0], _DEEP)
            return node
        called.node = _around(called.node, _DEEP)
        _watch_arguments(node)
        return node


def _around(node: Any, watch: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, watch, list(arguments), [], None, None, lineno=node.lineno)


def _watch_arguments(node: nodes.Call | nodes.Filter | nodes.Test) -> None:
    node.args = [_around(argument, _DEEP) for argument in node.args]
    for keyword in node.kwargs:
        assert isinstance(keyword, nodes.Keyword)
        keyword.value = _around(keyword.value, _DEEP)


# ---- what runs while a template renders -----------------------------------------------------------------------------


def _carries(value: Any) -> bool:
    """Whether there is a mark in it; also where that cannot be seen."""
    kind = type(value)
    if kind is str:
        return has_mark(value)
    if kind is list or kind is tuple:
        return any(_carries(item) for item in value)
    if kind is dict:
        return any(_carries(name) or _carries(item) for name, item in value.items())
    return not isinstance(value, (*_SCALARS, Undefined, Function, range))


def _deep(value: Any) -> Any:
    if _carries(value):
        raise DependsOnTextError
    return value


def _shallow(value: Any) -> Any:
    """An item or member of it is taken: that of a text is looked at, that of a list or object is passed on."""
    return _deep(value) if type(value) is str else value


def _each(value: Any) -> Any:
    """As `_shallow`, for all of them; the order of an object's is the client's."""
    return _deep(value) if type(value) in (str, dict) else value


def _written(value: Any) -> Any:
    """Texts are written as they are; of everything else Python's way to show it is written."""
    return value if type(value) is str else _deep(value)


def _truth(value: Any) -> Any:
    if type(value) is str:
        _watch.get().stripped.update(_marks(value))
    return value


def _against(value: Any, constant: Any) -> Any:
    """Compared with a constant, or searched for one. No object is equal to a text, and its names are no texts."""
    if type(value) is not str:
        return value if type(value) is dict else _deep(value)
    marks = _marks(value)
    if marks and type(constant) is str:
        if len(value) > 1:  # the constant could begin in what stands around the text
            raise DependsOnTextError
        watch = _watch.get()
        if constant:
            watch.without.setdefault(constant, set()).update(marks)
        else:
            watch.stripped.update(marks)
    return value


def _strip(value: Any, name: str, *arguments: Any) -> Any:
    """`name` is that of the method, or of the filter, which takes other values, too."""
    if type(value) is not str:
        if name != "trim":
            raise DependsOnTextError
        value = "" if isinstance(value, Undefined) else str(_deep(value))
    if marks := _marks(value):
        if not all(chars is None or (type(chars) is str and chars.isspace()) for chars in arguments):
            raise DependsOnTextError
        _watch.get().stripped.update(marks)
    method = "strip" if name == "trim" else name
    check_method(method, value, arguments)
    return getattr(value, method)(*arguments)


def _marks(text: str) -> list[int]:
    return [ord(found) - _FIRST_MARK for found in _MARK.findall(text)]
