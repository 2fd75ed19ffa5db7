"""The namespace of a request, by the client that our edge names; and the salt for other engines.

A Treeline runtime reads the edge's headers itself. Other engines (vLLM, SGLang) know only salts, so the picker writes
one into the body; since it replaces the caller's salt, no caller can choose another client's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec
from treeline_wire import headers as names
from treeline_wire.namespaces import client_salt
from treeline_wire.prompt import namespace_of, salt_of
from treeline_wire.security import CurveKeys

from treeline_epp.picking.sessions import session_number
from treeline_epp.requests.model_registry import ModelRegistry

_CACHE_SALT, _EXTRA_KEY = "cache_salt", "extra_key"
ROUTING_KEY: Final = "x-smg-routing-key"
"""The session's header in sgl-model-gateway, which ignores `x-session-id`; so this one counts first."""


class Cache(msgspec.Struct, frozen=True, gc=False):
    """The namespace of a request's prefix, the members that its body must have for that, if any, and the client's name,
    if the edge knows it.
    """

    namespace: str | None
    members: Mapping[str, str | None] | None = None
    client: str | None = None


class Isolation(msgspec.Struct, frozen=True, gc=False):
    """The picker's trust in clients. `trust_edge`: the proxy is our own Envoy, which sets the client's headers and
    removes those of callers; otherwise they are ignored. `key` is the secret of derived salts, the same in every picker
    of a gateway and after a restart.
    """

    trust_edge: bool = False
    key: bytes = b""

    @classmethod
    def of(cls, trust_edge: bool, curve: CurveKeys | None) -> Self:
        """Make one with a key from the key pair that all pickers of a gateway mount. Without a pair, anybody who knows
        a client's name can compute its salt, but must reach an engine past the edge to use it.
        """
        secret = b"" if curve is None else curve.secret
        return cls(trust_edge, hashlib.sha256(b"treeline.client-salt\0" + secret).digest())

    def client(self, headers: Mapping[str, str]) -> str | None:
        """Return the client's name from the edge; `None` if unknown."""
        return headers.get(names.CLIENT) or None if self.trust_edge else None

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """Return the client that has a cache of its own; `None` if the cache is shared by all."""
        return self.client(headers) if headers.get(names.ISOLATION) == names.PER_KEY else None

    def session(self, headers: Mapping[str, str], pool: str | None) -> int:
        """Return the number of the session that a request names (see `picking.sessions`); 0 without one. Clients that
        the edge knows have sessions of their own, and so have pools: no client can name another's.
        """
        named = headers.get(ROUTING_KEY) or headers.get(names.SESSION_ID)
        return session_number(self.key, pool or "", self.client(headers) or "", named) if named else 0

    def must_salt(self, headers: Mapping[str, str], registry: ModelRegistry) -> bool:
        """Return whether the body needs a salt. If one engine knows only salts, every body does: when an endpoint has
        gone, the proxy may send its requests to any other.
        """
        return self.tenant(headers) is not None and not registry.isolates_clients()

    def cache(
        self,
        body: Mapping[str, Any],
        path: str,
        headers: Mapping[str, str],
        registry: ModelRegistry,
        pool: str,
        model: str | None = None,
    ) -> Cache:
        """Return the cache of a request for `model` to an endpoint of `pool`. Raises `PromptError`."""
        body = registry.adapters_of(pool).read(body, model, path)
        client, tenant = self.client(headers), self.tenant(headers)
        if tenant is None or not self.must_salt(headers, registry):
            return Cache(namespace_of(body, tenant), client=client)
        salt = client_salt(self.key, tenant, salt_of(body))
        # SGLang joins the two on OpenAI's paths; its native path reads only the second.
        native = path.endswith("/generate")
        members = {_CACHE_SALT: salt, _EXTRA_KEY: salt if native else None}
        if registry.isolates_clients(pool):
            return Cache(namespace_of({**body, **members}, tenant), members, client)
        # Its events name this one salt.
        return Cache(namespace_of({**body, _CACHE_SALT: salt, _EXTRA_KEY: None}), members, client)


NO_ISOLATION: Final = Isolation()
"""Callers are not told apart."""
