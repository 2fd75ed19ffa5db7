"""A JSON Schema as a document: read within bounds, with its schemas found by reference and nesting."""

from __future__ import annotations

import functools
import itertools
import json
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from treeline_runtime.grammar.backend import GrammarError
from treeline_runtime.grammar.schema_words import DEFINITIONS, VALUES, inner

Schema = dict[str, Any]

MAX_DEPTH = 100
"""The deepest nesting of brackets."""
_INDEX_DIGITS = 10
_PLAIN_POINTER = re.compile(r"#[\w/$.-]*", re.ASCII)


class UnsupportedError(GrammarError):
    """A keyword that a library would ignore or misread."""

    def __init__(self, keyword: str, path: str, why: str = "is not supported") -> None:
        super().__init__(f"{keyword!r} at {path or '/'} {why}")


def unsatisfiable(path: str, why: str) -> GrammarError:
    """Says that no value fits the schema at `path`."""
    return GrammarError(f"can never be satisfied: {why} at {path or '/'}")


class Document:
    """A schema with everything it refers to. Its schemas may be rewritten; references still work."""

    def __init__(self, source: str) -> None:
        """Raises GrammarError if it is not a schema, is nested too deeply, or has a dangling reference."""
        self.root = _read(source)
        self.schemas: list[tuple[str, Schema]] = []
        """Each with its path."""
        self._targets: dict[int, tuple[str, Schema | bool, Any]] = {}
        """`id` of a schema with a `$ref` → the result of `_resolve`."""
        self._paths: dict[int, str] = {}
        """`id` of a schema → its first path."""
        self._kept: list[Any] = []
        """Schemas that were replaced, kept so that no new object gets their `id`."""
        draft = str(self.root.get("$schema")) if isinstance(self.root, dict) else ""
        if re.search("draft-0[0-3]", draft):
            raise UnsupportedError("$schema", "", "names a draft before the fourth, which is not supported")
        self.is_draft_4 = "draft-04" in draft
        self.is_before_2019 = bool(re.search("draft-0[4-7]", draft))
        self._identifier = "id" if self.is_draft_4 else "$id"
        self.find()
        if self.is_before_2019:
            self._drop_beside_references()

    def target(self, schema: Schema) -> Schema | bool:
        return self._targets[id(schema)][1]

    def _drop_beside_references(self) -> None:
        """In these drafts, keywords beside a `$ref` have no effect, except as targets."""
        for _path, schema in self.schemas:
            if "$ref" in schema:
                self._kept.append({**schema})
                for word in schema.keys() - DEFINITIONS - {"$ref", "$schema"}:
                    del schema[word]
        self.find()

    def resolved(self, option: Any, alone: bool = False) -> Any:
        """Follows an option's references. alone: only those without other keywords beside them."""
        for _ in range(8):
            if not isinstance(option, dict) or "$ref" not in option:
                break
            if alone and option.keys() - DEFINITIONS != {"$ref"}:
                break
            option = self.target(option)
        return option

    def written(self) -> str:
        """Returns the document as JSON, with references as pointers from the root."""
        if not isinstance(self.root, dict):
            return json.dumps(self.root)
        places = {id(found): place for place, found in _containers("#", self.root)}
        for _path, schema in self.schemas:
            if "$ref" not in schema:
                continue
            target = self.target(schema)
            place = places.get(id(target), "")
            if isinstance(target, bool) or not _PLAIN_POINTER.fullmatch(place):
                definitions = self.root.setdefault("$defs", {})
                name = next(name for i in itertools.count() if (name := f"r{i}") not in definitions)
                definitions[name], place = target, f"#/$defs/{name}"
                places |= {id(found): there for there, found in _containers(place, target)}
            schema["$ref"] = place
        return json.dumps(self.root)

    def find(self) -> None:
        """Collects the schemas below the root, again where they were rewritten."""
        self._kept.append(self.schemas)
        self.schemas, seen = [], set[int]()
        stack: list[tuple[str, Any, Any]] = [("", self.root, self.root)]
        while stack:
            path, schema, resource = stack.pop()
            if not isinstance(schema, dict | bool):
                raise GrammarError(f"a schema is an object, or true or false: at {path}")
            if isinstance(schema, bool) or id(schema) in seen:
                continue
            seen.add(id(schema))
            path = self._paths.setdefault(id(schema), path)
            self.schemas.append((path, schema))
            resource = schema if self._uri(schema) else resource
            if "$ref" in schema:
                if id(schema) not in self._targets:
                    self._targets[id(schema)] = self._resolve(resource, schema["$ref"], path)
                stack.append(self._targets[id(schema)])
            stack += [(f"{path}/{place}", found, resource) for place, found in inner(schema)]

    def _uri(self, schema: Any) -> str:
        """The URI by which a schema is a document of its own; "" if it is not."""
        uri = schema.get(self._identifier) if isinstance(schema, dict) else None
        return uri if isinstance(uri, str) and not uri.startswith("#") else ""

    def _resolve(self, resource: Any, reference: Any, path: str) -> tuple[str, Schema | bool, Any]:
        """Path and schema of a `$ref` at `path` in document `resource`, and the document it is in."""
        if not isinstance(reference, str):
            raise GrammarError(f"'$ref' at {path or '/'} is a text")
        uri, _, fragment = reference.partition("#")
        if uri:
            wanted = urllib.parse.urljoin(self._documents[id(resource)][0], uri)
            resource = next((document for base, document in self._documents.values() if base == wanted), None)
            if resource is None:
                raise UnsupportedError("$ref", path, f"to another document ({reference[:200]}) is not supported")
        found = resource
        if fragment and not fragment.startswith("/"):
            found = next((one for _, one in _containers("", resource) if self._is_named(one, fragment)), None)
        for part in urllib.parse.unquote(fragment).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and len(key) < _INDEX_DIGITS and int(key) < len(found):
                found = found[int(key)]
            else:
                found = None
            resource = found if self._uri(found) else resource
        if found is None:
            raise GrammarError(f"'$ref' at {path or '/'}: there is no {reference!r}")
        if not isinstance(found, dict | bool):
            raise GrammarError(f"'$ref' at {path or '/'}: {reference!r} is not a schema")
        return fragment, found, resource

    def _is_named(self, schema: Any, name: str) -> bool:
        return isinstance(schema, dict) and (
            schema.get("$anchor") == name or schema.get(self._identifier) == f"#{name}"
        )

    @functools.cached_property
    def _documents(self) -> dict[int, tuple[str, Any]]:
        """The address of each document within, and of itself."""
        found = {id(self.root): ("", self.root)}
        waiting: list[tuple[Any, str]] = [(self.root, "")]
        while waiting:
            value, base = waiting.pop()
            if uri := self._uri(value):
                base = urllib.parse.urljoin(base, uri).partition("#")[0]
                found[id(value)] = base, value
            waiting += [(one, base) for _, one in _members("", value)]
        return found


def _containers(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    waiting = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict | list):
            yield place, value
            waiting += _members(place, value)


def _members(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Members, except values, which contain no schemas."""
    if isinstance(value, dict):
        for key, one in value.items():
            if key not in VALUES or (isinstance(one, dict) and key != "const"):
                yield f"{place}/{key.replace('~', '~0').replace('/', '~1')}", one
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield f"{place}/{i}", one


def _read(source: str) -> Schema | bool:
    try:
        schema = json.loads(source)
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise GrammarError(f"the schema is nested more than {MAX_DEPTH} deep") from None
    except UnicodeEncodeError:
        raise GrammarError("the schema has half a surrogate pair in a string") from None
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema is an object, or true or false")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            one
            for value in level
            if isinstance(value, dict | list)
            for one in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return schema
    raise GrammarError(f"the schema is nested more than {MAX_DEPTH} deep")
