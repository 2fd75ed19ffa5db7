"""Parses the headers and body of an HTTP request into the picker's `Request`.

Nothing is decided here, and only requests that no runtime could answer are refused (no JSON, a model that no pool
serves). A prompt that we cannot render is routed without a key, and the runtime reports its errors.

The event loop waits meanwhile, so the work is bounded: of a large body, or one of many values, only an outline is read
(see `outline`), and a prompt's key covers at most its first bytes and messages (see `prompts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from treeline_wire import headers as names
from treeline_wire.apis import ollama
from treeline_wire.json_values import SLOW, count_values
from treeline_wire.models import Criticality
from treeline_wire.ollama_errors import is_ollamas
from treeline_wire.prompt import PromptError, TooDeep

from treeline_epp.keyers.base import Keyer
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import Body, Immediate, RouteRequest
from treeline_epp.requests.forms import model_field
from treeline_epp.requests.gateway_rules import NO_RULES, GatewayRules
from treeline_epp.requests.handover import named
from treeline_epp.requests.isolation import NO_ISOLATION, Cache, Isolation
from treeline_epp.requests.model_registry import ModelNotFound, ModelRegistry, ModelTarget
from treeline_epp.requests.outline import MAX_VALUES, NotReadable, Outline, Summary, summary_of
from treeline_epp.requests.prompts import CHARS_PER_TOKEN, Door, KeyedPrompt, chat, completion, door_of
from treeline_epp.requests.refusals import Refusal, bad_request, model_not_found, not_kept_apart

_decode = msgspec.json.Decoder().decode
_ANY_CACHE = Cache(None)


Ready = Callable[[str, str], bool]
"""Returns whether a pool could serve a model, by its name there, now."""


def parse(
    request: RouteRequest,
    registry: ModelRegistry,
    *,
    outline: Outline | None = None,
    draw: float = 0.0,
    ready: Ready = lambda _pool, _model: True,
    isolation: Isolation = NO_ISOLATION,
    rules: GatewayRules = NO_RULES,
) -> Request | Refusal | Immediate:
    """Parse one request. `Immediate` is an answer that needs no endpoint (the list of models).

    `outline`, finished, is that of a large body (see `is_large`), which then is a `Body`. `draw` in [0, 1) chooses
    among a model's weighted targets; `ready` is called when it has pools to fall back on; `isolation` decides the
    request's cache; `rules` its priority, and the rewrite of its model.
    """
    path = request.path.rstrip("/")
    method = request.headers.get(":method")
    door = door_of(path) if request.headers else _door_of(request.body, outline)
    if request.headers.get("content-type", "").startswith(_GRPC):
        door = None  # a gRPC call may have the same name; its content is not JSON
    if method == "GET" and (answer := _models(path, registry)) is not None:
        return answer
    if not request.body:
        # A preflight (OPTIONS) and the like have no body, and the engine answers them.
        if request.body is not None and method == "POST" and door is not None:
            return bad_request("The request has no body.", code="invalid_json")
        # No body (a probe, a page), or one that the proxy does not show: any ready endpoint.
        if request.body is None and isolation.must_salt(request.headers, registry):
            return not_kept_apart("its body is not shown to the endpoint picker")
        priority = rules.priority(request.headers, request.pool)
        return Request(
            request.id,
            subset=request.subset,
            pool=request.pool,
            priority=priority,
            sheddable=priority < 0,
            client=isolation.client(request.headers),
        )
    reading = _Reading(request, path, registry, outline, draw, ready, isolation, rules)
    if door is None or method not in (None, "POST") or (not door.salted and reading.must_salt()):
        return reading.other(request.body)
    return reading.with_prompt(request.body, door)


class _Reading(msgspec.Struct, frozen=True, gc=False):
    """A request with a body, and the context to parse it: see `parse`."""

    request: RouteRequest
    path: str
    registry: ModelRegistry
    outline: Outline | None
    draw: float
    ready: Ready
    isolation: Isolation
    rules: GatewayRules

    def with_prompt(self, body: bytes | Body, door: Door) -> Request | Refusal:
        """Parse a request with a prompt, at one of the doors for those."""
        try:
            read = _read(body, self.outline, door.prompt)
        except NotReadable as error:
            return bad_request(str(error), code="invalid_json")
        if (other := named(read.members, read.left_out)) is not None:
            return _names_engine(other)
        if door.suffix == _GENERATE:
            read = _as_completion(read)
        model = read.members.get("model")
        if (model is not None and not isinstance(model, str)) or "model" in read.left_out:
            return bad_request("`model` must be a string.", param="model")
        target: ModelTarget | None = None
        # Before any endpoint has answered, there is none to route to either: the picker says so.
        if not self.registry.empty:
            try:
                target = self._resolve(model)
            except ModelNotFound as error:
                return self._unknown(error.name)
        keyer = self.registry.keyer_of(target.pool) if target is not None else None
        cache = self._cache(read, target)
        if isinstance(cache, Refusal):
            return cache
        if cache is None:
            keyer, cache = None, _ANY_CACHE
        try:
            if door.chat and not (door.convert is ollama.text_to_chat and read.members.get("raw")):
                engine = self.registry.engine_of(target.pool) if target is not None else ""
                prompt = chat(read, keyer, door, engine, cache)
            else:
                prompt = completion(read, keyer)
        except TooDeep as error:  # an engine may fail on it, and its breaker would count that
            return bad_request(f"`{error.param}` {error}", param=error.param)
        most, outputs = _max_output_tokens(self.path, read.members), _outputs(self.path, read.members)
        apart = bool(self.request.headers) and door.apart and outputs == 1 and _ends_at_prompt(read.members)
        return self._parsed(model, target, prompt, most, keyer, cache, outputs, apart=apart)

    def other(self, body: bytes | Body) -> Request | Refusal:
        """Parse a request of a path without a known prompt: its model still picks the pool, if it names one that is
        served.

        A request for vectors must name a model, unless there is only one: other pools could not answer it. It has no
        key although its engine has a prefix cache: the shared prefix of such texts, an instruction or a query, is a few
        pages, and soon everywhere.
        """
        vectors = self.path.endswith(_VECTORS) and not self.registry.empty
        if self.must_salt() and not self.path.endswith(_WITHOUT_CACHE):
            return not_kept_apart("only chat and text completions and /generate take a salt")
        model: str | None = None
        target: ModelTarget | None = None
        try:
            field = model_field(body)
            if field is None:
                read = _read(body, self.outline, ())
            else:
                read = Summary({"model": field.text.decode("utf-8", "replace")}, len(body))
            if (other := named(read.members, read.left_out)) is not None:
                return _names_engine(other)
            named_model = read.members.get("model")
            model = named_model if isinstance(named_model, str) else None
            target = None if model is None and not vectors else self._resolve(model)
        except NotReadable as error:  # a form without a model; but no JSON that engines can read
            if _begins_as_object(body) and not self.request.headers.get("content-type", "").startswith(_GRPC):
                return bad_request(str(error), code="invalid_json")
        except ModelNotFound as error:
            if vectors:
                return self._unknown(error.name)
            model = None
        most = 0 if vectors else None
        return self._parsed(model, target, KeyedPrompt(None, len(body) // CHARS_PER_TOKEN), most)

    def must_salt(self) -> bool:
        return self.isolation.must_salt(self.request.headers, self.registry)

    def _resolve(self, model: str | None) -> ModelTarget:
        """Return the pool and the name there of a model. Raises `ModelNotFound`."""
        if model is None:
            target = self.registry.resolve(model, self.draw, self.request.pool)
        else:
            if is_ollamas(self.path):
                model = ollama.without_tag(model, lambda name: self._home(name)[1])
            asked = self.rules.asked(model, self.request.headers, self.draw, self.request.pool, self._home)
            target = self.registry.resolve(asked.model, asked.draw, asked.pool)
        if target.fallback_pools and not self.ready(target.pool, target.target):
            for pool in target.fallback_pools:
                name = self.registry.name_at(pool, target.target)
                if self.ready(pool, name):
                    return msgspec.structs.replace(target, pool=pool, target=name)
        return target

    def _unknown(self, model: str | None) -> Refusal:
        if model is None:
            return bad_request("`model` is required: more than one model is served.", param="model")
        return model_not_found(model, self.registry.models(self.request.pool))

    def _home(self, model: str) -> tuple[str | None, bool]:
        """Return the pool of a model, and whether it is known to be served; a model that no pool serves belongs to the
        only pool, if there is just one.
        """
        try:
            target = self.registry.resolve(model)
            return target.pool, target.listed
        except ModelNotFound:
            pools = self.registry.models_by_pool()
            return (next(iter(pools)) if len(pools) == 1 else None), False

    def _cache(self, read: Summary, target: ModelTarget | None) -> Cache | Refusal | None:
        """Return the request's cache; `None` if its salt cannot be read and the engine will report that."""
        pool, model = (target.pool, target.target) if target is not None else ("", None)
        try:
            unread = sorted(read.left_out & _NAMESPACE)
            if unread:
                raise PromptError(unread[0], "is too large")
            return self.isolation.cache(read.members, self.path, self.request.headers, self.registry, pool, model)
        except PromptError as error:
            if self.must_salt():
                return bad_request(f"`{error.param}` {error}.", param=error.param)
            return None

    def _parsed(
        self,
        model: str | None,
        target: ModelTarget | None,
        prompt: KeyedPrompt,
        max_output_tokens: int | None,
        keyer: Keyer | None = None,
        cache: Cache = _ANY_CACHE,
        outputs: int = 1,
        *,
        apart: bool = False,
    ) -> Request:
        pool = self.request.pool if target is None else target.pool
        priority = self.rules.priority(self.request.headers, pool)
        if not priority and target is not None:
            priority = _PRIORITY[target.criticality]
        return Request(
            self.request.id,
            model=model if target is None else target.target or None,
            namespace=cache.namespace,
            key=prompt.key,
            prompt_tokens_estimate=prompt.tokens,
            key_tokens_estimate=prompt.key_tokens,
            max_output_tokens=max_output_tokens,
            outputs=outputs,
            subset=self.request.subset,
            pool=pool,
            listed=model is None if target is None else target.listed,
            fallback_pools=() if target is None else target.fallback_pools,
            priority=priority,
            sheddable=priority < 0 or (target is not None and target.criticality == "Sheddable"),
            session=self.isolation.session(self.request.headers, pool),
            fork=_fork(self.request.headers),
            apart=apart,
            client=self.isolation.client(self.request.headers),
            asked=None if target is None else model or target.target,
            rewrite=_rewrite(model, target),
            members=cache.members,
            learn=keyer.learn if keyer is not None and prompt.key is not None else None,
            sent=prompt.sent,
        )


