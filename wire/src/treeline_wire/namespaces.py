"""Namespaces: prefixes are shared only within one. A namespace is a string, or None for the common one.

Made from the client (by its API key), the caller's salt and the LoRA adapter. A salt alone is its own namespace, equal
to the `cache_salt` of SGLang's events. All others start with NUL and continue as JSON; a salt that starts with NUL is
also written that way, so no caller can forge another's namespace. Our runtime publishes its namespace as `cache_salt`;
the adapter in it is the digest of its files, whose name the events have as `lora_name`.
"""

from __future__ import annotations

import hashlib
import hmac
import json

_MARK = "\0"


def join_namespace(lora: str | None, salt: str | None, client: str | None = None) -> str | None:
    """Returns the namespace of adapter, salt and client; None without any of them. Empty strings count as None.

    Injective: no two triples share a namespace.
    """
    parts = {"lora": lora or None, "salt": salt or None}
    if client:
        return _MARK + json.dumps({"client": client, **parts}, ensure_ascii=False)
    if lora or (salt and salt.startswith(_MARK)):
        return _MARK + json.dumps(parts, ensure_ascii=False)
    return salt or None


def adapter_of(namespace: str | None) -> str | None:
    """Returns the adapter in a namespace from `join_namespace`."""
    if namespace is None or not namespace.startswith(_MARK):
        return None
    adapter: str | None = json.loads(namespace[1:])["lora"]
    return adapter


def with_adapter(namespace: str | None, adapter: str | None) -> str | None:
    """Returns a namespace from `join_namespace` with this adapter in place of its own; the same if one of the two is
    None.
    """
    if namespace is None or adapter is None or adapter_of(namespace) in (None, adapter):
        return namespace
    return _MARK + json.dumps({**json.loads(namespace[1:]), "lora": adapter}, ensure_ascii=False)


def join_salt(cache_salt: str | None, extra_key: str | None) -> str | None:
    """Joins the two salts that a request may have. Injective."""
    if extra_key or (cache_salt and cache_salt.startswith(_MARK)):
        return _MARK + json.dumps([cache_salt or None, extra_key or None], ensure_ascii=False)
    return cache_salt or None


def client_salt(key: bytes, client: str, salt: str | None) -> str:
    """Returns the salt for a client and its own salt, for engines that know only salts: 64 hexadecimal digits.

    Without the secret `key` nobody can compute another client's salt, or the client of a salt.
    """
    named = json.dumps([client, salt or None], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hmac.digest(key, named, hashlib.sha256).hex()


def event_namespace(lora_name: str | None, cache_salt: str | None) -> str | None:
    """Returns the namespace of a stored block's event (`lora_name` and `cache_salt`)."""
    if cache_salt and cache_salt.startswith(_MARK):
        return cache_salt
    return join_namespace(lora_name, cache_salt)
