"""A Jinja environment in which a template cannot reach anything and cannot do much.

Reach: Jinja's immutable sandbox, and of plain values only the methods in `bounded_ops`. Work: `budget` is charged
wherever a template can loop or make something. Jinja has hooks for calls, attributes, filters, tests and most
operators; for the rest the parsed template is rewritten, so that there is no way around:

    loops            a step in each round
    a < b, a in b    a step before comparing
    a ~ b            `bounded_ops.concatenated`
    [..], {..}, a[:] charged with their size
    literal text     charged with its length inside loops and macros
"""

import types
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from . import bounded_ops
from .budget import current

# Names that the grammar cannot spell, so that a template cannot use them.
_TICK: Final = "tick!"
_CHARGE: Final = "charge!"
_PAY: Final = "pay!"
_CONCAT: Final = "concat!"

_REFUSED: Final = (
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.ScopedEvalContextModifier,
    nodes.EvalContextModifier,
)
_BINARY: Final = {
    "+": bounded_ops.add,
    "*": bounded_ops.multiply,
    "**": bounded_ops.power,
    "%": bounded_ops.modulo,
}


class RaisedError(Exception):
    """The template called `raise_exception`: it refuses the messages."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that pay. Rendering needs a `budget.current`."""

    intercepted_binops = frozenset(_BINARY)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=[_Generation, loopcontrols],
        )
        self.binop_table.update(_BINARY)
        ours: dict[str, Any] = {_TICK: _tick, _CHARGE: _charge, _PAY: _pay, _CONCAT: bounded_ops.concatenated}
        self.filters.clear()
        self.filters.update(bounded_ops.bounded_filters(), **ours)
        self.tests.clear()
        self.tests.update(bounded_ops.bounded_tests())
        del self.globals["lipsum"]
        self.globals["range"] = bounded_ops.bounded_range
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for kind in _REFUSED:
            if tree.find(kind) is not None:
                raise SecurityError(f"chat templates may not contain {kind.__name__} statements")
        paying: nodes.Template = _Paying().visit(tree)
        return paying

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = bounded_ops.allowed_attribute(obj, attr)
        if allowed is not None:
            return allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        if not isinstance(value, types.BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        template = value.__self__
        if not isinstance(template, str):
            return None
        formatter = SandboxedFormatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: bounded_ops.formatted(formatter, template, (), mapping)
        return lambda *args, **kwargs: bounded_ops.formatted(formatter, template, args, kwargs)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.enter_call()
        try:
            if isinstance(function, types.BuiltinMethodType) and isinstance(function.__self__, str):
                for ours in (
                    "_loop_vars",
                    "_block_vars",
                ):  # Jinja's own, for callables that ask for the context
                    kwargs.pop(ours, None)
                return bounded_ops.call_method(function, args, kwargs)
            return budget.charged(super().call(context, function, *args, **kwargs))
        finally:
            budget.leave_call()


class _Paying(NodeTransformer):
    """Rewrites a template so that it pays for what Jinja has no hook for."""

    def __init__(self) -> None:
        self._repeated = 0

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._repeated += 1
        self.generic_visit(node)
        self._repeated -= 1
        if node.test is not None:
            node.test = _filtered(node.test, _TICK)
        node.body.insert(0, _statement(_filtered(nodes.Const(None), _TICK), node.lineno))
        return node

    def _visit_callable(self, node: nodes.Node) -> nodes.Node:
        self._repeated += 1
        self.generic_visit(node)
        self._repeated -= 1
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_callable

    def visit_Output(self, node: nodes.Output) -> nodes.Node | list[nodes.Node]:
        self.generic_visit(node)
        node.nodes = [
            nodes.TemplateData(child.value)
            if isinstance(child, nodes.Const) and isinstance(child.value, str)
            else child
            for child in node.nodes
        ]
        length = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if not self._repeated or not length:
            return node
        return [_statement(_filtered(nodes.Const(length), _CHARGE), node.lineno), node]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _TICK)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_constant(node.items) else _filtered(node, _PAY)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_constant(node.items) else _filtered(node, _PAY)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _PAY)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _PAY) if isinstance(node.arg, nodes.Slice) else node


def _is_constant(items: list[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _statement(node: nodes.Expr, lineno: int) -> nodes.Node:
    return nodes.ExprStmt(node, lineno=lineno)


def _tick(value: Any) -> Any:
    current.get().tick()
    return value


def _charge(units: int) -> None:
    current.get().charge(units)


def _pay(value: Any) -> Any:
    return current.get().charged(value)


def _finalize(value: Any) -> str:
    budget = current.get()
    text = value if type(value) is str else budget.text(value)
    budget.charge(len(text))
    return text


def _raise_exception(message: Any = "") -> None:
    raise RaisedError(str(message))


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}`: marks what the model wrote; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call: Any = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """The `dict` of templates: only a way to make one."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return bounded_ops.new_dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return bounded_ops.dict_from_keys(keys, value)


class _Namespace(Namespace):
    """Jinja's namespace, without underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates may not store {name!r} in a namespace")


def compile_template(source: str, globals: dict[str, Any]) -> jinja2.Template:
    """Compile a template. Raises whatever Jinja and Python's compiler raise."""
    return BoundedEnvironment().from_string(source, globals=globals)
