"""What a real API server says of an object, without keeping it."""

from __future__ import annotations

from typing import Any

import httpx

from support.control_plane import ControlPlane

PLURALS = {"InferencePool": "inferencepools", "InferenceModel": "inferencemodels"}


class Api:
    """Dry runs of creations, with strict validation."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._http = plane.http()
        self._namespace = namespace

    def create(self, obj: dict[str, Any]) -> httpx.Response:
        path = f"/apis/treeline.dev/v1alpha1/namespaces/{self._namespace}/{PLURALS[obj['kind']]}"
        return self._http.post(path, params={"dryRun": "All", "fieldValidation": "Strict"}, json=obj)

    def refusal(self, obj: dict[str, Any]) -> str:
        """What the API server says; empty if it takes the object."""
        reply = self.create(obj)
        return "" if reply.is_success else str(reply.json()["message"])

    def close(self) -> None:
        self._http.close()
