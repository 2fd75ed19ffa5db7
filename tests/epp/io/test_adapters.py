"""Each engine's adapter reads the answers of its releases, and survives any other answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.epp_io import FakeEngine
from support.pairs import sglang, started, vllm
from treeline_epp.endpoints.adapters.base import MAX_RANKS, EngineInfo, KvSource, LoadReports
from treeline_epp.endpoints.adapters.registry import ADAPTERS, adapter_of, recognise
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.spec import EndpointSpec, KvPorts
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.endpoints.watcher import EngineClient, EngineState, EngineWatcher, ProbePace
from treeline_wire.paths import INFERENCE

HERE = "127.0.0.1"
VLLM_0_32 = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5990",
        "replay_endpoint": "tcp://*:5991",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv@pod@tiny",
    }
}
SGLANG_0_5_23 = {
    "model_path": "m",
    "version": "0.5.23",
    "internal_states": [{}],
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "0.0.0.0",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 64,
        "dp_size": 2,
        "load_endpoint_port_base": 5657,
        "load_topic": "load",
        "replay_endpoint_port_base": 5757,
    },
}


def owned(engine: FakeEngine, owner: str, **documents: Any) -> None:
    engine.documents["/v1/models"] = {"object": "list", "data": [{"id": "tiny", "owned_by": owner}]}
    for path, document in documents.items():
        engine.documents[f"/{path}"] = document


def asked_for(engine: FakeEngine) -> set[str]:
    return {seen.path for seen in engine.seen}


# What they are


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_answers_all_questions_of_the_picker(name: str) -> None:
    adapter = ADAPTERS[name]
    assert adapter.probes
    assert all(path.startswith("/") for path in adapter.probes)
    assert adapter.paths in INFERENCE
    assert adapter.load is not LoadReports.ASKED or adapter.metrics is not None, "nobody would know its load"
    assert 0 < adapter.probe_timeout_s <= 5
    assert 0 < adapter.probe_interval_s <= 5


async def test_an_endpoint_without_a_type_is_probed_for_it(http: HttpClient, engine: FakeEngine) -> None:
    assert adapter_of("vllm") is ADAPTERS["vllm"]
    assert adapter_of("custom") is adapter_of("") is None
    owned(engine, "vllm", kv_event_sources=VLLM_0_32)
    info = await EngineClient(http, engine.address, "custom").info()
    assert (info.engine, len(info.sources)) == ("vllm", 1)


@pytest.mark.parametrize("owner", ["treeline", "vllm", "sglang"])
async def test_an_engine_is_known_by_who_owns_its_models(http: HttpClient, engine: FakeEngine, owner: str) -> None:
    owned(engine, owner)
    engine.missing.add("/kv_event_sources")
    assert (await EngineClient(http, engine.address).info()).engine == owner


@pytest.mark.parametrize(
    ("about", "name"),
    [
        ({"tokenizer_fingerprint": "f"}, "treeline"),
        ({"kv_events": None}, "sglang"),
        ({"kv_events": None, "isolates_clients": True}, "treeline"),
        ({"vllm_config": "…"}, "vllm"),
        ({"echo": 1}, "openai"),
        (b"no JSON", "openai"),
        ([1], "openai"),
        ({}, "openai"),
    ],
)
async def test_an_engine_without_an_owner_is_known_by_its_own_pages(
    http: HttpClient, engine: FakeEngine, about: Any, name: str
) -> None:
    engine.documents["/server_info"] = about
    assert (await recognise(EngineHttp(http, engine.address))).name == name


@pytest.mark.parametrize("owner", [None, 7, ["vllm"], {"vllm": 1}, "", "acme"])
async def test_an_engine_with_an_unknown_owner_is_accepted(http: HttpClient, engine: FakeEngine, owner: Any) -> None:
    engine.documents["/v1/models"] = {"data": [{"id": "tiny", "owned_by": owner}]}
    info = await EngineClient(http, engine.address).info()
    assert (info.engine, info.models) == ("openai", ("tiny",))


async def test_nothing_is_guessed_about_an_engine_of_a_given_type(http: HttpClient, engine: FakeEngine) -> None:
    owned(engine, "treeline", server_info={"tokenizer_fingerprint": "f", "kv_events": SGLANG_0_5_23["kv_events"]})
    info = await EngineClient(http, engine.address, "openai").info()
    assert (info.engine, info.sources) == ("openai", ())
    assert asked_for(engine) == {"/v1/models"}


# Engines with a key: `/v1` is for clients, and so is all of SGLang's but health and metrics


async def test_a_vllm_with_a_key_is_known_and_followed(http: HttpClient, engine: FakeEngine) -> None:
    engine.statuses["/v1/models"] = 401
    engine.documents |= {"/version": {"version": "0.33.0"}, "/kv_event_sources": VLLM_0_32}
    info = await EngineClient(http, engine.address).info()
    assert (info.engine, info.models, info.wants_key) == ("vllm", (), True)
    assert info.sources == (KvSource(HERE, 5990, 5991, topic="kv@pod@tiny"),)


@pytest.mark.parametrize("named", ["", "sglang"])
async def test_an_sglang_with_a_key_is_followed_at_the_discovered_port(
    http: HttpClient, engine: FakeEngine, named: str
) -> None:
    engine.statuses |= dict.fromkeys(("/v1/models", "/server_info", "/version"), 401)
    info = await EngineClient(http, engine.address, named, KvPorts(5557)).info()
    assert (info.wants_key, info.sources) == (True, (KvSource(HERE, 5557),))
    assert (await EngineClient(http, engine.address, named).info()).no_events


async def test_an_engine_with_a_key_is_ready(
    http: HttpClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.statuses["/v1/models"] = 403
    watcher = EngineWatcher(
        EndpointSpec("e", engine.address), EngineClient(http, engine.address), lambda *_: None, ProbePace()
    )
    watching = asyncio.create_task(watcher.run())
    await asyncio.wait_for(watcher.probed.wait(), 60)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert watcher.state is EngineState.READY
    assert any("without its API key" in text for text in caplog.messages)


# vLLM


async def test_vllm_0_32_reports_the_publisher_of_each_rank(http: HttpClient, engine: FakeEngine) -> None:
    two = {**VLLM_0_32, "1": {**VLLM_0_32["0"], "endpoint": "tcp://*:5991", "replay_endpoint": None, "topic": ""}}
    owned(engine, "vllm", kv_event_sources=two)
    info = await EngineClient(http, engine.address, "vllm").info()
    assert info.sources == (
        KvSource(HERE, 5990, 5991, topic="kv@pod@tiny", rank=0),
        KvSource(HERE, 5991, None, rank=1),
    )
    assert (info.models, info.no_events, info.foreign_host) == (("tiny",), "", None)
    assert not any(source.hello for source in info.sources)
    assert asked_for(engine) == {"/v1/models", "/kv_event_sources"}


@pytest.mark.parametrize("ranks", [{}, {"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}])
async def test_a_vllm_without_events_gets_a_hint_to_enable_them(
    http: HttpClient, engine: FakeEngine, ranks: dict[str, Any]
) -> None:
    owned(engine, "vllm", kv_event_sources=ranks)
    info = await EngineClient(http, engine.address, "vllm").info()
    assert info.sources == ()
    assert "--kv-events-config" in info.no_events


async def test_an_older_vllms_publisher_comes_from_discovery(http: HttpClient, engine: FakeEngine) -> None:
    owned(engine, "vllm")
    engine.missing.add("/kv_event_sources")
    info = await EngineClient(http, engine.address, "vllm").info()
    assert "kv_events in the endpoints file" in info.no_events
    told = KvPorts(6000, 6100, "kv", ranks=2, first_rank=1)
    info = await EngineClient(http, engine.address, "vllm", told).info()
    assert info.sources == (
        KvSource(HERE, 6001, 6101, topic="kv", rank=1),
        KvSource(HERE, 6002, 6102, topic="kv", rank=2),
    )
    engine.missing.clear()
    engine.documents["/kv_event_sources"] = VLLM_0_32
    info = await EngineClient(http, engine.address, "vllm", told).info()
    assert [source.events_port for source in info.sources] == [5990], "it knows better"


@pytest.mark.parametrize(
    ("endpoint", "port", "foreign"),
    [
        ("tcp://127.0.0.1:5557", 5557, None),
        ("tcp://[::]:5557", 5557, None),
        ("tcp://10.9.8.7:41000", 41000, "10.9.8.7"),
        ("tcp://central.svc:5557", 5557, "central.svc"),
        ("tcp://*:0", None, None),
        ("tcp://*:65536", None, None),
        ("tcp://*:" + "9" * 5000, None, None),
        ("tcp://*:\u0665\u0665", None, None),
        ("tcp://" + "x" * 300 + ":1", None, None),
        ("ipc:///tmp/kv", None, None),
        ("inproc://kv_dp1", None, None),
        ("", None, None),
        (None, None, None),
    ],
)
async def test_vllm_is_followed_at_its_own_address_even_if_it_names_another(
    http: HttpClient, engine: FakeEngine, endpoint: str | None, port: int | None, foreign: str | None
) -> None:
    owned(engine, "vllm", kv_event_sources={"0": {"endpoint": endpoint}})
    info = await EngineClient(http, engine.address, "vllm").info()
    assert info.sources == (() if port is None else (KvSource(HERE, port),))
    assert info.foreign_host == foreign
    assert bool(info.no_events) == (port is None)


# SGLang and ours


async def test_sglang_counts_its_ranks_from_base_ports(http: HttpClient, engine: FakeEngine) -> None:
    owned(engine, "sglang", server_info=SGLANG_0_5_23)
    info = await EngineClient(http, engine.address).info()
    assert info.engine == "sglang"
    assert info.sources == (KvSource(HERE, 5557, 5757, 5657, rank=0), KvSource(HERE, 5558, 5758, 5658, rank=1))
    assert info.foreign_host is None


async def test_an_older_sglang_is_followed_at_the_discovered_port(http: HttpClient, engine: FakeEngine) -> None:
    owned(engine, "sglang", server_info={"version": "0.5.4"})
    client = EngineClient(http, engine.address, "sglang", KvPorts(6000, ranks=2))
    assert [source.events_port for source in (await client.info()).sources] == [6000, 6001]


@pytest.mark.parametrize(
    ("config", "sources"),
    [
        ('{"publisher":"zmq"}', (KvSource(HERE, 5557), KvSource(HERE, 5558, rank=1))),
        (
            '{"publisher":"zmq","endpoint":"tcp://*:6000","replay_endpoint":"tcp://*:6100","topic":"kv"}',
            (KvSource(HERE, 6000, 6100, topic="kv"), KvSource(HERE, 6001, 6101, topic="kv", rank=1)),
        ),
        ('{"publisher":"zmq","endpoint":"tcp://10.9.8.7:99999"}', ()),
        ('{"publisher":"null"}', ()),
        ('{"publisher":"zmq","endpoint":"tcp://*:99999"}', ()),
        ("{", ()),
        ("[" * 5000, ()),
        ({"publisher": "zmq"}, ()),
    ],
)
async def test_an_sglang_that_shows_only_its_settings_is_followed_by_them(
    http: HttpClient, engine: FakeEngine, config: Any, sources: tuple[KvSource, ...]
) -> None:
    about = {"version": "0.5.7", "kv_events_config": config, "dp_size": 2}
    owned(engine, "sglang", server_info=about)
    info = await EngineClient(http, engine.address).info()
    assert info.sources == sources
    assert ("endpoint tcp://*:PORT" in info.no_events) is not bool(sources)
    owned(engine, "sglang", server_info={**about, "kv_events": None})
    info = await EngineClient(http, engine.address).info()
    assert info.sources == (), "a newer one has looked at its settings itself"


async def test_hello_is_for_our_own_runtimes(http: HttpClient, engine: FakeEngine) -> None:
    owned(engine, "treeline", server_info={**SGLANG_0_5_23, "epoch": 5, "tokenizer_fingerprint": "f"})
    info = await EngineClient(http, engine.address).info()
    assert [source.hello for source in info.sources] == [True, True]
    owned(engine, "sglang")
    info = await EngineClient(http, engine.address).info()
    assert [source.hello for source in info.sources] == [False, False]


# Whoever lies


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        7,
        b"{",
        {"x": {}},
        {"-1": {}},
        {"9" * 5000: {}},
        {"0": []},
        {"0": {"endpoint": 5}},
        {"0": {"endpoint": "tcp://*:1", "topic": "x" * 5000}},
        {str(rank): {} for rank in range(5000)},
    ],
)
async def test_an_unusable_answer_loses_the_events_but_not_the_engine(
    http: HttpClient, engine: FakeEngine, ranks: Any
) -> None:
    owned(engine, "vllm", kv_event_sources=ranks)
    info = await EngineClient(http, engine.address, "vllm").info()
    assert (info.models, info.sources) == (("tiny",), ())
    assert "/kv_event_sources" in info.no_events
    assert len(info.no_events) <= 300
    owned(engine, "sglang", server_info=[1])
    info = await EngineClient(http, engine.address, "sglang", KvPorts(6000)).info()
    assert (info.sources, info.no_events) == ((KvSource(HERE, 6000),), ""), "discovery may know better"


@pytest.mark.parametrize(("status", "lasts"), [(401, True), (405, True), (429, False), (500, False), (503, False)])
async def test_a_refusal_is_final_and_a_failure_is_retried(
    http: HttpClient, engine: FakeEngine, status: int, lasts: bool
) -> None:
    owned(engine, "vllm")
    engine.reply_status = status  # of /kv_event_sources
    client = EngineClient(http, engine.address, "vllm")
    if lasts:
        assert f"answered {status}" in (await client.info()).no_events
    else:
        with pytest.raises(EngineError, match=f"answered {status}"):
            await client.info()


async def test_no_engine_makes_the_picker_open_more_than_a_few_sockets(http: HttpClient, engine: FakeEngine) -> None:
    many = {str(rank): {"endpoint": f"tcp://*:{6000 + rank}"} for rank in range(1000)}
    owned(engine, "vllm", kv_event_sources=many)
    info = await EngineClient(http, engine.address, "vllm").info()
    assert [source.rank for source in info.sources] == list(range(MAX_RANKS))
    events = {"publisher": "zmq", "endpoint_port_base": 65500, "load_endpoint_port_base": 60000, "dp_size": 10**9}
    owned(engine, "sglang", server_info={"kv_events": events})
    info = await EngineClient(http, engine.address, "sglang").info()
    assert len(info.sources) == MAX_RANKS
    assert all(source.events_port is None or source.events_port <= 65535 for source in info.sources)
    told = KvPorts(65535, ranks=4000)
    info = await EngineClient(http, engine.address, "openai", told).info()
    assert [source.events_port for source in info.sources] == [65535]


answers = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 70_000) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["0", "1", "kv_events", "publisher", "endpoint", "dp_size", "endpoint_port_base", "topic"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(answers, answers)
async def test_any_answer_is_used_or_refused(http: HttpClient, engine: FakeEngine, sources: Any, about: Any) -> None:
    engine.documents["/kv_event_sources"] = json.dumps(sources).encode()
    engine.documents["/server_info"] = json.dumps(about).encode()
    for name in ("", *ADAPTERS):
        try:
            info = await EngineClient(http, engine.address, name).info()
        except EngineError:
            continue
        assert all(source.host == HERE for source in info.sources)
        assert len(info.sources) <= MAX_RANKS


# 503


@pytest.mark.parametrize(("owner", "state"), [("vllm", "down"), ("sglang", "draining"), ("treeline", "draining")])
async def test_the_adapter_interprets_503(http: HttpClient, engine: FakeEngine, owner: str, state: str) -> None:
    owned(engine, owner)
    engine.missing.add("/kv_event_sources")
    spec = EndpointSpec("e", engine.address)
    watcher = EngineWatcher(spec, EngineClient(http, engine.address), lambda _state, _info: None, ProbePace())
    await watcher._probe()
    assert watcher.state is EngineState.READY
    engine.ready = False
    for _ in range(2):
        await watcher._probe()
        assert watcher.state == state


# Documents that are made to be slow


DEEP = b"[" * 100_000 + b"]" * 100_000
MANY = b"[" + b"[]," * 1_300_000 + b"[]]"
SLOW = {
    "owners": (b'{"data": [{"id": "tiny", "owned_by": ' + MANY + b"}]}", "values"),
    "parents": (b'{"data": [{"id": "tiny", "parent": ' + MANY[: 3 * 1000 + 1] + b"[]]}]}", ""),
    "models": (b'{"data": [' + b'{"id":"tiny"},' * 250_000 + b'{"id":"tiny"}]}', "values"),
    "unread": (b'{"data": [{"id": "tiny"}], "more": ' + MANY + b"}", "values"),
    "deep": (b'{"data": [{"id": "tiny", "owned_by": ' + DEEP + b"}]}", "/v1/models"),
    "half a pair": (b'{"data": [{"id": "tiny", "owned_by": "\\ud800", "parent": "\\ud800"}]}', "/v1/models"),
}


@pytest.mark.parametrize("shape", SLOW)
async def test_a_list_of_models_is_not_built_however_many_values_it_has(
    http: HttpClient, engine: FakeEngine, shape: str
) -> None:
    document, problem = SLOW[shape]
    engine.documents["/v1/models"] = document
    engine.documents["/server_info"] = b'{"version": ' + MANY + b"}"
    client = EngineHttp(http, engine.address)
    if problem:
        with pytest.raises(EngineError, match=problem):
            await recognise(client)
    else:
        adapter = await recognise(client)
        assert adapter.name == "openai"
        assert (await adapter.info(client, None)).models == ("tiny",)


# How they hand over prompts


async def test_a_vllm_with_a_role_is_asked_once_how_it_hands_over_prompts(http: HttpClient) -> None:
    async with started(vllm("d", "decode", block_size=32)) as (engine,):
        client = EngineClient(http, engine.address, apart=True)
        found = [(await client.info()).transfer for _ in range(2)]
        facts = {"block size": "32", "type of cached values": "auto", "version of vLLM": "0.33.0", "model": "org/tiny"}
        assert found == [Transfer(Protocol.NIXL, alike=tuple(facts.items()))] * 2
        assert [seen.path for seen in engine.seen].count("/metrics") == 1
        assert (await EngineClient(http, engine.address).info()).transfer is None, "one without a role is not asked"


async def test_an_engine_does_not_choose_how_much_the_picker_remembers(http: HttpClient) -> None:
    async with started(vllm("d", "decode"), sglang("p", "prefill", model_path="x" * 100_000)) as (decode, prefill):
        decode.documents["/version"] = {"version": "9" * 100_000}
        for engine in (decode, prefill):
            found = (await EngineClient(http, engine.address, apart=True).info()).transfer
            assert found is not None
            assert sum(len(value) for _, value in found.alike) < 1000


async def test_a_vllm_without_the_connector_hands_over_no_prompts(http: HttpClient) -> None:
    async with started(vllm("d", "decode", nixl=False)) as (engine,):
        assert (await EngineClient(http, engine.address, apart=True).info()).transfer is None
        engine.statuses["/metrics"] = 503
        assert (await EngineClient(http, engine.address, apart=True).info()).transfer is None


async def test_an_sglang_says_its_role_and_its_bootstrap_port(http: HttpClient) -> None:
    async with started(sglang("p", "prefill", kv_cache_dtype="auto", model_path=None)) as (engine,):
        info = await EngineClient(http, engine.address).info()
        facts = (("page size", "16"), ("type of cached values", "auto"))
        assert (info.role, info.transfer) == (Role.PREFILL, Transfer(Protocol.SGLANG, 9876, facts))
        engine.documents["/server_info"]["disaggregation_bootstrap_port"] = "no port"
        assert (await EngineClient(http, engine.address).info()).transfer == Transfer(Protocol.SGLANG, 8998, facts)
        engine.documents["/server_info"]["disaggregation_mode"] = "null"
        info = await EngineClient(http, engine.address).info()
        assert (info.role, info.transfer) == (None, None)


def test_discovery_names_the_protocol_and_the_engine_the_facts() -> None:
    told = EndpointSpec("d", "10.0.0.1:80", role=Role.DECODE, transfer=Transfer(Protocol.LLM_D))
    facts = (("block size", "16"),)
    found = EngineInfo(transfer=Transfer(Protocol.NIXL, alike=facts)).registered(told)
    assert (found.role, found.transfer) == (Role.DECODE, Transfer(Protocol.LLM_D, alike=facts))
    assert EngineInfo().registered(told).transfer == Transfer(Protocol.LLM_D)
    assert EngineInfo(role=Role.PREFILL).registered(told).role is Role.PREFILL


@pytest.mark.parametrize(
    ("said", "transfer"),
    [
        ({"kv_transfer_port": 5857, "internal_states": [{"tiers": {"fingerprint": "ab"}}]}, (5857, "ab")),
        ({"cache_sources_off": ["disk"], "internal_states": [{"tiers": {"fingerprint": "ab"}}]}, (0, "ab")),
        ({"internal_states": [{"tiers": None}]}, None),
        *(({"cache_sources_off": words}, None) for words in (["disk\n"], ["a\x1b[2J"], ["d" * 65], ["disk"] * 9)),
        ({}, None),
    ],
)
async def test_our_runtime_says_where_it_gives_pages_and_which(
    http: HttpClient, said: dict[str, Any], transfer: tuple[int, str] | None
) -> None:
    async with started(FakeEngine("r")) as (engine,):
        owned(engine, "treeline", server_info={"tokenizer_fingerprint": "f", "kv_events": None, **said})
        info = await EngineClient(http, engine.address).info()
        assert info.cache_sources_off == (("disk",) if said.get("cache_sources_off") == ["disk"] else ())
        found = info.transfer
        if transfer is None:
            assert found is None
        else:
            assert found == Transfer(Protocol.TREELINE, transfer[0], (("fingerprint of pages", transfer[1]),))
