"""How a namespace is spelled: prefixes are shared only inside one. It is one string, or None for the common one.

It is made from the client whom the edge has recognised by its key, the salt that the caller chose and the LoRA adapter.
A salt alone is its own namespace string, so that it equals the `cache_salt` of SGLang's events. Every other namespace
starts with NUL and is JSON after it; a salt that starts with NUL itself is written the long way, too, so that no caller
can name by its salt what belongs to an adapter or to another client. Our runtime publishes its namespace verbatim as
`cache_salt`.
"""

from __future__ import annotations

import hashlib
import hmac
import json

_MARK = "\0"


def join_namespace(lora: str | None, salt: str | None, client: str | None = None) -> str | None:
    """The namespace of an adapter, a salt and a client; None when there is none of them. Empty strings count as None.

    Injective: no two triples share a namespace, whatever the strings are.
    """
    parts = {"lora": lora or None, "salt": salt or None}
    if client:
        return _MARK + json.dumps({"client": client, **parts}, ensure_ascii=False)
    if lora or (salt and salt.startswith(_MARK)):
        return _MARK + json.dumps(parts, ensure_ascii=False)
    return salt or None


def adapter_of(namespace: str | None) -> str | None:
    """The LoRA adapter of a namespace that `join_namespace` made, apart from salt and client."""
    if namespace is None or not namespace.startswith(_MARK):
        return None
    adapter: str | None = json.loads(namespace[1:])["lora"]
    return adapter


def join_salt(cache_salt: str | None, extra_key: str | None) -> str | None:
    """One salt from the two that a request may carry. Injective, too."""
    if extra_key or (cache_salt and cache_salt.startswith(_MARK)):
        return _MARK + json.dumps([cache_salt or None, extra_key or None], ensure_ascii=False)
    return cache_salt or None


def client_salt(key: bytes, client: str, salt: str | None) -> str:
    """The salt that stands for a client and its own salt at an engine that knows salts alone: 64 hexadecimal digits.

    With a secret `key`, no one without it can compute another client's salt, or find the client of a salt.
    """
    named = json.dumps([client, salt or None], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hmac.digest(key, named, hashlib.sha256).hex()


def event_namespace(lora_name: str | None, cache_salt: str | None) -> str | None:
    """The namespace that a stored block's event names (its `lora_name` and `cache_salt`)."""
    if cache_salt and cache_salt.startswith(_MARK):
        return cache_salt
    return join_namespace(lora_name, cache_salt)
