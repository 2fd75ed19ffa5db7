"""All metrics that benchmarks may report, with their meaning and reference.

A name may have a tail (a policy, a size) without an entry: `routing.hit_rate` describes `routing.hit_rate.random`.
"""

from __future__ import annotations

from typing import Any

from treeline_sim.traces import TRACES

from treeline_bench.engine_metrics import ENGINE, RANKS
from treeline_bench.figure import BOUND, PAPER, Metric, detail
from treeline_bench.results import Row

EXPECTED = "expected on 2 cores"
_ORACLE = "an oracle: each shared prefix is computed once"
_RANDOM = "random routing, same run"


def _simulated(trace: str) -> dict[str, Metric]:
    """Metrics of `routing-sim` on a trace, and of `routing-sim --peers`, where the tail is a router's name."""
    name, peers = f"routing.{trace}", f"routing.peers.{trace}"
    hits = "hit rate of the default policy on simulated engines ÷ the better oracle's"
    faults = "with 4 pickers, 1 % of events and gossip lost, one engine and one picker restarted"
    waits = "time to first token, 90th percentile ÷ the best other policy's"
    endless: dict[str, Any] = {"source": "one endless cache of all endpoints", "beside": "endless"}
    return {
        f"{name}.hit_vs_oracle": Metric("share", f"{hits}, trace {trace}", "higher", 0.98, BOUND),
        f"{name}.ttft_p90_vs_best": Metric("times", f"{waits}, trace {trace}", "lower", 1.05, BOUND),
        f"{name}.faults.hit_vs_oracle": detail("share", f"{hits}, {faults}", "higher", 0.93, BOUND),
        f"{name}.faults.ttft_p90_vs_best": detail("times", f"{waits}, {faults}", "lower", 1.05, BOUND),
        f"{name}.hit_rate": detail("share", "prompt tokens from a cache", "higher", **endless),
        **{f"{name}.ttft_p{q}_ms": detail("ms", f"time to first token, percentile {q}", "lower") for q in (50, 90, 99)},
        f"{name}.output_tokens_s": detail("tokens/s", "of all endpoints", "higher"),
        f"{name}.load_cov": detail("share", "spread of requests over endpoints: deviation ÷ mean", "lower"),
        f"{name}.errors": detail("requests", "without a whole answer", "lower"),
        f"{peers}.hit_vs": detail("times", "our hit rate by that of another router", "higher", 1.0, "same run"),
        f"{peers}.ttft_p90_vs": detail("times", "our time to first token, p90, by another's", "lower", 1.0, "same run"),
        f"{peers}.hit_rate": detail("share", "prompt tokens from a cache, as engines count them", "higher", **endless),
        f"{peers}.ttft_p50_ms": detail("ms", "time to first token, median", "lower"),
        f"{peers}.ttft_p90_ms": detail("ms", "time to first token with several pickers, 90th percentile", "lower"),
        f"{peers}.errors": detail("requests", "without a whole answer", "lower"),
        f"{peers}.late": detail("requests", "sent over 20 ms after they were due", "lower"),
    }


_ROUTING = {
    "routing.hit_rate": Metric(
        "share", "prompt tokens that came from a runtime's cache", "higher", source=_ORACLE, beside="oracle"
    ),
    "routing.computed_tokens": Metric(
        "tokens", "prompt tokens that the runtimes had to compute", "lower", source=_ORACLE, beside="oracle"
    ),
    "routing.ttft_ms.p50": Metric(
        "ms", "time to first token, median, shared prefixes, two runtimes", "lower", source=_RANDOM, beside="random"
    ),
    "routing.ttft_ms.p99": detail("ms", "time to first token, p99", "lower", source=_RANDOM, beside="random"),
    "routing.duration_s": detail("s", "first request to last answer", "lower", source=_RANDOM, beside="random"),
    "routing.errors": Metric("requests", "requests without a complete answer", "lower", source="none expected"),
    **{name: described for trace in TRACES for name, described in _simulated(trace).items()},
}

