"""Which optional APIs a cluster offers: asked in one request, cheap to ask again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from treeline_operator.kube.client import Call, Cluster

AGGREGATED: Final = "application/json;v=v2;g=apidiscovery.k8s.io;as=APIGroupDiscoveryList"

OPTIONAL: Final = frozenset(
    {
        "gateway.networking.k8s.io/v1/Gateway",
        "gateway.networking.k8s.io/v1/HTTPRoute",
        "inference.networking.k8s.io/v1/InferencePool",
        "inference.networking.x-k8s.io/v1alpha2/InferencePool",
        "monitoring.coreos.com/v1/PodMonitor",
        "monitoring.coreos.com/v1/ServiceMonitor",
        "monitoring.coreos.com/v1/PrometheusRule",
        "keda.sh/v1alpha1/ScaledObject",
    }
)
"""The kinds that the operator uses where they are there, ``group/version/Kind``."""

METRICS: Final = {
    "metrics.k8s.io": "PodMetrics",
    "custom.metrics.k8s.io": "MetricValueList",
    "external.metrics.k8s.io": "ExternalMetricValueList",
}
"""Groups that an autoscaler reads. What they list changes with the metrics: that they are served is what counts."""


class Discovery:
    """``apis`` is what the last ``refresh`` found; a kind that appears later is found by a later one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._etag = ""
        self.apis: frozenset[str] = frozenset()

    async def refresh(self) -> frozenset[str]:
        """Ask again; an unchanged list is not sent again. A KubeError leaves ``apis`` as they were."""
        headers = (("If-None-Match", self._etag),) if self._etag else ()
        answer = await self._cluster.request(Call("get", "apis", "/apis", accept=AGGREGATED, headers=headers))
        if answer.code != 304:
            self.apis = frozenset(_found(msgspec.json.decode(answer.body)))
            self._etag = answer.headers.get("ETag", "")
        return self.apis


def _found(reply: dict[str, Any]) -> Iterator[str]:
    for group in reply["items"]:
        name = group["metadata"]["name"]
        for version in group["versions"]:
            prefix = f"{name}/{version['version']}"
            # stale: an aggregated API whose server does not answer
            if name in METRICS and version.get("freshness") != "Stale":
                yield f"{prefix}/{METRICS[name]}"
            for resource in version.get("resources", ()):
                kind = f"{prefix}/{resource.get('responseKind', {}).get('kind', '')}"
                if kind in OPTIONAL:
                    yield kind
