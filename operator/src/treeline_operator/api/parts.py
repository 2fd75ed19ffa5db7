"""Owns what the kinds of the API share: object metadata, quantities, references, the base of every spec."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    with_config,
)
from pydantic.alias_generators import to_camel
from treeline_kube.resources import Ref
from typing_extensions import TypedDict

from treeline_operator.api.rules import Rule, Ruled, forbidden
from treeline_operator.names import DELETION_COST

GROUP: Final = "treeline.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

QUANTITY_PATTERN: Final = r"^\+?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$"
SHORT_NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A name from which names of Services are made: it starts with a letter."""
DNS_LABEL_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
PORT_PATTERN: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
"""1 to 65535, as part of a text."""

SERVED_NAME_PATTERN: Final = r"^[A-Za-z0-9_][A-Za-z0-9._:/@+-]*$"
"""A model's name in requests. It appears in command lines, where `-` would begin a flag, `=` end an adapter's name and
`$(NAME)` be replaced by the kubelet, and in the headers that routes match."""
LABEL_VALUE_PATTERN: Final = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
QUALIFIED_NAME_PATTERN: Final = (
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
"""A key of labels, annotations and taints: `name` or `example.com/name`."""
NO_QUALIFIED_NAME: Final = "invalid key: write a name of 63 characters or fewer, or example.com/name"


_INT_OR_STRING: Final[dict[str, Any]] = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
}


def _quantity_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=64),
    WithJsonSchema({**_INT_OR_STRING, "pattern": QUANTITY_PATTERN, "maxLength": 64, "minimum": 0}),
]
"""A Kubernetes quantity as written, none below zero."""

PERCENT_PATTERN: Final = r"^(0|[1-9][0-9]?|100)%$"


def _count_or_percent(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("write a number of pods, such as 1, or a part of replicas, such as 25%")
    if isinstance(value, str) and not re.fullmatch(PERCENT_PATTERN, value):
        raise ValueError(f"{value!r} is no percentage: write one from 0% to 100%, or a number of pods")
    if isinstance(value, int) and not 0 <= value <= 1000:
        raise ValueError(f"{value} is no number of pods: write one from 0 to 1000")
    return value


CountOrPercent = Annotated[
    int | str,
    BeforeValidator(_count_or_percent),
    WithJsonSchema({**_INT_OR_STRING, "pattern": PERCENT_PATTERN, "maxLength": 4, "minimum": 0, "maximum": 1000}),
]
"""A number of pods, or a percentage of `replicas` such as `25%`; `pods_of` gives the number."""


def pods_of(value: int | str, replicas: int, *, up: bool) -> int:
    """The number of pods that a `CountOrPercent` is of `replicas`; percentages are rounded `up`, or down."""
    if isinstance(value, int):
        return value
    share = int(value.removesuffix("%")) * replicas
    return -(-share // 100) if up else share // 100


LIST_MAP: Final[dict[str, Any]] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
"""Schema of a list whose items are identified by name."""
BY_TYPE: Final[dict[str, Any]] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
SET: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}
FOREIGN: Final[dict[str, Any]] = {"x-kubernetes-preserve-unknown-fields": True}
"""Schema of a fragment that belongs to another API and is kept as it is."""

Port = Annotated[StrictInt, Field(ge=1, le=65535)]
DnsLabel = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]
ServedName = Annotated[str, StringConstraints(pattern=SERVED_NAME_PATTERN, min_length=1, max_length=256)]
DnsName = Annotated[str, StringConstraints(pattern=DNS_NAME_PATTERN, min_length=1, max_length=253)]


class Part(Ruled):
    """The base of everything in a spec: immutable, camelCase outside, snake_case inside, no unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class ObjectMeta(Part):
    """The metadata that is used of our objects."""

    model_config = ConfigDict(extra="ignore")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Resource(Ruled):
    """The base of our kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    api_version: Literal["treeline.dev/v1alpha1"] = Field(default="treeline.dev/v1alpha1", alias="apiVersion")
    kind: str
    metadata: ObjectMeta

    @classmethod
    def from_object(cls, obj: dict[str, Any], *, strict: bool = False) -> Self:
        """From a decoded object. Raises `pydantic.ValidationError` where it does not fit.

        Fields that we do not know are passed over, since an object in the cluster may have been written under a newer
        version of the CRD. `strict` refuses them, as the API server does with `--validate=strict`: for files.
        """
        return cls.model_validate(obj, extra="forbid" if strict else "ignore")

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def ref(self) -> Ref:
        """The object's address."""
        return Ref(API_VERSION, self.kind, self.namespace, self.name)

    @property
    def born(self) -> datetime:
        """The time of the object's creation. An object from a file, never applied, counts as younger than all
        others."""
        return self.metadata.creation_timestamp or datetime.max.replace(tzinfo=UTC)

    @property
    def deleting(self) -> bool:
        """Whether the object is being deleted."""
        return self.metadata.deletion_timestamp is not None

    def owner_reference(self, *, controller: bool) -> dict[str, Any]:
        """The ownerReference that makes an object go when this one goes."""
        reference: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            "name": self.name,
            "uid": self.metadata.uid,
        }
        return reference | {"controller": True, "blockOwnerDeletion": True} if controller else reference


