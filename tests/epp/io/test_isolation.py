"""Isolation of clients' caches: the names that the picker trusts, the namespace that it matches in, and the salts that
it writes for engines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import FakeEngine, data_plane, engines, small_bundle, until
from treeline_epp.metrics import MOST_CLIENTS, Metrics
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.isolation import NO_ISOLATION, Isolation
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.parse import parse
from treeline_epp.requests.refusals import Refusal
from treeline_wire import headers as names
from treeline_wire.namespaces import event_namespace, join_namespace
from treeline_wire.security import CurveKeys

TRUSTING = Isolation.of(True, None)
KEYS = {"ada": "sk-ada", "bob": "sk-bob"}


def registry(**pools: bool) -> ModelRegistry:
    """Return a registry of pools with one endpoint each; True: the pool isolates clients itself."""
    made = ModelRegistry()
    fingerprint = made.add_keyer(small_bundle()).fingerprint
    for pool, isolates in pools.items():
        made.set_endpoint(f"e-{pool}", pool, (pool,), fingerprint, isolates_clients=isolates)
    return made


OURS, THEIRS, MIXED = registry(ours=True), registry(theirs=False), registry(ours=True, theirs=False)


def ask(
    served: ModelRegistry,
    model: str,
    client: str | None,
    *,
    isolation: Isolation = TRUSTING,
    word: str = names.PER_KEY,
    path: str = "/v1/completions",
    **body: Any,
) -> Any:
    headers = {":path": path, ":method": "POST", names.ISOLATION: word}
    headers |= {names.CLIENT: client} if client else {}
    data = json.dumps({"model": model, "prompt": "hello", "text": "hello"} | body).encode()
    return parse(RouteRequest(headers, data, None), served, isolation=isolation)


def namespace(*args: Any, **body: Any) -> str | None:
    parsed = ask(*args, **body)
    assert isinstance(parsed, Request), parsed
    assert parsed.key
    return parsed.namespace


def test_the_prefix_of_a_client_is_matched_where_our_runtime_caches_it() -> None:
    assert namespace(OURS, "ours", "ada") == join_namespace(None, None, "ada")
    assert namespace(OURS, "ours", "ada", cache_salt="s") == join_namespace(None, "s", "ada")
    assert ask(OURS, "ours", "ada").members is None, "the runtime reads the header itself"


def test_without_trust_or_the_edges_header_a_clients_name_is_ignored() -> None:
    assert namespace(OURS, "ours", "ada", isolation=NO_ISOLATION) is None
    assert namespace(OURS, "ours", "ada", word=names.SHARED) is None
    assert namespace(OURS, "ours", None) is None
    assert ask(THEIRS, "theirs", "ada", isolation=NO_ISOLATION).members is None


def test_an_engine_that_knows_only_salts_gets_the_salt_of_its_events_namespace() -> None:
    parsed = ask(THEIRS, "theirs", "ada", cache_salt="mine")
    salt = parsed.members["cache_salt"]
    assert re.fullmatch("[0-9a-f]{64}", salt)
    assert parsed.members == {"cache_salt": salt, "extra_key": None}
    assert parsed.namespace == event_namespace(None, salt) == salt
    others = [
        ask(THEIRS, "theirs", "bob", cache_salt="mine"),
        ask(THEIRS, "theirs", "bob", cache_salt=salt),
        ask(THEIRS, "theirs", "bob", extra_key=salt),
        ask(THEIRS, "theirs", "ada"),
    ]
    salts = {salt, *(other.members["cache_salt"] for other in others)}
    assert len(salts) == 5
    assert ask(THEIRS, "theirs", "ada", cache_salt="mine").members == parsed.members


def test_the_native_path_is_salted_in_both_members() -> None:
    members = ask(THEIRS, "theirs", "ada", path="/generate").members
    assert members["extra_key"] == members["cache_salt"] == ask(THEIRS, "theirs", "ada").members["cache_salt"]


def test_one_engine_that_knows_only_salts_makes_every_body_salted() -> None:
    parsed = ask(MIXED, "ours", "ada")
    assert parsed.members is not None, "when its endpoint is gone, the proxy may choose the other"
    assert parsed.namespace == join_namespace(None, parsed.members["cache_salt"], "ada")
    assert MIXED.isolates_clients("ours")
    assert not MIXED.isolates_clients("theirs")


def test_only_pickers_with_the_same_key_pair_derive_the_same_salts(tmp_path: Path) -> None:
    pair = CurveKeys.generate(tmp_path / "a")
    one, again = Isolation.of(True, pair), Isolation.of(True, CurveKeys.load(tmp_path / "a"))
    other = Isolation.of(True, CurveKeys.generate(tmp_path / "b"))

    def salt(isolation: Isolation) -> str:
        return str(ask(THEIRS, "theirs", "ada", isolation=isolation).members["cache_salt"])

    assert salt(one) == salt(again)
    assert len({salt(one), salt(other), salt(TRUSTING)}) == 3


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/audio/transcriptions"])
def test_a_path_without_salts_is_refused_if_one_is_needed(path: str) -> None:
    refused = ask(registry(theirs=False), "theirs", "ada", path=path)  # by the first request after a change, too
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (400, "not_kept_apart")
    assert isinstance(ask(OURS, "ours", "ada", path=path), Request)
    assert isinstance(ask(THEIRS, "theirs", "ada", path=path, word=names.SHARED), Request)
    for counting in ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"):
        assert isinstance(ask(THEIRS, "theirs", "ada", path=counting), Request)


def test_a_body_hidden_by_the_proxy_is_refused_if_a_salt_is_needed() -> None:
    headers = {
        ":path": "/v1/completions",
        ":method": "POST",
        names.ISOLATION: names.PER_KEY,
        names.CLIENT: "ada",
    }
    refused = parse(RouteRequest(headers, None, None), THEIRS, isolation=TRUSTING)
    assert isinstance(refused, Refusal)
    assert isinstance(parse(RouteRequest(headers, None, None), OURS, isolation=TRUSTING), Request)


@pytest.mark.parametrize("member", ["cache_salt", "extra_key"])
def test_a_salt_that_is_no_string_is_refused_by_name_if_it_is_replaced(member: str) -> None:
    refused = ask(THEIRS, "theirs", "ada", **{member: ["x"]})
    assert isinstance(refused, Refusal)
    assert refused.param == member
    engine_decides = ask(OURS, "ours", "ada", **{member: ["x"]})
    assert isinstance(engine_decides, Request)
    assert engine_decides.key is None


def test_clients_beyond_the_first_hundred_share_a_label() -> None:
    metrics = Metrics()
    for number in range(MOST_CLIENTS + 50):
        metrics.asked(f"client-{number}")
    metrics.asked("client-0")
    metrics.asked(None)
    page = metrics.render().decode()
    lines = [line for line in page.splitlines() if line.startswith("treeline_epp_client_requests_total")]
    assert len(lines) == MOST_CLIENTS + 2
    assert 'treeline_epp_client_requests_total{client="other"} 50.0' in lines
    assert 'treeline_epp_client_requests_total{client="client-0"} 2.0' in lines
    assert 'treeline_epp_client_requests_total{client=""} 1.0' in lines


@pytest.mark.integration
async def test_through_envoy_a_foreign_engine_sees_one_salt_for_each_client(
    tmp_path: Path,
) -> None:
    async with (
        engines(1) as (fake,),
        data_plane(tmp_path, [fake], "--trust-edge", api_keys=KEYS, fail_open=False) as plane,
    ):

        async def salt_of(client: str, headers: dict[str, str] | None = None, **body: Any) -> str:
            told = {"authorization": f"Bearer {KEYS[client]}"} | (headers or {})
            answer = await plane.complete("hello", headers=told, **body)
            assert answer.status_code == 200, answer.text
            seen = fake.served[-1]
            assert seen.headers[names.CLIENT] == client
            assert KEYS[client] not in str(seen)
            assert int(seen.headers["content-length"]) == len(seen.body)
            assert json.loads(seen.body)["prompt"] == "hello"
            return str(json.loads(seen.body)["cache_salt"])

        mine = await salt_of("ada")
        assert await salt_of("ada") == mine
        spoofed = {names.CLIENT: "ada", names.ISOLATION: names.SHARED, names.EDGE: "mine"}
        theirs = await salt_of("bob", spoofed)
        assert theirs != mine
        assert len({mine, theirs, await salt_of("bob", cache_salt=mine), await salt_of("bob", extra_key=mine)}) == 4
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_client_requests_total{client="ada"}'] == 2
        assert metrics['treeline_epp_client_requests_total{client="bob"}'] == 3
        assert metrics["treeline_epp_salted_total"] == 5
        lines = await until(lambda: len(plane.envoy.access()) >= 5 and plane.envoy.access(), "five log lines")
        assert [line["api_client"] for line in lines] == ["ada", "ada", "bob", "bob", "bob"]
        assert (await plane.complete()).status_code == 401


@pytest.mark.integration
async def test_through_envoy_an_engine_that_separates_clients_gets_the_body_as_it_came(
    tmp_path: Path,
) -> None:
    def ours(fake: FakeEngine) -> None:
        fake.documents["/server_info"] = {"isolates_clients": True}

    async with engines(1) as (fake,):
        ours(fake)
        settings: dict[str, Any] = {"api_keys": KEYS, "isolation": "Shared"}
        async with data_plane(tmp_path, [fake], "--trust-edge", **settings) as plane:
            headers = {"authorization": "Bearer sk-ada", names.ISOLATION: names.PER_KEY, names.CLIENT: "bob"}
            assert (await plane.complete(headers=headers)).status_code == 200
            seen = fake.served[-1]
            assert (seen.headers[names.ISOLATION], seen.headers[names.CLIENT]) == (names.SHARED, "ada")
            assert "cache_salt" not in json.loads(seen.body)


def test_sessions_belong_to_a_pool_and_an_identified_client() -> None:
    def session(client: str, pool: str | None = "p", isolation: Isolation = TRUSTING, named: str = "s") -> int:
        return isolation.session({names.CLIENT: client, names.SESSION_ID: named}, pool)

    ada = session("ada")
    assert 0 < ada < 1 << 40
    assert ada == session("ada")
    assert len({ada, session("bob"), session("ada", "q"), session("ada", None), session("ada", named="t")}) == 5
    assert session("ada", isolation=NO_ISOLATION) == session("bob", isolation=NO_ISOLATION), (
        "the edge has not identified them"
    )
    assert session("ada", isolation=Isolation(True, b"another key")) != ada
    assert TRUSTING.session({names.CLIENT: "ada"}, "p") == session("ada", named="") == 0
    assert TRUSTING.session({names.CLIENT: "ada", "x-smg-routing-key": "s"}, "p") == ada, "as sgl-model-gateway has it"
    both = {names.CLIENT: "ada", "x-smg-routing-key": "s", names.SESSION_ID: "t"}
    assert TRUSTING.session(both, "p") == ada, "sgl-model-gateway reads its own alone"
