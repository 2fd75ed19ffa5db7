"""What the picker is asked."""

from __future__ import annotations

from msgspec import Struct


class PickRequest(Struct, frozen=True):
    """What the picker needs to know of a request.

    `key` is its prefix key (`treeline_wire.keys`), None if it has none (no tokenizer, no text): then only load counts.
    `prompt_tokens_estimate` counts the whole prompt; `key_tokens_estimate` what the key covers, where that is only the
    beginning of the prompt (else None). `max_output_tokens` is the longest output that the request allows, None where
    it does not say; it asks for so many `outputs`. `subset` limits the choice to these addresses: `ip:port`, or a bare
    IP for all its ports. `pool` limits it to one pool. `priority` is that of its objective, the higher the more urgent;
    `sheddable`: refuse it rather than let it queue for long. `listed`: an engine or the configuration names its model;
    else it is any name, which engines may take or may not know yet. `fallback_pools` may take it, under other names
    perhaps, while its pool has no endpoint. `session` is a number of the session that it belongs to, 0 of none
    (`picking.sessions`); `fork`: how many requests that begin like this one follow at once, 0 where that is not known.
    """

    request_id: str
    model: str | None = None
    namespace: str | None = None
    key: bytes | None = None
    prompt_tokens_estimate: int = 0
    key_tokens_estimate: int | None = None
    max_output_tokens: int | None = None
    outputs: int = 1
    subset: frozenset[str] | None = None
    pool: str | None = None
    priority: int = 0
    sheddable: bool = False
    listed: bool = True
    fallback_pools: tuple[str, ...] = ()
    session: int = 0
    fork: int = 0
