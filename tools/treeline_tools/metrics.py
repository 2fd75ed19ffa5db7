"""The metrics that picker, runtime and operator export: read from their own code, for the page and for the tests.

Most are objects in a registry. Some metrics of the picker exist only while they have a sample (an error's reason, say),
so they are found in its source: each is a tuple `kind, name, help, labels, value` that a generator yields.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import treeline_epp
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from treeline_epp.metrics import Metrics as PickerMetrics
from treeline_operator.controller.metrics import Metrics as OperatorMetrics
from treeline_runtime.server.metrics import Metrics as RuntimeMetrics

PICKER_PREFIX: Final = "treeline_epp_"


class Family(NamedTuple):
    """A metric as the metrics page shows it: a counter's name ends in `_total`, a histogram's has no suffix."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, for queries."""
        return (
            tuple(f"{self.name}{end}" for end in ("_bucket", "_sum", "_count"))
            if self.kind == "histogram"
            else (self.name,)
        )


class NotUnderstood(Exception):
    """A sample in the picker's source is written in a way that this module cannot read."""


@functools.cache
def families() -> dict[str, list[Family]]:
    """All metrics, sorted, by the process that exports them."""
    rooms = {
        "picker": [*_registered(PickerMetrics().registry), *_observed(Path(treeline_epp.__file__).parent)],
        "runtime": _registered(RuntimeMetrics("")._registry),
        "operator": _registered(OperatorMetrics().registry),
    }
    return {room: sorted(found) for room, found in rooms.items()}


def _registered(registry: CollectorRegistry) -> Iterator[Family]:
    """Yields the metrics of a registry. A metric with labels has no samples before it is used, but it knows its
    labels."""
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            yield _family(collector._name, str(collector._type), collector._labelnames, collector._documentation)
        else:
            for family in collector.collect():
                yield _family(family.name, family.type, getattr(family, "_labelnames", ()), family.documentation)


def _family(name: str, kind: str, labels: Iterable[str], text: str) -> Family:
    return Family(f"{name}_total" if kind == "counter" else name, kind, tuple(labels), text)


def _observed(package: Path) -> Iterator[Family]:
    found: dict[str, Family] = {}
    for path in sorted(package.rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef):
                for family in _Reader(path, module).samples(function.body, {}):
                    known = found.setdefault(family.name, family)
                    if known != family:
                        raise NotUnderstood(f"{path}: {family.name} is described in two ways: {known} and {family}")
    yield from found.values()


Known: TypeAlias = dict[str, ast.expr]


def _bound(node: ast.Assign | ast.AnnAssign) -> Known:
    """The values that an assignment gives to names."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {} if node.value is None else {k: v for target in targets for k, v in _unpacked(target, node.value).items()}


def _unpacked(target: ast.expr, value: ast.expr) -> Known:
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = zip(target.elts, value.elts, strict=True)
        return {name: one for part, given in pairs for name, one in _unpacked(part, given).items()}
    return {}


class _Reader:
    """Reads one function, statement by statement: a name has the value last assigned to it above."""

    def __init__(self, path: Path, module: ast.Module) -> None:
        self._path = path
        self._globals: Known = {}
        self._imports: dict[str, tuple[str, str]] = {}
        for node in module.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                self._globals |= _bound(node)
            elif isinstance(node, ast.ImportFrom) and node.module:
                self._imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}

    def samples(self, body: Iterable[ast.stmt], known: Known) -> Iterator[Family]:
        """Yields the metrics that these statements yield. Their assignments are added to `known`."""
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                known |= _bound(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
                yield from self._sample(node.value.value, known)
            elif isinstance(node, ast.For):
                # A loop over a literal is unrolled; any other is read once.
                rounds = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else [node.iter]
                for given in rounds:
                    known |= _unpacked(node.target, given)
                    yield from self.samples(node.body, known)
            else:
                for part in ("body", "orelse", "finalbody"):
                    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                        yield from self.samples(getattr(node, part, ()), known)

    def _sample(self, node: ast.expr | None, known: Known) -> Iterator[Family]:
        if not isinstance(node, ast.Tuple) or len(node.elts) != 5:
            return
        kind, name, text, labels, _ = node.elts
        if isinstance(kind, ast.Constant) and kind.value in ("gauge", "counter"):
            try:
                words, keys = str(self._value(text, known)), tuple(self._keys(labels, known))
                yield _family(PICKER_PREFIX + str(self._value(name, known)), str(kind.value), keys, words)
            except NotUnderstood as error:
                raise NotUnderstood(f"{self._path}:{node.lineno}: {error}") from None

    def _value(self, node: ast.expr, known: Known) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self._value(part, known)) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            form = "" if node.format_spec is None else str(self._value(node.format_spec, known))
            return format(self._value(node.value, known), form)
        return self._value(self._meaning(node, known, "the text"), known)

    def _keys(self, node: ast.expr, known: Known) -> Iterator[str]:
        """The labels' names; `{**more, "name": value}` begins with the names in `more`."""
        if not isinstance(node, ast.Dict):
            yield from self._keys(self._meaning(node, known, "the labels"), known)
            return
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                yield from self._keys(value, known)
            else:
                yield str(self._value(key, known))

    def _meaning(self, node: ast.expr, known: Known, what: str) -> ast.expr:
        found = (known.get(node.id) or self._globals.get(node.id)) if isinstance(node, ast.Name) else None
        if found is None and isinstance(node, ast.Name) and node.id in self._imports:
            source, name = self._imports[node.id]
            value = getattr(importlib.import_module(source), name, None)
            found = ast.Constant(value) if isinstance(value, str | int | float) else None
        if found is None or found is node:
            raise NotUnderstood(
                f"{what} `{ast.unparse(node)}` is not written down above: use a constant or a local name"
            )
        return found


def by_series() -> dict[str, Family]:
    """Every metric of every room, by the names of its series."""
    every: Any = (one for found in families().values() for one in found)
    return {series: family for family in every for series in family.series}