_BETTER = "÷ that of all requests whole, or all apart if that is less"
_FORMS = {
    "forms.ttft_p90_vs_best": Metric("times", f"time to first token, 90th percentile {_BETTER}", "lower", 1.0, BOUND),
    "forms.itl_p99_vs_best": Metric("times", f"time between tokens, 99th percentile {_BETTER}", "lower", 1.0, BOUND),
    "forms.request_vs_best": Metric("times", f"time of a request until its end, mean {_BETTER}", "lower", 1.0, BOUND),
    "forms.ttft_p90_ms": detail("ms", "time to first token, 90th percentile", "lower"),
    "forms.itl_p99_ms": detail("ms", "time between two tokens of a request, 99th percentile", "lower"),
    "forms.request_s": detail("s", "time of a request until its end, mean", "lower"),
    "forms.apart": detail("requests", "whose prompt another engine computed, of 4,500", "higher"),
    "forms.pull": detail("requests", "that got a part of their prompt from another engine, of 4,500", "higher"),
}

_MEDIA = {
    "media.hit_vs_oracle": Metric(
        "share", "hit rate of chats with images on simulated engines ÷ the better oracle's", "higher", 0.95, BOUND
    ),
    "media.hit_rate": detail("share", "prompt tokens of chats with images from a cache", "higher"),
    "media.errors": detail("requests", "of chats with images, without a whole answer", "lower"),
}

