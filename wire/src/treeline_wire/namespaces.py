"""Namespaces: prefixes are shared only inside one. A namespace is one string, or None for the common one.

A salt alone is its own namespace string, so that it equals the `cache_salt` of SGLang's events. A LoRA adapter's
namespace starts with NUL, and a salt that does so itself is written the long way, too, so that a client cannot name an
adapter's namespace by its salt. Our runtime publishes its namespace verbatim as `cache_salt`.
"""

import json

_MARK = "\0"


def join_namespace(lora: str | None, salt: str | None) -> str | None:
    """The namespace of an adapter and a salt; None when there is neither. Empty strings count as None."""
    if lora or (salt and salt.startswith(_MARK)):
        return _MARK + json.dumps({"lora": lora or None, "salt": salt or None}, ensure_ascii=False)
    return salt or None


def join_salt(cache_salt: str | None, extra_key: str | None) -> str | None:
    """One salt from the two that a request may carry; both together never equal another pair's."""
    if extra_key:
        return json.dumps([cache_salt or None, extra_key], ensure_ascii=False)
    return cache_salt or None


def event_namespace(lora_name: str | None, cache_salt: str | None) -> str | None:
    """The namespace that a stored block's event names (its `lora_name` and `cache_salt`)."""
    if cache_salt and cache_salt.startswith(_MARK):
        return cache_salt
    return join_namespace(lora_name, cache_salt)
