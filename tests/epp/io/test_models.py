"""Names of models: rules, weights, criticality, fallbacks and pools fixed by the proxy, up to the reply."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from support.epp_io import small_bundle
from support.proxy import head, replies, whole
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Lease
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import ModelNotFound, ModelRegistry
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names
from treeline_wire.load import TreelineLoad
from treeline_wire.models import ModelRule, PoolClaim
from treeline_wire.tokenizer import TokenizerBundle

MODES = pb.ProcessingMode
RATE = 1000.0


def claims(pools: Mapping[str, tuple[str, ...]]) -> dict[str, PoolClaim]:
    """Pools by the names that they are configured to serve."""
    return {pool: PoolClaim("here", names) for pool, names in pools.items()}


class Bench:
    """Two pools: `a` serves a1 and a2, `b` serves b1."""

    def __init__(self, *rules: ModelRule, pools: dict[str, tuple[str, ...]] | None = None) -> None:
        self.picker = Picker(PickerConfig(max_ttft_s=10.0))
        self.registry = ModelRegistry()
        self.draws = [0.0]
        self.metrics = Metrics()
        self.router = Router(
            self.picker, self.registry, self.metrics, clock=lambda: 1.0, draw=lambda: self.draws.pop(0)
        )
        self.registry.set_pools(claims(pools or {"a": ("a1",), "b": ("b1",)}), rules)
        self.add("a-0", "a", "10.0.0.1:8000", ("a1", "a2"))
        self.add("b-0", "b", "10.0.0.2:8000", ("b1",))

    def add(self, name: str, pool: str, address: str, models: tuple[str, ...]) -> None:
        self.picker.add_endpoint(EndpointSpec(name, address, pool=pool, models=models))
        self.registry.set_endpoint(name, pool, models, None)

    def wait(self, name: str, seconds: float) -> None:
        """Give an endpoint a queue of this many seconds."""
        load = TreelineLoad(prefill_tokens_per_s=RATE, waiting_uncached_tokens=int(seconds * RATE))
        self.picker.on_load(name, load, 1.0)

    def ask(
        self,
        model: str | None,
        *,
        duplex: bool = False,
        pool: str | None = None,
        length: bool = True,
        headers: Mapping[str, str] = {},
        ends: bool = True,
    ) -> Any:
        """Send one request. Return the address and the body that arrives there, or the refusal. `ends`: also end the
        stream."""
        self.draws = self.draws or [0.0]
        stream = ExtProcSession(self.router, SessionLimits(1 << 20))
        fields = {"prompt": "hello", **({} if model is None else {"model": model})}
        data = json.dumps(fields).encode()
        sent = {":path": "/v1/completions", ":method": "POST", **headers}
        if length:
            sent["content-length"] = str(len(data))
        asks = head(sent, MODES.FULL_DUPLEX_STREAMED if duplex else MODES.BUFFERED)
        if pool is not None:
            asks.metadata_context.filter_metadata[names.LB].fields[names.POOL_METADATA].string_value = pool
        said = [*replies(stream, asks), *replies(stream, whole(data))]
        if ends:
            stream.close()
        if said[-1].WhichOneof("response") == "immediate_response":
            return said[-1].immediate_response
        return Routed(said, data, sent.get("content-length"))


class Routed:
    """The request after a proxy applied the replies."""

    def __init__(self, replies: list[pb.ProcessingResponse], body: bytes, length: str | None) -> None:
        self.body, self.length = body, length
        self.address = self.destination = ""
        for reply in replies:
            part = getattr(reply, reply.WhichOneof("response")).response
            for option in part.header_mutation.set_headers:
                if option.header.key == names.DESTINATION:
                    self.destination = option.header.raw_value.decode()
                    self.address = self.destination.split(",")[0]
                elif option.header.key == "content-length":
                    self.length = option.header.raw_value.decode()
            mutation = part.body_mutation
            if mutation.WhichOneof("mutation") == "body":
                self.body = mutation.body
            elif mutation.WhichOneof("mutation") == "streamed_response":
                self.body = mutation.streamed_response.body

    @property
    def model(self) -> Any:
        return json.loads(self.body).get("model")


def rule(name: str, pool: str, **fields: Any) -> ModelRule:
    return ModelRule(f"rule-{name}", name, pool, **fields)


def test_engines_names_need_no_rule_and_no_rewriting() -> None:
    bench = Bench()
    routed = bench.ask("a2")
    assert (routed.address, routed.body) == ("10.0.0.1:8000", b'{"prompt": "hello", "model": "a2"}')
    assert bench.ask("b1").address == "10.0.0.2:8000"
    assert bench.ask("nobody").status.code == 404
    assert bench.ask(None).status.code == 400


@pytest.mark.parametrize("duplex", [False, True])
def test_weighted_targets_share_by_weight_and_only_the_name_changes(duplex: bool) -> None:
    bench = Bench(rule("chat", "a", targets=(("a1", 3), ("a2", 1))))
    seen: Counter[str] = Counter()
    for step in range(8):
        bench.draws = [step / 8]
        routed = bench.ask("chat", duplex=duplex)
        seen[routed.model] += 1
        assert routed.address == "10.0.0.1:8000"
        assert routed.body.startswith(b'{"prompt": "hello", "model": "a')
        assert int(routed.length) == len(routed.body)
    assert seen == {"a1": 6, "a2": 2}
    assert bench.metrics.registry.get_sample_value("treeline_epp_rewritten_total") == 8


def test_an_unknown_length_stays_unknown() -> None:
    bench = Bench(rule("chat", "a", targets=(("a1", None),)))
    assert bench.ask("chat", length=False).length is None


def test_a_repeated_request_gets_its_own_body_back() -> None:
    bench = Bench(rule("gpt", "b"))
    sent = {"x-request-id": "r1"}
    first = bench.ask("gpt", headers=sent, ends=False)
    assert first.model == "b1"
    again = bench.ask("other", headers={**sent, names.DESTINATION: first.destination})
    assert (again.address, again.model) == (first.address, "other")


def test_a_sheddable_request_is_refused_when_its_endpoints_are_saturated_and_others_pass() -> None:
    bench = Bench(
        rule("batch", "a", targets=(("a1", None),), criticality="Sheddable"),
        rule("chat", "a", targets=(("a1", None),)),
        rule("vital", "a", targets=(("a1", None),), criticality="Critical"),
    )
    bench.add("a-1", "a", "10.0.0.3:8000", ("a1",))
    bench.wait("a-0", 20.0)
    bench.wait("a-1", 5.0)
    assert bench.ask("batch").address == "10.0.0.3:8000"
    bench.wait("a-1", 15.0)
    refused = bench.ask("batch")
    assert refused.status.code == 429
    told = {h.header.key: h.header.raw_value for h in refused.headers.set_headers}
    assert told["retry-after"] == b"5"
    assert told["x-llm-d-request-dropped-reason"] == b"rejected-saturated"
    assert json.loads(refused.body)["error"]["type"] == "rate_limit_error"
    for name in ("chat", "vital", "a1"):
        assert bench.ask(name).address == "10.0.0.3:8000", "the least loaded"


def test_a_pool_without_a_ready_endpoint_is_replaced_by_its_fallbacks_in_order() -> None:
    bench = Bench(
        rule("chat", "a", targets=(("a2", None),), fallback_pools=("gone", "c", "b")),
        pools={"a": ("a1",), "b": ("b1",), "c": ("c1",)},
    )
    assert bench.ask("chat").address == "10.0.0.1:8000"
    bench.picker.set_ready("a-0", False)
    routed = bench.ask("chat")
    assert (routed.address, routed.model) == ("10.0.0.2:8000", "b1"), "under its name there"
    bench.add("c-0", "c", "10.0.0.3:8000", ("a2", "c1"))
    assert (bench.ask("chat").address, bench.ask("chat").model) == ("10.0.0.3:8000", "a2")
    for name in ("b-0", "c-0"):
        bench.picker.set_ready(name, False)
    assert bench.ask("chat").status.code == 503
    bench.picker.set_ready("a-0", True)
    assert bench.ask("chat").address == "10.0.0.1:8000"


def test_a_pool_without_ready_endpoints_is_reported_although_a_fallback_serves() -> None:
    bench = Bench(rule("chat", "a", targets=(("a1", None),), fallback_pools=("b",)))

    def missed() -> set[str]:
        return {pool for pool, (whole, _) in bench.router.demand.asked(1.0).items() if whole.missed.requests}

    assert bench.ask("chat").address == "10.0.0.1:8000"
    assert bench.ask("nobody's").status.code == 404
    assert missed() == set()
    bench.picker.set_ready("a-0", False)
    assert bench.ask("chat").address == "10.0.0.2:8000"
    assert missed() == {"a"}
    bench.picker.set_ready("b-0", False)
    assert bench.ask("b1").status.code == 503
    assert missed() == {"a", "b"}


def test_a_saturated_pool_is_refused_without_trying_a_fallback() -> None:
    bench = Bench(rule("batch", "a", criticality="Sheddable", targets=(("a1", 1),), fallback_pools=("b",)))
    bench.wait("a-0", 20.0)
    assert bench.ask("batch").status.code == 429


def test_the_proxy_may_fix_the_pool() -> None:
    bench = Bench(rule("chat", "a", targets=(("a1", None),), fallback_pools=("b",)))
    bench.add("b-1", "b", "10.0.0.4:8000", ("a1",))
    assert bench.ask("a1").address == "10.0.0.1:8000", "the older pool has the name"
    assert bench.ask("a1", pool="b").address == "10.0.0.4:8000"
    assert bench.ask("chat", pool="a").address == "10.0.0.1:8000"
    assert bench.ask("chat", pool="b").status.code == 404
    bench.picker.set_ready("a-0", False)
    assert bench.ask("chat", pool="a").status.code == 503, "a fixed pool has no fallback"
    assert bench.ask(None, pool="a").status.code == 400


def test_a_configured_pool_without_endpoints_is_known_but_not_ready() -> None:
    bench = Bench(rule("alias", "c"), pools={"a": ("a1",), "c": ("c1",)})
    assert bench.ask("c1").status.code == 503
    assert bench.ask("alias").status.code == 503
    assert bench.ask("d1").status.code == 404
    bench.add("c-0", "c", "10.0.0.3:8000", ("other",))
    assert bench.ask("c1").status.code == 404, "what engines say goes before what is configured"
    assert bench.ask("alias").model == "other"


def test_rules_change_while_the_picker_runs() -> None:
    bench = Bench()
    assert bench.ask("chat").status.code == 404
    older = rule("chat", "b", created="2026-01-01T00:00:00Z")
    newer = ModelRule("other", "chat", "a", targets=(("a1", None),), created="2026-01-02T00:00:00Z")
    pools = {"a": ("a1",), "b": ("b1",)}
    bench.registry.set_pools(claims(pools), (newer, older))
    assert bench.ask("chat").model == "b1"
    bench.registry.set_pools(claims(pools), (newer,))
    assert bench.ask("chat").model == "a1"
    bench.registry.set_pools(claims(pools), ())
    assert bench.ask("chat").status.code == 404


def test_the_list_of_models_has_every_name_that_can_be_requested() -> None:
    bench = Bench(rule("chat", "a", targets=(("a1", None),)), rule("lost", "nowhere"))
    assert bench.registry.models() == ["a1", "a2", "b1", "chat"]
    assert bench.registry.models_by_pool() == {"a": ["a1", "a2", "chat"], "b": ["b1"]}


def test_engines_without_model_names_take_any() -> None:
    registry = ModelRegistry()
    registry.set_pools(claims({"p": ()}), ())
    assert registry.empty
    registry.set_endpoint("e", "p", (), None)
    assert registry.resolve("anything").pool == "p"
    assert registry.resolve(None).pool == "p"
    registry.set_endpoint("f", "q", ("known",), None)
    assert (registry.resolve("known").pool, registry.resolve("other").pool) == ("q", "p")
    with pytest.raises(ModelNotFound):
        registry.resolve("other", pool="q")


@pytest.mark.parametrize(
    ("engine", "method", "path", "served"),
    [
        ("treeline", "POST", "/v1/completions", True),
        ("treeline", "POST", "/v1/completions?a=b", True),
        ("treeline", "GET", "/v1/completions", False),
        ("treeline", "POST", "/flush_cache", False),
        ("treeline", "POST", "//v1/completions", False),
        ("treeline", "POST", "/x/../v1/completions", False),
        ("vllm", "POST", "/rerank", True),
        ("vllm", "POST", "/generate", False),
        ("sglang", "POST", "/generate", True),
        ("sglang", "POST", "/update_weights_from_disk", False),
        ("", "POST", "/anything", True),
    ],
)
def test_an_engine_of_a_known_type_gets_only_inference_paths(engine: str, method: str, path: str, served: bool) -> None:
    picker, registry, metrics = Picker(PickerConfig()), ModelRegistry(), Metrics()
    picker.add_endpoint(EndpointSpec("a-0", "10.0.0.1:8000", pool="a", engine=engine))
    registry.set_endpoint("a-0", "a", ("a1",), None)
    router = Router(picker, registry, metrics, clock=lambda: 1.0)
    decide = RouteRequest({":path": path, ":method": method}, b'{"model": "a1", "prompt": "x"}', None)
    result = router.route(decide)
    if served:
        assert isinstance(result, Lease)
        router.release(result)
    else:
        assert isinstance(result, Refusal)
        assert (result.status, result.code) == (404, "not_found")


def test_the_newest_few_unused_tokenizers_are_kept() -> None:
    registry = ModelRegistry()
    bundles = [
        TokenizerBundle.build(small_bundle().tokenizer_json, chat_template=f"template {number}") for number in range(12)
    ]
    for bundle in bundles:  # replaced before an engine's events could be read by it
        registry.add_keyer(bundle)
    registry.set_endpoint("e", "p", ("m",), bundles[0].fingerprint)
    assert registry.keyer_of("p") is registry.keyer(bundles[0].fingerprint)
    kept = [number for number, bundle in enumerate(bundles) if registry.keyer(bundle.fingerprint) is not None]
    assert kept == [0, 8, 9, 10, 11]
    registry.remove_endpoint("e")
    assert registry.empty
    assert registry.keyer(bundles[0].fingerprint) is None
