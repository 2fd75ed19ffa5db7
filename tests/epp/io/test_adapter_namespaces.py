"""Requests for LoRA adapters and with salts use the namespace of their engines' events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.epp_io import FakePublisher, engines, running_picker, small_bundle, so, stored, until
from support.epp_kube import models
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.watcher import EngineClient
from treeline_epp.picking.request import Request
from treeline_epp.requests import model_registry
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import Adapters, Alike, ModelRegistry, union
from treeline_epp.requests.parse import parse
from treeline_epp.requests.refusals import Refusal
from treeline_wire.events import BlockStored
from treeline_wire.models import ModelRule, PoolClaim
from treeline_wire.namespaces import join_namespace

VLLM = Adapters("vllm", {"sql": "sql"})
SGLANG = Adapters("sglang", {"base:sql": "sql"})
LISTED = {
    "data": [
        {"id": "base", "object": "model", "root": "/models/base", "parent": None},
        {"id": "sql", "object": "model", "root": "/adapters/sql", "parent": "base"},
    ]
}


def registry(adapters: Adapters, rules: tuple[ModelRule, ...] = ()) -> ModelRegistry:
    made = ModelRegistry()
    fingerprint = made.add_keyer(small_bundle()).fingerprint
    made.set_endpoint("e", "pool", ("base", *adapters.names), fingerprint, adapters=adapters)
    made.set_pools({"pool": PoolClaim("here")}, rules)
    return made


def parsed(served: ModelRegistry, model: str | None, path: str = "/v1/completions", **body: Any) -> Request | Refusal:
    named = {} if model is None else {"model": model}
    data = json.dumps({"prompt": "hello", "text": "hello"} | named | body).encode()
    result = parse(RouteRequest({":path": path, ":method": "POST"}, data, None), served)
    assert isinstance(result, Request | Refusal)
    return result


def namespace(*args: Any, **body: Any) -> str | None:
    result = parsed(*args, **body)
    assert isinstance(result, Request), result
    assert result.key
    return result.namespace


@pytest.mark.parametrize("adapters", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_an_adapter_asked_for_is_the_one_that_events_carry(adapters: Adapters) -> None:
    served = registry(adapters)
    (asked,) = adapters.names
    event = BlockStored([1], None, [1], 1, lora_name="sql")
    assert namespace(served, asked) == event.namespace
    assert namespace(served, "base") is None, "the base model is in none"
    salted = BlockStored([1], None, [1], 1, lora_name="sql", cache_salt="s")
    assert namespace(served, asked, cache_salt="s") == salted.namespace
    assert namespace(served, "base", cache_salt="s") == "s"


def test_vllm_reads_neither_lora_path_nor_extra_key() -> None:
    served = registry(VLLM)
    assert namespace(served, "base", lora_path="sql", extra_key="k") is None
    assert namespace(served, "base", lora_path=["sql"]) is None
    assert namespace(served, "sql", lora_path="other", extra_key="k") == join_namespace("sql", None)


def test_sglang_takes_the_adapter_from_the_model_before_lora_path() -> None:
    served = registry(SGLANG)
    assert namespace(served, "base", lora_path="sql") == namespace(served, "base:sql")
    assert namespace(served, "base:sql", lora_path="other") == namespace(served, "base:sql")
    assert namespace(served, "base", lora_path="sql", path="/generate") == namespace(served, "base:sql")
    assert namespace(served, "base:sql", path="/generate") is None, "its native API knows no model"


def test_requests_with_extra_key_match_no_event_of_sglang() -> None:
    served = registry(SGLANG)
    for body in ({}, {"cache_salt": "s"}, {"lora_path": "sql"}):
        keyed = namespace(served, "base", extra_key="k", **body)
        names = [(lora, salt) for lora in (None, "sql", "k") for salt in (None, "s", "k", "sk")]
        told = {BlockStored([1], None, [1], 1, lora_name=lora, cache_salt=salt).namespace for lora, salt in names}
        assert keyed not in told
        assert keyed == namespace(served, "base", extra_key="k", **body), "history counts"


def test_a_public_name_stands_for_the_adapter_that_the_engine_is_asked_for() -> None:
    rule = ModelRule(name="r", pool="pool", model_name="analyst", targets=(("sql", None),))
    served = registry(VLLM, (rule,))
    result = parsed(served, "analyst")
    assert isinstance(result, Request)
    assert result.rewrite == "sql"
    assert result.namespace == join_namespace("sql", None)


def test_endpoints_with_different_adapters_are_distinguished_by_name() -> None:
    served = registry(VLLM)
    served.set_endpoint("f", "pool", ("base", "code"), None, adapters=Adapters("vllm", {"code": "code"}))
    assert namespace(served, "code") == join_namespace("code", None)
    assert namespace(served, "sql") == join_namespace("sql", None)
    served.remove_endpoint("f")
    assert isinstance(parsed(served, "code"), Refusal)


def test_an_engine_that_lists_its_base_model_as_an_adapter_takes_no_hits_of_others() -> None:
    served = registry(VLLM)
    liar = Adapters("vllm", {"base": "base"})
    served.set_endpoint("liar", "pool", ("base", "x"), None, adapters=liar)
    assert namespace(served, "base") is None, "as many say that it is none"
    assert namespace(served, "sql") == join_namespace("sql", None)
    served.set_endpoint("f", "pool", ("base", "sql"), None, adapters=VLLM)
    served.set_endpoint("other liar", "pool", ("base", "sql"), None, adapters=Adapters("vllm"))
    assert namespace(served, "base") is None
    assert namespace(served, "sql") == join_namespace("sql", None), "most say that it is one"
    served.remove_endpoint("e")
    served.remove_endpoint("f")
    assert served.adapters_of("pool") == Adapters("vllm"), "one against one"


GROUPS = st.lists(
    st.tuples(st.sets(st.sampled_from("abcd"), min_size=1), st.sets(st.sampled_from("abcd")), st.integers(1, 3)),
    max_size=6,
)


@given(GROUPS)
def test_a_name_is_an_adapter_where_most_endpoints_list_it_as_one(groups: list[tuple[set[str], set[str], int]]) -> None:
    made = [
        Alike(Adapters("vllm", {name: name for name in models & lora}), tuple(models), n) for models, lora, n in groups
    ]
    votes = {name: sum(n if name in lora else -n for models, lora, n in groups if name in models) for name in "abcd"}
    assert set(union(made).names) == {name for name in "abcd" if votes[name] > 0}
    assert union(made).names == union(made[::-1]).names


def test_common_models_of_endpoints_are_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def counted(groups: Sequence[Alike]) -> Adapters:
        given.append(len(groups))
        return union(groups)

    monkeypatch.setattr(model_registry, "union", counted)
    served = ModelRegistry()

    def serves(endpoint: int, value: str) -> None:
        models = tuple(f"adapter-{number}" for number in range(20))
        names = {model: f"{value}-{model}" for model in models}
        served.set_endpoint(f"e{endpoint}", "p", models, None, adapters=Adapters("vllm", names))

    for endpoint in range(30):
        serves(endpoint, "other" if endpoint == 7 else "one")
    assert served.adapters_of("p").names["adapter-3"] == "one-adapter-3"
    assert served.resolve("adapter-19").target == "adapter-19"
    serves(29, "other")
    assert served.adapters_of("p").names["adapter-3"] == "other-adapter-3", "those of the last endpoint"
    served.remove_endpoint("e29")
    assert served.adapters_of("p").names["adapter-3"] == "one-adapter-3"
    assert given == [2, 2, 2]
    for turn in range(200):
        serves(0, f"turn-{turn}")
    assert len(served._maps) < 4 * 29, "of what is served no more little is kept"
    for endpoint in range(29):
        served.remove_endpoint(f"e{endpoint}")
    assert served.adapters_of("p") == Adapters()
    assert not served._lists
    assert not served._maps


async def test_an_adapter_that_is_loaded_while_the_engine_runs_is_known_with_its_first_event() -> None:
    publisher = FakePublisher(epoch=1)
    async with engines(1, models=("base",)) as (engine,):
        engine.documents |= {
            "/server_info": {
                "kv_events": publisher.kv_events(),
                "epoch": publisher.epoch,
                "tokenizer_fingerprint": small_bundle().fingerprint,
            },
            "/treeline/tokenizer": small_bundle().to_json(),
        }
        async with running_picker("--endpoint", f"e0={engine.address}") as picker:
            await publisher.store(stored(range(32)))
            engine.documents["/v1/models"] = LISTED
            await publisher.store(msgspec.structs.replace(stored(range(32, 64)), lora_name="sql"))
            # It pushes its load, and so is asked every five seconds, or a little earlier.
            await until(lambda: so(models(picker, "default"), lambda now: "sql" in now), "the adapter to be listed")
    publisher.stop()


@pytest.mark.parametrize(
    ("engine_type", "models", "adapters"),
    [
        ("vllm", ("base", "sql"), {"sql": "sql"}),
        ("sglang", ("base", "base:sql"), {"base:sql": "sql"}),
        ("", ("base", "sql"), {"sql": "sql"}),
    ],
)
async def test_a_model_with_a_parent_is_an_adapter(
    http: HttpClient, engine_type: str, models: tuple[str, ...], adapters: dict[str, str]
) -> None:
    async with engines(1) as (engine,):
        engine.documents["/v1/models"] = LISTED
        info = await EngineClient(http, engine.address, engine_type).info()
        assert (info.models, info.adapters) == (models, adapters)


@pytest.mark.parametrize(
    ("listed", "models", "adapters"),
    [
        ([("base", "x")], ("base",), {}),
        ([("a", "b"), ("b", "a")], ("a", "b"), {}),
        ([("base", None), ("base", "x"), ("sql", "base")], ("base", "base:sql"), {"base:sql": "sql"}),
        (
            [("base", None), ("sql", "/models/somewhere")],
            ("base", "/models/somewhere:sql"),
            {"/models/somewhere:sql": "sql"},
        ),
        ([], (), {}),
    ],
)
async def test_there_is_no_engine_without_a_base_model(
    http: HttpClient,
    listed: list[tuple[str, str | None]],
    models: tuple[str, ...],
    adapters: dict[str, str],
) -> None:
    async with engines(1) as (engine,):
        engine.documents["/v1/models"] = {"data": [{"id": name, "parent": parent} for name, parent in listed]}
        info = await EngineClient(http, engine.address, "sglang").info()
        assert (info.models, info.adapters) == (models, adapters)


@pytest.mark.parametrize("parent", [None, "", "base", 7, ["x"], {}, "p" * 513])
async def test_a_model_with_an_unknown_parent_is_no_adapter(http: HttpClient, parent: object) -> None:
    async with engines(1) as (engine,):
        engine.documents["/v1/models"] = {"data": [{"id": "base", "parent": parent}]}
        info = await EngineClient(http, engine.address, "vllm").info()
        assert (info.models, info.adapters) == (("base",), {})
