"""Checks that a grammar has texts, and how long the shortest one is, from every position.

A rule that always leads to itself (`a ::= "[" a "]"`) derives no finite text: xgrammar compiles it, offers tokens
forever, and its forced text never ends. A rule whose shortest text doubles at each of forty references is as bad.

Every rule and every expression in it must derive a text of at most MAX_SHORTEST characters; also unreachable rules, for
which xgrammar 0.2.8 overflows its stack.

This bounds the forced text at any position. Forced text begins every text that may follow, so it is no longer than the
shortest one. A position is a stack of begun rules; the rest of each is part of a checked sequence or repetition, so at
most MAX_SHORTEST. There are no more open rules than bytes read times the number of rules.

Shortest texts are computed by Knuth's generalisation of Dijkstra's algorithm (A Generalization of Dijkstra's Algorithm,
1977): lengths become final in ascending order; O(n log n) in the grammar's size.

The format is `Grammar.serialize_json()` of xgrammar (cpp/grammar_impl.h, `GrammarExprType`).
"""

from __future__ import annotations

import heapq
import importlib
import json
import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from treeline_runtime.grammar.backend import MAX_SHORTEST, GrammarError
from treeline_runtime.grammar.character_sets import all_but, union

_PARSER: Any = importlib.import_module("re._parser")


class Kind(IntEnum):
    """The kind of an expression, and the meaning of its numbers."""

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


class Form(NamedTuple):
    """A node's texts: all parts in sequence, or `times` times one of them."""

    parts: Sequence[int] = ()
    is_sequence: bool = False
    times: int = 1
    alone: int | None = None
    """The length of the text besides the parts."""


class Rules:
    """The rules of a serialised xgrammar grammar. Nodes are expressions, followed by the rules."""

    def __init__(self, serialized: str) -> None:
        grammar = json.loads(serialized)
        self._bodies: list[int] = [rule[1] for rule in grammar["rules"]]
        self._data: list[int] = grammar["grammar_expr_data"]
        self._starts: list[int] = grammar["grammar_expr_indptr"]
        self.root = self._rule(grammar["root_rule_id"])
        self.nodes = {self._rule(number): rule[0] for number, rule in enumerate(grammar["rules"])}
        """All rules and what is in them, each with the name of a rule that it is in."""
        self.forms: dict[int, Form] = {}
        stack = [*self.nodes]
        while stack:
            node = stack.pop()
            self.forms[node] = self._form(node)
            for part in self.forms[node].parts:
                if part not in self.nodes:
                    self.nodes[part] = self.nodes[node]
                    stack.append(part)

    def _rule(self, number: int) -> int:
        return len(self._starts) + number

    def _form(self, node: int) -> Form:
        if node >= len(self._starts):
            return Form([self._bodies[node - len(self._starts)]])
        start = self._starts[node]
        kind, data = Kind(self._data[start]), self._data[start + 2 : start + 2 + self._data[start + 1]]
        match kind:
            case Kind.BYTES:
                return Form(alone=len(data))
            case Kind.EMPTY | Kind.CLASS_STAR | Kind.SUBSTRING:
                return Form(alone=0)
            case Kind.CLASS:
                return Form(alone=1 if _has_character(data) else None)
            case Kind.TOKEN:
                return Form(alone=1 if data else None)
            case Kind.OTHER_TOKEN:
                return Form(alone=1)
            case Kind.REGEX:
                return Form(alone=_width(bytes(data[1:]).decode()))
            case Kind.RULE:
                return Form([self._rule(data[0])])
            case Kind.CHOICES:
                return Form(data)
            case Kind.SEQUENCE:
                return Form(data, is_sequence=True, alone=None if data else 0)
            case Kind.REPEAT:
                return Form([self._rule(data[0])] if data[2] else [], times=data[1], alone=None if data[1] else 0)
            case Kind.TAG_DISPATCH:
                return Form([self._rule(number) for number in data[1:-2:2]], alone=0)
            case Kind.TOKEN_DISPATCH:
                return Form([self._rule(number) for number in data[2 : 1 + 2 * data[0] : 2]], alone=0)


def check_satisfiable(serialized: str) -> None:
    """Raises GrammarError if a rule or expression derives no finite text, or only long ones."""
    rules = Rules(serialized)
    shortest = shortest_texts(rules)
    for node, name in rules.nodes.items():
        if node not in shortest:
            raise GrammarError(f"can never be satisfied: no finite text is a {name!r}")
        if shortest[node] > MAX_SHORTEST:
            raise GrammarError(
                f"too long: the shortest text of {name!r} has {shortest[node]} characters; {MAX_SHORTEST} are the most"
            )


def shortest_texts(rules: Rules) -> dict[int, int]:
    """The length of each node's shortest text, if any: bytes of texts, characters of classes, one per token."""
    users, waits = dict[int, list[int]](), dict[int, int]()
    queue: list[tuple[int, int]] = []
    for node, form in rules.forms.items():
        parts = set(form.parts)
        for part in parts:
            users.setdefault(part, []).append(node)
        waits[node] = len(parts) if form.is_sequence else min(1, len(parts))
        if form.alone is not None:
            queue.append((form.alone, node))
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
                form = rules.forms[user]
                together = sum(final[part] for part in form.parts) if form.is_sequence else form.times * length
                heapq.heappush(queue, (together, user))
    return final


def _has_character(data: list[int]) -> bool:
    ranges = [(first, last) for first, last in zip(data[1::2], data[2::2], strict=True) if first <= last]
    return bool(all_but(ranges) if data[0] else union(ranges))


def _width(pattern: str) -> int:
    """The length of the shortest text of one of our patterns; xgrammar has refused those without a text."""
    try:
        return int(_PARSER.parse(pattern).getwidth()[0])
    except (re.error, OverflowError, RecursionError):
        return 0
