"""CEL outside the API server: whether a rule of a kind holds of a value.

The rules are written once, for the API server; files are judged by the same text. The evaluator is loaded when it is
first asked, which the running operator never does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from treeline_operator.quantity import quantity

if TYPE_CHECKING:
    from cel_expr_python import cel


def holds(rule: str, value: Any) -> bool:
    """Whether a rule of `self` holds. One that cannot be evaluated does not, as at the API server."""
    return _compiled(rule).eval(data={"self": value}).value() is True


@functools.cache
def _compiled(rule: str) -> cel.Expression:
    return _environment().compile(rule)


@functools.cache
def _environment() -> cel.Env:
    """CEL's own functions, and those that Kubernetes adds of which our rules use some: of quantities."""
    from cel_expr_python import cel

    string, number = cel.Type.STRING, cel.Type.INT
    of_text = cel.Overload("string_to_quantity", string, [string], False, lambda text: text)
    compare = cel.Overload("quantity_compare", number, [string, string], True, _compare)
    functions = [cel.FunctionDecl("quantity", [of_text]), cel.FunctionDecl("compareTo", [compare])]
    return cel.NewEnv(variables={"self": cel.Type.DYN}, functions=functions)


def _compare(one: str, other: str) -> int:
    left, right = quantity(one) or 0, quantity(other) or 0
    return (left > right) - (left < right)
