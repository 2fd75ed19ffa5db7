"""What reflectors see goes into the store: whole objects of the children, and an audit of our own kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from treeline_kube.resources import Collection, Ref

from treeline_operator.controller.store import Store


class Meta(msgspec.Struct):
    """What tells an object and its version from all others."""

    name: str
    uid: str
    namespace: str = ""
    resourceVersion: str = ""


class _Item(msgspec.Struct):
    metadata: Meta


_item = msgspec.json.Decoder(_Item).decode
_decode: Callable[[msgspec.Raw], dict[str, Any]] = msgspec.json.decode


class AuditSink:
    """Drops from the store what a list does not name, and passes on what it names; it puts nothing in."""

    def __init__(self, store: Store, collection: Collection, on_list: Callable[[dict[Ref, Meta]], None]) -> None:
        self._store = store
        self._resource, self._namespace, _ = collection
        self._on_list = on_list
        self._named: dict[Ref, Meta] = {}

    def begin(self) -> None:
        """A list begins."""
        self._named = {}

    def listed(self, data: msgspec.Raw) -> None:
        """The list names this object."""
        ref, meta = self._address(data)
        self._named[ref] = meta

    def complete(self, version: str) -> bool:
        """The list has ended."""
        named, self._named = self._named, {}
        uids = {meta.uid for meta in named.values()}
        resource = self._resource
        gone = self._store.retain(resource.api_version, resource.kind, self._namespace, uids, version)
        self._on_list(named)
        return gone > 0

    def changed(self, data: msgspec.Raw) -> bool:
        """Nothing is watched."""
        return False

    def deleted(self, data: msgspec.Raw) -> bool:
        """Nothing is watched."""
        return False

    def _address(self, data: msgspec.Raw) -> tuple[Ref, Meta]:
        meta = _item(data).metadata
        return Ref(self._resource.api_version, self._resource.kind, meta.namespace, meta.name), meta


class StoreSink(AuditSink):
    """Keeps the objects of a collection in the store."""

    def listed(self, data: msgspec.Raw) -> None:
        """The list names this object."""
        super().listed(data)
        self.changed(data)

    def changed(self, data: msgspec.Raw) -> bool:
        """An object came or changed."""
        # items of a list do not say what they are
        kind = {"apiVersion": self._resource.api_version, "kind": self._resource.kind}
        return self._store.put({**kind, **_decode(data)})

    def deleted(self, data: msgspec.Raw) -> bool:
        """An object went."""
        ref, meta = self._address(data)
        return self._store.remove(ref, meta.uid, meta.resourceVersion)
