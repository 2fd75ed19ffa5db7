"""The tokens of a prompt left to compute: its cached part is counted, only the rest is estimated."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from support.epp_core import KEYS, Prompt
from support.epp_io import small_bundle, stored
from tokenizers import Tokenizer
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Lease
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router


@given(guess=st.floats(0.2, 5.0), held=st.integers(0, 8), more=st.integers(0, 3))
def test_a_wrong_length_estimate_matters_only_for_uncached_prompts(guess: float, held: int, more: int) -> None:
    picker = Picker()
    for name in ("a", "b"):
        picker.add_endpoint(EndpointSpec(name, f"10.0.0.{ord(name)}:80", models=("m",)))
    prompt = Prompt.random(3, 8 + more)
    if held:
        picker.index.apply(picker.endpoints["a"].pod, prompt.stored(stop=held), KEYS)
    estimate = max(1, int(guess * len(prompt.tokens)))
    request = Request("id", model="m", key=prompt.key, prompt_tokens_estimate=estimate)
    decision = picker.pick(request, 0.0)
    lengths = {one.candidate.spec.name: one.candidate for one in decision.ranked}
    hit = picker.index.match("m", None, prompt.key, 0.0).longest
    assert (hit.tokens > 0) >= (held == 8)
    length = max(hit.tokens + (len(prompt.key) - hit.end) * estimate / len(prompt.key), 1)
    for name, cached in (("a", hit.tokens), ("b", 0)):
        assert lengths[name].cached_tokens == cached
        assert abs(cached + lengths[name].uncached_tokens - length) <= 1


def test_token_lengths_are_learnt_from_events_of_engines_without_headers() -> None:
    picker, registry = Picker(), ModelRegistry()
    keyer = registry.add_keyer(small_bundle())
    assert keyer.keys is not None
    picker.add_endpoint(EndpointSpec("a", "10.0.0.1:80", models=("m",)))
    registry.set_endpoint("a", "default", ("m",), keyer.fingerprint)
    text = "".join(random.Random(1).choices("abcdefgh", k=320))
    picker.index.apply(
        picker.endpoints["a"].pod,
        stored(Tokenizer.from_str(small_bundle().tokenizer_json).encode(text).ids),
        keyer.keys,
    )
    router = Router(picker, registry, Metrics(), clock=lambda: 1.0)
    path = {":path": "/v1/completions", ":method": "POST"}
    for number in range(60):
        body = f'{{"model": "m", "prompt": "{text} and {number}"}}'.encode()
        routed = router.route(RouteRequest({**path, "x-request-id": str(number)}, body, None))
        assert isinstance(routed, Lease)
        router.response(routed, {":status": "200", "content-type": "text/event-stream"}, None)
    assert 0.9 < 1000 / keyer.estimate_tokens(1000) < 1.2, "a token is a byte"
