"""What the picker is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What the picker needs to know of a request.

    `key` is its prefix key (`treeline_wire.keys`), None if it has none (no tokenizer, no text): then only load counts.
    `prompt_tokens_estimate` counts the whole prompt; `key_tokens_estimate` what the key covers, where that is only the
    beginning of the prompt (else None). `max_output_tokens` is the longest output that the request allows,
    None where it does not say. `subset` limits the choice to these addresses: `ip:port`, or a bare IP for all its
    ports. `pool` limits it to one pool. `sheddable`: refuse it rather than let it queue for long.
    """

    request_id: str
    model: str | None = None
    namespace: str | None = None
    key: bytes | None = None
    prompt_tokens_estimate: int = 0
    key_tokens_estimate: int | None = None
    max_output_tokens: int | None = None
    subset: frozenset[str] | None = None
    pool: str | None = None
    sheddable: bool = False
