"""Whose namespace a request is in: the one of the client whom our edge names; and the salt for engines of others.

A Treeline runtime reads the edge's headers itself. Other engines (vLLM, SGLang) know salts alone, so the picker writes
one into the body; since it replaces what the caller wrote there, no caller can choose another client's.
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
"""The session's header in sgl-model-gateway, which pays no regard to `x-session-id`; so this one goes before it."""


class Cache(msgspec.Struct, frozen=True, gc=False):
    """The namespace that a request's prefix is cached in, the members that its body must have for that, if any, and
    the client who asks, as far as the edge knows."""

    namespace: str | None
    members: Mapping[str, str | None] | None = None
    client: str | None = None


class Isolation(msgspec.Struct, frozen=True, gc=False):
    """What this picker believes of clients. `trust_edge`: the proxy is our own Envoy, which sets the client's headers
    and removes what callers send; without it they are anybody's word and count for nothing. `key` is the secret of
    derived salts, the same in every picker of a gateway and after a restart."""

    trust_edge: bool = False
    key: bytes = b""

    @classmethod
    def of(cls, trust_edge: bool, curve: CurveKeys | None) -> Self:
        """With a key made from the key pair that all pickers of a gateway mount. Without a pair, anybody who knows a
        client's name can compute its salt, but to use it must reach an engine past the edge."""
        secret = b"" if curve is None else curve.secret
        return cls(trust_edge, hashlib.sha256(b"treeline.client-salt\0" + secret).digest())

    def client(self, headers: Mapping[str, str]) -> str | None:
        """Who asks, by the edge's word; `None` if it is not known."""
        return headers.get(names.CLIENT) or None if self.trust_edge else None

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """The client whose cache is its own; `None` where the cache is everybody's."""
        return self.client(headers) if headers.get(names.ISOLATION) == names.PER_KEY else None

    def session(self, headers: Mapping[str, str], pool: str | None) -> int:
        """The session that a request says it belongs to (see `picking.sessions`); 0 without one. Clients that the edge
        knows have sessions of their own, as pools have: no client can name another's."""
        named = headers.get(ROUTING_KEY) or headers.get(names.SESSION_ID)
        return session_number(self.key, pool or "", self.client(headers) or "", named) if named else 0

    def must_salt(self, headers: Mapping[str, str], registry: ModelRegistry) -> bool:
        """Whether the body has to say whose cache it uses. Where one engine knows salts alone every body does: when an
        endpoint has gone, the proxy may send its requests to any other."""
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
        """Which cache a request to an endpoint of `pool`, which is asked for `model`, uses. Raises `PromptError`."""
        body = registry.adapters_of(pool).read(body, model, path)
        client, tenant = self.client(headers), self.tenant(headers)
        if tenant is None or not self.must_salt(headers, registry):
            return Cache(namespace_of(body, tenant), client=client)
        salt = client_salt(self.key, tenant, salt_of(body))
        # SGLang joins the two where it speaks OpenAI's language; its native path reads the second alone.
        native = path.endswith("/generate")
        members = {_CACHE_SALT: salt, _EXTRA_KEY: salt if native else None}
        if registry.isolates_clients(pool):
            return Cache(namespace_of({**body, **members}, tenant), members, client)
        # What its events name is the one salt.
        return Cache(namespace_of({**body, _CACHE_SALT: salt, _EXTRA_KEY: None}), members, client)


NO_ISOLATION: Final = Isolation()
"""All callers are alike."""
