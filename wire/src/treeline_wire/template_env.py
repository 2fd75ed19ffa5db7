"""The language of chat templates: Jinja as set up by `transformers`, in a closed sandbox.

Templates come with checkpoints and are not trusted. They see JSON values and a few of Jinja's own types, and of each
only the members listed here. All others are closed, so no list of dangers must be complete. There is no `Markup` (its
`format` is no builtin method), no `str.format`, no underscored name.

The *cost* of a template is limited elsewhere: `template_inline`, and the runtime's `templates.worker`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from types import BuiltinMethodType, MethodType
from typing import Any, Final

import jinja2
import markupsafe
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, _GroupTuple
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

_MAX_DATE_FORMAT: Final = 256


def words(text: str) -> frozenset[str]:
    """Returns a set of names from one text."""
    return frozenset(text.split())


_STR: Final = words(
    "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper zfill"
)
_LOOP: Final = words("changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0")
MEMBERS: Final[dict[type, frozenset[str]]] = {
    str: _STR,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
    LoopContext: _LOOP,
    _GroupTuple: frozenset({"grouper", "list"}),
}
"""Members that a template may use, by the exact type of the value."""
_DICT_NAMES: Final = frozenset(dir(dict))
_SUBSCRIPTABLE: Final = frozenset({str, dict, list, tuple, range, _GroupTuple})
"""Types whose items a template may read."""

_FILTERS: Final = words(
    "abs attr batch capitalize center count d default dictsort filesizeformat first float format groupby indent int "
    "items join last length list lower map max min reject rejectattr replace reverse round select selectattr slice "
    "sort string sum title trim truncate unique upper urlencode wordcount wordwrap"
)
_REFUSED: Final = (
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Block,
    nodes.ScopedEvalContextModifier,
    nodes.EvalContextModifier,
)
"""Statements that load other templates or switch escaping on, and blocks, which serve inheritance."""


class RaisedError(Exception):
    """The template called `raise_exception`: it refuses the messages."""


class TemplateNamespace(Namespace):
    """Jinja's namespace without underscored names. Printing it does not show its contents."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class Function:
    """A function for templates, without readable attributes."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return "<function>"


class _CodeGenerator(CodeGenerator):
    """Evaluates nothing at compile time: a template's constants may be arbitrarily large."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Rendering raises `RaisedError` for `raise_exception`, and any exception for other
    faults.

    `clock` gives the time of `strftime_now`, in UTC, so that prompts do not depend on the place.
    """

    code_generator_class = _CodeGenerator

    clock: Callable[[], datetime]

    def __init__(self, *, finalize: Callable[[Any], str] | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=finalize,
            extensions=[_Generation, loopcontrols],
        )
        self.filters = {name: FILTERS[name] for name in _FILTERS} | {
            "tojson": tojson,
            "safe": str,
            "e": _escaped,
            "escape": _escaped,
            "forceescape": _escaped,
            "attr": self._attr,
        }
        self.globals = {
            "range": Function(safe_range),
            "dict": Function(dict),
            "namespace": Function(TemplateNamespace),
            "raise_exception": Function(_raise_exception),
            "strftime_now": Function(self._strftime_now),
        }
        self.clock = utc_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for kind in _REFUSED:
            if tree.find(kind) is not None:
                raise SecurityError(f"chat templates may not contain {kind.__name__} statements")
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns `obj.attribute`: a member, or the item of that name."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif isinstance(obj, Undefined) and not attribute.startswith("_"):
            return getattr(obj, attribute)  # raises an error that names it
        return self._member(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Returns `obj[argument]`: an item, or the member of that name."""
        if type(obj) in _SUBSCRIPTABLE or isinstance(obj, Undefined):
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str):
            return self._member(obj, argument)
        return self.undefined(obj=obj, name=argument)

    def _member(self, obj: Any, name: str) -> Any:
        kind = type(obj)
        if name in MEMBERS.get(kind, ()):
            return getattr(obj, name)
        if kind is TemplateNamespace and not name.startswith("_"):
            try:
                return getattr(obj, name)
            except AttributeError:
                return self.undefined(obj=obj, name=name)
        if name.startswith("_"):
            raise SecurityError(f"chat templates may not read {name!r}")
        if name in dir(kind):
            return self.unsafe_undefined(obj, name)
        return self.undefined(obj=obj, name=name)

    def _attr(self, obj: Any, name: str) -> Any:
        """Applies the filter `attr`: members only."""
        return self._member(obj, str(name))

    def _strftime_now(self, format: str) -> str:
        if len(format) > _MAX_DATE_FORMAT:
            raise ValueError("the date format is too long")
        return self.clock().strftime(format)

    def is_safe_callable(self, obj: Any) -> bool:
        kind = type(obj)
        if kind is BuiltinMethodType:
            return obj.__name__ in MEMBERS.get(type(obj.__self__), ())
        if kind is MethodType:
            return type(obj.__self__) is LoopContext and obj.__name__ in MEMBERS[LoopContext]
        return kind in (Function, Macro, LoopContext)


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks the model's text; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def raised_texts(tree: nodes.Template) -> frozenset[str]:
    """Returns the template's own constant messages for `raise_exception`."""
    texts = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "raise_exception" and len(call.args) == 1:
            argument = call.args[0]
            if isinstance(argument, nodes.Const) and isinstance(argument.value, str):
                texts.add(argument.value)
    return frozenset(texts)


def line_of(error: BaseException) -> int | None:
    """Returns the template's line of an error."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON like `transformers`' filter: as Python does, without HTML escapes."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def utc_now() -> datetime:
    """Returns the current time."""
    return datetime.now(UTC)


def _escaped(value: Any) -> str:
    return str(markupsafe.escape(str(value)))


def _raise_exception(message: Any = "") -> None:
    raise RaisedError(str(message))


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("chat templates may not store underscored names in a namespace")


def compile_template(environment: jinja2.Environment, source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compiles a template; returns also its `raised_texts`. Raises any error of Jinja and of Python's compiler."""
    texts = raised_texts(environment.parse(source))
    return environment.from_string(source), texts
