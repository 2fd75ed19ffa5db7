"""A request that can be routed, as it was read: all that the picker needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct


class Request(Struct, frozen=True):
    """A parsed request.

    `key` is its prefix key (`treeline_wire.keys`), None if it has none (no tokenizer, no text): then only load counts.
    `prompt_tokens_estimate` counts the whole prompt; `key_tokens_estimate` what the key covers, where that is only the
    beginning of the prompt (else None). `max_output_tokens` is the longest output that the request allows, None where
    it does not say; it asks for so many `outputs`. `subset` limits the choice to these addresses: `ip:port`, or a bare
    IP for all its ports. `pool` limits it to one pool. `priority` is that of its objective, the higher the more urgent;
    `sheddable`: refuse it rather than let it queue for long. `listed`: an engine or the configuration names its model;
    else it is any name, which engines may take or may not know yet. `fallback_pools` may take it, under other names
    perhaps, while its pool has no endpoint. `session` is a number of the session that it belongs to, 0 of none
    (`picking.sessions`); `fork`: how many requests that begin like this one follow at once, 0 where that is not known.

    `client` asks, by the edge's word, None where that is not known. `asked` is the model's name in the body, where a
    pool serves it; `rewrite` is its name in the pool, where that is another one; `members` are those that the body must
    have besides, with these values alone. `learn` is told of bytes of a key and their true count of tokens.
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
    client: str | None = None
    asked: str | None = None
    rewrite: str | None = None
    members: Mapping[str, str | None] | None = None
    learn: Callable[[int, int], None] | None = None
