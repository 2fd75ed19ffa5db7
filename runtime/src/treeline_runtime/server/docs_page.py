"""The page that shows the OpenAPI document: HTML made here, without a script and without anything from other hosts.

Each operation and each schema is folded; a schema that is named is linked to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
details { border: 1px solid #8885; border-radius: .4rem; margin: .4rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
summary b { display: inline-block; min-width: 3.5rem; }
:focus-visible { outline: 2px solid; outline-offset: 2px; }
code, pre { font-family: ui-monospace, monospace; font-size: .92em; }
pre { overflow-x: auto; background: #8882; padding: .6rem; border-radius: .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #8883; }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{_HASH}'",
    "X-Content-Type-Options": "nosniff",
}


def docs_page(document: Schema) -> str:
    info = document["info"]
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(info['title'])}: the HTTP API</title>\n<style>{_STYLE}</style>",
            f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
            *_paragraphs(info.get("description", "")),
            '<p>For programs: <a href="/openapi.json">/openapi.json</a>.</p>',
            "<h2>Paths</h2>",
            *(
                _operation(method, path, found)
                for path, methods in document["paths"].items()
                for method, found in methods.items()
            ),
            "<h2>Schemas</h2>",
            *(
                # What a link leads to is inside: so a browser opens it.
                f'<details><summary>{escape(name)}</summary><div id="{escape(name)}">{_schema(found)}</div></details>'
                for name, found in sorted(document.get("components", {}).get("schemas", {}).items())
            ),
            "</html>",
        )
    )


def _paragraphs(text: str) -> Iterator[str]:
    return (f"<p>{_text(part)}</p>" for part in text.split("\n\n") if part.strip())


def _text(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _operation(method: str, path: str, found: Schema) -> str:
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    parts = [
        f"<summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code> {escape(found.get('summary', ''))}"
        "</summary>",
        *_paragraphs(found.get("description", "")),
    ]
    if found.get("security"):
        parts.append("<p>Wants the server's API key, where it has one.</p>")
    if found.get("parameters"):
        rows = [(one["name"], one.get("schema", {}), one.get("description", "")) for one in found["parameters"]]
        parts.append(f"<h3>Parameters</h3>{_table(rows)}")
    if body is not None:
        parts.append(f"<h3>Body</h3>{_schema(body)}")
    rows = [
        (status, _first(answer.get("content", {})).get("schema", {}), answer.get("description", ""))
        for status, answer in found.get("responses", {}).items()
    ]
    return f"<details>{''.join(parts)}<h3>Answers</h3>{_table(rows)}</details>"


def _first(content: Mapping[str, Schema]) -> Schema:
    return next(iter(content.values()), {})


def _schema(found: Schema) -> str:
    """A table of an object's members, or what else it is."""
    members = found.get("properties")
    text = "".join(_paragraphs(found.get("description", "")))
    if not members:
        return f"{text}<p>{_kind(found)}</p>"
    needed = found.get("required", ())
    rows = [
        (name, member, ("Required. " if name in needed else "") + member.get("description", ""))
        for name, member in members.items()
    ]
    return text + _table(rows)


def _table(rows: list[tuple[str, Schema, str]]) -> str:
    lines = (f"<tr><td><code>{escape(name)}</code><td>{_kind(kind)}<td>{_text(text)}" for name, kind, text in rows)
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _kind(found: Schema) -> str:
    if "$ref" in found:
        name = escape(found["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf"):
        if word in found:
            return " or ".join(dict.fromkeys(_kind(one) for one in found[word]))
    if "enum" in found:
        return escape(" or ".join(json.dumps(value) for value in found["enum"]))
    if found.get("type") == "array" and found.get("items"):
        return f"list of {_kind(found['items'])}"
    kind = found.get("type", "")
    bounds = [f"{words} {found[key]}" for key, words in _BOUNDS.items() if key in found]
    return escape(" ".join([" or ".join(kind) if isinstance(kind, list) else kind, ", ".join(bounds)]).strip())


_BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minItems": "at least",
    "maxItems": "at most",
    "minLength": "length ≥",
    "maxLength": "length ≤",
}
