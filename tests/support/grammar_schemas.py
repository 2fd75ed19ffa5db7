"""Random JSON Schemas (draft 2020-12), equal for equal seeds, and a judge of their values."""

from __future__ import annotations

import datetime
import fractions
import ipaddress
import json
import math
import random
import re
import string
from collections.abc import Iterator
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, ValidationError, validators

NAMES = ["a", "b", "id", "name", "é", "日本", 'q"t', "x y", "$k", "Größe"]
TEXTS = ["", "a", "red", "green", "a b", "ünï", "日本語", 'say "hi"', "back\\slash", "tab\t", "line\n", "😀", "a/b"]
PATTERNS = [
    r"^[a-z]+$", r"^\d{3}-\d{4}$", "^(red|green)$", "[A-Z]{2}", "^a.*z$", r"^\w+@\w+\.com$", "^$|^x{2,4}$",
    r"^[^\s]{1,5}$", r"^\S+$", "^.{2,6}$", r"^[\w.-]+$", "^é+$", '^"q"$', r"^\u0041+$", r"^v\d+(?:\.\d+)?$",
    r"^\p{L}+$", "^(?!no).*$", r"(a|b)\1", "^(?i)abc$",
]  # fmt: skip
KEY_PATTERNS = ["^x-", "^[a-z]{1,3}$", "^S_", "_id$", "^[0-9]+$"]
FORMATS = [
    *["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration"] * 4,
    "regex", "json-pointer", "zip",
]  # fmt: skip


