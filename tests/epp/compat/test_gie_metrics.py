"""Metrics under GIE's names: known ones are shown, others have no series, and labels are bounded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parsed
from support.epp_io import engines, running_picker
from support.epp_kube import asked
from support.http import client
from support.proxy import NONE, Proxy
from treeline_epp.compat import gie_metrics
from treeline_epp.compat.gie_metrics import CHOICES, REQUESTS, GieMetrics, Histogram, head, label_text, shown
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.options import options_of
from treeline_epp.picking.picker import Picker
from treeline_wire import headers as names
from treeline_wire.load import TreelineLoad

KNOWN = """
inference_objective_request_total inference_objective_running_requests inference_objective_request_ttft_seconds
inference_objective_request_tpot_seconds inference_objective_request_duration_seconds inference_objective_request_sizes
inference_objective_response_sizes inference_objective_input_tokens inference_objective_output_tokens
inference_objective_prompt_cached_tokens inference_objective_normalized_time_per_output_token_seconds
inference_pool_average_kv_cache_utilization inference_pool_average_queue_size inference_pool_average_running_requests
inference_pool_ready_pods inference_pool_per_pod_queue_size inference_extension_scheduler_e2e_duration_seconds
inference_extension_prefix_indexer_size inference_extension_prefix_indexer_hit_ratio
inference_extension_prefix_indexer_hit_bytes inference_extension_scheduler_attempts_total
"""


class Page:
    """A picker that counts under GIE's names."""

    def __init__(self) -> None:
        self.metrics = GieMetrics(Picker(), "team")
        self.proxy = Proxy([self.metrics])
        self.metrics._picker = self.proxy.picker

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = self.metrics.render().decode()
        found = [(s.name, frozenset(s.labels.items()), s.value) for f in parsed(text) for s in f.samples]
        assert len(found) == len({(name, labels) for name, labels, _ in found}), "each series once"
        return {(name, labels): value for name, labels, value in found}

    def value(self, name: str, /, **labels: str) -> float | None:
        found = [v for (n, had), v in self.samples().items() if n == name and labels.items() <= dict(had).items()]
        assert len(found) <= 1, found
        return found[0] if found else None

    def named(self) -> set[str]:
        suffixes = ("_bucket", "_sum", "_count")
        return {next((n.removesuffix(s) for s in suffixes if n.endswith(s)), n) for n, _ in self.samples()}


@pytest.fixture
def page() -> Page:
    return Page()


def test_a_request_observed_to_its_end_fills_every_metric(page: Page) -> None:
    # A report counts for 3 s, and a slow machine may take longer to read the page so often.
    page.proxy.picker.on_load("e0", ScrapedLoad(3, 5, 0.25, 1000), time.monotonic() + 60.0)
    page.proxy.stream(11)
    assert page.named() == set(KNOWN.split())
    model = {"model_name": "tiny", "target_model_name": "tiny"}
    for name, value in {
        "inference_objective_input_tokens_sum": 200,
        "inference_objective_output_tokens_sum": 11,
        "inference_objective_prompt_cached_tokens_sum": 64,
        "inference_objective_request_ttft_seconds_sum": 0.5,
        "inference_objective_request_tpot_seconds_sum": 0.1,
        "inference_objective_request_duration_seconds_sum": 1.5,
        "inference_objective_normalized_time_per_output_token_seconds_sum": 1.5 / 11,
    }.items():
        assert page.value(name, **model) == pytest.approx(value), name
    assert page.value("inference_objective_request_total", **model, priority="0") == 1
    assert page.value("inference_pool_average_queue_size", name="default") == 5
    assert page.value("inference_pool_average_kv_cache_utilization", name="default") == 0.25
    assert page.value("inference_pool_per_pod_queue_size", name="default", model_server_pod="e0") == 5
    assert page.value("inference_pool_per_pod_queue_size", name="default", model_server_pod="e1") is None
    assert page.value("inference_pool_ready_pods", name="default") == 2
    assert page.value("inference_objective_running_requests", model_name="tiny") == 0


