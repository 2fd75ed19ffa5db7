"""Owns the promise that the CRDs only grow within a version: what was valid stays valid, what was read stays there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Schema = dict[str, Any]

_FREE: Final = ("description", "title", "example", "externalDocs")
"""Says nothing about which objects are valid."""
_UPPER: Final = ("maximum", "maxLength", "maxItems", "maxProperties")
_LOWER: Final = ("minimum", "minLength", "minItems", "minProperties")
_FIXED: Final = (
    *("type", "format", "x-kubernetes-int-or-string"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
)
"""Any change to these may refuse or change what is stored."""
_LOOSER_WITHOUT: Final = ("pattern", "exclusiveMinimum", "exclusiveMaximum", "uniqueItems")
"""Fewer objects are valid with these than without."""
_READ: Final = frozenset(
    {
        *_FREE,
        *_UPPER,
        *_LOWER,
        *_FIXED,
        *_LOOSER_WITHOUT,
        *("default", "enum", "required", "properties", "items", "additionalProperties"),
        *("x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"),
    }
)
"""Keywords that are looked at one by one; a change to any other is told as it is."""

Definition = dict[str, Any]
"""What of a CustomResourceDefinition clients rely on: scope, names, subresources and the schema."""


def retreat(old: Definition, new: Definition) -> Iterator[str]:
    """Every way in which clients of ``old`` may find that ``new`` is not what they knew."""
    if not new:
        yield ": the kind is gone"
        return
    if old["scope"] != new["scope"]:
        yield f": scope was {old['scope']!r} and is {new['scope']!r}"
    for key, value in old["names"].items():
        now = new["names"].get(key)
        if isinstance(value, list):
            yield from (f": {key} lacks {name!r} now" for name in value if name not in (now or ()))
        elif value != now:
            yield f": {key} was {value!r} and is {now!r}"
    for key, value in old["subresources"].items():
        if new["subresources"].get(key) != value:
            yield f": subresource {key} was {value!r} and is {new['subresources'].get(key)!r}"
    yield from shrinkage(old["schema"], new["schema"])


def shrinkage(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """Every way in which objects that were valid under ``old`` may be refused, pruned or changed under ``new``.

    A rule whose text has changed counts as a new one, even where it is looser: somebody has to look at it.
    """
    here = path or "object"
    others = sorted((old.keys() | new.keys()) - _READ)
    for key in (*_FIXED, *_LOOSER_WITHOUT, *others):
        if old.get(key) != new.get(key) and not (key in _LOOSER_WITHOUT and not new.get(key)):
            yield f"{here}: {key} was {old.get(key)!r} and is {new.get(key)!r}"
    if not _same_default(old.get("default"), new.get("default")):
        yield f"{here}: default was {old.get('default')!r} and is {new.get('default')!r}"
    if "enum" in new:
        if "enum" not in old:
            yield f"{here}: only some values are allowed now"
        yield from (f"{here}: the value {v!r} is gone" for v in old.get("enum", ()) if v not in new["enum"])
    yield from _bounds(old, new, here)
    if old.get("x-kubernetes-preserve-unknown-fields") and not new.get(
        "x-kubernetes-preserve-unknown-fields"
    ):
        yield f"{here}: unknown fields are not kept any more"
    for field in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        yield f"{path}.{field}: is required now"
    known = {rule["rule"] for rule in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        if rule["rule"] not in known:
            yield f"{here}: has a new rule: {rule['message']}"
    yield from _within(old, new, path)


def _same_default(old: Any, new: Any) -> bool:
    """Fields may join the default of an object."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and _same_default(value, new[key]) for key, value in old.items())
    return bool(old == new)


def _bounds(old: Schema, new: Schema, here: str) -> Iterator[str]:
    for key in _UPPER:
        if key in new and (key not in old or new[key] < old[key]):
            yield f"{here}: {key} was {old.get(key, 'unbounded')} and is {new[key]}"
    for key in _LOWER:
        if key in new and (key not in old or new[key] > old[key]):
            yield f"{here}: {key} was {old.get(key, 'unbounded')} and is {new[key]}"


def _within(old: Schema, new: Schema, path: str) -> Iterator[str]:
    fields = new.get("properties", {})
    if old.get("x-kubernetes-preserve-unknown-fields"):
        for name in sorted(fields.keys() - old.get("properties", {}).keys()):
            yield f"{path}.{name}: was free and has a form now"
    for name, schema in old.get("properties", {}).items():
        if name in fields:
            yield from shrinkage(schema, fields[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}: is gone"
    for inner, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if inner in old:
            yield from shrinkage(old[inner], new.get(inner, {}), path + mark)