class Generator:
    """Makes one schema. `rare` is the share of rare keywords and of contradictions."""

    def __init__(self, seed: int, rare: float = 0.03) -> None:
        self._draw = random.Random(seed)
        self._rare = rare
        self._defs: list[str] = []

    def schema(self) -> Any:
        self._defs = [f"d{i}" for i in range(self._draw.choice([0, 0, 0, 1, 2]))]
        root = self._any(3)
        if not isinstance(root, dict):
            return root
        if self._defs:
            root["$defs"] = {name: self._any(2) for name in self._defs}
        if self._chance(0.2):
            root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return root

    def _chance(self, share: float) -> bool:
        return self._draw.random() < share

    def _any(self, depth: int) -> Any:
        leaves = [self._string, self._string, self._number, self._integer, self._constant, self._enum, self._plain]
        inner = [self._object, self._object, self._object, self._array, self._array, self._any_of, self._one_of,
                 self._all_of, self._nullable]  # fmt: skip
        kind = self._draw.choice(leaves if depth <= 0 or self._chance(0.25) else inner)
        if self._defs and self._chance(0.15) and (depth < 3 or self._chance(0.1)):
            kind = self._reference
        schema = kind(depth)
        if isinstance(schema, dict) and self._chance(0.15):
            schema[self._draw.choice(["title", "description", "$comment", "x-note"])] = "about it"
        if isinstance(schema, dict) and self._chance(self._rare):
            self._add_rare(schema)
        return schema

    def _add_rare(self, schema: dict[str, Any]) -> None:
        key, value = self._draw.choice([
            ("not", {"type": "null"}), ("uniqueItems", True), ("contains", {"type": "integer"}), ("minLength", 2),
            ("if", {"type": "string"}), ("dependentRequired", {"a": ["b"]}), ("minProperties", 2), ("minimum", 3),
            ("enum", [1, "a", None]), ("anyOf", [{"type": "string"}, {"required": ["a"]}]), ("pattern", "^a"),
            ("unevaluatedProperties", False), ("type", "string"), ("required", ["zz"]), ("maxItems", 1),
            ("then", False),
        ])  # fmt: skip
        schema.setdefault(key, value)

    def _plain(self, _depth: int) -> Any:
        types: list[Any] = ["boolean", "null", "object", "array", ["string", "null"], ["integer", "boolean"]]
        return self._draw.choice([{}, True, *({"type": name} for name in types)])

    def _string(self, _depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        match self._draw.randrange(6):
            case 0:
                schema["pattern"] = self._draw.choice(PATTERNS)
            case 1:
                schema["format"] = self._draw.choice(FORMATS)
            case 2 | 3:
                low, high = sorted([self._draw.randint(0, 6), self._draw.randint(0, 12)])
                schema |= {"minLength": low, "maxLength": high}
                if self._chance(0.4):
                    del schema[self._draw.choice(["minLength", "maxLength"])]
        return schema

    def _bounds(self, numbers: list[Any]) -> dict[str, Any]:
        low, high = sorted(self._draw.sample(numbers, 2))
        bounds = {self._draw.choice(["minimum", "exclusiveMinimum"]): low}
        bounds[self._draw.choice(["maximum", "exclusiveMaximum"])] = high
        if self._chance(0.4):
            del bounds[self._draw.choice(list(bounds))]
        return bounds

    def _integer(self, _depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        if self._chance(0.5):
            schema |= self._bounds([-1000, -17, -1, 0, 1, 5, 12, 99, 100, 2024, 10**6])
        if self._chance(0.15):
            schema["multipleOf"] = self._draw.choice([2, 3, 5, 7, 100])
        return schema

    def _number(self, _depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        if self._chance(0.5):
            schema |= self._bounds([-273.15, -10, -1.5, 0, 0.1, 0.25, 1, 3.14159, 99.99, 1e3, 1e6])
        if self._chance(0.1):
            schema["multipleOf"] = self._draw.choice([0.01, 0.5, 2, 0.25, 10])
        return schema

    def _value(self, depth: int) -> Any:
        if depth > 0 and self._chance(0.3):
            if self._chance(0.5):
                return [self._value(depth - 1) for _ in range(self._draw.randint(0, 3))]
            return {name: self._value(depth - 1) for name in self._draw.sample(NAMES, self._draw.randint(0, 2))}
        return self._draw.choice([*TEXTS, None, True, False, 0, 1, -7, 12345678901, 0.5, -1.25e-7, 3e20])

    def _constant(self, depth: int) -> dict[str, Any]:
        return {"const": self._value(depth)}

    def _enum(self, depth: int) -> dict[str, Any]:
        if self._chance(0.5):
            schema: dict[str, Any] = {"type": "string", "enum": self._draw.sample(TEXTS, self._draw.randint(1, 5))}
            return schema
        return {"enum": [self._value(min(depth, 1)) for _ in range(self._draw.randint(1, 4))]}

    def _reference(self, _depth: int) -> dict[str, Any]:
        return {"$ref": "#" if self._chance(0.1) else f"#/$defs/{self._draw.choice(self._defs)}"}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._draw.sample(NAMES, self._draw.randint(0, 4))
        schema: dict[str, Any] = {"type": "object"}
        if names:
            schema["properties"] = {name: self._any(depth - 1) for name in names}
            schema["required"] = [name for name in names if self._chance(0.6)]
        if self._chance(0.5):
            open_ = {} if names and self._chance(0.8) else self._any(depth - 1)
            schema["additionalProperties"] = False if names and self._chance(0.8) else open_
        if self._chance(0.08):
            schema["patternProperties"] = {self._draw.choice(KEY_PATTERNS): self._any(depth - 2) for _ in range(2)}
        if self._chance(0.05):
            schema["propertyNames"] = self._draw.choice(
                [{"pattern": "^[a-z]+$"}, {"maxLength": 4}, {"enum": ["a", "id"]}]
            )
        if self._chance(0.1):
            schema["minProperties"] = self._draw.randint(0, 2)
        if self._chance(0.1):
            schema["maxProperties"] = self._draw.randint(1, 4) + len(schema.get("required", ()))
        if self._chance(0.02):
            schema["dependentRequired"] = {self._draw.choice(NAMES): [self._draw.choice(NAMES)]}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if self._chance(0.3):
            schema["prefixItems"] = [self._any(depth - 1) for _ in range(self._draw.randint(1, 3))]
            if self._chance(0.6):
                schema["items"] = False if self._chance(0.6) else self._any(depth - 1)
        elif self._chance(0.9):
            schema["items"] = self._any(depth - 1)
        if self._chance(0.3):
            schema["minItems"] = self._draw.randint(0, 3)
        if self._chance(0.3):
            schema["maxItems"] = self._draw.randint(1, 5)
        if self._chance(0.03):
            schema["uniqueItems"] = True
        return schema

    def _options(self, depth: int) -> list[Any]:
        return [self._any(depth - 1) for _ in range(self._draw.randint(1, 3))]

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": self._options(depth)}

    def _nullable(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth - 1), {"type": "null"}]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        if self._chance(0.5):
            tags = self._draw.sample(string.ascii_lowercase, 2)
            arms = [self._object(depth - 1) for _ in tags]
            for tag, arm in zip(tags, arms, strict=True):
                arm["properties"] = {"kind": {"const": tag}, **arm.get("properties", {})}
                arm["required"] = ["kind", *arm.get("required", [])]
            return {"oneOf": arms}
        plain = [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": self._any(depth - 2)}]
        return {"oneOf": self._options(depth) if self._chance(0.15) else self._draw.sample(plain, 2)}

    def _all_of(self, depth: int) -> dict[str, Any]:
        if self._chance(0.5):
            return {"allOf": [self._any(depth - 1)]}
        return {"allOf": [self._object(depth - 1), self._object(depth - 1)]}


def judge(schema: Any) -> Any:
    """Return a validator of the draft that the schema names, with formats. Multiples are computed in decimals: 19.99 is
    one of 0.01. OpenAPI's `nullable` is known."""
    draft = validators.validator_for(schema, default=Draft202012Validator)
    rules = {"multipleOf": _multiple_of, "type": partial(_type, draft.VALIDATORS["type"])}
    validator: Any = validators.extend(draft, rules)
    return validator(schema, format_checker=CHECKER)


def _type(rule: Any, validator: Any, types: Any, value: Any, schema: Any) -> Any:
    return () if value is None and schema.get("nullable") is True else rule(validator, types, value, schema)


def _multiple_of(_validator: Any, unit: float, value: Any, _schema: Any) -> Iterator[ValidationError]:
    number = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )
    if number and fractions.Fraction(repr(value)) % fractions.Fraction(repr(unit)):
        yield ValidationError(f"{value} is not a multiple of {unit}")


def parse(text: str) -> Any:
    """Parse JSON strictly: NaN and infinities are refused."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


CHECKER = FormatChecker(["regex"])


def _check(name: str, accepts: Any) -> None:
    def check(value: object) -> bool:
        return not isinstance(value, str) or bool(accepts(value))

    CHECKER.checks(name, raises=ValueError)(check)


_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"


def _is_date(text: str) -> bool:
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and datetime.date.fromisoformat(text))


def _is_moment(text: str) -> bool:
    return text[10:11] == "T" and _is_date(text[:10]) and bool(re.fullmatch(_TIME, text[11:], re.ASCII))


def _is_hostname(text: str) -> bool:
    labels = text.split(".")
    return len(text) < 254 and all(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label) for label in labels)


_check("date", _is_date)
_check("time", lambda text: re.fullmatch(_TIME, text, re.ASCII))
_check("date-time", _is_moment)
_check("email", lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+", text))
_check("ipv4", ipaddress.IPv4Address)
_check("ipv6", ipaddress.IPv6Address)
_check("uuid", lambda text: re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text))
_check("hostname", _is_hostname)
_check("uri", lambda text: re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s\"<>\\^`{|}]*", text))
_check("duration", lambda text: re.fullmatch(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)", text))
