"""Which optional APIs a cluster offers: asked in one request, cheap to ask again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from treeline_kube.connection import Call, Connection

AGGREGATED: Final = "application/json;v=v2;g=apidiscovery.k8s.io;as=APIGroupDiscoveryList"


class Discovery:
    """`apis` are those of `kinds` (each `group/version/Kind`) that the last `refresh` found."""

    def __init__(self, client: Connection, kinds: Iterable[str]) -> None:
        self._client = client
        self._kinds = frozenset(kinds)
        self._etag = ""
        self.apis: frozenset[str] = frozenset()

    async def refresh(self) -> frozenset[str]:
        """Ask again; an unchanged list is not sent again. A KubeError leaves `apis` as they were."""
        headers = (("If-None-Match", self._etag),) if self._etag else ()
        answer = await self._client.request(Call("get", "apis", "/apis", accept=AGGREGATED, headers=headers))
        if answer.code != 304:
            self.apis = self._kinds & _offered(msgspec.json.decode(answer.body))
            self._etag = answer.headers.get("ETag", "")
        return self.apis


def _offered(reply: dict[str, Any]) -> set[str]:
    return {
        f"{group['metadata']['name']}/{version['version']}/{resource.get('responseKind', {}).get('kind', '')}"
        for group in reply["items"]
        for version in group["versions"]
        for resource in version.get("resources", ())
    }
