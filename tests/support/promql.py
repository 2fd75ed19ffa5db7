"""Which labels the result of a PromQL expression has, given the metrics that there are: says what a query gets wrong.

The parser is `promql_parser`, a port of Prometheus' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import promql_parser as promql
from treeline_tools.metrics import Family

SCRAPED = frozenset({"namespace", "pod", "job"})
"""What the Prometheus operator adds to every series of a pod."""
_COUNTS = ("rate", "increase")


class WrongQuery(Exception):
    """The expression names what is not there, or does with it what makes no sense."""


Judge = Callable[[Family, str, str, str], None]
"""Of a matcher: family, label, operator as in `promql.MatchOp`, value."""


def labels_of(
    expr: str, metrics: Mapping[str, Family], judge: Judge = lambda family, label, op, value: None
) -> frozenset[str]:
    """The labels that the result can have. Raises ValueError for what is no PromQL, and `WrongQuery`.

    `metrics` by the names of their series. `judge` is shown every matcher of a label that is the metric's own.
    """
    return _Reader(metrics, judge).labels(promql.parse(expr))


class _Reader:
    def __init__(self, metrics: Mapping[str, Family], judge: Judge) -> None:
        self._metrics = metrics
        self._judge = judge

    def labels(self, expr: promql.Expr) -> frozenset[str]:
        match expr:
            case promql.VectorSelector():
                return self._selected(expr, counted=False)
            case promql.Call():
                return self._called(expr)
            case promql.AggregateExpr():
                return self._aggregated(expr)
            case promql.BinaryExpr():
                left, right = self.labels(expr.lhs), self.labels(expr.rhs)
                if left and right and expr.modifier is None and left != right:
                    raise WrongQuery(f"{expr}: the sides have other labels, {sorted(left)} and {sorted(right)}")
                return left or right
            case promql.ParenExpr():
                return self.labels(expr.expr)
            case promql.NumberLiteral():
                return frozenset()
            case _:
                raise WrongQuery(f"{expr}: a {type(expr).__name__} is not expected here")

    def _selected(self, selector: promql.VectorSelector, *, counted: bool) -> frozenset[str]:
        family = self._metrics.get(selector.name or "")
        if family is None:
            raise WrongQuery(f"{selector}: no process exports that")
        if counted != (family.kind != "gauge"):
            raise WrongQuery(f"{selector}: rate and increase are for counters and histograms, and these need them")
        own = frozenset(family.labels) | ({"le"} if str(selector.name).endswith("_bucket") else set())
        for matcher in selector.matchers.matchers:
            if matcher.name not in own | SCRAPED:
                raise WrongQuery(f"{selector}: it has no label {matcher.name}, only {sorted(own)}")
            if matcher.name in own - SCRAPED:
                self._judge(family, matcher.name, str(matcher.op), matcher.value)
        return own | SCRAPED

    def _called(self, call: promql.Call) -> frozenset[str]:
        if call.func.name in _COUNTS:
            (matrix,) = call.args
            if not isinstance(matrix, promql.MatrixSelector):
                raise WrongQuery(f"{call}: of a selection over a time")
            return self._selected(matrix.vector_selector, counted=True)
        if call.func.name == "absent":
            self.labels(call.args[0])
            return frozenset()
        if call.func.name == "histogram_quantile":
            found = self.labels(call.args[1])
            if "le" not in found:
                raise WrongQuery(f"{call}: `le` is not among {sorted(found)}")
            return found - {"le"}
        raise WrongQuery(f"{call}: the function {call.func.name} is not expected here")

    def _aggregated(self, expr: promql.AggregateExpr) -> frozenset[str]:
        found = self.labels(expr.expr)
        if expr.modifier is None:
            return found if str(expr.op) in ("topk", "bottomk") else frozenset()
        if expr.modifier.type != promql.AggModifierType.By:
            raise WrongQuery(f"{expr}: say by which labels, not without which")
        by = frozenset(expr.modifier.labels)
        if not by <= found:
            raise WrongQuery(f"{expr}: there is no {sorted(by - found)}, only {sorted(found)}")
        return by
