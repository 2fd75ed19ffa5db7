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

Every runtime serves this as an OpenAPI document at `/openapi.json` and as a page at `/docs`. The gateway serves the
paths of OpenAI, Anthropic, Ollama and SGLang; probes and information are on a runtime's own port.

Unknown fields get a 400 that names them, unless their value asks for nothing (`null`, `false`, `[]`, `{}`).

A server with `--dp-size` runs a request at the data-parallel rank that the header `X-data-parallel-rank` names, or the
field `routed_dp_rank` or `data_parallel_rank` of any body with a prompt; else at the rank with the fewest in flight.
Different ranks in one request are a 400. Behind our edge the picker alone names the rank, and these fields are ignored.
"""
_FEW: Final = 2
"""Fields that the same bodies share are listed once if there are more of them."""
_ANY: Final = 1 << 30
"""A bound beyond this is that of the number's size."""
_NO_EFFECT: Final = "Changes nothing: "


def page() -> str:
    """The whole page."""
    document = _document()
    schemas = document["components"]["schemas"]
    bodies: dict[str, Schema] = {}
    lines = [_HEAD]
    for tag, operations in _by_tag(document).items():
        lines += [f"## {tag}", "", "| path | | body |", "|---|---|---|"]
        rows: dict[tuple[str, str], list[str]] = {}
        for method, path, operation in operations:
            body = _body(operation)
            bodies |= {body: schemas[body]} if body else {}
            link = f"[{_title(body)}](#{_title(body).lower()})" if body else ""
            rows.setdefault((operation["summary"], link), []).append(f"`{method.upper()} {path}`")
        lines += [f"| {', '.join(paths)} | {summary} | {link} |" for (summary, link), paths in rows.items()]
        lines.append("")
    lines += ["## Bodies", "", *_bodies(bodies), *_without_effect(bodies.values())]
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
    (content,) = operation["requestBody"]["content"].values()
    return str(content["schema"]["$ref"].rpartition("/")[2])


def _title(name: str) -> str:
    return name.removesuffix("Body")


def _bodies(bodies: dict[str, Schema]) -> Iterator[str]:
    acted_on = {
        body: {name: field for name, field in schema["properties"].items() if _acted_on(field)}
        for body, schema in bodies.items()
    }
    shared = _shared(acted_on)
    yield from ("### Common fields", "")
    for owners, names in shared.items():
        yield from (f"Of {', '.join(map(_title, owners))}:", "")
        yield from _table({name: acted_on[owners[0]][name] for name in names}, set())
    for body, fields in acted_on.items():
        common = {name for owners, names in shared.items() if body in owners for name in names}
        about = " ".join(bodies[body].get("description", "").split())
        more = "It also has [common fields](#common-fields)." if common else ""
        yield from (f"### {_title(body)}", "", f"{about} {more}".strip(), "")
        own = {name: field for name, field in fields.items() if name not in common}
        yield from _table(own, {*bodies[body].get("required", ())})


def _shared(bodies: dict[str, dict[str, Schema]]) -> dict[tuple[str, ...], list[str]]:
    """Bodies → the fields that exactly these have, and have alike."""
    owners: dict[tuple[str, str], list[str]] = {}
    for body, fields in bodies.items():
        for name, field in fields.items():
            owners.setdefault((name, json.dumps(field, sort_keys=True)), []).append(body)
    groups: dict[tuple[str, ...], list[str]] = {}
    for (name, _), those in owners.items():
        groups.setdefault(tuple(those), []).append(name)
    return {key: names for key, names in groups.items() if len(key) > 1 and len(names) > _FEW}


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
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"] if one.get("type") != "null"))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"] if value is not None)
    kinds = field.get("type", "any")
    kind = " or ".join(one for one in kinds if one != "null") if isinstance(kinds, list) else str(kinds)
    if kind == "array" and "items" in field:
        kind = f"array of {_type(field['items'])}"
    low, sign = field.get("minimum"), "≤"
    if "exclusiveMinimum" in field:
        low, sign = field["exclusiveMinimum"], "<"
    low = None if low is None or low < -_ANY else low
    high = field.get("maximum")
    high = None if high is None or high > _ANY else high
    if low is not None and high is not None:
        kind = f"{low:g} {sign} {kind} ≤ {high:g}"
    elif low is not None:
        kind = f"{kind} {'≥' if sign == '≤' else '>'} {low:g}"
    elif high is not None:
        kind = f"{kind} ≤ {high:g}"
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
    why: dict[str, list[str]] = {}
    for name in sorted(ignored):
        why.setdefault(ignored[name], []).append(f"`{name}`")
    yield from ("### Fields without effect", "", "Accepted, and named in the response header `x-treeline-ignored`.", "")
    yield from (
        "| field | why |",
        "|---|---|",
        *(f"| {', '.join(names)} | {said} |" for said, names in why.items()),
        "",
    )
