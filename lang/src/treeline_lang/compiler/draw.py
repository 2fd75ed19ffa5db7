"""Graphs as pictures (SVG), and as a text in lines.

Streams are columns, a step is a box as low as what it needs lets it be; lines lead from forks to branches, from
branches to joins, and (dashed) from what generates a variable to what reads it elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from treeline_lang.compiler.nodes import (
    ROOT,
    Append,
    Const,
    Entries,
    Fork,
    GraphData,
    Hole,
    Items,
    Join,
    Joined,
    Place,
    SetVar,
    State,
    Step,
    Value,
    Variable,
    reads,
)
from treeline_lang.expressions import (
    Expr,
    Gen,
    Image,
    OrderBegin,
    OrderEnd,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    Text,
    flatten,
)

_WIDTH: Final = 300
_GAP_X: Final = 60
_GAP_Y: Final = 16
_LINE: Final = 18
_PAD: Final = 6
_MARGIN: Final = 24
_HEAD: Final = 64
_CHARACTERS: Final = 39
"""Characters that fit in a line of a box."""
_ENOUGH: Final = 12
"""Lines of one step that are shown."""
_STYLE: Final = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#24292f}"
    ".head{font-weight:600}.small{fill:#57606a;font-size:11px}"
    ".box{fill:#fff;stroke:#d0d7de}.ask{fill:#f0fff4;stroke:#1a7f37}.flow{fill:#f6f8fa;stroke:#57606a}"
    "path{fill:none;stroke:#57606a;stroke-width:1.3}.reads{stroke:#0969da;stroke-dasharray:4 3}"
)


def shorten(text: str, most: int = _CHARACTERS) -> str:
    """The beginning and the end, where it is too long."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\n", "⏎") + '"'


def value_text(value: Value | str) -> str:
    """As the program could have written it."""
    match value:
        case str():
            return _quoted(value)
        case Joined(parts):
            return " + ".join(map(value_text, parts))
        case Const(constant):
            return repr(constant)
        case Items(items, mutable):
            inner = ", ".join(map(value_text, items))
            return f"[{inner}]" if mutable else f"({inner})"
        case Entries(entries):
            return "{" + ", ".join(f"{value_text(key)}: {value_text(entry)}" for key, entry in entries) + "}"
        case State(stream):
            return f"state {stream}"
        case _:
            return value.name + "".join(f"[{key!r}]" for key in value.path)


def lines_of(step: Step) -> list[str]:
    match step:
        case Append(parts):
            return [line for part in parts for line in _part(part)]
        case SetVar(name, value):
            return [f"{name} = {value_text(value)}"]
        case Fork(children):
            return [f"fork {len(children)}"]
        case Join(children, appends):
            return [f"join {len(children)}, {'appending their texts' if appends else 'gathering variables'}"]


def _part(part: Expr) -> Iterator[str]:
    match part:
        case Text(text):
            yield _quoted(text)
        case Hole(Variable() as value):
            yield f"← {{{value_text(value)}}} of stream {value.stream}"
        case Hole(value):
            yield f"{{{value_text(value)}}}"
        case Gen(name, sampling):
            limit = f", {sampling.max_tokens} tokens" if sampling.max_tokens is not None else ""
            several = f", {sampling.n} answers" if (sampling.n or 1) > 1 else ""
            held = f", {sampling.dtype.__name__}" if sampling.dtype else ", constrained" if sampling.constrained else ""
            yield f"gen {name or ''}{limit}{several}{held}"
        case Select(name, choices):
            yield f"select {name or ''} of {', '.join(_choice(choice) for choice in choices)}"
        case RoleBegin(role):
            yield f"{role}:"
        case RoleEnd(role):
            yield f"end of {role}"
        case ScopeBegin(name):
            yield f"{name} = from here …"
        case ScopeEnd(name):
            yield f"… to here = {name}"
        case OrderBegin():
            yield "in any order, from here …"
        case OrderEnd():
            yield "… to here"
        case SeparateReasoning(expr, model_type):
            yield f"reasoning apart ({model_type})"
            for one in flatten(expr):
                yield from _part(one)
        case Image(source):
            yield f"image {source if isinstance(source, str) else f'of {len(source)} bytes'}"
        case _:
            yield part.step


def _choice(choice: str | Expr) -> str:
    if isinstance(choice, str):
        return _quoted(choice)
    return "+".join(line for part in flatten(choice) for line in _part(part))


# ---- layout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    x: int
    y: int
    lines: tuple[str, ...]

    @property
    def height(self) -> int:
        return len(self.lines) * _LINE + 2 * _PAD

    @property
    def bottom(self) -> int:
        return self.y + self.height


def _lines_shown(step: Step) -> tuple[str, ...]:
    lines = lines_of(step)
    if len(lines) > _ENOUGH:
        lines[_ENOUGH - 1 :] = [f"… and {len(lines) - _ENOUGH + 1} more"]
    return tuple(map(shorten, lines))


