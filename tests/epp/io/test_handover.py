"""What a request becomes for the engine that computes its prompt, and for the one that answers."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pairs import HANDED_OVER
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.picking.request import Request
from treeline_epp.requests.handover import MEMBERS, BadHandover, handover, named, pages_at, place_of
from treeline_epp.requests.rewrite import to_send


def spec(protocol: Protocol, role: Role, address: str = "10.0.0.1:8000", port: int = 9000) -> EndpointSpec:
    return EndpointSpec(role, address, role=role, transfer=Transfer(protocol, port))


def plan(protocol: Protocol, address: str = "10.0.0.1:8000", path: str = "/v1/completions"):  # type: ignore[no-untyped-def]
    return handover(spec(protocol, Role.PREFILL, address), spec(protocol, Role.DECODE, port=1), path, 7, 2.04)


def test_the_copy_for_vllm_asks_for_one_token_and_has_the_clients_salt_and_model() -> None:
    made = plan(Protocol.NIXL)
    body = b'{"model":"alias","prompt":"p","max_tokens":90,"min_tokens":5,"stream":true,"stream_options":{"a":1}}'
    request = Request("r", rewrite="tiny", members={"cache_salt": "of this client"})
    copy = to_send(body, None, request, made.copy)
    assert isinstance(copy, bytes)
    found = json.loads(copy)
    params = found.pop("kv_transfer_params")
    assert (params["do_remote_decode"], params["do_remote_prefill"], params["remote_host"]) == (True, False, None)
    one = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "stream": False, "stream_options": None}
    assert found == {"model": "tiny", "prompt": "p", "cache_salt": "of this client", **one}
    assert made.waits


def test_sglangs_two_requests_name_the_prefill_engines_bootstrap_server_and_one_room() -> None:
    made = plan(Protocol.SGLANG, "[fd00::1]:8000")
    shared = {"bootstrap_host": "fd00::1", "bootstrap_port": 9000, "bootstrap_room": 7, "rid": f"{7:016x}"}
    assert made.members == shared
    assert made.copy == {**shared, "stream": False, "stream_options": None}
    assert json.loads(made.abort) == {"rid": shared["rid"]}
    assert not made.waits


def test_a_sidecar_gets_a_header_and_the_prefill_engine_nothing() -> None:
    made = plan(Protocol.LLM_D)
    assert (made.copy, made.members) == (None, {})
    assert made.headers == (("x-prefiller-host-port", "10.0.0.1:8000"),)


@pytest.mark.parametrize(("address", "host"), [("10.0.0.1:8000", "10.0.0.1"), ("[fd00::1]:8000", "[fd00::1]")])
def test_our_decode_engine_learns_where_the_prompts_pages_are(address: str, host: str) -> None:
    made = plan(Protocol.TREELINE, address, "/v1/chat/completions")
    one = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "stream": False, "stream_options": None}
    assert (made.copy, made.members, made.waits, made.abort) == (one, {}, False, b"")
    assert plan(Protocol.TREELINE).copy == {**one, "max_completion_tokens": None}, "completions do not know it"
    assert made.headers == (("x-treeline-pages-from", f"{host}:9000;within=2.0"),)
    native = plan(Protocol.TREELINE, path="/generate")
    assert native.copy == {"stream": False, "sampling_params": {"max_new_tokens": 1}}


def test_a_rank_gives_its_pages_at_a_port_of_its_own() -> None:
    source = spec(Protocol.TREELINE, Role.PREFILL).at_rank(3, 4)
    assert pages_at(source) == ("x-treeline-pages-from", "10.0.0.1:9003")


def test_the_place_of_a_prompt_is_passed_on_unchanged() -> None:
    answer = b'{"choices":[{"text":"x"}], "kv_transfer_params": {"a" : 1.0e5,\n"b":[ ]} }'
    sent = to_send(b'{"model":"m","kv_transfer_params":null}', None, Request("r"), place_of(answer))
    assert sent == b'{"model":"m","kv_transfer_params":{"a" : 1.0e5,\n"b":[ ]}}'


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": [1]}', b'{"choices": []}']
)
def test_an_answer_without_a_place_is_refused(answer: bytes) -> None:
    with pytest.raises(BadHandover):
        place_of(answer)


@given(st.binary() | st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner)).map(msgspec.json.encode))
def test_any_answer_has_a_place_or_is_refused(answer: bytes) -> None:
    whole = json.dumps({"kv_transfer_params": HANDED_OVER}).encode()
    for data in (answer, whole[: len(answer)], whole + answer):
        with contextlib.suppress(BadHandover):
            assert set(place_of(data)) == {"kv_transfer_params"}


@given(st.dictionaries(st.sampled_from([*MEMBERS, "model"]), st.none() | st.integers()))
def test_a_member_that_names_an_engine_is_found(members: dict[str, int | None]) -> None:
    given_ones = {name for name in MEMBERS if members.get(name) is not None}
    found = named(members)
    assert found in given_ones if given_ones else found is None
