"""No test asserts a number of seconds: what is true of them depends on the machine, and on what else it does."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
WALL = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
CPU = {"thread_time", "process_time", "thread_time_ns", "process_time_ns"}
LEAST_S = 30


def called(node: ast.AST) -> str:
    """The last name of what is called, as in `time.monotonic()`."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
    return ""


class Times(ast.NodeVisitor):
    """Names of a module that hold how long something took: differences of a clock, and what is made from them."""

    def __init__(self, module: ast.Module, clocks: set[str]) -> None:
        self.module, self.clocks, self.names = module, clocks, set[str]()
        self.stamps = set()
        count = -1
        while len(self.names) > count:
            count = len(self.names)
            self.visit(module)

    def holds(self, node: ast.AST | None) -> bool:
        """Whether a time is in the expression, or a name for one."""
        for part in ast.walk(node) if node else ():
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and self.stamp(part.left):
                return True
            if isinstance(part, ast.Name) and part.id in self.names:
                return True
        return False

    def stamp(self, node):
        return called(node) in self.clocks or (isinstance(node, ast.Name) and node.id in self.stamps)

    def visit_Assign(self, node: ast.Assign) -> None:
        vals = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        if any(called(v) in self.clocks for v in vals):
            self.stamps.update(
                part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)
            )
        if self.holds(node.value):
            self.names.update(
                part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)
            )

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="append") if any(map(self.holds, node.args)):
                self.names.add(name)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if any(isinstance(part, ast.Return) and self.holds(part.value) for part in ast.walk(node)):
            self.names.add(node.name)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def bounds(self):
        for claim in ast.walk(self.module):
            if isinstance(claim, ast.Assert):
                for node in ast.walk(claim.test):
                    if isinstance(node, ast.Compare):
                        sides = [node.left, *node.comparators]
                        for left, op, right in zip(sides, node.ops, sides[1:]):
                            if isinstance(op, ast.Gt | ast.GtE):
                                left, right = right, left
                            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and self.holds(left):
                                yield node.lineno, ast.unparse(node), right


if __name__ == "__main__":
    for path in TESTS:
        tree = ast.parse(path.read_text())
        for clocks in (WALL, CPU):
            for line, text, right in Times(tree, clocks).bounds():
                print(f"{path.relative_to(ROOT)}:{line}: {text}")