class NamedRef(Part):
    """An object of the same namespace."""

    name: DnsName
    """Name of the object, in this namespace."""


class KeyRef(NamedRef):
    """One key of a Secret of the same namespace."""

    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "token"
    """Key within the Secret."""


class ConfigMapKeyRef(NamedRef):
    """One key of a ConfigMap of the same namespace."""

    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "chat_template.jinja"
    """Key within the ConfigMap."""


class Resources(Part):
    """Resources of a container."""

    requests: Annotated[dict[str, Quantity], Field(max_length=32)] = Field(default_factory=dict)
    """Requests, by resource name."""
    limits: Annotated[dict[str, Quantity], Field(max_length=32)] = Field(default_factory=dict)
    """Limits, by resource name."""


DOCUMENTED: Final = with_config(ConfigDict(use_attribute_docstrings=True))
"""Makes a TypedDict's docstrings its schema's descriptions."""


@DOCUMENTED
class Condition(TypedDict):
    """One condition, as `metav1.Condition`."""

    type: Annotated[str, StringConstraints(max_length=316)]
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    reason: Annotated[str, StringConstraints(max_length=1024)]
    """The reason, as one word: docs/reasons.md."""
    message: Annotated[str, StringConstraints(max_length=32768)]
    """The cause and what to do."""
    lastTransitionTime: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """Time of the last change of status."""
    observedGeneration: int
    """The generation that the condition is about."""


def explain(exc: ValidationError, kind: type[BaseModel]) -> str:
    """The errors of an object of `kind`, field by field, in one line."""
    errors = exc.errors(include_url=False)
    return "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {misfit(e, kind)}" for e in errors)


def misfit(error: Any, kind: type[BaseModel]) -> str:
    """The error of one field, an item of `ValidationError.errors()`."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    *before, name = error["loc"]
    near = difflib.get_close_matches(str(name), _names(kind, before), n=1)
    return f"unknown field; did you mean {near[0]}?" if near else "unknown field"


def _names(kind: Any, path: Sequence[int | str]) -> list[str]:
    """The names of the fields at a path."""
    for part in path:
        if isinstance(part, str):
            kind = next((field.annotation for name, field in _fields(kind) if name == part), None)
    return [name for name, _ in _fields(kind)]


def _fields(annotation: Any) -> Iterator[tuple[str, Any]]:
    """Names and fields of the models that an annotation is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from ((field.serialization_alias or name, field) for name, field in annotation.model_fields.items())
    else:
        for inner in get_args(annotation):
            yield from _fields(inner)


_NAMED: Final[dict[str, Any]] = {
    "type": "array",
    "maxItems": 64,
    **LIST_MAP,
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "description": "Name, by which it is merged.", "maxLength": 63}},
        **FOREIGN,
    },
}
_STRINGS: Final = {"type": "object", "maxProperties": 64, "additionalProperties": {"type": "string"}}


def template_schema(container: str, annotations: str = "") -> dict[str, Any]:
    """The schema of a fragment for pods whose `container` is ours. `annotations` says which annotations of treeline.dev
    a user may set."""
    return {
        "type": "object",
        "properties": {
            "metadata": {
                "type": "object",
                "description": "Labels and annotations of the pods.",
                "properties": {
                    "labels": {**_STRINGS, "description": "Labels, other than those of treeline.dev."},
                    "annotations": {
                        **_STRINGS,
                        "description": f"Annotations, other than those of treeline.dev{annotations}.",
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
            "labels of treeline.dev on pods are reserved: remove them from template.metadata.labels",
            field=".template.metadata.labels",
        ),
        forbidden(
            "!has(self.template) || !has(self.template.metadata) || !has(self.template.metadata.annotations)"
            " || self.template.metadata.annotations.all(k, k != "
            f"'{DELETION_COST}' && (!k.startsWith('treeline.dev/') || ({allowed})))",
            f"annotations of treeline.dev and {DELETION_COST} on pods are reserved:"
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
