"""Lists of metadata alone: which objects there are, in which version, for a fraction of the bytes."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import msgspec

from treeline_operator.kube.errors import Unavailable
from treeline_operator.kube.transport import Answer, Call

_ACCEPT: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE: Final = 500


class Asker(Protocol):
    """Whoever sends requests. Raises KubeError."""

    async def request(self, call: Call) -> Answer:
        """The answer to one request."""


class Meta(msgspec.Struct):
    """What tells an object and its version from all others."""

    name: str
    uid: str
    namespace: str = ""
    resourceVersion: str = ""


class Listing(NamedTuple):
    """All objects of a collection as of ``version``."""

    items: list[Meta]
    version: str


class _ListMeta(msgspec.Struct):
    resourceVersion: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Item(msgspec.Struct):
    metadata: Meta


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[_Item] | None = None  # null where there are none


async def list_metadata(cluster: Asker, plural: str, path: str, selector: str = "") -> Listing:
    """All pages of a collection. Raises KubeError, of which Unavailable where the answer is no such list."""
    query = [("limit", str(_PAGE)), *([("labelSelector", selector)] if selector else [])]
    found: list[Meta] = []
    more = ""
    while True:
        asked = [*query, ("continue", more)] if more else query
        answer = await cluster.request(Call("list", plural, path, asked, accept=_ACCEPT))
        try:
            page = msgspec.json.decode(answer.body, type=_Page)
        except msgspec.MsgspecError as exc:
            raise Unavailable(f"the answer is no list of metadata: {exc}") from exc
        found += [item.metadata for item in page.items or ()]
        more = page.metadata.continue_
        if not more:
            return Listing(found, page.metadata.resourceVersion)
