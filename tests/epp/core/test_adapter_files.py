"""Adapters of our runtimes in a pick: which files an endpoint has under a name, and whether they have a slot."""

from __future__ import annotations

import pytest
from support.epp_core import KEYS, Prompt
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Transfer
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.picker import ADAPTER_S, Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.load import TreelineLoad
from treeline_wire.namespaces import join_namespace

OLD, NEW = "0a" * 32, "0b" * 32
PROMPT = Prompt([1, 2, 3, 4] * 40)


def picker_of(*digests: str, **config: object) -> Picker:
    """Return a picker with an endpoint e0, e1 … for each digest of the adapter `sql`."""
    picker = Picker(PickerConfig(**config))  # type: ignore[arg-type]
    for number, digest in enumerate(digests):
        has(picker, number, sql=digest)
        report(picker, number)
    return picker


def has(picker: Picker, number: int, **adapters: str) -> None:
    lends = Transfer(Protocol.TREELINE, 9000, ())
    names = ("m", *adapters)
    spec = EndpointSpec(f"e{number}", f"10.0.0.{number}:80", models=names, adapters=adapters, transfer=lends)
    picker.add_endpoint(spec)


def report(picker: Picker, number: int, resident: tuple[str, ...] = (), **fields: object) -> None:
    digests = dict(picker.endpoints[f"e{number}"].spec.adapters)
    load = TreelineLoad(digests=digests, resident=list(resident), prefill_tokens_per_s=1e4, **fields)  # type: ignore[arg-type]
    picker.on_load(f"e{number}", load, now=0.0)


def ask(model: str = "sql", digest: str = NEW, **fields: object) -> Request:
    namespace = join_namespace(digest if model == "sql" else None, "salt", "client")
    tokens = len(PROMPT.tokens)
    return Request("id", model, namespace, PROMPT.key, tokens, **fields)  # type: ignore[arg-type]


def store(picker: Picker, number: int, digest: str | None) -> None:
    prompt = Prompt(PROMPT.tokens, namespace=join_namespace(digest, "salt", "client"))
    picker.index.apply(picker.endpoints[f"e{number}"].pod, prompt.stored(), KEYS)


def hits(picker: Picker, request: Request) -> dict[str, int]:
    """Return the confirmed tokens of each endpoint."""
    found = picker.explain(request, now=0.0).endpoints
    return {
        one.endpoint: int(one.terms["confirmed_tokens"] or 0) for one in sorted(found, key=lambda one: one.endpoint)
    }


@pytest.mark.parametrize("count", [3, 12], ids=["few", "many"])
@pytest.mark.parametrize("asked", [OLD, NEW], ids=["old", "new"])
def test_each_endpoint_is_matched_with_its_own_files(count: int, asked: str) -> None:
    picker = picker_of(OLD, NEW, *[NEW] * (count - 2))
    for number in range(2):
        store(picker, number, OLD)
    found = hits(picker, ask(digest=asked))
    assert found.pop("e0") > 0
    assert set(found.values()) == {0}, "what e1 computed with the old files is nothing to the new ones"
    store(picker, 1, NEW)
    both = hits(picker, ask(digest=asked))
    assert both["e0"] == both["e1"] > 0
    assert hits(picker, ask("m")) == dict.fromkeys(both, 0)


def test_predictions_are_of_the_chosen_endpoints_files() -> None:
    picker = picker_of(OLD, NEW)
    lease = picker.reserve(picker.pick(ask(subset=frozenset({"10.0.0.0:80"})), 0.0), 0.0)
    assert lease.endpoint.spec.name == "e0"
    e0 = picker.endpoints["e0"]

    def reach(digest: str) -> int:
        namespace = join_namespace(digest, "salt", "client")
        return picker.index.match(e0.pod.scope, namespace, PROMPT.key, 0.0).hit(e0.pod).reach

    assert (reach(OLD) > 0, reach(NEW)) == (True, 0)
    picker.close(lease, 0.0, Outcome.ERROR)
    assert reach(OLD) == 0