_PICKER = {
    "gie.vs_gie.rps_per_core.1kb": Metric(
        "×",
        "our picker's requests per CPU-second ÷ GIE 1.5's, bodies of 1 KB, worst of 2, 16 and 64 endpoints",
        "higher",
        1.1,
    ),
    "gie.vs_gie.rps_per_core.30kb": Metric(
        "×", "our picker's requests per CPU-second ÷ GIE 1.5's, bodies of 30 KB", "higher", 3.5
    ),
    "gie.vs_gie.rps_per_core.220kb": Metric(
        "×", "our picker's requests per CPU-second ÷ GIE 1.5's, bodies of 220 KB", "higher", 6.0
    ),
    "gie.times_gie": detail(
        "×", "our picker's requests per CPU-second ÷ GIE 1.5's, by body mode and endpoints", "higher"
    ),
    "gie.rps_per_core": detail("requests/s", "requests decided per CPU-second of our picker", "higher"),
    "gie.rps_per_core_gie": detail("requests/s", "requests decided per CPU-second of GIE 1.5's picker", "higher"),
    "gie.added_ms.p50": Metric(
        "ms", "latency that our picker adds to Envoy, median, worst of all endpoints and modes", "lower", 0.8
    ),
    "gie.added_ms.p99": Metric(
        "ms", "latency that our picker adds to Envoy, 99th percentile, worst of all endpoints and modes", "lower", 2.0
    ),
    "gie.each_added_ms": detail("ms", "added by our picker, by body mode and endpoints", "lower"),
    "gie.each_added_gie_ms": detail("ms", "added by GIE 1.5's picker, by body mode and endpoints", "lower"),
    "gie.errors": Metric("requests", "requests without a 200 through ours", "lower", source="none expected"),
    "gie.errors_gie": detail("requests", "requests without a 200 through GIE 1.5's", "lower"),
    "picker.added_ms.p50": Metric("ms", "latency that the picker adds to Envoy, median", "lower", 2.0, EXPECTED),
    "picker.added_ms.p99": Metric(
        "ms",
        "latency that the picker adds to Envoy, 99th percentile",
        "lower",
        2.8,
        "grpc.aio prototype, top of its range",
    ),
    "picker.bare_ms.p50": detail("ms", "latency of Envoy without the picker, median", "lower", 0.21, "prototype"),
    "picker.bare_ms.p99": detail(
        "ms", "latency of Envoy without the picker, 99th percentile", "lower", 0.46, "prototype"
    ),
    "picker.rps_per_core.1kb": Metric(
        "requests/s", "requests decided per CPU-second of the picker, 1 KB bodies", "higher", 800.0, EXPECTED
    ),
    "picker.rps_per_core.220kb": Metric(
        "requests/s",
        "requests decided per CPU-second of the picker, 220 KB bodies",
        "higher",
        130.0,
        "published plateau of the Go picker, 220 KB prompts",
    ),
    "picker.rps": detail("requests/s", "requests answered per second at saturation", "higher"),
    "picker.hit_rate": detail(
        "share", "requests that reached an endpoint holding their prefix", "higher", 1.0, "every prompt is held"
    ),
    "picker.send_late_ms.p99": detail("ms", "how late the paced client sent, p99", "lower", 1.0, "a tick of its timer"),
    "picker.errors": Metric("requests", "requests without a 200", "lower", source="none expected"),
    "picker.pick_ms.1000": Metric("ms", "CPU time of one choice among 1,000 endpoints, median", "lower", 0.3, EXPECTED),
    "picker.pick_ms.5000": Metric("ms", "one decision among 5,000 endpoints", "lower", 1.0, EXPECTED),
    "picker.pick_p99_ms": detail("ms", "CPU time of one choice, 99th percentile", "lower"),
    "picker.image_ms": Metric("ms", "processor time that an image of 1 MiB adds to a request", "lower", 3.0, BOUND),
    "picker.image_turn_ms": Metric("ms", "longest turn of the loop with such a request, p99", "lower", 5.0, BOUND),
    "picker.followed": Metric(
        "endpoints", "publishers that one picker follows, each of whose events arrived", "higher", 2000.0, EXPECTED
    ),
    "picker.live_s": detail("s", "start of the picker's process to all publishers being live", "lower"),
    "picker.events_s": detail("s", "until one event of each publisher has arrived", "lower"),
    "picker.idle_cores": Metric(
        "cores", "the picker's process while publishers only report their load", "lower", 1.0, EXPECTED
    ),
    "picker.files": detail("files", "file descriptors of the process", "lower", 20_000.0, "a usual hard limit"),
    "picker.rss_mb": detail("MB", "memory of the picker's process", "lower"),
    "scrape.cores": Metric(
        "cores", "reading the load of 100 engines from their metrics pages of 100 KB", "lower", 0.1, BOUND
    ),
    "scrape.read_us": detail("µs", "CPU time of one read", "lower"),
    "scrape.reads_s": detail("reads/s", "pages read a second, of all engines", "higher"),
    "tree.match_us.2700": Metric("µs", "longest cached prefix of a 2,700-token prompt", "lower", 25.0, EXPECTED),
    "tree.match_us.100k": Metric("µs", "longest cached prefix of a 100,000-token prompt", "lower", 600.0, EXPECTED),
    "tree.ingest_blocks_s": Metric("blocks/s", "KV-event payloads to tree, end to end", "higher", 400_000.0, EXPECTED),
    "tree.remove_blocks_s": detail("blocks/s", "removals from KV-event payloads to tree", "higher"),
    "tree.bytes_per_block": Metric("B", "memory per 16-token block beyond its text", "lower", 120.0, EXPECTED),
    "tree.rss_mb.100x30k": Metric(
        "MB", "resident memory of a picker with 100 endpoints of 30,000 blocks", "lower", 600.0, EXPECTED
    ),
    "tree.vs_dynamo.lookup": Metric(
        "times", "CPU time of a lookup of 450 blocks by that of Dynamo's tree", "lower", 1.0, "Dynamo's RadixTree"
    ),
    "tree.event_to_routable_ms.p50": detail(
        "ms", "from the publication of KV events to the first decision that uses them, median", "lower"
    ),
    "tree.event_to_routable_ms.p99": Metric(
        "ms",
        "from the publication of KV events to the first decision that uses them, 99th percentile",
        "lower",
        5.0,
        EXPECTED,
    ),
}

