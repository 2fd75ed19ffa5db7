"""The operations that a chat template may use, each with its price.

Python's and Jinja's own functions do the work; here it is checked that what they make is not too large, before they
run. What has no bounded form (or has no use in a chat template) is missing: the template that asks for it is refused.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from jinja2.filters import FILTERS
from jinja2.sandbox import safe_range
from jinja2.tests import TESTS

from .budget import LimitError, current

_MAX_NUMBER_ARG: Final = 10_000
_MAX_BITS: Final = 4096
_MAX_INDENT: Final = 64
# Python looks for a text from the right, and for characters to strip, in quadratic time.
_MAX_NEEDLE: Final = 1000
_MAX_RANGE_BOUND: Final = 1 << 53
_BIG_FIELD: Final = re.compile(r"\d{5}|\*|\{[^{}]*\{")

#: Filters without a bounded form, or whose output is not a function of the input.
_NO_FILTERS: Final = frozenset({"pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr", "lipsum"})
#: Filters whose numbers are values, not sizes.
_FREE_NUMBERS: Final = frozenset(
    {"d", "default", "select", "reject", "selectattr", "rejectattr", "map", "abs"}
)

_STR_QUERIES: Final = (
    "count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable "
    "isspace istitle isupper rfind rindex startswith"
)
_STR_COPIES: Final = (
    "capitalize casefold center expandtabs format format_map join ljust lower lstrip partition removeprefix "
    "removesuffix replace rjust rpartition rsplit rstrip split splitlines strip swapcase title upper zfill"
)
METHODS: Final[dict[type, frozenset[str]]] = {
    str: frozenset(_STR_QUERIES.split() + _STR_COPIES.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}


def allowed_attribute(obj: Any, name: str) -> bool | None:
    """Whether a method of a plain value may be used; None for other objects."""
    for kind, names in METHODS.items():
        if isinstance(obj, kind):
            return name in names
    return None


def call_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a text, having paid for what it makes."""
    budget = current.get()
    text: str = method.__self__
    price = _METHOD_PRICES.get(method.__name__)
    if method.__name__ == "join" and len(args) == 1 and not kwargs:
        return joined(text, args[0])
    if price is not None:
        budget.charge(price(text, *args, **kwargs))
    return budget.charged(method(*args, **kwargs))


def joined(separator: str, items: Iterable[Any]) -> str:
    """`separator.join(items)`."""
    budget = current.get()
    parts = list(items)
    budget.charge(sum(budget.size(part) for part in parts) + len(separator) * len(parts))
    return separator.join(parts)


def concatenated(items: Iterable[Any]) -> str:
    """The operator `~`."""
    budget = current.get()
    return joined("", [budget.text(item) for item in items])


def add(left: Any, right: Any) -> Any:
    """The operator `+`."""
    budget = current.get()
    if type(left) is str and type(right) is str:  # nearly always
        budget.charge(len(left) + len(right))
        return left + right
    if isinstance(left, str | list | tuple):
        budget.check(budget.size(left) + budget.size(right))
        return budget.charged(left + right)
    return left + right


def multiply(left: Any, right: Any) -> Any:
    """The operator `*`."""
    budget = current.get()
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            length = len(sequence) if isinstance(sequence, str) else budget.size(sequence)
            budget.check(length * max(times, 1))
            return budget.charged(left * right)
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > _MAX_BITS
    ):
        raise LimitError("it makes a number too large")
    return left * right


def power(left: Any, right: Any) -> Any:
    """The operator `**`."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
        raise LimitError("it makes a number too large")
    return left**right


def modulo(left: Any, right: Any) -> Any:
    """The operator `%`, on numbers or as printf formatting."""
    if isinstance(left, str):
        _charge_format(left, "%", right)
    return left % right


def formatted(formatter: Any, template: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """`template.format(*args, **kwargs)` by a sandboxed formatter."""
    _charge_format(template, "{", [*args, *kwargs.values()])
    return str(formatter.vformat(template, args, kwargs))


def bounded_range(*args: int) -> range:
    """Jinja's `range`, short and of small numbers."""
    if any(abs(bound) > _MAX_RANGE_BOUND for bound in args):
        raise LimitError("it counts too far")
    return safe_range(*args)