def test_the_migration_page_lists_every_histogram() -> None:
    text = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text(encoding="utf-8")
    for row in (*REQUESTS, *CHOICES):
        assert f"| `{row.name}` | {row.help} |" in text


def test_parts_that_the_proxy_does_not_send_have_no_series(page: Page) -> None:
    page.proxy.open(response=NONE)
    page.proxy.answer(**{"content-type": "text/event-stream"})
    page.proxy.close()
    unknown = {
        "inference_objective_request_ttft_seconds",
        "inference_objective_request_duration_seconds",
        "inference_objective_response_sizes",
        "inference_objective_input_tokens",
        "inference_objective_output_tokens",
        "inference_objective_running_requests",
        "inference_pool_average_kv_cache_utilization",
        "inference_pool_average_queue_size",
    }
    assert not unknown & page.named()
    assert page.value("inference_objective_request_total", model_name="tiny") == 1


def test_our_runtimes_report_tokens_and_ttft_by_headers(page: Page) -> None:
    page.proxy.open(response=NONE)
    page.proxy.now += 0.25
    told = {names.PROMPT_TOKENS: "300", names.CACHED_TOKENS: "100"}
    page.proxy.answer(**{"content-type": "text/event-stream", **told})
    page.proxy.close()
    assert page.value("inference_objective_input_tokens_sum") == 300
    assert page.value("inference_objective_prompt_cached_tokens_sum") == 100
    assert page.value("inference_objective_request_ttft_seconds_sum") == 0.25
    assert page.value("inference_objective_output_tokens_sum") is None


def test_a_request_runs_until_its_response_ends(page: Page) -> None:
    page.proxy.open()
    page.proxy.answer()
    assert page.value("inference_objective_running_requests", model_name="tiny") == 1
    page.proxy.chunk(b"{}", ends=True)
    page.proxy.close()
    assert page.value("inference_objective_running_requests", model_name="tiny") == 0


def test_refusals_and_errors_of_engines_are_counted_by_code(page: Page) -> None:
    page.proxy.open(model="nobody-serves-this")
    page.proxy.close()
    page.proxy.open()
    page.proxy.answer(500)
    page.proxy.close()
    for name in ("e0", "e1"):
        page.proxy.picker.set_ready(name, False)
    page.proxy.open()
    page.proxy.close()
    name = "inference_objective_request_error_total"
    assert page.value(name, model_name="", target_model_name="", error_code="NotFound") == 1
    assert page.value(name, model_name="tiny", target_model_name="tiny", error_code="ModelServerError") == 1
    assert page.value(name, model_name="tiny", error_code="ServiceUnavailable") == 1
    failed = page.value("inference_extension_scheduler_attempts_total", status="failure", target_model_name="tiny")
    assert failed == 1
    assert page.value("inference_objective_request_total") == 1


def test_a_client_that_leaves_and_a_request_that_is_only_shown_are_no_errors(page: Page) -> None:
    page.proxy.open()
    page.proxy.close()
    page.proxy.open(observed=True)
    page.proxy.close()
    assert page.value("inference_objective_request_total") == 2
    assert page.value("inference_objective_request_error_total") is None
    assert page.value("inference_objective_running_requests") == 0


def test_a_choice_counts_for_the_pod_of_its_rank_until_the_endpoint_is_gone(page: Page) -> None:
    for name in ("e0", "e1"):
        page.proxy.picker.remove_endpoint(name)
    page.proxy.picker.add_endpoint(EndpointSpec("vllm-7-rank-1", "10.0.0.9:8001", models=("tiny",)))
    page.proxy.router.registry.set_endpoint("vllm-7-rank-1", "default", ("tiny",), None)
    page.proxy.stream()
    pod = {"pod_name": "vllm-7", "namespace": "team", "port": "8001"}
    assert page.value("inference_extension_scheduler_attempts_total", status="success", **pod) == 1
    page.metrics.forget("vllm-7-rank-1")
    assert page.value("inference_extension_scheduler_attempts_total") is None