_BESIDE: dict[str, Any] = {"source": "the other server, same run", "beside": "beside"}
_SERVING = {
    "serving": Metric("×", "how much better the first server is than another one, same requests and run", "higher"),
    "serving.requests_s": detail("requests/s", "whole answers", "higher", **_BESIDE),
    "serving.output_tokens_s": Metric("tokens/s", "output", "higher", **_BESIDE),
    "serving.goodput_s": Metric("requests/s", "answers within the limits that the command names", "higher", **_BESIDE),
    "serving.cached_share": detail("share", "prompt tokens from the cache, as the server tells", "higher", **_BESIDE),
    "serving.errors": detail("requests", "without a whole answer", "lower", source="none expected"),
    "serving.ttft_ms": detail("ms", "due to first output", "lower", **_BESIDE),
    "serving.itl_ms": detail("ms", "between chunks of output", "lower", **_BESIDE),
    "serving.tpot_ms": detail("ms", "first to last output ÷ (tokens − 1)", "lower", **_BESIDE),
    "serving.e2e_ms": detail("ms", "due to the end of the answer", "lower", **_BESIDE),
}

_GAIN = "by those with neither cache nor parallel branches"
_CALLS = "calls of a black box for three fields of a text, by those with speculation"
_PROGRAMS = {
    "programs.hit_vs_optimal": detail(
        "share", "cached tokens by what the best of all caches would have had", "higher", 0.96, f"{PAPER}: the mean"
    ),
    "programs.hit_vs_optimal.min": Metric(
        "share",
        "hit rate ÷ the best possible, worst of eleven workloads of programs",
        "higher",
        0.96,
        f"{PAPER}: the mean",
    ),
    "programs.throughput_full_over_none": detail("×", f"programs a second, {_GAIN}", "higher"),
    "programs.throughput_full_over_none.geomean": Metric(
        "×", f"programs a second, {_GAIN}: geometric mean of eleven workloads", "higher", 3.0, EXPECTED
    ),
    "programs.latency_full_over_none": detail("times", f"time of a program that runs alone, {_GAIN}", "lower"),
    "programs.api_speculation_call_ratio": Metric(
        "×", f"{_CALLS}: the worse of chats and completions", "higher", 3.0, f"{PAPER}: about three times cheaper"
    ),
    "programs.api_speculation_call_ratio.chats": detail("×", f"{_CALLS}, chats", "higher"),
    "programs.api_speculation_call_ratio.completions": detail("×", f"{_CALLS}, completions", "higher"),
    "programs.throughput": detail(
        "programs/s", "a batch of a workload under an ablation", "higher", source="neither, same run", beside="none"
    ),
    "programs.hit_rate": detail(
        "share", "prompt tokens from the cache", "higher", source="the tree of all that was sent", beside="optimum"
    ),
    **{
        f"lang.vs_sglang.{name}": Metric(
            "ratio", f"CPU time of the language's client for {what}, by SGLang's", "lower", 1.0, "SGLang's, same run"
        )
        for name, what in (("call", "a program of one call"), ("fork4", "a fork of four calls"))
    },
    "lang.cpu_ms": detail("ms", "CPU time of the client", "lower"),
}

