"""From the headers and body of an HTTP request to what the picker needs to know of it.

Nothing is decided here, and little is refused: only what no runtime could answer (not JSON, a model that nobody
serves). A prompt that we cannot render is routed without a key, and the runtime, which knows better, says what is
wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from treeline_wire import headers as names
from treeline_wire.chat import TemplateError
from treeline_wire.models import ModelNotFound, ModelTarget
from treeline_wire.prompt import PromptError, namespace_of, prompt_of_completion

from treeline_epp.catalog import Catalog, Renderer
from treeline_epp.endpoint import PickRequest
from treeline_epp.exchange import Decide, Immediate
from treeline_epp.refusal import Refusal, bad_request, model_not_found

_CHARS_PER_TOKEN = 4
_decode = msgspec.json.Decoder().decode


class Parsed(msgspec.Struct, frozen=True, gc=False):
    """A request that can be routed. ``renderer`` made its key, and learns from the runtime's count of tokens.
    ``rewrite`` is the model's name in the pool, where it is another one than the body says."""

    pick: PickRequest
    renderer: Renderer | None = None
    rewrite: str | None = None


Ready = Callable[[str, str], bool]
"""From a pool and a model's name there to: could it be served now?"""


def parse(
    decide: Decide, catalog: Catalog, *, draw: float = 0.0, ready: Ready = lambda _pool, _model: True
) -> Parsed | Refusal | Immediate:
    """Read one request. :class:`Immediate` is an answer that needs no endpoint (the list of models).

    ``draw`` in [0, 1) chooses among a model's weighted targets; ``ready`` is asked when it has pools to fall back on.
    """
    path = decide.headers.get(":path", "").partition("?")[0].rstrip("/")
    request_id = decide.headers.get(names.REQUEST_ID, "")
    if decide.headers.get(":method") == "GET" and (answer := _models(path, catalog)) is not None:
        return answer
    if not decide.body:
        if decide.body is not None and path.endswith(_WITH_PROMPT):
            return bad_request("The request has no body.", code="invalid_json")
        # No body (a probe, a page), or a proxy that does not show it: any ready endpoint.
        return Parsed(PickRequest(request_id, subset=decide.subset, pool=decide.pool))
    resolver = _Resolver(catalog, decide.pool, draw, ready)
    if not path.endswith(_WITH_PROMPT):
        return _other(decide, decide.body, request_id, resolver)
    try:
        body = _decode(decide.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return bad_request(f"The request body is not JSON: {error}", code="invalid_json")
    if not isinstance(body, dict):
        return bad_request("The request body must be a JSON object.", code="invalid_json")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        return bad_request("`model` must be a string.", param="model")
    target: ModelTarget | None = None
    # While no endpoint has spoken, there is none to route to either: the picker says so.
    if not catalog.empty:
        try:
            target = resolver.resolve(model)
        except ModelNotFound:
            if model is None:
                return bad_request("`model` is required: more than one model is served.", param="model")
            return model_not_found(model)
    renderer = catalog.renderer_of(target.pool) if target is not None else None
    namespace, key, tokens = _prompt(path, body, len(decide.body), renderer)
    most = _max_output_tokens(path, body)
    pick = _pick(decide, request_id, model, target, tokens, namespace, key, most)
    return Parsed(pick, renderer if key is not None else None, _rewrite(model, target))


class _Resolver(msgspec.Struct, frozen=True, gc=False):
    """How this request's model becomes a pool and a name there."""

    catalog: Catalog
    only_pool: str | None
    draw: float
    ready: Ready

    def resolve(self, model: str | None) -> ModelTarget:
        """Raises ``ModelNotFound``."""
        target = self.catalog.resolve(model, self.draw, self.only_pool)
        if target.fallback_pools and not self.ready(target.pool, target.target):
            for pool in target.fallback_pools:
                name = self.catalog.name_at(pool, target.target)
                if self.ready(pool, name):
                    return msgspec.structs.replace(target, pool=pool, target=name)
        return target


def _pick(
    decide: Decide,
    request_id: str,
    model: str | None,
    target: ModelTarget | None,
    tokens: int,
    namespace: str | None = None,
    key: bytes | None = None,
    max_output_tokens: int | None = None,
) -> PickRequest:
    return PickRequest(
        request_id,
        model=model if target is None else target.target or None,
        namespace=namespace,
        key=key,
        prompt_tokens_estimate=tokens,
        max_output_tokens=max_output_tokens,
        subset=decide.subset,
        pool=decide.pool if target is None else target.pool,
        sheddable=target is not None and target.criticality == "Sheddable",
    )


def _rewrite(model: str | None, target: ModelTarget | None) -> str | None:
    if model is None or target is None or target.target in ("", model):
        return None
    return target.target


def parse_subset(value: object) -> frozenset[str] | None:
    """A subset hint in any spelling in use: a list, a comma list in one string, comma lists inside a list.

    ``None`` when there is no hint (anything but strings is no hint). An empty hint is an empty set: nothing may be
    picked.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    return frozenset(part.strip() for item in value for part in item.split(",") if part.strip())


_CHAT = "/chat/completions"
_COMPLETIONS = "/completions"
_GENERATE = "/generate"
_WITH_PROMPT = (_COMPLETIONS, _GENERATE)  # the first also ends /chat/completions


def _models(path: str, catalog: Catalog) -> Immediate | Refusal | None:
    if path == "/v1/models":
        return catalog.models_answer()
    if path.startswith("/v1/models/"):
        model = path.removeprefix("/v1/models/")
        return catalog.model_answer(model) or model_not_found(model)
    return None


def _other(decide: Decide, body: bytes, request_id: str, resolver: _Resolver) -> Parsed | Refusal:
    """A path that has no prompt that we know: its model still picks the pool, if it names one that is served."""
    model: str | None = None
    target: ModelTarget | None = None
    try:
        model = _just_model(body).model
        target = None if model is None else resolver.resolve(model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    except ModelNotFound:
        model = None
    tokens = len(body) // _CHARS_PER_TOKEN
    return Parsed(_pick(decide, request_id, model, target, tokens), rewrite=_rewrite(model, target))


class _JustModel(msgspec.Struct):
    model: str | None = None


_just_model = msgspec.json.Decoder(_JustModel).decode


def _prompt(
    path: str, body: dict[str, Any], size: int, renderer: Renderer | None
) -> tuple[str | None, bytes | None, int]:
    """``(namespace, key, estimated tokens)``; the key of the first prompt where there are several."""
    rough = size // _CHARS_PER_TOKEN
    if renderer is None:
        return None, None, rough
    try:
        namespace = namespace_of(body)
        if path.endswith(_CHAT):
            key = renderer.chat_key(body)
            return namespace, key, rough if key is None else renderer.estimate_tokens(len(key))
        prompts = prompt_of_completion(body if path.endswith(_COMPLETIONS) else _as_completion(body))
        keys = renderer.completion_keys(prompts)
    except (PromptError, TemplateError):
        return None, None, rough
    if not keys:
        return namespace, None, rough
    ids = sum(len(prompt.ids) for prompt in prompts if prompt.ids is not None)
    return namespace, keys[0], ids or renderer.estimate_tokens(sum(map(len, keys)))


def _max_output_tokens(path: str, body: dict[str, Any]) -> int | None:
    """The limit of the output that a request names; anything but a count is the runtime's to refuse."""
    if path.endswith(_GENERATE):
        params = body.get("sampling_params")
        asked = params.get("max_new_tokens") if isinstance(params, dict) else None
    else:
        asked = body.get("max_completion_tokens")
        asked = body.get("max_tokens") if asked is None else asked
    return asked if type(asked) is int and asked >= 0 else None


def _as_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """The native ``/generate`` names its prompt ``text`` or ``input_ids``."""
    prompt = body.get("text") if body.get("text") is not None else body.get("input_ids")
    return {**body, "prompt": prompt}