def _layout(graph: GraphData) -> dict[Place, _Box]:
    needs, columns = graph.needs(), _columns(graph)
    boxes: dict[Place, _Box] = {}
    for place in graph.order():
        number, index = place
        above = [boxes[other].bottom + (1 if other[0] == number else 2) * _GAP_Y for other in needs[place]]
        left = _MARGIN + columns[number] * (_WIDTH + _GAP_X)
        boxes[place] = _Box(left, max(above, default=_HEAD), _lines_shown(graph.streams[number].steps[index]))
    return boxes


def _columns(graph: GraphData) -> dict[int, int]:
    """A column for each stream: right of its parent's, its own branches before its siblings. A program that was called
    is drawn as the root's."""
    forks = graph.parents()
    children: dict[int, list[int]] = {}
    for number in range(1, len(graph.streams)):
        children.setdefault(forks[number][0] if number in forks else ROOT, []).append(number)
    columns: dict[int, int] = {}
    waiting = [ROOT]
    while waiting:
        number = waiting.pop()
        columns[number] = len(columns)
        waiting += reversed(children.get(number, ()))
    return columns


# ---- SVG ------------------------------------------------------------------------------------------------------------


def _xml(text: str) -> str:
    """Escaped, without the characters that XML cannot hold."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text), {'"': "&quot;"})


def picture(graph: GraphData) -> str:
    """Raises ValueError for a graph that cannot be executed."""
    boxes = _layout(graph)
    end = max((box.bottom for box in boxes.values()), default=_HEAD)
    wide = max((box.x for box in boxes.values()), default=_MARGIN) + _WIDTH + _MARGIN
    high = end + _GAP_Y + _LINE + _MARGIN
    title = f"{graph.name}({', '.join(parameter.name for parameter in graph.parameters)})"
    across = (wide - 2 * _MARGIN) // 7
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" style="fill:#57606a;stroke:none"/></marker></defs>',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        _text("head", _MARGIN, _MARGIN + 8, shorten(title, across)),
        *(_edge(*edge) for edge in _edges(graph, boxes)),
        *(
            _text("small", box.x + 2, box.y - 5, f"stream {number}")
            for (number, index), box in boxes.items()
            if index == 0
        ),
        *(_drawn(box, graph.streams[number].steps[index]) for (number, index), box in boxes.items()),
        _text("small", _MARGIN, end + _GAP_Y + _LINE, shorten(f"returns {value_text(graph.returns)}", across)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(kind: str, x: int, y: int, text: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{_xml(text)}</text>'


def _drawn(box: _Box, step: Step) -> str:
    parts = step.parts if isinstance(step, Append) else ()
    asks = any(isinstance(part, Gen | Select | SeparateReasoning) for part in parts)
    kind = "ask" if asks else "box" if isinstance(step, Append) else "flow"
    where = f"<title>{_xml(str(step.where))}</title>" if step.where else ""
    rect = f'<rect class="{kind}" x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{box.height}" rx="5"/>'
    lines = [_text("line", box.x + 10, box.y + _PAD + n * _LINE + 13, line) for n, line in enumerate(box.lines)]
    return f"<g>{where}{rect}{''.join(lines)}</g>"


def _edges(graph: GraphData, boxes: dict[Place, _Box]) -> Iterator[tuple[_Box, _Box, str]]:
    """(from, to, what it is)."""
    parents, places = graph.parents(), graph.definitions()
    for (number, index), box in boxes.items():
        step = graph.streams[number].steps[index]
        if index:
            yield boxes[number, index - 1], box, "next"
        elif number in parents:
            yield boxes[parents[number]], box, "fork"
        for child in step.children if isinstance(step, Join) else ():
            if graph.streams[child].steps:
                yield boxes[child, len(graph.streams[child].steps) - 1], box, "join"
        sources = dict.fromkeys(source for source in reads(step) if isinstance(source, Variable))
        for source in sources:
            place = places[Variable(source.stream, source.name, source.nth)]
            if place[0] != number:
                yield boxes[place], box, "reads"


def _edge(begin: _Box, end: _Box, kind: str) -> str:
    """From the bottom of one to the top of the other, which is below it."""
    x, to = begin.x + _WIDTH // 2, end.x + _WIDTH // 2
    path = f"M{x} {begin.bottom}C{x} {begin.bottom + 30} {to} {end.y - 30} {to} {end.y}"
    return f'<path class="{kind}" d="{path}" marker-end="url(#end)"/>'


# ---- text -----------------------------------------------------------------------------------------------------------


def outline(graph: GraphData) -> str:
    """All of it in lines, stream by stream; every line but headings says where in the program it is from."""
    parameters = [
        parameter.name if parameter.required else f"{parameter.name}={parameter.default!r}"
        for parameter in graph.parameters
    ]
    parents = graph.parents()
    shown = [f"{graph.name}({', '.join(parameters)})"]
    for number, stream in enumerate(graph.streams):
        origin = f"forked from stream {parents[number][0]}" if number in parents else "begins by itself"
        shown.append("")
        shown.append(f"stream {number}" + ("" if number == ROOT else f", {origin}"))
        for step in stream.steps:
            where = f"{step.where.line:>5}" if step.where else "     "
            for line in lines_of(step):
                shown.append(f"{where}  {shorten(line, 100)}")
                where = "     "
    shown += ["", f"returns {value_text(graph.returns)}"]
    return "\n".join("".join(one if one.isprintable() else "\ufffd" for one in line) for line in shown)
