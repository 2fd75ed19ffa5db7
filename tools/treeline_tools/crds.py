"""The CustomResourceDefinitions: names, subresources, columns; as objects and as templates of the chart."""

from __future__ import annotations

from typing import Any, Final

import yaml
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.parts import GROUP, VERSION, Resource
from treeline_operator.api.pool import InferencePool

from treeline_tools import GENERATED
from treeline_tools.schema import structural


def _column(name: str, path: str, description: str, kind: str = "string", priority: int = 0) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": priority} if priority else column


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


_AGE: Final = _column("Age", ".metadata.creationTimestamp", "Time since it was made", "date")


def _crd(kind: type[Resource], short: str, columns: list[dict[str, Any]], scale: dict[str, str]) -> dict[str, Any]:
    name = kind.__name__
    plural = f"{name.lower()}s"
    subresources: dict[str, Any] = {"status": {}}
    if scale:
        subresources["scale"] = scale
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": name,
                "listKind": f"{name}List",
                "plural": plural,
                "singular": name.lower(),
                "shortNames": [short],
                "categories": ["treeline"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": structural(kind)},
                }
            ],
        },
    }


def pools() -> dict[str, Any]:
    """The CustomResourceDefinition of InferencePools."""
    columns = [
        _column("Ready", _condition("Ready", "status"), "Whether a request would succeed"),
        _column("Model", ".status.modelName", "Name of the model"),
        _column("Replicas", ".status.replicaSummary", "Pods that are ready of those that are wanted"),
        _column("URL", ".status.url", "Where clients reach the pool"),
        _column("Reason", _condition("Ready", "reason"), "Why"),
        _AGE,
    ]
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return _crd(InferencePool, "tlpool", columns, scale)


def models() -> dict[str, Any]:
    """The CustomResourceDefinition of InferenceModels."""
    columns = [
        _column("Accepted", _condition("Accepted", "status"), "Whether the name is served"),
        _column("Model", ".spec.modelName", "Name that clients ask for"),
        _column("Pool", ".spec.poolRef.name", "The pool that serves it"),
        _column("Criticality", ".spec.criticality", "What happens to it under load", priority=1),
        _column("Reason", _condition("Accepted", "reason"), "Why"),
        _AGE,
    ]
    return _crd(InferenceModel, "tlmodel", columns, {})


def all_crds() -> dict[str, dict[str, Any]]:
    """Every CustomResourceDefinition by its plural name."""
    return {crd["spec"]["names"]["plural"]: crd for crd in (pools(), models())}


def as_yaml(value: Any) -> str:
    """A document, the same for the same value."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)


def chart_template(crd: dict[str, Any]) -> str:
    """The definition as a template of the chart, behind `crds.install` and `crds.keep`."""
    body = as_yaml({"spec": crd["spec"]})
    if "{{" in body:
        raise ValueError("the text of a definition would be taken for a template: it has '{{' in it")
    lines = [
        "{{- if .Values.crds.install }}",
        f"apiVersion: {crd['apiVersion']}",
        f"kind: {crd['kind']}",
        "metadata:",
        f"  name: {crd['metadata']['name']}",
        "  labels:",
        '    {{- include "treeline.labels" . | nindent 4 }}',
        "  {{- if .Values.crds.keep }}",
        "  annotations:",
        "    helm.sh/resource-policy: keep",
        "  {{- end }}",
    ]
    return GENERATED + "\n".join(lines) + "\n" + body + "{{- end }}\n"