_KUBERNETES = {
    "operator.apply_s.p50": detail("s", "change of a pool to its last child applied, median", "lower"),
    "operator.apply_s.p95": Metric(
        "s", "change of a pool to its last child applied, 95th percentile", "lower", 1.0, EXPECTED
    ),
    "operator.apply_s.p95.alone": detail(
        "s", "change of a pool to its last child applied, 95th percentile, changes one after another", "lower"
    ),
    "operator.apply_s.p95.together": detail(
        "s", "change of a pool to its last child applied, 95th percentile, eight changes at a time", "lower"
    ),
    "operator.rss_mb": Metric("MB", "resident memory of the operator, so many pools", "lower"),
    "operator.rss_mb.0": Metric("MB", "resident memory of the operator, no pools", "lower", 90.0, EXPECTED),
    "operator.rss_mb.500": Metric(
        "MB", "memory of the operator with 500 pools of 8 children", "lower", 200.0, EXPECTED
    ),
    "operator.idle_writes": Metric(
        "writes", "to the API server when nothing changes, 10 minutes, but for its lease", "lower", 0.0, EXPECTED
    ),
    "operator.idle_reconciles": detail("reconciles", "made meanwhile, which shows that it looked", "higher"),
    "operator.converge_s": detail("s", "first request to create so many pools to their last child", "lower"),
    "operator.children": detail("objects", "made for so many pools, pods aside", "lower"),
    "operator.throttled.status_s": Metric(
        "s", "until each of so many pools created at once has a status, with a fifth of a processor", "lower"
    ),
    "operator.throttled.judged_s": detail("s", "until each status speaks of what was planned", "lower"),
    "operator.throttled.converge_s": Metric(
        "s", "first request to create so many pools to their last child, with a fifth of a processor", "lower"
    ),
    "operator.throttled.cpu_s": detail("s", "of the operator's processor for so many pools", "lower"),
    "operator.throttled.lost": Metric("times", "the lease was lost or a replica ended meanwhile", "lower"),
    "epp.models_consistent_s": Metric(
        "s", "last of 1,000 changed InferenceModels to the picker's list being true", "lower", 2.0, EXPECTED
    ),
    "epp.models_changes_s": detail("changes/s", "how fast the API server answered the fastest burst", "higher"),
    "e2e.install_to_first_token_s": Metric(
        "s", "`helm install` to the first token, images on the node", "lower", 45.0, EXPECTED
    ),
    "e2e.dropped_streams": Metric(
        "streams",
        "streams cut off, unanswered or 5xx while pods roll, scale and die on a cluster",
        "lower",
        0.0,
        EXPECTED,
    ),
    "e2e.streams": detail("streams", "sent in these journeys", "higher"),
    "e2e.ready_to_routed_s.p95": Metric(
        "s", "a pod's Ready to the first request that is routed to it, 95th percentile", "lower", 2.0, EXPECTED
    ),
    "e2e.cluster_up_s": Metric("s", "`make cluster-up` of two nodes, everything built before", "lower", 60.0, EXPECTED),
    "e2e.duration_s": Metric("s", "all of `make e2e`", "lower", 1500.0, EXPECTED),
    "e2e.drain_s": Metric(
        "s", "a lowered number of replicas to the pod being gone, idle streams", "lower", 10.0, EXPECTED
    ),
}

HEADLINES = (
    "routing.ttft_ms.p50.treeline",
    "routing.multi-turn.hit_vs_oracle",
    "picker.added_ms.p50",
    "gie.vs_gie.rps_per_core.30kb",
    "offline.vs_vllm.llama8b",
    "e2e.dropped_streams",
)
"""The rows quoted in the README, in order."""

METRICS: dict[str, Metric] = _ROUTING | _FORMS | _MEDIA | _PICKER | ENGINE | RANKS | _SERVING | _PROGRAMS | _KUBERNETES


def metric(name: str) -> Metric:
    """The entry for `name` or its longest dotted beginning. Raises KeyError, which lists the names."""
    known = name
    while known:
        if known in METRICS:
            return METRICS[known]
        known = known.rpartition(".")[0]
    raise KeyError(f"unknown metric {name!r}; known: {', '.join(METRICS)}")


def row(name: str, value: float, reference: float | None = None) -> Row:
    """A result row; `reference` is for comparisons measured in the same run.

    `ratio` is value ÷ reference, None where there is no reference or it is 0.
    """
    described = metric(name)
    against = described.reference if reference is None else reference
    ratio = round(value / against, 4) if against else None
    return Row(name, round(value, 6), described.unit, against, ratio)


def missed(row: Row) -> bool | None:
    """Whether the figure misses its bound; None for a figure without a bound."""
    described = metric(row.metric)
    if row.reference is None or isinstance(row.reference, str) or described.beside:
        return None
    return row.value > row.reference if described.better == "lower" else row.value < row.reference
