"""No test limits the duration of something, and none gives up soon: other machines are slower, and this one is busy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = {"monotonic", "perf_counter", "time"}
PROCESSOR_TIME = {"thread_time", "process_time"}
CLOCK = rf"\b({'|'.join(CLOCKS | PROCESSOR_TIME)})\("
LEAST_S = 30
WAITS = {"timeout": 0, "wait_for": 1, "eventually": 1, "until": 2}
"""Functions that wait, with the index of the argument that limits the wait in seconds."""


def called(node: ast.AST | None) -> str:
    """Return the last part of a called function's name: `monotonic` for `time.monotonic()`."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
    return ""


def names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


class Times(ast.NodeVisitor):
    """Finds a function's variables that hold durations by these clocks."""

    def __init__(self, clocks: set[str], times: set[str], function: ast.AST) -> None:
        self.clocks, self.stamps, self.times = clocks, set[str](), set(times)
        known = -1
        while known < len(self.times):  # one is made from another
            known = len(self.times)
            self.visit(function)

    def holds(self, node: ast.AST | None) -> bool:
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Name) and part.id in self.times:
                return True
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub):
                at = part.left
                if called(at) in self.clocks or (isinstance(at, ast.Name) and at.id in self.stamps):
                    return True
        return False

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if called(node.value) in self.clocks:
                self.stamps |= names(target)
            elif self.holds(node.value):
                self.times |= names(target)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="append") if any(map(self.holds, node.args)):
                self.times.add(name)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.generic_visit(node)
        if any(isinstance(part, ast.Return) and self.holds(part.value) for part in ast.walk(node)):
            self.times.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def bounded(self, claim: ast.Assert) -> Iterator[tuple[ast.Compare, ast.expr]]:
        """Yield comparisons that bound a duration from above, with the bound."""
        for node in ast.walk(claim.test):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                for less, op, more in zip(sides, node.ops, sides[1:], strict=False):
                    if isinstance(op, ast.Gt | ast.GtE):
                        less, more = more, less
                    if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and self.holds(less):
                        yield node, more


def bounds(module: ast.Module) -> Iterator[ast.expr]:
    """Yield assertions that bound a duration; for processor time only those whose bound was not measured."""
    for clocks in (CLOCKS, PROCESSOR_TIME):
        times = set[str]()
        for function in (node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            times |= Times(clocks, times, function).times & {function.name}
        for part in module.body:
            found = Times(clocks, times, part)
            for claim in (node for node in ast.walk(part) if isinstance(node, ast.Assert)):
                for node, most in found.bounded(claim):
                    measured = any(isinstance(p, ast.Call) for p in ast.walk(most)) or any(
                        map(str.islower, names(most))
                    )
                    if clocks is CLOCKS or not measured:
                        yield node


def hasty(module: ast.Module) -> Iterator[ast.expr]:
    """Yield the time limits that are too short, except in waits that are expected to fail."""
    fails = set[ast.AST]()
    for node in ast.walk(module):
        if isinstance(node, ast.Try) or (
            isinstance(node, ast.With)
            and any(called(item.context_expr) in ("raises", "suppress") for item in node.items)
        ):
            fails |= {part for statement in node.body for part in ast.walk(statement)}
    for node in ast.walk(module):
        if called(node) in WAITS and isinstance(node, ast.Call) and node not in fails:
            seconds = [*node.args[WAITS[called(node)] :][:1]]
            seconds += [word.value for word in node.keywords if word.arg in ("timeout", "timeout_s")]
            for given in seconds:
                if (
                    isinstance(given, ast.Constant)
                    and isinstance(given.value, int | float)
                    and 0 < given.value < LEAST_S
                ):
                    yield node
        elif isinstance(node, ast.For) and any(isinstance(part, ast.Return | ast.Break) for part in ast.walk(node)):
            times = node.iter.args[-1] if isinstance(node.iter, ast.Call) and called(node.iter) == "range" else None
            for call in (part for part in ast.walk(node) if isinstance(part, ast.Call) and called(part) == "sleep"):
                match times, call.args:
                    case ast.Constant(value=int(count)), [ast.Constant(value=int() | float() as pause)]:
                        if 0 < count * pause < LEAST_S:
                            yield node.iter


def test_no_test_depends_on_how_fast_the_machine_is() -> None:
    found = list[str]()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source = path.read_text()
        signs = ((bounds, CLOCK), (hasty, rf"\b({'|'.join(WAITS)})\([^)]*\d|in range\(\d+\):"))
        finders = [find for find, sign in signs if re.search(sign, source)]  # parsing each takes seconds
        module = ast.parse(source) if finders else None
        for find in finders:
            found += [f"{path.relative_to(ROOT)}:{n.lineno}: {ast.unparse(n)}" for n in find(module)]
    assert found == [], "see CONTRIBUTING.md, Tests"


BOUNDED = [
    "began = time.monotonic()\nassert time.monotonic() - began < 0.5",
    "assert 2 >= loop.time() - began",
    "def test():\n    took = time.perf_counter() - began\n    assert 0 < 1e3 * took < LIMIT_S",
    "def seconds():\n    return time.time() - began\ndef test():\n    assert max(seconds() for _ in range(3)) < most",
    "def test():\n    turns.append(time.thread_time() - began)\n    assert min(turns) < MOST_S / 2",
]
UNBOUNDED = [
    "assert time.monotonic() - began > 0.5",
    "assert time.monotonic() < deadline",
    "assert time.thread_time() - began < 20 * reference_s()",
]


def test_bounds_are_found() -> None:
    assert [len(list(bounds(ast.parse(source)))) for source in BOUNDED] == [1] * len(BOUNDED)
    assert [source for source in UNBOUNDED if list(bounds(ast.parse(source)))] == []
