"""docs/http-api.md: the paths that a runtime serves and the fields of their bodies, from its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from treeline_runtime.server import surfaces
from treeline_runtime.server.probes import Probes

Schema = dict[str, Any]

_HEAD: Final = """\
# HTTP API

Generated from the OpenAPI document that every runtime serves at `/openapi.json` (`/docs` shows it). The gateway takes
the paths of OpenAI, Anthropic and SGLang; probes and information are on a runtime's own port.

A field that is not named here is refused with a 400 that names it, unless its value asks for nothing (`null`, `false`,
`[]`, `{}`). Unset fields have the model's defaults.
"""
_SHARED: Final = ("ChatBody", "CompletionBody")
"""Bodies whose common fields are listed once."""
_NO_EFFECT: Final = "Changes nothing: "


def page() -> str:
    """The whole page."""
    document = _document()
    schemas = document["components"]["schemas"]
    bodies: dict[str, Schema] = {}
    lines = [_HEAD]
    for tag, operations in _by_tag(document).items():
        lines += [f"## {tag}", "", "| path | | body |", "|---|---|---|"]
        for method, path, operation in operations:
            body = _body(operation)
            bodies |= {body: schemas[body]} if body else {}
            link = f"[{_title(body)}](#{_title(body).lower()})" if body else ""
            lines.append(f"| `{method.upper()} {path}` | {operation['summary']} | {link} |")
        lines.append("")
    lines += ["## Bodies", "", *_bodies(bodies, schemas), *_without_effect(bodies.values())]
    return "\n".join(lines).rstrip() + "\n"


def _document() -> Schema:
    """The OpenAPI document of a runtime, with a mock for the service, which the document does not depend on."""
    service = mock.Mock()
    served: Any = surfaces.inference(service, Probes(service, mock.Mock()), key=None, metrics_at=None, admin_at=None)
    document: Schema = json.loads(served._app.state.document)
    return document


def _by_tag(document: Schema) -> dict[str, list[tuple[str, str, Schema]]]:
    found: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found.setdefault(operation["tags"][0], []).append((method, path, operation))
    return found


def _body(operation: Schema) -> str:
    if "requestBody" not in operation:
        return ""
    return str(operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2])


def _title(name: str) -> str:
    return name.removesuffix("Body")


def _bodies(bodies: dict[str, Schema], schemas: Schema) -> Iterator[str]:
    first, second = (schemas[name]["properties"] for name in _SHARED)
    shared = {name: field for name, field in first.items() if second.get(name) == field and _acted_on(field)}
    yield from ("### Common fields", "", "Chats and completions have these, and their own fields besides.", "")
    yield from _table(shared, set())
    for name, body in bodies.items():
        own = {field: schema for field, schema in body["properties"].items() if _acted_on(schema)}
        common = [field for field in own if name in _SHARED and field in shared]
        yield from (f"### {_title(name)}", "", f"{body.get('description', '')}", "")
        if common:
            yield from ("It also has the [common fields](#common-fields).", "")
        yield from _table({field: own[field] for field in own if field not in common}, {*body.get("required", ())})


def _acted_on(field: Schema) -> bool:
    return [] not in field.get("enum", ()) and not str(field.get("description", "")).startswith(_NO_EFFECT)


def _table(fields: dict[str, Schema], required: set[str]) -> Iterator[str]:
    yield from ("| field | type | |", "|---|---|---|")
    for name, field in fields.items():
        said = " ".join(["required."] * (name in required) + [str(field.get("description", ""))]).strip()
        yield f"| `{name}` | {_type(field)} | {said.replace('|', chr(92) + '|')} |"
    yield ""


def _type(field: Schema) -> str:
    """A type with its bounds; "or null" is left out, since every field that is not required may be null."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"] if value is not None)
    kinds = field.get("type", "any")
    kind = " or ".join(one for one in kinds if one != "null") if isinstance(kinds, list) else str(kinds)
    if kind == "array" and "items" in field:
        kind = f"array of {_type(field['items'])}"
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None or high is not None or "exclusiveMinimum" in field:
        low = (
            f"{low:g} ≤ "
            if low is not None
            else f"{field['exclusiveMinimum']:g} < "
            if "exclusiveMinimum" in field
            else ""
        )
        high = f" ≤ {high:g}" if high is not None and abs(high) < 1 << 30 else ""
        low = low if not low.startswith(("-2.14748e", "-9.22337e")) else ""
        kind += f" ({low}value{high})" if low or high else ""
    if "maxItems" in field:
        kind += f", at most {field['maxItems']}"
    if "maxLength" in field:
        kind += f" of at most {field['maxLength']} characters"
    return kind


def _without_effect(bodies: Any) -> Iterator[str]:
    ignored = {
        name: str(field["description"]).removeprefix(_NO_EFFECT)
        for body in bodies
        for name, field in body["properties"].items()
        if str(field.get("description", "")).startswith(_NO_EFFECT)
    }
    yield from ("### Fields without effect", "", "Accepted, and named in the response header `x-treeline-ignored`.", "")
    yield from ("| field | why |", "|---|---|", *(f"| `{name}` | {ignored[name]} |" for name in sorted(ignored)), "")