def _door_of(body: bytes | Body | None, outline: Outline | None) -> Door | None:
    """Return a door whose prompt member the body has, for a proxy that shows no headers; None without one."""
    if isinstance(body, Body):
        names = frozenset(outline.spans) if outline is not None and outline.problem is None else frozenset[str]()
    else:
        try:
            names = frozenset(_decode_object(body or b""))
        except NotReadable:
            return None
    path = next((path for member, path in _BY_PROMPT.items() if member in names), None)
    return None if path is None else door_of(path)


def is_large(body: bytes | Body | None) -> bool:
    """Return whether this body needs an outline before it is parsed. O(bytes) at memory speed."""
    if not isinstance(body, bytes):
        return body is not None
    # Commas in texts count here, too, but are seldom this many: only then look closer. Each value may be a slow number.
    if body.count(b",") + body.count(b"[") + body.count(b"{") < MAX_VALUES // SLOW:
        return False
    return count_values(body) > MAX_VALUES


def _read(body: bytes | Body, outline: Outline | None, wanted: tuple[str, ...]) -> Summary:
    """Decode a body, or the wanted part of a large one. Raises NotReadable."""
    if isinstance(body, Body):
        assert outline is not None, "a large body needs an outline"
        return summary_of(body, outline, wanted)
    return Summary(_decode_object(body), len(body))


