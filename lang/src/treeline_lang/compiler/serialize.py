"""Programs in files: a graph as JSON, read again by another process that has nothing of the program's code.

A file is data, and is believed in nothing. Reading it evaluates nothing and opens no other file; every field has a type
and a bound, and whatever is not as it should be raises ProgramFileError with its place in the file.

Two things that a program may do, one in a file may not: show pictures of the machine that runs it (those of the machine
that writes the file are in it); and have `stop_regex`, which is matched in this process, for as long as it likes.
"""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple, Never

from treeline_lang import images
from treeline_lang.choices import CHOICES_METHODS, ChoicesMethod
from treeline_lang.compiler import growth
from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.nodes import (
    Append,
    Argument,
    Const,
    Entries,
    Fork,
    Hole,
    Items,
    Join,
    Joined,
    Parameter,
    SetVar,
    State,
    Stream,
    Variable,
)
from treeline_lang.errors import ProgramFileError
from treeline_lang.expressions import (
    ROLES,
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
    Sum,
    Text,
    flatten,
)
from treeline_lang.reasoning import MARKS
from treeline_lang.sampling import Sampling, check_sampling
from treeline_lang.where import Where

VERSION: Final = 1
MARK: Final = "treeline_program"
MAX_BYTES: Final = 16 << 20
MAX_STREAMS: Final = 1024
MAX_STEPS: Final = 16_384
MAX_ITEMS: Final = 4096
"""The longest list in a file."""
MAX_NAME: Final = 256
MAX_DEPTH: Final = 32


class _Codec(NamedTuple):
    """How one kind of value is written and read. `load` gets its place in the file, for errors."""

    dump: Callable[[Any], Any]
    load: Callable[[Any, str], Any]
    kind: type = object
    """The class of what is read."""


def _wrong(at: str, what: str) -> Never:
    raise ProgramFileError(f"{at}: {what}")


def _same(value: Any) -> Any:
    return value


def _checked(fits: Callable[[Any], bool], what: str) -> _Codec:
    def load(value: Any, at: str) -> Any:
        return value if fits(value) else _wrong(at, f"not {what}: {str(value)[:80]!r}")

    return _Codec(_same, load)


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 53) < value < 1 << 53


_TEXT = _checked(lambda value: isinstance(value, str), "a text")
_NAME = _checked(lambda value: isinstance(value, str) and 0 < len(value) <= MAX_NAME, "a name")
_INTEGER = _checked(_is_integer, "an integer")
_NUMBER = _checked(lambda value: _is_integer(value) and value >= 0, "a number of something")
_FLAG = _checked(lambda value: isinstance(value, bool), "true or false")
_ROLE = _checked(lambda value: value in ROLES, f"one of {', '.join(ROLES)}")
_MODEL_TYPE = _checked(lambda value: isinstance(value, str) and value in MARKS, f"one of {', '.join(MARKS)}")
_KEY = _checked(lambda value: _is_integer(value) or (isinstance(value, str) and len(value) <= MAX_NAME), "a key")


def _optional(codec: _Codec) -> _Codec:
    return _Codec(
        lambda value: None if value is None else codec.dump(value),
        lambda value, at: None if value is None else codec.load(value, at),
    )


