"""From the rules of xgrammar's EBNF to the Lark dialect of llguidance (its docs/syntax.md).

llguidance splits the text into lexemes first, the longest one winning: `/[a-z]*/ "b"` takes no text. So each lexeme
here is one character, and everything else is rules; the language stays the one that was written.
"""

from __future__ import annotations

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.character_sets import characters
from treeline_runtime.grammar.patterns import Chars, as_regex
from treeline_runtime.grammar.satisfiable import Kind, Rules


def as_lark(rules: Rules) -> str:
    """Raises GrammarError for what Lark cannot say."""
    lines = [f"start: {_name(rules, rules.root)}"]
    for number, name in enumerate(rules.names):
        if rules.looks_ahead(number):
            raise GrammarError(f"a lookahead, in the rule {name!r}, is not supported")
        node = rules.rule(number)
        lines.append(f"{_name(rules, node)}: {_written(rules, rules.parts(node)[0], name)}")
    return "\n".join(lines) + "\n"


def _name(rules: Rules, node: int) -> str:
    return f"r{node - rules.rule(0)}"


def _written(rules: Rules, node: int, rule: str) -> str:
    kind, data = rules.expression(node)
    match kind:
        case Kind.BYTES:
            return _text(bytes(data), rule)
        case Kind.CLASS:
            return _class(data)
        case Kind.CLASS_STAR:
            return f"{_class(data)}*"
        case Kind.EMPTY:
            return '""'
        case Kind.RULE:
            return _name(rules, rules.rule(data[0]))
        case Kind.SEQUENCE:
            return "(" + " ".join(_written(rules, part, rule) for part in data) + ")" if data else '""'
        case Kind.CHOICES:
            return "(" + " | ".join(_written(rules, part, rule) for part in data) + ")"
        case Kind.REPEAT:
            most = "" if data[2] < 0 else data[2]
            return f"{_name(rules, rules.rule(data[0]))}{{{data[1]},{most}}}"
        case _:
            raise GrammarError(f"{kind.name.lower()} in the rule {rule!r} is not supported")


def _class(data: list[int]) -> str:
    ranges = characters(zip(data[1::2], data[2::2], strict=True), negated=bool(data[0]))
    return f"/{as_regex(Chars(ranges))}/"


def _text(text: bytes, rule: str) -> str:
    try:
        return "(" + " ".join(f"/{as_regex(Chars(((ord(c), ord(c)),)))}/" for c in text.decode()) + ")"
    except UnicodeDecodeError:
        raise GrammarError(f"a text that is not UTF-8, in the rule {rule!r}, is not supported") from None
