"""A parsed request: all fields that the picker needs for routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from treeline_wire.namespaces import with_adapter

from treeline_epp.endpoints.spec import EndpointSpec


class Request(Struct, frozen=True):
    """A parsed request.

    `key` is its prefix key (`treeline_wire.keys`), None if it has none (no tokenizer, no text): then only load counts.
    `prompt_tokens_estimate` counts the whole prompt; `key_tokens_estimate` the part that the key covers, if that is
    only the beginning of the prompt (else None). `max_output_tokens` is the longest output that the request allows,
    None where it does not say; `outputs` is the number of outputs. `subset` limits the choice to these addresses:
    `ip:port`, or a bare IP for all its ports. `pool` limits it to one pool. `priority` is that of its objective, the
    higher the more urgent; `sheddable`: refuse it rather than let it queue for long. `listed`: an engine or the
    configuration names its model; otherwise engines may accept the name, or not know it yet. `fallback_pools` may take
    it, perhaps under other names, while its pool has no endpoint. `session` is the number of its session, 0 without one
    (`picking.sessions`); `fork`: the number of requests that begin like this one and follow at once, 0 if unknown.

    `apart`: one endpoint may compute its prompt and another one its answer.

    `client` is the client's name from the edge, None if unknown. `asked` is the model's name in the body, if a pool
    serves it; `rewrite` is its name in the pool, if that differs; `members` are members of the body to set to these
    values. `learn` is called with the bytes of a key and their true count of tokens, `sent` with the name of an
    endpoint that the request goes to, and the time.
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
    apart: bool = False
    client: str | None = None
    asked: str | None = None
    rewrite: str | None = None
    members: Mapping[str, Any] | None = None
    learn: Callable[[int, int], None] | None = None
    sent: Callable[[str, float], None] | None = None

    def namespace_at(self, spec: EndpointSpec) -> str | None:
        """Return its namespace at an endpoint, where its adapter may have other files than at others."""
        return with_adapter(self.namespace, spec.adapters.get(self.model or ""))