def test_endpoints_lend_no_pages_of_other_files() -> None:
    for digests, lends in (((OLD, OLD), True), ((OLD, NEW), False)):
        picker = picker_of(*digests)
        picker.on_tick(0.0)
        request = ask(digest=OLD)
        picker.explain(request, 0.0)
        rows = picker._table.lenders(request, picker.endpoints["e1"].spec)
        assert (picker.endpoints["e0"].pod.row in rows) is lends


def test_a_reload_forgets_what_the_old_files_left() -> None:
    picker = picker_of(OLD, OLD)
    store(picker, 0, OLD)
    assert hits(picker, ask(digest=OLD))["e0"] > 0
    has(picker, 0, sql=NEW)
    assert hits(picker, ask(digest=OLD)) == hits(picker, ask(digest=NEW)) == {"e0": 0, "e1": 0}


def test_an_endpoint_with_other_adapters_alone_is_no_candidate() -> None:
    picker = picker_of(NEW, NEW)
    has(picker, 0, other=NEW)
    assert {picker.pick(ask(), 0.0).endpoint.name for _ in range(20)} == {"e1"}
    assert {picker.pick(ask("m"), 0.0).endpoint.name for _ in range(40)} == {"e0", "e1"}


@pytest.mark.parametrize("count", [3, 12], ids=["few", "many"])
def test_an_adapter_with_a_slot_attracts_its_requests_at_equal_load(count: int) -> None:
    picker = picker_of(*[NEW] * count)
    report(picker, 1, resident=(NEW,))
    assert {picker.pick(ask(), 0.0).endpoint.name for _ in range(20)} == {"e1"}
    terms = {one.endpoint: one.terms for one in picker.explain(ask(), 0.0).endpoints}
    assert (terms["e1"]["adapter_s"], terms["e0"]["adapter_s"]) == (0.0, ADAPTER_S)
    cost_s, ttft_s = (round((terms["e0"][name] or 0) - (terms["e1"][name] or 0), 6) for name in ("cost_s", "ttft_s"))
    assert (cost_s, ttft_s) == (ADAPTER_S, ADAPTER_S)
    assert len({picker.pick(ask("m"), 0.0).endpoint.name for _ in range(100)}) > 1, "the base model needs no slot"
    report(picker, 1, resident=(NEW,), waiting=1, waiting_uncached_tokens=5000)
    assert picker.pick(ask(), 0.0).endpoint.name != "e1", "waiting there costs more"


def test_endpoints_that_do_not_tell_of_slots_cost_nothing_more() -> None:
    picker = picker_of(NEW, NEW)
    picker.on_load("e0", TreelineLoad(prefill_tokens_per_s=1e4), now=0.0)
    terms = {one.endpoint: one.terms["adapter_s"] for one in picker.explain(ask(), 0.0).endpoints}
    assert terms == {"e0": 0.0, "e1": ADAPTER_S}


def test_an_engine_that_is_scraped_is_as_dear_if_none_of_its_requests_uses_the_adapter() -> None:
    picker = Picker(PickerConfig())
    for number, running in enumerate([frozenset({"sql"}), frozenset({"law"}), frozenset(), None]):
        has(picker, number, sql="sql")
        picker.on_load(f"e{number}", ScrapedLoad(running=1, adapters=running), now=0.0)
    request = ask(digest="sql")
    terms = {one.endpoint: one.terms["adapter_s"] for one in picker.explain(request, 0.0).endpoints}
    assert terms == {"e0": 0.0, "e1": ADAPTER_S, "e2": ADAPTER_S, "e3": 0.0}, "e3 does not tell"
    assert {picker.explain(ask("m"), 0.0).endpoints[at].terms["adapter_s"] for at in range(4)} == {0.0}


def test_the_policy_for_adapters_knows_slots_too() -> None:
    picker = picker_of(NEW, NEW, NEW, policy="lora_affinity")
    report(picker, 2, resident=(NEW,))
    assert {picker.pick(ask(), 0.0).endpoint.name for _ in range(20)} == {"e2"}
