"""Every filter and every test of the inline language, with every argument it has, looks at the clock as it works.

Jinja's own names are enumerated, and the arguments of each: a filter that is new is attacked without a line here. What
is counted are the calls of functions between two looks at the clock, which are the same on each machine.
"""

import inspect
import sys
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2.filters import FILTERS
from jinja2.tests import TESTS
from treeline_wire.template_env import TemplateEnvironment
from treeline_wire.template_inline import (
    MAX_CHARS,
    InlineEnvironment,
    InlineTemplate,
    NotInlineError,
)

ITEMS = 100
MOST_CALLS = 30 * ITEMS
"""A filter may call a few functions for each item before it checks the clock, and not one for each part of a path."""

PASSED_ON = {name for name in InlineEnvironment().filters if name.endswith("!")}
"""The guards, whose names no template can spell."""
FILTER_NAMES = sorted({*FILTERS, *TemplateEnvironment().filters, *InlineEnvironment().filters} - PASSED_ON)
TEST_NAMES = sorted({*TESTS, *InlineEnvironment().tests})
CONSTANT_TESTS = {
    "boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter", "float", "integer",
    "iterable", "mapping", "none", "number", "odd", "sequence", "string", "test", "true", "undefined",
}  # fmt: skip
"""They check a type or one number."""

INPUTS: dict[str, Any] = {
    "numbers": list(range(ITEMS)),
    "lists": [[[0]] for _ in range(ITEMS)],
    "objects": [{"0": {"0": "x"}} for _ in range(ITEMS)],
    "mapping": {str(at): [0] for at in range(ITEMS)},
    "text": "x " * ITEMS,
}
ARGUMENTS: dict[str, Any] = {
    "path": ".".join("0" * 400),
    "short_path": ".".join("0" * 127),
    "paths": ",".join("0" * 400),
    "words": " ".join("x" * ITEMS),
    "number": ITEMS,
    "values": [[0]] * ITEMS,
}


class TooManyCallsError(Exception):
    pass


def compiled(source: str) -> InlineTemplate | None:
    """Return the template; None if a worker must render it, or it does not compile."""
    try:
        return InlineTemplate(source)
    except Exception:
        return None


def calls_without_a_look(template: InlineTemplate, variables: dict[str, Any]) -> int:
    """Return the most function calls of a rendering between two looks at the clock."""
    calls = most = 0

    def count(_frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, most
        if event == "c_call" and argument is time.perf_counter:
            calls = 0
        elif event in ("call", "c_call"):
            calls += 1
            most = max(most, calls)
            if calls > 2 * MOST_CALLS:
                raise TooManyCallsError

    sys.setprofile(count)
    try:
        template.render(variables, seconds=60)
    except Exception:  # stopped, or wrong arguments
        pass
    finally:
        sys.setprofile(None)
    return most


def uses(name: str, leading: str = "") -> Iterator[str]:
    """Return a filter's calls, each with the hostile `argument` in another place."""
    function = TemplateEnvironment().filters.get(name) or FILTERS[name]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # one written in C, without any
        parameters = []
    parameters = parameters[2 if hasattr(function, "jinja_pass_arg") else 1 :]
    head = [leading] if leading else []
    open_ended = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    yield f"{name}({', '.join(head)})" if not leading else f"map({leading})"
    outer = "map" if leading else name
    for at, parameter in enumerate(names):
        before = ["0"] * at
        yield f"{outer}({', '.join([*head, *before, 'argument'])})"
        yield f"{outer}({', '.join([*head, f'{parameter}=argument'])})"
        yield f"{outer}({', '.join([*head, *(f'{other}=argument' for other in names)])})"
    if open_ended:
        yield f"{outer}({', '.join([*head, 'argument'])})"
        yield f"{outer}({', '.join([*head, 'attribute=argument'])})"
        yield f"{outer}({', '.join([*head, 'attribute=argument', 'default=argument'])})"
        for test in TEST_NAMES if not leading else ():
            yield f"{outer}({', '.join([*head, 'argument', repr(test), 'argument'])})"
            yield f"{outer}({', '.join([*head, repr(test), 'argument'])})"


DOUBLES = ("reject", "rejectattr", "selectattr")
"""They do what `select` does."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep) if name in DOUBLES else name for name in FILTER_NAMES]
)
@pytest.mark.parametrize("mapped", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_no_filter_works_long_without_checking_the_clock(name: str, mapped: bool) -> None:
    if mapped and name not in InlineEnvironment().filters:
        return
    for use in uses(name, repr(name)) if mapped else uses(name):
        template = compiled(f"{{% if items|{use}|list %}}{{% endif %}}")
        if template is None:
            continue
        for of, items in INPUTS.items():
            for what, argument in ARGUMENTS.items():
                calls = calls_without_a_look(template, {"items": items, "argument": argument})
                assert calls <= MOST_CALLS, f"{use} on {of}, its argument {what}"


@pytest.mark.parametrize("step", ["map(attribute='0')", "select", "reject('none')", "rejectattr('x')", "map('abs')"])
def test_every_chain_of_filters_checks_the_clock(step: str) -> None:
    template = InlineTemplate("{% if items|" + "|".join([step] * 60) + "|list %}{% endif %}")
    assert calls_without_a_look(template, {"items": list(range(1, ITEMS))}) <= MOST_CALLS


def test_reading_members_takes_time() -> None:
    template = InlineTemplate("{% if " + " or ".join(["items[0].a"] * 90) + " %}{% endif %}")
    assert calls_without_a_look(template, {"items": [{"a": 0}]}) < 90


def test_a_long_path_is_refused_before_its_first_part() -> None:
    for use in ("map(attribute=a)", "selectattr(a)", "rejectattr(a)", "sort(attribute=a)", "join(attribute=a)"):
        with pytest.raises(NotInlineError, match="an argument is too long"):
            InlineTemplate(f"{{{{ items|{use}|list }}}}").render({"items": [], "a": ARGUMENTS["path"]})


@pytest.mark.parametrize("name", sorted({*TEST_NAMES} - CONSTANT_TESTS))
def test_every_test_that_reads_its_value_checks_the_clock(name: str) -> None:
    arguments = "" if name in ("lower", "upper") else ", text"
    template = InlineTemplate(f"{{% for found in text|select('{name}'{arguments}) %}}{{% endfor %}}")
    looks = 0

    def count(_frame: Any, event: str, argument: Any) -> None:
        nonlocal looks
        looks += event == "c_call" and argument is time.perf_counter

    sys.setprofile(count)
    try:
        template.render({"text": "xX" * 25}, seconds=60)
    finally:
        sys.setprofile(None)
    assert looks >= 50


@pytest.mark.parametrize("name", sorted({*InlineEnvironment().filters} - PASSED_ON))
def test_values_built_item_by_item_are_measured_while_built(name: str) -> None:
    """Each item may be as large as a value may be; all of them together are checked, too, before a filter collects
    them."""
    made = "items|map('replace', 'x', '" + "y" * 250 + "')"
    items = ["x" * 900] * 200
    try:
        template = InlineTemplate(f"{{% if {made}|{name} %}}{{% endif %}}")
    except Exception:
        return
    tracemalloc.start()
    try:
        template.render({"items": items}, seconds=60)
    except Exception:  # too large, or wrong arguments
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * MAX_CHARS
