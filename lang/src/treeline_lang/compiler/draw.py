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
_CHARACTERS: Final = 37
"""Characters that fit in a line of a box."""
_TIP: Final = 1000
"""Characters of what a reader sees who points at a line."""
_ENOUGH: Final = 12
"""Lines of one step that are shown."""
_COLOURS: Final = {
    "text": "#57606a",
    "hole": "#0969da",
    "gen": "#1a7f37",
    "role": "#8250df",
    "scope": "#9a6700",
    "flow": "#24292f",
}
_STYLE: Final = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#24292f}"
    ".head{font-weight:600}.small{fill:#57606a;font-size:11px}"
    ".box{fill:#fff;stroke:#d0d7de}.ask{fill:#f0fff4;stroke:#1a7f37}.flow{fill:#f6f8fa;stroke:#57606a}"
    "path{fill:none;stroke:#57606a;stroke-width:1.3}.reads{stroke:#0969da;stroke-dasharray:4 3}"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One in a box: what it is about, which colours it, what it says, and that in full."""

    kind: str
    text: str
    full: str


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


def lines_of(step: Step) -> list[Line]:
    match step:
        case Append(parts):
            return [line for part in parts for line in _part(part)]
        case SetVar(name, value):
            return [_line("flow", f"{name} = {value_text(value)}")]
        case Fork(children, hint, ahead):
            notes = [f"hint: {'+'.join(part.full for one in hint for part in _part(one))}"] if hint else []
            notes += ["not waited for"] if ahead and not hint else []
            return [_line("flow", f"fork {len(children)}"), *(_line("scope", note) for note in notes)]
        case Join(children, appends):
            mode = "appending their texts" if appends else "gathering variables"
            return [_line("flow", f"join {len(children)}, {mode}")]


def _line(kind: str, text: str) -> Line:
    return Line(kind, shorten(text), text)


def _part(part: Expr) -> Iterator[Line]:
    match part:
        case Text(text):
            yield _line("text", _quoted(text))
        case Hole(value):
            source = f"← {{{value_text(value)}}} of stream {value.stream}" if isinstance(value, Variable) else ""
            yield _line("hole", source or f"{{{value_text(value)}}}")
        case Gen(name, sampling):
            limit = f", {sampling.max_tokens} tokens" if sampling.max_tokens is not None else ""
            several = f", {sampling.n} answers" if (sampling.n or 1) > 1 else ""
            held = f", {sampling.dtype.__name__}" if sampling.dtype else ", constrained" if sampling.constrained else ""
            yield _line("gen", f"gen {name or ''}{limit}{several}{held}")
        case Select(name, choices):
            yield _line("gen", f"select {name or ''} of {', '.join(_choice(choice) for choice in choices)}")
        case RoleBegin(role):
            yield _line("role", f"{role}:")
        case RoleEnd(role):
            yield _line("role", f"end of {role}")
        case ScopeBegin(name):
            yield _line("scope", f"{name} = from here …")
        case ScopeEnd(name):
            yield _line("scope", f"… to here = {name}")
        case OrderBegin():
            yield _line("scope", "in any order, from here …")
        case OrderEnd():
            yield _line("scope", "… to here")
        case SeparateReasoning(expr, model_type):
            yield _line("scope", f"reasoning apart ({model_type})")
            for one in flatten(expr):
                yield from _part(one)
        case Image(source):
            yield _line("scope", f"{part.step} {source if isinstance(source, str) else f'of {len(source)} bytes'}")
        case _:
            yield _line("scope", part.step)


def _choice(choice: str | Expr) -> str:
    if isinstance(choice, str):
        return _quoted(choice)
    return "+".join(line.full for part in flatten(choice) for line in _part(part))


# ---- layout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    x: int
    y: int
    height: int
    lines: tuple[Line, ...]

    @property
    def bottom(self) -> int:
        return self.y + self.height


def _lines_shown(step: Step) -> tuple[Line, ...]:
    lines = lines_of(step)
    if len(lines) <= _ENOUGH:
        return tuple(lines)
    rest = lines[_ENOUGH - 1 :]
    return (*lines[: _ENOUGH - 1], Line("text", f"… and {len(rest)} more", "\n".join(one.full for one in rest)))


def _layout(graph: GraphData) -> dict[Place, _Box]:
    needs = graph.needs()
    shown = {place: _lines_shown(graph.streams[place[0]].steps[place[1]]) for place in needs}
    tops: dict[Place, int] = {}
    heights = {place: len(lines) * _LINE + 2 * _PAD for place, lines in shown.items()}
    for place in graph.order():
        below = [
            tops[other] + heights[other] + (_GAP_Y if other[0] == place[0] else 2 * _GAP_Y) for other in needs[place]
        ]
        tops[place] = max(below, default=_HEAD)
    left = {stream: _MARGIN + column * (_WIDTH + _GAP_X) for stream, column in _columns(graph).items()}
    return {place: _Box(left[place[0]], tops[place], heights[place], shown[place]) for place in needs}


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
    returns = f"returns {value_text(graph.returns)}"
    title = f"{graph.name}({', '.join(parameter.name for parameter in graph.parameters)})"
    high = end + _GAP_Y + _LINE + _MARGIN
    across = (wide - 2 * _MARGIN) // 7
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}">',
        f"<title>{_xml(shorten(title, _TIP))}</title><style>{_STYLE}</style>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" style="fill:#57606a;stroke:none"/></marker></defs>',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        f'<text class="head" x="{_MARGIN}" y="{_MARGIN + 8}">{_xml(shorten(title, across))}</text>',
        *(_edge(*edge) for edge in _edges(graph, boxes)),
        *(_heading(place[0], box) for place, box in boxes.items() if not place[1]),
        *(_drawn(box, graph.streams[place[0]].steps[place[1]]) for place, box in boxes.items()),
        f'<text class="small" x="{_MARGIN}" y="{end + _GAP_Y + _LINE}">{_xml(shorten(returns, across))}'
        f"<title>{_xml(returns[:_TIP])}</title></text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _heading(stream: int, box: _Box) -> str:
    return f'<text class="small" x="{box.x + 2}" y="{box.y - 5}">stream {stream}</text>'


def _drawn(box: _Box, step: Step) -> str:
    kind = "box" if isinstance(step, Append) else "flow"
    if any(line.kind == "gen" for line in box.lines):
        kind = "ask"
    parts = [f'<g><rect class="{kind}" x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{box.height}" rx="5"/>']
    if step.where is not None:
        parts.append(f"<title>{_xml(str(step.where))}</title>")
    for index, line in enumerate(box.lines):
        y = box.y + _PAD + index * _LINE
        parts.append(
            f'<rect x="{box.x + 6}" y="{y + 3}" width="3" height="{_LINE - 6}" fill="{_COLOURS[line.kind]}"/>'
            f'<text x="{box.x + 16}" y="{y + 13}">{_xml(line.text)}<title>{_xml(line.full[:_TIP])}</title></text>'
        )
    return "".join([*parts, "</g>"])


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
    middle = _WIDTH // 2
    if kind == "next":
        path = f"M{begin.x + middle} {begin.bottom}V{end.y}"
    elif kind == "fork":
        x, y = end.x + middle, begin.y + begin.height // 2
        path = f"M{begin.x + _WIDTH} {y}C{x} {y} {x} {end.y - 30} {x} {end.y}"
    elif begin.x > end.x:
        x, y = begin.x + middle, end.y + end.height // 2
        if kind == "reads":
            x = begin.x + 30
        path = f"M{x} {begin.bottom}C{x} {y} {x} {y} {end.x + _WIDTH} {y}"
    else:
        y, to = begin.y + begin.height // 2, end.x + 30
        path = f"M{begin.x + _WIDTH} {y}C{to} {y} {to} {y} {to} {end.y}"
    return f'<path class="{kind}" d="{path}" marker-end="url(#end)"/>'


# ---- text -----------------------------------------------------------------------------------------------------------


def outline(graph: GraphData) -> str:
    """All of it in lines, stream by stream; every line but headings says where in the program it is from."""
    parameters = [
        parameter.name if parameter.required else f"{parameter.name}={parameter.default!r}"
        for parameter in graph.parameters
    ]
    parents = graph.parents()
    told = [f"{graph.name}({', '.join(parameters)})"]
    for number, stream in enumerate(graph.streams):
        origin = f"forked from stream {parents[number][0]}" if number in parents else "begins by itself"
        told.append("")
        told.append(f"stream {number}" + ("" if number == ROOT else f", {origin}"))
        for step in stream.steps:
            where = f"{step.where.line:>5}" if step.where else "     "
            for line in lines_of(step):
                told.append(f"{where}  {shorten(line.full, 100)}")
                where = "     "
    told += ["", f"returns {value_text(graph.returns)}"]
    return "\n".join("".join(one if one.isprintable() else "\ufffd" for one in line) for line in told)
