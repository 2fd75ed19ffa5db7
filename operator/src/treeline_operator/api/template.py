"""Owns fragments of pod templates: their schema, and what of a pod's metadata is the operator's."""

from __future__ import annotations

from typing import Any, Final, Literal

from treeline_operator.api.parts import FOREIGN, LIST_MAP, NO_QUALIFIED_NAME, QUALIFIED_NAME_PATTERN
from treeline_operator.api.rules import Rule, forbidden
from treeline_operator.names import DELETION_COST

_NAMED: Final[dict[str, Any]] = {
    "type": "array",
    "maxItems": 64,
    **LIST_MAP,
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "description": "Its name, by which it is merged.", "maxLength": 63}},
        **FOREIGN,
    },
}
_STRINGS: Final = {"type": "object", "maxProperties": 64, "additionalProperties": {"type": "string"}}


def template_schema(container: str, annotations: str = "") -> dict[str, Any]:
    """The schema of a fragment for pods whose `container` is ours. `annotations` are those of treeline.dev that a user
    may set, in words."""
    return {
        "type": "object",
        "properties": {
            "metadata": {
                "type": "object",
                "description": "Labels and annotations of the pods.",
                "properties": {
                    "labels": {**_STRINGS, "description": "Labels; those of treeline.dev are the operator's."},
                    "annotations": {
                        **_STRINGS,
                        "description": f"Annotations; those of treeline.dev are the operator's{annotations}.",
                    },
                },
            },
            "spec": {
                "type": "object",
                "description": "Fragment of a PodSpec.",
                "properties": {
                    "containers": {**_NAMED, "description": f"Containers; {container}, others are added."},
                    "initContainers": {**_NAMED, "description": "Containers that run first."},
                    "volumes": {**_NAMED, "description": "Volumes."},
                },
                **FOREIGN,
            },
        },
    }


def template_rules(allowed: str = "false") -> tuple[Rule, ...]:
    """Rules of an object with a field `template`. `allowed` is CEL: which annotation `k` of treeline.dev may be set."""
    return (
        forbidden(
            "!has(self.template) || !has(self.template.metadata) || !has(self.template.metadata.labels)"
            " || self.template.metadata.labels.all(k, !k.startsWith('treeline.dev/'))",
            "labels of treeline.dev on pods are the operator's: remove them from template.metadata.labels",
            field=".template.metadata.labels",
        ),
        forbidden(
            "!has(self.template) || !has(self.template.metadata) || !has(self.template.metadata.annotations)"
            " || self.template.metadata.annotations.all(k, k != "
            f"'{DELETION_COST}' && (!k.startsWith('treeline.dev/') || ({allowed})))",
            f"annotations of treeline.dev and {DELETION_COST} on pods are the operator's:"
            " remove them from template.metadata.annotations",
            field=".template.metadata.annotations",
        ),
        _keys_rule("labels"),
        _keys_rule("annotations"),
    )


def _keys_rule(which: Literal["labels", "annotations"]) -> Rule:
    return Rule(
        f"!has(self.template) || !has(self.template.metadata) || !has(self.template.metadata.{which})"
        f" || self.template.metadata.{which}.all(k, k.matches('{QUALIFIED_NAME_PATTERN}'))",
        NO_QUALIFIED_NAME,
        field=f".template.metadata.{which}",
    )