def _several(codec: _Codec, most: int = MAX_ITEMS) -> _Codec:
    def load(value: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > most:
            _wrong(at, f"not a list of at most {most}")
        return tuple(codec.load(item, f"{at}[{index}]") for index, item in enumerate(value))

    return _Codec(lambda values: [codec.dump(value) for value in values], load)


def _pair(one: _Codec, other: _Codec) -> _Codec:
    def load(value: Any, at: str) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            _wrong(at, "not a pair")
        return one.load(value[0], f"{at}[0]"), other.load(value[1], f"{at}[1]")

    return _Codec(lambda pair: [one.dump(pair[0]), other.dump(pair[1])], load)


def _record(kind: type, **special: _Codec) -> _Codec:
    """The codec of a dataclass: a field's is the special one, else that of its name in `_FIELDS`; a field that has none
    is in no file. Those that are left out of a file have their defaults."""
    codecs = {one.name: found for one in fields(kind) if (found := special.get(one.name) or _FIELDS.get(one.name))}

    def load(value: Any, at: str) -> Any:
        if not isinstance(value, dict):
            _wrong(at, "not an object")
        unknown = sorted(value.keys() - codecs.keys())
        if unknown:
            _wrong(at, f"has no field {unknown[0][:80]!r}")
        given = {"where": None} if "where" in codecs else {}
        given |= {name: codecs[name].load(one, f"{at}.{name}") for name, one in value.items()}
        try:
            return kind(**given)
        except TypeError as error:
            return _wrong(at, str(error).partition(" ")[2])

    return _Codec(lambda node: {name: codec.dump(getattr(node, name)) for name, codec in codecs.items()}, load, kind)


def _union(name: str, **records: _Codec) -> _Codec:
    """The codec of several classes; the field `is` says which."""
    tags = {record.kind: tag for tag, record in records.items()}

    def dump(node: Any) -> dict[str, Any]:
        if type(node) not in tags:
            raise ProgramFileError(f"a {type(node).__name__} cannot be in a file")
        tag = tags[type(node)]
        return {"is": tag, **records[tag].dump(node)}

    def load(value: Any, at: str) -> Any:
        if at.count(".") > MAX_DEPTH:
            _wrong(at, "too deep")
        tag = value.get("is") if isinstance(value, dict) else None
        if not isinstance(tag, str) or tag not in records:
            _wrong(at, f"not a {name}: one of {', '.join(records)}")
        return records[tag].load({key: one for key, one in value.items() if key != "is"}, at)

    return _Codec(dump, load)


# ---- lines, sampling, pictures --------------------------------------------------------------------------------------


def _dump_where(where: Where) -> list[Any]:
    return [Path(where.file).name, where.line, where.function]


def _load_where(value: Any, at: str) -> Where:
    if not isinstance(value, list) or len(value) != 3:
        _wrong(at, "not [file, line, function]")
    return Where(_NAME.load(value[0], at), _NUMBER.load(value[1], at), _NAME.load(value[2], at))


_WHERE = _optional(_Codec(_dump_where, _load_where))
_PLAIN_SAMPLING = Sampling()


def _dump_sampling(sampling: Sampling) -> dict[str, Any]:
    if sampling.stop_regex:
        raise ProgramFileError("stop_regex cannot be in a file: it is matched in the process that reads it")
    said = {
        field.name: getattr(sampling, field.name)
        for field in fields(Sampling)
        if getattr(sampling, field.name) != getattr(_PLAIN_SAMPLING, field.name)
    }
    if sampling.dtype is not None:
        said["dtype"] = sampling.dtype.__name__
        del said["regex"]  # it follows
    return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


def _load_sampling(value: Any, at: str) -> Sampling:
    if not isinstance(value, dict):
        _wrong(at, "not an object")
    if value.get("stop_regex"):
        _wrong(at, "stop_regex cannot be in a file: it is matched in the process that reads it")
    for one in value.values():
        if isinstance(one, list) and len(one) > MAX_ITEMS:
            _wrong(at, f"a list of more than {MAX_ITEMS}")
    try:
        return check_sampling(**value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return _wrong(at, str(error)[:500])


_SAMPLING = _Codec(_dump_sampling, _load_sampling)


def _dump_picture(source: str | bytes) -> str:
    try:
        return images.url_of(source)
    except (OSError, ValueError) as error:
        raise ProgramFileError(f"no image: {error}") from error


_PICTURE = _Codec(
    _dump_picture, _checked(lambda value: isinstance(value, str) and images.is_url(value), "the URL of an image").load
)


# ---- values, parts, steps -------------------------------------------------------------------------------------------


def _is_constant(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)  # JSON has no others
    return value is None or type(value) in (bool, str) or _is_integer(value)


def _dump_constant(value: Any) -> Any:
    if not _is_constant(value):
        raise ProgramFileError(f"{value!r} cannot be in a file: texts, numbers, true, false and null are")
    return value


_CONSTANT = _Codec(_dump_constant, _checked(_is_constant, "a constant").load)
_FIELDS: Final[dict[str, _Codec]] = {
    "appends": _FLAG,
    "children": _several(_NUMBER, MAX_STREAMS),
    "model_type": _MODEL_TYPE,
    "mutable": _FLAG,
    "name": _NAME,
    "nth": _NUMBER,
    "path": _several(_KEY, 16),
    "required": _FLAG,
    "role": _ROLE,
    "sampling": _SAMPLING,
    "stream": _NUMBER,
    "where": _WHERE,
}
"""How a field is written, by its name, where a class says nothing else."""
_ARGUMENT, _VARIABLE = _record(Argument), _record(Variable)
_SOURCE = _union("source", argument=_ARGUMENT, variable=_VARIABLE)
_TEXT_OR_SOURCE = _Codec(
    lambda part: part if isinstance(part, str) else _SOURCE.dump(part),
    lambda part, at: part if isinstance(part, str) else _SOURCE.load(part, at),
)
_INNER = _Codec(lambda value: _VALUE.dump(value), lambda value, at: _VALUE.load(value, at))
_VALUE: Final[_Codec] = _union(
    "value",
    argument=_ARGUMENT,
    variable=_VARIABLE,
    joined=_record(Joined, parts=_several(_TEXT_OR_SOURCE)),
    const=_record(Const, value=_CONSTANT),
    items=_record(Items, items=_several(_INNER)),
    entries=_record(Entries, entries=_several(_pair(_INNER, _INNER))),
    state=_record(State),
)
_HOLE = _record(Hole, value=_SOURCE, text=_FLAG)
_TEXT_PART = _record(Text, text=_TEXT)
_LITERAL = _union("text", text=_TEXT_PART, hole=_HOLE)


def _sum_of(part: _Codec) -> _Codec:
    """An expression, by its parts."""
    parts = _several(part)
    return _Codec(lambda expr: parts.dump(flatten(expr)), lambda value, at: Sum(parts.load(value, at)))


_CHOICE_PARTS = _sum_of(_LITERAL)


def _load_choice(choice: Any, at: str) -> str | Expr:
    if choice == "":
        _wrong(at, "a choice is empty")
    return choice if isinstance(choice, str) else _CHOICE_PARTS.load(choice, at)


_CHOICE = _Codec(lambda choice: choice if isinstance(choice, str) else _CHOICE_PARTS.dump(choice), _load_choice)


def _dump_method(method: ChoicesMethod) -> str:
    if CHOICES_METHODS.get(method.name) is not method:
        raise ProgramFileError(f"the choices method {method.name} is the program's own, which no file holds")
    return method.name


_METHOD = _Codec(
    _dump_method,
    lambda name, at: (
        CHOICES_METHODS[name]
        if isinstance(name, str) and name in CHOICES_METHODS
        else _wrong(at, f"not one of {', '.join(CHOICES_METHODS)}")
    ),
)
_GEN = _record(Gen, name=_optional(_NAME))
_CHOICES = _Codec(
    _several(_CHOICE).dump, lambda value, at: _several(_CHOICE).load(value, at) or _wrong(at, "there is no choice")
)
_THOUGHTS = _sum_of(_union("text or gen", text=_TEXT_PART, hole=_HOLE, gen=_GEN))
_PART = _union(
    "part",
    text=_TEXT_PART,
    hole=_HOLE,
    gen=_GEN,
    select=_record(Select, name=_optional(_NAME), choices=_CHOICES, method=_METHOD),
    role_begin=_record(RoleBegin),
    role_end=_record(RoleEnd),
    scope_begin=_record(ScopeBegin),
    scope_end=_record(ScopeEnd),
    order_begin=_record(OrderBegin),
    order_end=_record(OrderEnd),
    image=_record(Image, source=_PICTURE),
    reasoning=_record(SeparateReasoning, expr=_THOUGHTS),
)
_STEP = _union(
    "step",
    append=_record(Append, parts=_several(_PART)),
    set_var=_record(SetVar, value=_VALUE),
    fork=_record(Fork),
    join=_record(Join),
)


def _plain(value: Any, depth: int = 0) -> bool:
    match value:
        case list():
            return depth < MAX_DEPTH and all(_plain(item, depth + 1) for item in value)
        case dict():
            return depth < MAX_DEPTH and all(isinstance(key, str) and _plain(value[key], depth + 1) for key in value)
        case _:
            return _is_constant(value)


def _dump_default(value: Any) -> Any:
    plain = list(value) if isinstance(value, tuple) else value
    return plain if _plain(plain) else _wrong("a default", f"{value!r} cannot be in a file")


_DEFAULT = _Codec(_dump_default, _checked(_plain, "plain data").load)
_PARAMETER = _record(Parameter, default=_DEFAULT)
_STREAM = _record(Stream, steps=_several(_STEP, MAX_STEPS))
_GRAPH = _record(
    Graph,
    parameters=_several(_PARAMETER, 256),
    streams=_several(_STREAM, MAX_STREAMS),
    returns=_VALUE,
    num_api_spec_tokens=_optional(_INTEGER),
)


# ---- files ----------------------------------------------------------------------------------------------------------


def dumps(graph: Graph) -> str:
    """The graph as JSON. Raises ProgramFileError for what cannot be in a file, with the reason."""
    return json.dumps({MARK: VERSION, **_GRAPH.dump(graph)}, indent=1, allow_nan=False) + "\n"


def loads(text: str | bytes) -> Graph:
    """Raises ProgramFileError."""
    if len(text) > MAX_BYTES:
        raise ProgramFileError(f"the file is larger than {MAX_BYTES >> 20} MiB")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramFileError(f"this is not JSON: {error}") from None
    version = data.pop(MARK, None) if isinstance(data, dict) else None
    if type(version) is not int or version != VERSION:
        raise ProgramFileError(
            "this is no program"
            if type(version) is not int
            else f"this is a program of version {version!r}, not {VERSION}"
        )
    graph: Graph = _GRAPH.load(data, "program")
    _check(graph)
    return graph


def _check(graph: Graph) -> None:
    names = [parameter.name for parameter in graph.parameters]
    if len(set(names)) < len(names) or "s" in names or not all(map(_is_identifier, names)):
        raise ProgramFileError("program.parameters: names of parameters are identifiers, each once, and not s")
    if not graph.streams:
        raise ProgramFileError("program.streams: there is none")
    if sum(len(stream.steps) for stream in graph.streams) > MAX_STEPS:
        raise ProgramFileError(f"program.streams: more than {MAX_STEPS} steps")
    if graph.num_api_spec_tokens is not None and graph.num_api_spec_tokens < 1:
        raise ProgramFileError("program.num_api_spec_tokens is at least 1")
    try:
        graph.check()
        growth.check(graph)
    except ValueError as error:
        raise ProgramFileError(f"program.streams: {error}") from None


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
