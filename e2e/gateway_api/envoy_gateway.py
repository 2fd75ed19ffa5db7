"""Envoy Gateway in a cluster without a registry: built from its Go module, installed by its own chart.

It knows no InferencePool by itself. Envoy AI Gateway's controller is the extension that does: Envoy Gateway hands it
what it made of an HTTPRoute, and it puts our picker (ext_proc) and the picker's choice (a header) into that. The Envoys
are of our own gateway's image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from e2e.kit.kube import Kube

CLASS: Final = "envoy"
PROGRAMS: Final = ("envoy-gateway", "ai-gateway")
"""Names in scripts/control_plane.sh; each program brings its charts along."""
SYSTEM: Final = "envoy-gateway-system"
AI_SYSTEM: Final = "envoy-ai-gateway-system"
UPSTREAM_CRDS: Final = Path(__file__).parent / "crds"
_CONTROLLER: Final = "gateway.envoyproxy.io/gatewayclass-controller"
_TAG: Final = "e2e"
_GATEWAY_IMAGE: Final = f"docker.io/library/treeline-e2e-envoy-gateway:{_TAG}"
_AI_IMAGE: Final = f"docker.io/library/treeline-e2e-ai-gateway:{_TAG}"
_WATCHED_BY_AI: Final = ("backends", "httproutefilters")
"""Envoy Gateway's own kinds without which its extension does not start; no others are needed."""
_PATIENCE: Final = "--timeout=120s"


def images(programs: Mapping[str, Path]) -> dict[str, Path]:
    """List the images that the nodes must have, each of one program."""
    return {
        _GATEWAY_IMAGE: programs["envoy-gateway"] / "envoy-gateway",
        _AI_IMAGE: programs["ai-gateway"] / "ai-gateway",
    }