def _begins_as_object(body: bytes | Body) -> bool:
    """Return whether a body may be JSON to an engine although we cannot read it: Python reads UTF-16 and UTF-32, byte
    order marks, and NaN. O(blank bytes).
    """
    pieces = (bytes(piece).lstrip(_NO_TEXT) for piece in (body.pieces() if isinstance(body, Body) else [body]))
    return next(filter(None, pieces), b"").startswith(b"{")


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        members = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotReadable(f"The request body is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise NotReadable("The request body must be a JSON object.")
    return members


def _rewrite(model: str | None, target: ModelTarget | None) -> str | None:
    if model is None or target is None or target.target in ("", model):
        return None
    return target.target


_PRIORITY: Mapping[Criticality, int] = {"Critical": 1, "Standard": 0, "Sheddable": -1}
"""Priorities of an InferenceModel's criticality, for requests without an objective: newer APIs have numbers only."""
_GENERATE = "/generate"
_GRPC = "application/grpc"
_NO_TEXT = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"
"""Blanks, byte order marks, and the other halves of ASCII in wider encodings."""
_LIMITS = (
    ("/chat/completions", ("max_completion_tokens", "max_tokens")),
    ("/responses", ("max_output_tokens",)),
    ("", ("max_tokens",)),
)
"""Members that bound the output, by the end of the path; engines ignore other APIs'. The first present one counts."""
_NESTED_LIMITS = (
    ("/api/chat", ("options", "num_predict")),
    ("/api/generate", ("options", "num_predict")),
    (_GENERATE, ("sampling_params", "max_new_tokens")),
)
"""The same for members that hold the limit as a member of their own."""
_BY_PROMPT = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "text": "/generate"}
_VECTORS = ("/embeddings", "/pooling", "/classify", "/score", "/rerank")
_WITHOUT_CACHE = ("/tokenize", "/detokenize", "/count_tokens", "/input_tokens")