def test_the_hit_of_a_choice_is_counted_in_bytes_where_the_prompt_was_looked_up(page: Page) -> None:
    page.proxy.stream()
    counted = page.value("inference_extension_prefix_indexer_hit_bytes_count")
    assert counted == page.value("inference_extension_prefix_indexer_hit_ratio_count") == 1
    assert page.value("inference_extension_prefix_indexer_hit_bytes_sum") == 0
    page.proxy.stream()
    assert (page.value("inference_extension_prefix_indexer_hit_bytes_sum") or 0) > 0


def test_pairs_of_models_and_endpoints_are_bounded(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gie_metrics, "_MOST_ATTEMPTS", 0)
    page.proxy.stream()
    assert page.value("inference_extension_scheduler_attempts_total", pod_name="other") == 1


def test_a_name_of_unreasonable_length_is_counted_as_other(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gie_metrics, "_LONGEST", 3)
    page.proxy.stream()
    assert page.value("inference_objective_request_total", model_name="other") == 1


def test_sets_of_labels_are_bounded_where_each_is_hundreds_of_lines(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gie_metrics, "MOST_SETS", 1)
    page.proxy.open(model="nobody-serves-this")
    page.proxy.close()
    for _ in range(3):
        page.proxy.stream()
    assert len(page.metrics._of_requests) == 1
    assert page.value("inference_objective_request_duration_seconds_count", model_name="other") == 3


@given(st.text(max_size=20), st.lists(st.floats(0, 1e6), max_size=30))
def test_the_page_is_what_the_library_reads_back(value: str, observed: list[float]) -> None:
    series = Histogram((0.5, 1.0, 250.0))
    for one in observed:
        series.observe(one)
    text = head("h", "histogram", "words") + series.lines("h", label_text(("a", "b"), (value, "x")))
    text += shown("g", "gauge", "words", ("a",), {(value,): 1.5})
    histogram, gauge = parsed(text)
    had = {(s.name, s.labels.get("le")): s.value for s in histogram.samples if s.labels["a"] == value}
    assert had["h_bucket", "0.5"] == sum(one <= 0.5 for one in observed)
    assert had["h_bucket", "250.0"] == sum(one <= 250.0 for one in observed)
    assert had["h_bucket", "+Inf"] == had["h_count", None] == len(observed)
    assert had["h_sum", None] == pytest.approx(sum(observed))
    assert [(s.labels, s.value) for s in gauge.samples] == [({"a": value}, 1.5)]


def test_our_runtimes_do_not_report_running_requests_share_of_the_cache(page: Page) -> None:
    load = TreelineLoad(pages_used=1, pages_cached=99, pages_total=100, page_size=16, running=2, waiting=1)
    page.proxy.picker.on_load("e0", load, time.monotonic() + 60.0)
    assert page.value("inference_pool_average_kv_cache_utilization") is None
    assert page.value("inference_pool_average_queue_size") == 1


def test_a_histogram() -> None:
    series = Histogram((1.0, 3.0))
    for value in (0.5, 1.0, 2.5, 3.0, 9.0):
        series.observe(value)
    assert series.lines("h", 'a="b"').splitlines() == [
        'h_bucket{a="b",le="1.0"} 2',
        'h_bucket{a="b",le="3.0"} 4',
        'h_bucket{a="b",le="+Inf"} 5',
        'h_count{a="b"} 5',
        'h_sum{a="b"} 16.0',
    ]


@pytest.mark.parametrize(("wanted", "shown"), [("gie", (False, True)), ("treeline", (True, False))])
async def test_the_flag_selects_the_names_of_the_page(wanted: str, shown: tuple[bool, bool]) -> None:
    async with engines(1) as (engine,):
        flags = ("--endpoint", f"e0={engine.address}", "--metrics-families", wanted)
        async with running_picker(*flags) as picker, client() as http:
            assert await asked(picker, "tiny") == engine.address
            text = (await http.get(f"http://127.0.0.1:{picker.options.metrics_port}/metrics")).text
    assert ("treeline_epp_decisions_total" in text, "inference_objective_request_total" in text) == shown


def test_an_unknown_metric_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--gateway", "g", "--metrics-families", "treeline,kserve"])
    assert "'kserve' is none of treeline, gie" in capsys.readouterr().err
