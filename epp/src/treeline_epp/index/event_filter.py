"""The rules for blocks of engines' events: whether they decide a prefix, in which namespace, with which texts."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from operator import itemgetter

from treeline_wire.events import BlockRemoved, BlockStored
from treeline_wire.keys import escape
from treeline_wire.namespaces import join_namespace


class Skip(StrEnum):
    """The reason why blocks of an event are not in the tree. The values are metric labels."""

    REMOTE = "remote"  # in a store that several engines share: not the pod's own
    GROUP = "group"  # a KV group that does not decide the prefix (sliding window, Mamba), or a second group
    NO_TEXT = "no_text"  # no tokenizer, no tokens, or tokens that do not fit the blocks (masked blocks)
    EXTRA_KEYS = "extra_keys"  # multimodal items or embeddings: the text is only a part of the key
    HASHES = "hashes"  # a hash twice in one event, or its own parent
    NAMESPACE = "namespace"  # a first block of another namespace
    ADAPTER = "adapter"  # an adapter with a number and no name (vLLM up to 0.11): no request can match it
    CROWDED = "crowded"  # the same text under too many hashes
    FULL = "full"  # the index is at its limit
    UNKNOWN_REMOVAL = "unknown_removal"  # removed, but never seen


class Tier(StrEnum):
    """A tier of a pod's cache below the device, the faster first. The values are metric labels."""

    HOST = "host"
    DISK = "disk"


_MEDIA = {"GPU": None, "DEVICE": None, "HBM": None, "CPU": Tier.HOST, "CPU_PINNED": Tier.HOST, "HOST": Tier.HOST}
"""Spellings of media, in capitals. Others (DISK, STORAGE, EXTERNAL) are disks, or as slow."""
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})
"""Kinds of KV groups whose blocks decide how far a prefix is cached."""


def skip_reason(event: BlockStored | BlockRemoved) -> Skip | None:
    """Return why an event decides no prefix, as far as the event alone shows it; None if it may."""
    if event.locality is not None and event.locality.upper() != "LOCAL":
        return Skip.REMOTE
    if type(event) is BlockStored:
        if event.kv_cache_spec_kind not in _PREFIX_KINDS:
            return Skip.GROUP
        if event.lora_id is not None and not event.lora_name:
            return Skip.ADAPTER
    return None


def tier_of(event: BlockStored | BlockRemoved) -> Tier | None:
    """Return the tier that an event is about; None for the device."""
    return None if event.medium is None else _MEDIA.get(event.medium.upper(), Tier.DISK)


def namespace_of(event: BlockStored) -> tuple[str | None, bool]:
    """Return the namespace of an event, and whether its tokens alone make its text.

    vLLM lists in `extra_keys`, untagged and for each block in this order: the LoRA's name, multimodal items, the salt
    (prompt's first block only), a digest of prompt embeddings (`generate_block_hash_extra_keys` and
    `to_event_extra_keys` in vllm/v1/core/kv_cache_utils.py). Items are pairs and digests are bytes, so the LoRA's name,
    which `lora_name` repeats, and the salt are the only strings.
    """
    if event.extra_keys is None:
        return event.namespace, True
    salt, plain = None, True
    for at, extra in enumerate(event.extra_keys):
        rest = list(extra) if isinstance(extra, list | tuple) else [] if extra is None else [extra]
        if rest and event.lora_name is not None and rest[0] == event.lora_name:
            del rest[0]
        if at == 0 and event.parent_block_hash is None:
            strings = [place for place, item in enumerate(rest) if isinstance(item, str)]
            salt = rest.pop(strings[-1]) if strings else None
        plain = plain and not rest
    if salt is None:
        return event.namespace, plain
    return join_namespace(event.lora_name, salt), plain


def block_texts(table: Sequence[bytes], tokens: Sequence[int], width: int) -> list[bytes]:
    """Return the texts of blocks of `width` tokens; ids beyond the table as in `PrefixKeys.block_key`. O(tokens).

    Most of an event's time is spent here, nearly all of it in cache misses: so there are only these two passes over the
    parts, and no function call for each.
    """
    try:
        parts = itemgetter(*tokens)(table) if len(tokens) > 1 else (table[tokens[0]],)
    except IndexError:
        size = len(table)
        parts = tuple(table[token] if token < size else escape(token) for token in tokens)
    return list(map(b"".join, zip(*[iter(parts)] * width, strict=True)))
