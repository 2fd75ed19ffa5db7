"""Judges bodies and answers by an OpenAPI document."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema

Schema = dict[str, Any]


class Judge:
    """Validates values by a document's schemas, with objects closed: an undocumented member is an error."""

    def __init__(self, document: Schema, *, closed: bool = True) -> None:
        self._components = copy.deepcopy(document["components"])
        self._paths = document["paths"]
        for found in self._components["schemas"].values() if closed else ():
            found.setdefault("additionalProperties", False)

    def body(self, path: str) -> Any:
        return self._validator(self._paths[path]["post"]["requestBody"]["content"]["application/json"])

    def answer(self, path: str, *, method: str = "post", kind: str = "application/json") -> Any:
        responses = self._paths[path][method]["responses"]
        return self._validator(responses["200"]["content"][kind])

    def error(self, name: str = "Error") -> Any:
        return self._validator({"schema": {"$ref": f"#/components/schemas/{name}"}})

    def _validator(self, content: Schema) -> Any:
        schema = {**content["schema"], "components": self._components}
        jsonschema.Draft202012Validator.check_schema(schema)
        return jsonschema.Draft202012Validator(schema)
