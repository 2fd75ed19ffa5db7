"""Whether a grammar has texts at all, and how long the shortest one is, from every place in it.

A rule that leads to itself on every way (`a ::= "[" a "]"`) derives no finite text. xgrammar compiles it, offers tokens
for ever, and its forced text never ends. A rule whose shortest text doubles at each of forty references is no better.

What is checked, of every rule and each expression in it: it derives a text, and the shortest one has at most
MAX_SHORTEST characters. Of rules that nothing leads to as well, for which xgrammar 0.2.8 overflows its stack.

This bounds the forced text at any place. What is forced begins every text that may follow, the shortest too, so it is
no longer than that one. The place is a stack of rules that have begun; what remains of each is the rest of one sequence
that was checked, or of one repetition, so at most MAX_SHORTEST; and a shortest text opens no rule within itself. So it
is at most MAX_SHORTEST for each rule that is open, and no more are than bytes were read, times the rules there are.

The shortest texts are computed by Knuth's generalisation of Dijkstra's algorithm (A Generalization of Dijkstra's
Algorithm, 1977): lengths become final in ascending order; O(n log n) in the size of the grammar.

The format is `Grammar.serialize_json()` of xgrammar (cpp/grammar_impl.h, `GrammarExprType`).
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator
from enum import IntEnum

from treeline_runtime.grammar.backend import MAX_SHORTEST, GrammarError


class Kind(IntEnum):
    """Of an expression, with what its numbers are."""

    BYTES = 0  # the bytes
    CLASS = 1  # negative, then pairs: first and last character
    CLASS_STAR = 2
    EMPTY = 3
    RULE = 4  # rule
    SEQUENCE = 5  # expressions
    CHOICES = 6  # expressions
    TAG_DISPATCH = 7  # pairs: text and rule; then whether it goes on, and an expression of texts that are excluded
    REPEAT = 8  # rule, at least, at most (-1: any number)
    TOKEN = 9  # tokens
    OTHER_TOKEN = 10  # tokens that it is not
    TOKEN_DISPATCH = 11  # count of pairs, pairs: token and rule; whether it goes on, count, tokens that are excluded
    REGEX = 12  # whether it is within a JSON string, then the bytes of the pattern
    SUBSTRING = 13  # any part of a list of texts, the empty one too


class Rules:
    """The rules of a grammar of xgrammar, as it serialises them. Nodes are expressions, and behind them the rules."""

    def __init__(self, serialized: str) -> None:
        grammar = json.loads(serialized)
        self.names: list[str] = [rule[0] for rule in grammar["rules"]]
        self._ahead: list[int] = [rule[2] for rule in grammar["rules"]]
        self._bodies: list[int] = [rule[1] for rule in grammar["rules"]]
        self._data: list[int] = grammar["grammar_expr_data"]
        self._starts: list[int] = grammar["grammar_expr_indptr"]
        self.root = self.rule(grammar["root_rule_id"])

    def rule(self, number: int) -> int:
        """Its node."""
        return len(self._starts) + number

    def looks_ahead(self, number: int) -> bool:
        return self._ahead[number] >= 0

    def expression(self, node: int) -> tuple[Kind, list[int]]:
        start = self._starts[node]
        return Kind(self._data[start]), self._data[start + 2 : start + 2 + self._data[start + 1]]

    def is_rule(self, node: int) -> bool:
        return node >= len(self._starts)

    def name(self, node: int) -> str:
        return self.names[node - len(self._starts)]

    def parts(self, node: int) -> list[int]:
        """The nodes that texts of this one can have within."""
        if self.is_rule(node):
            return [self._bodies[node - len(self._starts)]]
        kind, data = self.expression(node)
        match kind:
            case Kind.SEQUENCE | Kind.CHOICES:
                return data
            case Kind.RULE:
                return [self.rule(data[0])]
            case Kind.REPEAT:
                return [self.rule(data[0])] if data[2] else []
            case Kind.TAG_DISPATCH:
                return [self.rule(number) for number in data[1:-2:2]]
            case Kind.TOKEN_DISPATCH:
                return [self.rule(number) for number in data[2 : 1 + 2 * data[0] : 2]]
            case _:
                return []

    def nodes(self) -> dict[int, str]:
        """All rules and what is in them, each with the name of a rule that it is in."""
        stack = [self.rule(number) for number in range(len(self.names))]
        found = {node: self.name(node) for node in stack}
        while stack:
            node = stack.pop()
            for part in self.parts(node):
                if part not in found:
                    found[part] = found[node]
                    stack.append(part)
        return found


def check_satisfiable(serialized: str) -> None:
    """Raises GrammarError when some rule, or an expression in it, derives no finite text, or only long ones."""
    rules = Rules(serialized)
    shortest = shortest_texts(rules)
    for node, name in rules.nodes().items():
        if node not in shortest:
            raise GrammarError(f"can never be satisfied: no finite text is a {name!r}")
        if shortest[node] > MAX_SHORTEST:
            raise GrammarError(
                f"too long: the shortest text of {name!r} has {shortest[node]} characters; {MAX_SHORTEST} are the most"
            )


def shortest_texts(rules: Rules) -> dict[int, int]:
    """The length of the shortest text of each node that has one, in bytes of fixed texts and characters of classes;
    a token counts as one."""
    users, waits = dict[int, list[int]](), dict[int, int]()
    queue: list[tuple[int, int]] = []
    for node in rules.nodes():
        parts = set(rules.parts(node))
        for part in parts:
            users.setdefault(part, []).append(node)
        waits[node] = len(parts) if _is_sequence(rules, node) else min(1, len(parts))
        alone = _alone(rules, node)
        if alone is not None:
            queue.append((alone, node))
    heapq.heapify(queue)
    final = dict[int, int]()
    while queue:
        length, node = heapq.heappop(queue)
        if node in final:
            continue
        final[node] = length
        for user in users.get(node, ()):
            waits[user] -= 1
            if waits[user] == 0:
                heapq.heappush(queue, (_together(rules, user, final, length), user))
    return final


def _is_sequence(rules: Rules, node: int) -> bool:
    return not rules.is_rule(node) and rules.expression(node)[0] is Kind.SEQUENCE


def _together(rules: Rules, node: int, final: dict[int, int], least: int) -> int:
    """least: of the part that has become final just now. It is the shortest of all parts where one is enough."""
    if rules.is_rule(node):
        return least
    kind, data = rules.expression(node)
    match kind:
        case Kind.SEQUENCE:
            return sum(final[part] for part in data)
        case Kind.REPEAT:
            return data[1] * least
        case _:
            return least


def _alone(rules: Rules, node: int) -> int | None:
    """The length of a text of this node that has nothing to do with its parts."""
    if rules.is_rule(node):
        return None
    kind, data = rules.expression(node)
    match kind:
        case Kind.BYTES:
            return len(data)
        case Kind.EMPTY | Kind.CLASS_STAR | Kind.TAG_DISPATCH | Kind.TOKEN_DISPATCH | Kind.SUBSTRING:
            return 0
        case Kind.CLASS:
            return 1 if _has_character(data) else None
        case Kind.TOKEN:
            return 1 if data else None
        case Kind.OTHER_TOKEN:
            return 1
        case Kind.REGEX:
            return _width(bytes(data[1:]).decode())
        case Kind.SEQUENCE:
            return None if data else 0
        case Kind.REPEAT:
            return 0 if data[1] == 0 else None
        case Kind.RULE | Kind.CHOICES:
            return None


_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF


def _has_character(data: list[int]) -> bool:
    ranges = sorted(_pairs(data[1:]))
    if not data[0]:
        return any(first <= last for first, last in ranges)
    after = 0
    for first, last in sorted([*ranges, _SURROGATES]):
        if first > after:
            return True
        after = max(after, last + 1)
    return after <= _LAST


def _pairs(data: list[int]) -> Iterator[tuple[int, int]]:
    return zip(data[::2], data[1::2], strict=True)


def _width(pattern: str) -> int:
    """Of the shortest text that a pattern of ours takes; xgrammar has refused those that take none."""
    from re import _parser  # type: ignore[attr-defined]

    try:
        return int(_parser.parse(pattern).getwidth()[0])
    except (re.error, OverflowError, RecursionError):
        return 0