def _models(path: str, registry: ModelRegistry) -> Immediate | Refusal | None:
    if path == "/v1/models":
        return registry.models_answer()
    if path.startswith("/v1/models/"):
        model = unquote(path.removeprefix("/v1/models/"))
        return registry.model_answer(model) or model_not_found(model, registry.models())
    return registry.ollama_answer() if path == "/api/tags" else None


def _names_engine(member: str) -> Refusal:
    return bad_request(f"`{member}` names an engine, and only the endpoint picker does that.", param=member)


def _ends_at_prompt(body: dict[str, Any]) -> bool:
    """Return whether an answer needs nothing of the prompt's computation: no log probabilities of its tokens, and no
    hidden states; and it has one beam.
    """
    of_prompt = body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None)
    of_prompt = of_prompt or body.get("logprob_start_len") not in (None, -1)  # SGLang's
    return not of_prompt and not body.get("use_beam_search") and not body.get("return_hidden_states")


_MOST_CHILDREN = 4096
_NAMESPACE = frozenset({"lora_path", "cache_salt", "extra_key"})


def _max_output_tokens(path: str, body: dict[str, Any]) -> int | None:
    """Return the output limit that a request names; the runtime refuses values that are no counts."""
    within = next((within for suffix, within in _NESTED_LIMITS if path.endswith(suffix)), None)
    if within is not None:
        params = body.get(within[0])
        asked = params.get(within[1]) if isinstance(params, dict) else None
    else:
        names = next((names for suffix, names in _LIMITS if path.endswith(suffix)), ())
        asked = next((body[name] for name in names if body.get(name) is not None), None)
    return asked if type(asked) is int and asked >= 0 else None


def _outputs(path: str, body: dict[str, Any]) -> int:
    """Return how many outputs a request asks for, over all of its prompts. The runtime refuses bad counts."""
    params = body.get("sampling_params") if path.endswith(_GENERATE) else body
    counts = [params.get(name) for name in ("n", "best_of")] if isinstance(params, dict) else []
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return prompts * max([1, *(count for count in counts if type(count) is int)])


def _fork(headers: Mapping[str, str]) -> int:
    """Return how many requests will follow; 0 for anything but a number."""
    text = headers.get(names.FORK, "")
    return min(int(text), _MOST_CHILDREN) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _as_completion(read: Summary) -> Summary:
    """Rename the prompt of the native `/generate`, which is `text` or `input_ids`, to `prompt`."""
    members = read.members
    prompt = members.get("text") if members.get("text") is not None else members.get("input_ids")
    cut = None if read.cut is None else "prompt"
    return msgspec.structs.replace(read, members={**members, "prompt": prompt}, cut=cut)
