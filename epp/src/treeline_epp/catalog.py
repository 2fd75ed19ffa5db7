"""What is served: which pool has which model, and how a request for it becomes a prefix key.

Written by the engines' watchers, read on every request. Renderers are shared by tokenizer fingerprint, so that
a hundred replicas of a model keep one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from treeline_wire.chat import ChatTemplate, TemplateError
from treeline_wire.keys import KeySelfTestError, PrefixKeys
from treeline_wire.models import ModelTarget, resolve_model, served_models
from treeline_wire.prompt import Prompt, prompt_of_chat
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.exchange import Immediate

log = logging.getLogger(__name__)

_FIRST_GUESS_BYTES_PER_TOKEN = 4.0
_LEARNING_RATE = 0.05


class Renderer:
    """Turns requests into prefix keys for one tokenizer and its chat template.

    ``keys`` is ``None`` when the tokenizer failed its self-test (``problem`` says why): requests are then routed
    by load alone. ``bytes_per_token`` is learnt from what the runtimes report.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.fingerprint = bundle.fingerprint
        self.problem: str | None = None
        self.bytes_per_token = _FIRST_GUESS_BYTES_PER_TOKEN
        self.keys: PrefixKeys | None = None
        self._template: ChatTemplate | None = None
        try:
            keys = PrefixKeys.from_bundle(bundle)
            keys.self_test()
            self.keys = keys
        except (KeySelfTestError, ValueError) as error:
            self.problem = f"no prefix keys for tokenizer {bundle.fingerprint}: {error}"
        if bundle.chat_template is not None:
            try:
                self._template = ChatTemplate(bundle.chat_template, special_tokens=bundle.special_tokens)
            except TemplateError as error:
                self.problem = (
                    f"chat requests have no prefix key with tokenizer {bundle.fingerprint}: {error}"
                )

    def chat_key(self, body: Mapping[str, Any]) -> bytes | None:
        """The key of a chat request; ``None`` without keys or template. Raises ``PromptError``, ``TemplateError``."""
        if self.keys is None or self._template is None:
            return None
        return self.keys.prompt_key_of(prompt_of_chat(body, self._template))

    def completion_keys(self, prompts: list[Prompt]) -> list[bytes]:
        """The keys of the prompts of one request; empty without keys."""
        return [] if self.keys is None else [self.keys.prompt_key_of(prompt) for prompt in prompts]

    def estimate_tokens(self, key_bytes: int) -> int:
        """How many tokens a key of so many bytes has, about."""
        return int(key_bytes / self.bytes_per_token) + 1

    def learn(self, key_bytes: int, tokens: int) -> None:
        """A runtime counted ``tokens`` in a prompt whose key has ``key_bytes``."""
        if tokens >= 16:  # short prompts are mostly template
            self.bytes_per_token += _LEARNING_RATE * (key_bytes / tokens - self.bytes_per_token)


class Catalog:
    """The models of every pool, and their renderers. One owner: the fleet."""

    def __init__(self) -> None:
        self._endpoints: dict[str, tuple[str, tuple[str, ...], str | None]] = {}
        self._renderers: dict[str, Renderer] = {}
        self._pools: dict[str, tuple[str, ...]] = {}
        self._by_pool: dict[str, Renderer] = {}
        self._started = int(time.time())

    def renderer(self, fingerprint: str) -> Renderer | None:
        """The renderer of a tokenizer that was added before."""
        return self._renderers.get(fingerprint)

    def add_renderer(self, bundle: TokenizerBundle) -> Renderer:
        """The renderer for a bundle; made only if its fingerprint is new."""
        known = self._renderers.get(bundle.fingerprint)
        if known is None:
            known = self._renderers[bundle.fingerprint] = Renderer(bundle)
            if known.problem is not None:
                log.warning(known.problem)
        return known

    def set_endpoint(self, name: str, pool: str, models: tuple[str, ...], fingerprint: str | None) -> None:
        """What an endpoint serves, and with which tokenizer (``None``: unknown)."""
        self._endpoints[name] = (pool, models, fingerprint)
        self._rebuild()

    def remove_endpoint(self, name: str) -> None:
        """The endpoint has gone; its models go with the last endpoint that serves them."""
        if self._endpoints.pop(name, None) is not None:
            self._rebuild()

    def resolve(self, model: str | None) -> ModelTarget:
        """The pool for a model. Raises ``ModelNotFound``."""
        return resolve_model(model, self._pools)

    def renderer_of(self, pool: str) -> Renderer | None:
        """The renderer for a pool; its endpoints serve one base model, so they share one."""
        return self._by_pool.get(pool)

    @property
    def empty(self) -> bool:
        """No endpoint has told its models yet, so no name can be called unknown."""
        return not self._pools

    def models(self) -> list[str]:
        """Every model that can be asked for."""
        return served_models(self._pools)

    def models_answer(self) -> Immediate:
        """The answer to ``GET /v1/models``: the union over all pools."""
        body = {"object": "list", "data": [self._card(model) for model in self.models()]}
        return _json(body)

    def model_answer(self, model: str) -> Immediate | None:
        """The answer to ``GET /v1/models/{model}``; ``None`` for an unknown one."""
        return _json(self._card(model)) if model in self.models() else None

    def _card(self, model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "treeline"}

    def _rebuild(self) -> None:
        pools: dict[str, dict[str, None]] = {}
        self._by_pool = {}
        for pool, models, fingerprint in self._endpoints.values():
            pools.setdefault(pool, {}).update(dict.fromkeys(models))
            if fingerprint is not None and (renderer := self._renderers.get(fingerprint)) is not None:
                self._by_pool.setdefault(pool, renderer)
        self._pools = {pool: tuple(models) for pool, models in pools.items()}


def _json(body: object) -> Immediate:
    return Immediate(
        200, msgspec.json.encode(body), [("content-type", b"application/json")], "treeline_models"
    )