def new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)`."""
    budget = current.get()
    if args and not isinstance(args[0], dict):
        items = list(args[0])
        budget.charged(items)
        args = (items, *args[1:])
    return dict(*args, **kwargs)


def dict_from_keys(keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
    """`dict.fromkeys(...)`."""
    items = list(keys)
    current.get().charged(items)
    return dict.fromkeys(items, value)


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`transformers`' filter: JSON as Python writes it, without HTML escapes."""
    budget = current.get()
    step = len(indent) if isinstance(indent, str) else indent or 0
    if abs(step) > _MAX_INDENT or any(len(str(s)) > _MAX_INDENT for s in separators or ()):
        raise LimitError("it indents too much")
    units = budget.size(x)
    budget.charge(units + (units // 64) * (budget.depth(x) * step + sum(map(len, separators or ()))))
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters, each paying for its result, and without those that cannot be bounded."""
    filters = {name: _priced(name, filter) for name, filter in FILTERS.items() if name not in _NO_FILTERS}
    return filters | {"tojson": _steps(tojson)}


def bounded_tests() -> dict[str, Callable[..., Any]]:
    """Jinja's tests, each a step."""
    return {name: _steps(test) for name, test in TESTS.items()}


def _steps(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        current.get().tick()
        return function(*args, **kwargs)

    return call


def _priced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
    price = _FILTER_PRICES.get(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.tick()
        values = args[skipped:]
        if name not in _FREE_NUMBERS:
            _check_numbers((*values[1:], *kwargs.values()))
        if price is not None:
            values, kwargs = price(values, kwargs)
        return budget.charged(function(*args[:skipped], *values, **kwargs))

    return call


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER_ARG:
            raise LimitError(f"it passes {value} to a filter")


def _charge_format(template: str, sign: str, values: Any) -> None:
    if _BIG_FIELD.search(template):
        raise LimitError("it formats with a computed or very large width")
    budget = current.get()
    for value in values if isinstance(values, list | tuple) else [values]:
        budget.check_printable(value)
    budget.charge(len(template) + template.count(sign) * (budget.size(values) + _MAX_NUMBER_ARG // 8))


def _replace_price(text: str, old: str = "", new: str = "", count: int = -1) -> int:
    del count
    return current.get().size(text) + text.count(old) * len(new)


def _pieces_price(text: str, sep: str | None = None, *_: Any, **__: Any) -> int:
    if sep:
        pieces = text.count(sep)
    elif text.isascii():
        pieces = sum(text.count(blank) for blank in " \n\t\r\x0b\x0c\x1c\x1d\x1e\x1f")
    else:
        pieces = len(text)
    return current.get().size(text) + 64 * (pieces + 1)


def _lines_price(text: str, *_: Any, **__: Any) -> int:
    return _pieces_price(text)


def _from_right_price(text: str, needle: str = "", *_: Any, **__: Any) -> int:
    _check_needle(needle)
    return current.get().size(text)


def _strip_price(text: str, chars: str | None = None) -> int:
    _check_needle(chars)
    return current.get().size(text)


def _rsplit_price(text: str, sep: str | None = None, *_: Any, **__: Any) -> int:
    _check_needle(sep)
    return _pieces_price(text, sep)


def _check_needle(needle: str | None) -> None:
    if needle is not None and len(needle) > _MAX_NEEDLE:
        raise LimitError(f"it looks for {len(needle)} characters")


def _width_price(text: str, width: int = 0, *_: Any, **__: Any) -> int:
    return current.get().size(text) + abs(int(width))


def _tabs_price(text: str, tabsize: int = 8) -> int:
    return current.get().size(text) + text.count("\t") * abs(int(tabsize))


_METHOD_PRICES: Final[dict[str, Callable[..., int]]] = {
    "replace": _replace_price,
    "split": _pieces_price,
    "rsplit": _rsplit_price,
    "rfind": _from_right_price,
    "rindex": _from_right_price,
    "rpartition": _from_right_price,
    "strip": _strip_price,
    "lstrip": _strip_price,
    "rstrip": _strip_price,
    "splitlines": _lines_price,
    "ljust": _width_price,
    "rjust": _width_price,
    "center": _width_price,
    "zfill": _width_price,
    "expandtabs": _tabs_price,
}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Price = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]


def _bind(function: Callable[..., Any]) -> Price:
    """Turn a function over a filter's arguments by name into one that pays and returns what to pass on."""
    signature = inspect.signature(function)

    def pay(values: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        bound = signature.bind(*values, **kwargs)
        bound.apply_defaults()
        return tuple(function(*bound.args, **bound.kwargs)), {}

    return pay


@_bind
def _pay_replace(s: Any, old: Any, new: Any, count: int | None = None) -> Iterable[Any]:
    text, old, new = (current.get().text(value) for value in (s, old, new))
    current.get().charge(_replace_price(text, old, new))
    return text, old, new, count


@_bind
def _pay_join(value: Any, d: Any = "", attribute: Any = None) -> Iterable[Any]:
    budget = current.get()
    items = list(value)
    separator = budget.text(d)
    if attribute is None:
        items = [budget.text(item) for item in items]
    budget.charge(sum(budget.size(item) for item in items) + len(separator) * len(items))
    return items, separator, attribute


@_bind
def _pay_indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Iterable[Any]:
    step = len(width) if isinstance(width, str) else abs(width)
    text = current.get().text(s)
    current.get().charge(_pieces_price(text) + (len(text.splitlines()) + 1) * step)
    return text, width, first, blank


@_bind
def _pay_list(value: Any) -> Iterable[Any]:
    if isinstance(value, str):
        current.get().charge(64 * len(value))
    return (value,)


@_bind
def _pay_sum(iterable: Any, attribute: Any = None, start: Any = 0) -> Iterable[Any]:
    if not isinstance(start, int | float):
        raise LimitError("it sums what are not numbers")
    return iterable, attribute, start


@_bind
def _pay_batch(value: Any, size: int, fill_with: Any = None) -> Iterable[Any]:
    if isinstance(value, str):
        current.get().charge(128 * len(value))
    current.get().charge(abs(size) * 8)
    return value, size, fill_with


@_bind
def _pay_unique(value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterable[Any]:
    items = list(value)
    current.get().charged(items)
    return items, case_sensitive, attribute


@_bind
def _pay_trim(value: Any, chars: str | None = None) -> Iterable[Any]:
    text = current.get().text(value)
    current.get().charge(_strip_price(text, chars))
    return text, chars


def _pay_text(values: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    text = current.get().text(values[0])
    current.get().charge(len(text) * 4)
    return (text, *values[1:]), kwargs


def _pay_format(values: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    text = current.get().text(values[0])
    _charge_format(text, "%", [*values[1:], *kwargs.values()])
    return (text, *values[1:]), kwargs


_FILTER_PRICES: Final[dict[str, Price]] = {
    "replace": _pay_replace,
    "join": _pay_join,
    "indent": _pay_indent,
    "list": _pay_list,
    "sum": _pay_sum,
    "trim": _pay_trim,
    "unique": _pay_unique,
    "batch": _pay_batch,
    "slice": _pay_batch,
    "format": _pay_format,
    **dict.fromkeys(
        (
            "capitalize",
            "center",
            "e",
            "escape",
            "forceescape",
            "lower",
            "string",
            "title",
            "truncate",
            "upper",
            "wordcount",
        ),
        _pay_text,
    ),
}