class EnvoyGateway:
    """Owns an installation: ``remove`` removes all of it, and a second ``install`` repairs the first."""

    def __init__(self, kube: Kube, programs: Mapping[str, Path], envoy_image: str) -> None:
        self._kube = kube
        self._gateway, self._ai = programs["envoy-gateway"], programs["ai-gateway"]
        self._envoy_image = envoy_image

    def install_crds(self) -> None:
        """Install the CRDs of Gateway API and of the Inference Extension."""
        self._apply_files(UPSTREAM_CRDS.glob("*/*.yaml"))

    def install(self) -> None:
        """Install everything, and a GatewayClass. Returns when both controllers are ready."""
        self.install_crds()
        self._install_extension()
        self._install_gateway(self._gateway_values(extended=True))

    def install_without_extension(self) -> None:
        """Install Envoy Gateway alone, which knows no InferencePool."""
        self.install_crds()
        self._install_gateway(self._gateway_values(extended=False))

    def _install_extension(self) -> None:
        kube = self._kube
        self._apply_files((self._ai / "ai-gateway-crds-helm/templates").glob("*.yaml"))
        definitions = self._gateway / "gateway-helm/charts/crds/crds/generated"
        self._apply_files(definitions / f"gateway.envoyproxy.io_{kind}.yaml" for kind in _WATCHED_BY_AI)
        kube.helm(
            *("upgrade", "--install", "envoy-ai-gateway", str(self._ai / "ai-gateway-helm")),
            *("--namespace", AI_SYSTEM, "--create-namespace", "-f", "-"),
            stdin=json.dumps(self._ai_values()),
        )
        kube.kubectl("-n", AI_SYSTEM, "rollout", "status", "deployment/ai-gateway-controller", _PATIENCE)

    def _install_gateway(self, values: dict[str, Any]) -> None:
        kube, chart = self._kube, self._gateway / "gateway-helm"
        kube.helm(
            *("upgrade", "--install", "envoy-gateway", str(chart), "-f", str(chart / "values.tmpl.yaml")),
            *("--namespace", SYSTEM, "--create-namespace", "-f", "-"),
            stdin=json.dumps(values),
        )
        kube.kubectl("-n", SYSTEM, "rollout", "status", "deployment/envoy-gateway", _PATIENCE)
        # Its Envoys are not in the namespaces of the Gateways: the policies of a pool's pods let them in by this label.
        kube.kubectl("label", "--overwrite", "namespace", SYSTEM, "treeline.dev/gateway-access=true")
        kube.apply("default", gateway_class())

    def remove(self) -> None:
        """Remove everything that ``install`` brought, definitions and their objects included."""
        kube = self._kube
        if CLASS in kube.kubectl("get", "gatewayclass", "-o", "name", check=False):
            kube.kubectl("delete", "gateway", "--all", "-A", _PATIENCE, timeout_s=130)
            kube.kubectl("delete", "gatewayclass", CLASS, _PATIENCE, timeout_s=130)
        for release, namespace in (("envoy-gateway", SYSTEM), ("envoy-ai-gateway", AI_SYSTEM)):
            kube.helm("uninstall", release, "--namespace", namespace, "--ignore-not-found", "--wait")
            kube.kubectl("delete", "namespace", namespace, "--ignore-not-found", _PATIENCE, timeout_s=130)
        definitions = kube.kubectl("get", "crd", "-o", "name").split()
        groups = (
            "aigateway.envoyproxy.io",
            "gateway.envoyproxy.io",
            "gateway.networking.k8s.io",
            "inference.networking.k8s.io",
            "inference.networking.x-k8s.io",
        )
        gone = [name for name in definitions if name.endswith(groups)]
        if gone:
            kube.kubectl("delete", *gone, _PATIENCE, timeout_s=130)

    def _apply_files(self, files: Any) -> None:
        words = [word for file in sorted(files) for word in ("-f", str(file))]
        self._kube.kubectl("apply", "--server-side", "--force-conflicts", *words)

    def _ai_values(self) -> dict[str, Any]:
        repository, _, tag = _AI_IMAGE.rpartition(":")
        image = {"repository": repository, "tag": tag}
        controller = {"image": image, "imagePullPolicy": "Never", "leaderElection": {"enabled": False}}
        return {"controller": controller, "envoyGateway": {"namespace": SYSTEM}}

    def _gateway_values(self, *, extended: bool) -> dict[str, Any]:
        proxy = {"container": {"image": self._envoy_image}}
        # a cluster without a load balancer: an address that is reached from where the journeys run
        infrastructure = {"envoyDeployment": proxy, "envoyService": {"type": "ClusterIP"}}
        translation = {part: {"includeAll": True} for part in ("listener", "route", "cluster", "secret")}
        extension = {
            "backendResources": [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "version": "v1"}],
            "hooks": {"xdsTranslator": {"translation": translation, "post": ["Translation", "Cluster", "Route"]}},
            "service": {
                "fqdn": {
                    "hostname": f"ai-gateway-controller.{AI_SYSTEM}.svc.cluster.local",
                    "port": 1063,
                }
            },
        }
        return {
            "crds": {"enabled": False},
            "global": {"images": {"envoyGateway": {"image": _GATEWAY_IMAGE, "pullPolicy": "Never"}}},
            "topologyInjector": {"enabled": False},
            # its configuration is read at its start: another one is another pod
            "deployment": {"pod": {"labels": {"extended": str(extended).lower()}}},
            "config": {
                "envoyGateway": {
                    "gateway": {"controllerName": _CONTROLLER},
                    "extensionApis": {"enableBackend": True, "enableEnvoyPatchPolicy": True},
                    "envoyProxy": {
                        "provider": {"type": "Kubernetes", "kubernetes": infrastructure},
                        "shutdown": {"drainTimeout": "5s", "minDrainDuration": "1s"},
                    },
                    **({"extensionManager": extension} if extended else {}),
                }
            },
        }


def gateway_class() -> dict[str, Any]:
    """Return the GatewayClass that Envoy Gateway serves."""
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GatewayClass",
        "metadata": {"name": CLASS},
        "spec": {"controllerName": _CONTROLLER},
    }


def gateway(name: str, class_name: str) -> dict[str, Any]:
    """Return a Gateway with one listener for HTTP."""
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": name},
        "spec": {
            "gatewayClassName": class_name,
            "listeners": [{"name": "http", "protocol": "HTTP", "port": 80}],
        },
    }
