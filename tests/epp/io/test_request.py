"""From headers and body to a pick request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_io import small_bundle
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.picking.decision import NoEndpoints, PickError, Saturated
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import Body, Immediate, RouteRequest
from treeline_epp.requests.handover import MEMBERS
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import parse
from treeline_epp.requests.refusals import DROPPED_REASON, Refusal, of_pick
from treeline_wire.tokenizer import TokenizerBundle


def registry(*pools: tuple[str, tuple[str, ...]], bundle: TokenizerBundle | None = None) -> ModelRegistry:
    made = ModelRegistry()
    fingerprint = made.add_keyer(bundle).fingerprint if bundle is not None else None
    for i, (pool, models) in enumerate(pools):
        made.set_endpoint(f"e{i}", pool, models, fingerprint)
    return made


ONE = registry(("default", ("tiny",)), bundle=small_bundle())
TWO = registry(("default", ("tiny",)), ("big", ("huge", "tiny")))


def ask(path: str, body: Any = None, *, served: ModelRegistry = ONE, method: str = "POST", **settings: Any) -> Any:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {":path": path, ":method": method, "x-request-id": "r1"}
    return parse(RouteRequest(headers, data, settings.get("subset")), served)


def pick(path: str, body: Any = None, **settings: Any) -> Request:
    parsed = ask(path, body, **settings)
    assert isinstance(parsed, Request), parsed
    return parsed


def test_a_completion_gets_the_key_of_its_prompt() -> None:
    keyer = ONE.keyer_of("default")
    assert keyer is not None
    assert keyer.keys is not None
    request = pick("/v1/completions?x=1", {"model": "tiny", "prompt": "hello there"})
    assert request.key == keyer.keys.prompt_key("hello there", True)
    assert (request.request_id, request.model, request.pool) == ("r1", "tiny", "default")
    assert request.prompt_tokens_estimate == len("hello there") // 4 + 1


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/completions", {"max_tokens": 7}, 7),
        ("/v1/completions", {}, None),
        ("/v1/chat/completions", {"max_tokens": 7}, 7),
        ("/v1/chat/completions", {"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ("/generate", {"sampling_params": {"max_new_tokens": 0}}, 0),
        ("/generate", {"sampling_params": [{"max_new_tokens": 3}], "max_tokens": 3}, None),
        ("/api/chat", {"options": {"num_predict": 7}, "max_tokens": 3}, 7),
        ("/api/generate", {"options": {"num_predict": -1}}, None),
        ("/v1/completions", {"max_tokens": "7"}, None),
        ("/v1/completions", {"max_tokens": True}, None),
        ("/v1/completions", {"max_tokens": -1}, None),
        ("/v1/completions", {"max_tokens": 1e9}, None),
    ],
)
def test_the_longest_output_is_read_from_the_request(path: str, body: dict[str, Any], most: int | None) -> None:
    assert pick(path, {"model": "tiny", **body}).max_output_tokens == most


@pytest.mark.parametrize(
    ("path", "body", "outputs"),
    [
        ("/v1/chat/completions", {"messages": []}, 1),
        ("/v1/chat/completions", {"messages": [], "n": 128}, 128),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "best_of": 4}, 12),
        ("/v1/completions", {"prompt": [5, 6, 7], "n": None}, 1),
        ("/v1/completions", {"prompt": [[5], [6]], "n": "many"}, 2),
        ("/v1/completions", {"prompt": [], "n": -3}, 1),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 3}, "n": 100}, 6),
        ("/generate", {"input_ids": [[5], [6]], "sampling_params": [{"n": 3}]}, 2),
    ],
)
def test_a_request_may_ask_for_many_outputs(path: str, body: dict[str, Any], outputs: int) -> None:
    assert pick(path, {"model": "tiny", **body}).outputs == outputs


def test_bounds_of_another_api_are_ignored() -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 700, "max_completion_tokens": 1, "max_output_tokens": 1}
    assert pick("/v1/completions", body).max_output_tokens == 700
    assert pick("/v1/messages", {**body, "messages": []}).max_output_tokens == 700
    assert pick("/v1/responses", {**body, "input": "a"}).max_output_tokens == 1


def test_ids_are_counted_and_several_prompts_give_the_first_ones_key() -> None:
    keyer = ONE.keyer_of("default")
    assert keyer is not None
    assert keyer.keys is not None
    request = pick("/v1/completions", {"model": "tiny", "prompt": [[5, 6, 7], [8, 9]]})
    assert request.key == keyer.keys.block_key([5, 6, 7])
    assert request.prompt_tokens_estimate == 5
    native = pick("/generate", {"input_ids": [5, 6, 7]})
    assert (native.key, native.prompt_tokens_estimate, native.model) == (request.key, 3, "tiny")
    assert pick("/generate", {"text": "abc"}).key == keyer.keys.prompt_key("abc", True)


def test_a_chat_is_rendered_with_the_models_own_template() -> None:
    keyer = ONE.keyer_of("default")
    assert keyer is not None
    assert keyer.keys is not None
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "cache_salt": "s"}
    request = pick("/v1/chat/completions", body)
    assert request.key == keyer.keys.prompt_key("user:hi;assistant:", False)
    assert request.namespace == "s"


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny", "messages": "nonsense"},
        {"model": "tiny"},
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "cache_salt": 7},
    ],
)
def test_requests_that_only_the_runtime_can_judge_are_routed_without_a_key(body: Any) -> None:
    assert pick("/v1/chat/completions", body).key is None


def test_without_a_tokenizer_requests_are_routed_by_history() -> None:
    request = pick("/v1/completions", {"model": "huge", "prompt": "x" * 400}, served=TWO)
    assert (request.pool, request.key) == ("big", b"x" * 400)
    assert request.prompt_tokens_estimate >= 100


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b"nul", b'{"model": "tiny"', b"\xff", b"[" * 100_000])
def test_bad_json_is_400(body: bytes) -> None:
    refusal = ask("/v1/completions", body)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (400, "invalid_json")


def test_an_unknown_model_is_404_and_a_missing_one_is_400_only_where_there_is_a_choice() -> None:
    unknown = ask("/v1/completions", {"model": "gpt-9" * 1000, "prompt": "x"})
    assert (unknown.status, unknown.code, unknown.param) == (404, "model_not_found", "model")
    assert len(unknown.message) < 400
    assert unknown.message.endswith("…` does not exist or you do not have access to it. Served: `tiny`.")
    several = ask("/v1/completions", {"model": "gpt-9", "prompt": "x"}, served=TWO)
    assert several.message.endswith(f"Served: {', '.join(f'`{name}`' for name in TWO.models())}.")
    path = ask("/v1/models/gpt-9", method="GET", served=TWO)
    assert path.message == several.message
    assert pick("/v1/completions", {"prompt": "x"}).model == "tiny"
    missing = ask("/v1/completions", {"prompt": "x"}, served=TWO)
    assert (missing.status, missing.param) == (400, "model")
    typed = ask("/v1/completions", {"model": ["tiny"], "prompt": "x"})
    assert (typed.status, typed.param) == (400, "model")


def test_before_any_engine_has_reported_no_model_is_unknown() -> None:
    assert pick("/v1/completions", {"model": "anything", "prompt": "x"}, served=ModelRegistry()).model == "anything"


def test_paths_without_a_prompt_go_to_any_endpoint_with_the_model() -> None:
    assert pick("/health", b"", method="GET") == Request("r1")
    assert pick("/v1/completions", None) == Request("r1")  # the proxy does not show the body
    assert pick("/v1/audio/speech", {"model": "huge", "input": "x"}, served=TWO).pool == "big"
    assert pick("/v1/audio/speech", {"model": "nobody", "input": "x"}, served=TWO).pool is None
    assert pick("/upload", b"\x00\x01", served=TWO).model is None


@pytest.mark.parametrize(
    "path", ["/vllm.grpc.engine.VllmEngine/Generate", "/engine.Generation/generate", "/v1/completions"]
)
@pytest.mark.parametrize("body", [b"\x00\x00\x00\x00\x07\n\x05hello", b"", b"\x00" * 100_000, None])
@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto"])
def test_engines_grpc_calls_are_routed_by_load(path: str, body: bytes | None, kind: str) -> None:
    parsed = parse(RouteRequest({":path": path, ":method": "POST", "content-type": kind}, body, None, "big"), TWO)
    assert isinstance(parsed, Request), parsed
    assert (parsed.key, parsed.pool, parsed.rewrite, parsed.members) == (None, "big", None, None)
    assert parsed.prompt_tokens_estimate == len(body or b"") // 4


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify", "/v1/score", "/rerank", "/v2/rerank"])
def test_vectors_are_routed_by_model_and_load_and_produce_no_tokens(path: str) -> None:
    request = pick(path, {"model": "huge", "input": "x" * 400}, served=TWO)
    assert (request.model, request.pool, request.key, request.max_output_tokens) == ("huge", "big", None, 0)
    assert request.prompt_tokens_estimate >= 100
    assert pick(path, {"input": "x"}).model == "tiny"
    unknown = ask(path, {"model": "nobody", "input": "x"}, served=TWO)
    assert (unknown.status, unknown.code, unknown.param) == (404, "model_not_found", "model")
    missing = ask(path, {"input": "x"}, served=TWO)
    assert (missing.status, missing.param) == (400, "model")
    assert pick(path, {"model": "anything", "input": "x"}, served=ModelRegistry()).pool is None
    assert ask(path, b"{", served=TWO).code == "invalid_json"
    assert pick(path, b"--form", served=TWO).model is None  # the engine knows what it is


_PLACE = {"remote_host": "10.0.0.66", "remote_port": 1}
_NAMING = [
    b'{"kv_transfer\\u005fparams": {}}',
    b'{"kv_transfer_params": null, "kv_transfer_params": {}}',
    b'{"ec_transfer_params": {"a": 1}}',
    b'{"bootstrap_host": ["10.0.0.66"]}',
    b'{"disagg_prefill_dp_rank": 0}',
    b'{"vllm_xargs": {"kv_transfer_params": "x"}}',
    b'{"sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}}}',
    *(json.dumps({"kv_transfer_params": _PLACE}).encode(code) for code in ("utf-8-sig", "utf-16", "utf-16-be")),
    *(json.dumps({"kv_transfer_params": _PLACE}).encode(code) for code in ("utf-32", "utf-32-le")),
    b' \n{"kv_transfer_params": {"a": 1}, "temperature": NaN}',
    b'{"kv_transfer_params": {"a": 1}, "user": "\\ud800"}',
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/inference/v1/generate", "/other"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("body", _NAMING)
def test_no_body_that_an_engine_can_read_names_an_engine(path: str, large: bool, body: bytes) -> None:
    data: bytes | Body = body
    outline = Outline() if large else None
    if outline is not None:
        data = Body([body[:5], body[5:]])
        for piece in data.pieces():
            outline.feed(piece)
        outline.finish(data)
    refusal = parse(RouteRequest({":path": path, ":method": "POST"}, data, None), ONE, outline=outline)
    assert isinstance(refusal, Refusal), refusal
    assert refusal.status == 400


def test_members_too_large_to_be_read_may_name_an_engine() -> None:
    body = Body([json.dumps({"prompt": "x", "vllm_xargs": {str(n): n for n in range(100_000)}}).encode()])
    outline = Outline()
    outline.feed(body.joined())
    outline.finish(body)
    refusal = parse(RouteRequest({":path": "/v1/completions", ":method": "POST"}, body, None), ONE, outline=outline)
    assert isinstance(refusal, Refusal)
    assert refusal.param == "vllm_xargs"


@pytest.mark.parametrize("body", [b"--boundary\r\n{", b"RIFF\0\0{", b"[{}]", b"\xff\xfb\x90", b'"{"', b" " * 9])
def test_bodies_that_are_no_objects_go_to_the_engine(body: bytes) -> None:
    assert pick("/v1/audio/transcriptions", body).model is None


def test_the_list_of_models_is_answered_without_an_endpoint() -> None:
    listed = ask("/v1/models", b"", method="GET", served=TWO)
    assert isinstance(listed, Immediate)
    assert [m["id"] for m in json.loads(listed.body)["data"]] == ["tiny", "huge"]
    assert json.loads(ask("/v1/models/huge", b"", method="GET", served=TWO).body)["id"] == "huge"
    assert json.loads(ask("/v1/models/h%75ge", b"", method="GET", served=TWO).body)["id"] == "huge"
    assert ask("/v1/models/none", b"", method="GET", served=TWO).status == 404
    tags = json.loads(ask("/api/tags", b"", method="GET", served=TWO).body)
    assert [m["model"] for m in tags["models"]] == ["tiny", "huge"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["tiny", "none"]) | JSON,
        "prompt": JSON,
        "max_tokens": JSON,
        "sampling_params": st.fixed_dictionaries({"max_new_tokens": JSON}) | JSON,
        "messages": st.lists(st.fixed_dictionaries({"role": st.text(), "content": JSON}), max_size=3) | JSON,
        "text": JSON,
        "input_ids": JSON,
        "tools": JSON,
        "cache_salt": JSON,
        "chat_template_kwargs": JSON,
    },
)


@settings(deadline=None)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate", "/x", "/v1/models"]),
    method=st.sampled_from(["GET", "POST"]),
    body=BODIES | st.binary(max_size=30),
)
def test_any_request_is_routed_or_refused(path: str, method: str, body: Any) -> None:
    result = ask(path, body, method=method)
    assert isinstance(result, Request | Refusal | Immediate)


def test_the_pickers_refusals_have_their_status_and_reason() -> None:
    saturated, empty, other = (
        of_pick(Saturated("full", 2.3)),
        of_pick(NoEndpoints("none")),
        of_pick(PickError("?")),
    )
    assert [r.status for r in (saturated, empty, other)] == [429, 503, 500]
    assert dict(saturated.headers())["retry-after"] == b"3"
    assert dict(empty.headers())[DROPPED_REASON] == b"rejected-no-endpoints"
    assert json.loads(saturated.body())["error"]["type"] == "rate_limit_error"


def test_the_bytes_of_a_token_are_learnt_from_reports() -> None:
    keyer = PromptKeyer(small_bundle())
    for _ in range(200):
        keyer.learn(3000, 1000)
    assert keyer.estimate_tokens(3000) == pytest.approx(1000, rel=0.02)
    keyer.learn(1000, 1)  # too short to say anything
    assert keyer.estimate_tokens(3000) == pytest.approx(1000, rel=0.02)


def test_a_tokenizer_without_prefix_keys_is_reported_and_gives_none() -> None:
    broken = TokenizerBundle.build('{"version": "1.0"}', chat_template="{{ unclosed")
    keyer = PromptKeyer(broken)
    assert keyer.keys is None
    assert keyer.problem is not None
    assert keyer.renderer is None
    served = registry(("default", ("tiny",)), bundle=broken)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    assert pick("/v1/chat/completions", body, served=served).key is not None, "it is routed by history"


def test_a_replaced_tokenizer_is_forgotten_with_its_last_endpoint() -> None:
    served = registry(("default", ("tiny",)), ("default", ("tiny",)), bundle=small_bundle())
    old = small_bundle().fingerprint
    new = served.add_keyer(TokenizerBundle.build(small_bundle().tokenizer_json, chat_template="new"))
    served.set_endpoint("e0", "default", ("tiny",), new.fingerprint)
    assert served.keyer(old) is not None
    served.set_endpoint("e1", "default", ("tiny",), new.fingerprint)
    assert served.keyer(old) is None
    assert served.keyer_of("default") is new


def test_a_pool_uses_a_tokenizer_with_keys_if_an_endpoint_has_one() -> None:
    served = registry(("default", ("tiny",)), bundle=TokenizerBundle.build("{}"))
    good = served.add_keyer(small_bundle())
    served.set_endpoint("e9", "default", ("tiny",), good.fingerprint)
    assert served.keyer_of("default") is good


def test_models_live_as_long_as_an_endpoint_that_serves_them() -> None:
    served = registry(("default", ("tiny",)), ("default", ("tiny", "lora")))
    served.remove_endpoint("e1")
    assert served.models() == ["tiny"]
    served.remove_endpoint("e1")
    served.remove_endpoint("e0")
    assert served.empty


@pytest.mark.parametrize(
    ("said", "fork"), [("3", 3), ("0", 0), ("", 0), ("-1", 0), ("many", 0), ("²", 0), ("9" * 9, 4096), ("9" * 99, 0)]
)
def test_the_number_of_following_requests_comes_from_a_header(said: str, fork: int) -> None:
    headers = {":path": "/generate", ":method": "POST", "x-treeline-fork": said}
    body = json.dumps({"text": "hello there", "sampling_params": {"max_new_tokens": 0}}).encode()
    parsed = parse(RouteRequest(headers, body, None), ONE)
    assert isinstance(parsed, Request)
    assert parsed.fork == fork


@pytest.mark.parametrize(
    ("path", "body", "apart"),
    [
        ("/v1/completions", {"prompt": "hello"}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}, True),
        ("/generate", {"text": "hello"}, True),
        ("/generate", {"text": ["hello", "you"]}, False),
        ("/generate", {"text": "hello", "sampling_params": {"n": 2}}, False),
        ("/v1/completions", {"prompt": ["hello", "you"]}, False),
        ("/v1/completions", {"prompt": "hello", "n": 2}, False),
        ("/v1/completions", {"prompt": "hello", "best_of": 2}, False),
        ("/v1/completions", {"prompt": "hello", "prompt_logprobs": 0}, False),
        ("/v1/completions", {"prompt": "hello", "echo": True}, True),
        ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1}, False),
        ("/v1/completions", {"prompt": "hello", "use_beam_search": True}, False),
        ("/generate", {"text": "hello", "return_logprob": True, "logprob_start_len": -1}, True),
        ("/generate", {"text": "hello", "return_logprob": True, "logprob_start_len": 0}, False),
        ("/generate", {"text": "hello", "return_hidden_states": True}, False),
        ("/v1/responses", {"input": "hello"}, False),
        ("/v1/embeddings", {"input": "hello"}, False),
    ],
)
def test_a_request_with_one_prompt_and_one_output_may_be_split(path: str, body: dict[str, Any], apart: bool) -> None:
    assert pick(path, {"model": "tiny", **body}).apart is apart


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("large", [False, True])
def test_a_client_names_no_engine(path: str, member: str, large: bool) -> None:
    data = json.dumps({"model": "tiny", "prompt": "hello", "input": "hello", member: "10.0.0.1"}).encode()
    asked: bytes | Body = Body([data]) if large else data
    outline = Outline()
    outline.feed(data)
    outline.finish(Body([data]))
    request = RouteRequest({":path": path, ":method": "POST"}, asked, None)
    refusal = parse(request, ONE, outline=outline if large else None)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.param) == (400, member)
