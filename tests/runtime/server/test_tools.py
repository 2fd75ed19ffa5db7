"""The tools that a chat may or must call, read from `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.tools import MAX_TOOLS, Calls, Tool, read_calls

WEATHER_OF = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: Any, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("weather", parameters=WEATHER_OF, strict=True), tool("now", description="The time.", parameters=None)]
WEATHER, NOW = Tool("weather", WEATHER_OF, strict=True), Tool("now")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": None, "tool_choice": "none", "parallel_tool_calls": False}, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": TOOLS}, Calls([WEATHER, NOW])),
        ({"tools": TOOLS, "tool_choice": None}, Calls([WEATHER, NOW])),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, Calls([WEATHER, NOW], several=False)),
        ({"tools": TOOLS, "tool_choice": "required"}, Calls([WEATHER, NOW], required=True)),
        ({"tools": TOOLS, "tool_choice": named("now")}, Calls([NOW], required=True, narrowed=True)),
        ({"tools": TOOLS[:1], "tool_choice": named("weather")}, Calls([WEATHER], required=True)),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "now")}, Calls([NOW], narrowed=True)),
        ({"tools": TOOLS, "tool_choice": allowed("required", "now", "weather")}, Calls([NOW, WEATHER], required=True)),
        ({"tools": [{"function": {"name": "a.b:c/d-e_1", "more": 1}}]}, Calls([Tool("a.b:c/d-e_1")])),
    ],
    ids=str,
)
def test_the_callable_tools_are_read(body: dict[str, Any], expected: Calls | None) -> None:
    assert read_calls(body) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool("f")] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(None)]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f\n")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("f", description=5)]}, "tools[0].function.description"),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f"), "tools": []}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": ["auto"]}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "function": {"name": "now"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": "now"}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": named("later")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed("any", "now")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "later")}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_errors_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_calls(body)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["auto", "required", "none", "function", "f", "g"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "parameters", "allowed_tools", "mode", "tools"]), inner
        )
    ),
    max_leaves=15,
)


@given(st.fixed_dictionaries({}, optional={"tools": values, "tool_choice": values, "parallel_tool_calls": values}))
def test_any_value_is_read_or_a_400(body: dict[str, Any]) -> None:
    found, refusal = None, None
    try:
        found = read_calls(body)
    except ApiError as error:
        refusal = error
    assert found is None or found.tools
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.body["error"]["param"].startswith(("tool", "parallel_tool_calls"))
