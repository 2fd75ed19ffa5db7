"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat → which tools its answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from treeline_runtime.server.errors import invalid, short

MAX_TOOLS: Final = 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""The union of OpenAI's names, Anthropic's length, and characters of tool namespaces."""

_TOOL: Final = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON Schema of the arguments."},
                "strict": {"type": ["boolean", "null"], "description": "The arguments hold the schema."},
            },
        },
    },
}
Tools = Annotated[
    Any,
    Meta(
        description="Functions that the model may call.",
        extra_json_schema={"type": ["array", "null"], "items": _TOOL, "maxItems": MAX_TOOLS},
    ),
]
ToolChoice = Annotated[
    Any,
    Meta(
        description="Default `auto`. An object names the function to call, or is `allowed_tools`.",
        extra_json_schema={"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]},
    ),
]
SeveralCalls = Annotated[
    Any,
    Meta(
        description="Allow several calls (default true).",
        extra_json_schema={"type": ["boolean", "null"]},
    ),
]


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] = {}
    """The JSON Schema of its arguments; {} if the client gave none."""
    strict: bool = False
    """The call's arguments must match the schema."""


class Calls(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tools that an answer may or must call."""

    tools: list[Tool]
    required: bool = False
    """The answer has at least one call, and no text."""
    several: bool = True
    """Several calls are allowed."""
    narrowed: bool = False
    """The model sees tools that it may not call."""

    @property
    def constrained(self) -> bool:
        """Whether a grammar must enforce this."""
        return self.required or self.narrowed or any(tool.strict for tool in self.tools)


def read_calls(body: Mapping[str, Any]) -> Calls | None:
    """Reads the body's `tools` and `tool_choice`; None if no calls are allowed. Raises ApiError 400."""
    tools = _tools(body.get("tools"))
    several = _flag(body, "parallel_tool_calls", True)
    choice = body.get("tool_choice")
    if choice is None:
        choice = "auto"
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        raise invalid("tool_choice", "expected 'none', 'auto', 'required', or an object that names a function")
    if not tools:
        raise invalid("tool_choice", "there are no 'tools' to choose from")
    if not isinstance(choice, dict):
        return Calls(tools, choice == "required", several)
    if choice.get("type") == "allowed_tools":
        required, names = _allowed(choice)
    else:
        required, names = True, [_named(choice, "tool_choice")]
    known = {tool.name: tool for tool in tools}
    for name in names:
        if name not in known:
            raise invalid("tool_choice", f"there is no tool {short(name)!r}")
    chosen = [known[name] for name in dict.fromkeys(names)]
    return Calls(chosen, required, several, narrowed=len(chosen) < len(tools))


def _tools(value: Any) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("tools", "expected a list of objects")
    if len(value) > MAX_TOOLS:
        raise invalid("tools", f"more than {MAX_TOOLS} tools")
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(value)]
    seen = set[str]()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise invalid(f"tools[{index}].function.name", f"there are two tools {tool.name!r}")
        seen.add(tool.name)
    return tools


def _tool(value: Any, where: str) -> Tool:
    """Other members go to the chat template."""
    if not isinstance(value, dict):
        raise invalid(where, "expected an object")
    if value.get("type", "function") != "function":
        raise invalid(f"{where}.type", "only functions are supported")
    function = value.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", "expected an object")
    where += ".function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.name", "expected 1 to 128 letters, digits or any of _ - . : /")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{where}.parameters", "expected a JSON Schema, which is an object")
    if parameters and parameters.get("type", "object") != "object":
        raise invalid(f"{where}.parameters.type", "arguments are an object")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise invalid(f"{where}.description", "expected a text")
    return Tool(name, parameters or {}, _flag(function, "strict", False, f"{where}."))


def _allowed(choice: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """OpenAI's `allowed_tools`: whether one must be called, and their names."""
    where = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise invalid(where, "expected an object")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"{where}.mode", "expected 'auto' or 'required'")
    if not isinstance(tools, list) or not tools:
        raise invalid(f"{where}.tools", "expected a list of tools that is not empty")
    return mode == "required", [_named(tool, f"{where}.tools[{index}]") for index, tool in enumerate(tools)]


def _named(value: Any, where: str) -> str:
    """The name in `{"type": "function", "function": {"name": …}}`."""
    function = value.get("function") if isinstance(value, dict) else None
    if function is None or value.get("type", "function") != "function":
        raise invalid(where, 'expected {"type": "function", "function": {"name": …}}')
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"{where}.function.name", "expected the name of one of the tools")
    return name


def _flag(body: Mapping[str, Any], name: str, default: bool, where: str = "") -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise invalid(where + name, "expected true or false")
    return default if value is None else value
