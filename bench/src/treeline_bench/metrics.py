"""Every metric that a benchmark may report: what it means, and what it is compared with.

One place, so that a row, its line in a table and the README agree. A metric's name may have a tail (a policy, a size)
that selects no entry of its own: `routing.hit_rate.random` is described by `routing.hit_rate`.
"""

from __future__ import annotations

from treeline_bench.metric import EXPECTED, Metric, beside_peers, of_engine, simulated
from treeline_bench.programs.metrics import METRICS as PROGRAMS
from treeline_bench.results import Row

_CORPUS = "the bound that was set"
_CHAOS = "the bound that was set for free requests beside hostile ones"


def _company() -> dict[str, Metric]:
    """Of one picker, and of two that are peers, behind an Envoy of two threads."""
    found: dict[str, Metric] = {}
    for name, who in (("one", "one process"), ("peers2", "two pickers that are peers")):
        first = name == "one"
        found |= {
            f"picker.{name}.rps_per_core": Metric(
                "requests/s",
                f"requests decided per CPU-second of {who}, two Envoy threads",
                "higher",
                headline=not first,
            ),
            f"picker.{name}.rps": Metric(
                "requests/s", "the same per second, all cores shared by all", "higher", headline=False
            ),
            f"picker.{name}.ms.p99": Metric(
                "ms", "latency at saturation with 64 clients, 99th percentile", "lower", headline=False
            ),
            f"picker.{name}.equal_picks": Metric(
                "share",
                f"requests that {who} sent where most with the same prompt went",
                "higher",
                1.0,
                "one decides",
                headline=not first,
            ),
            f"picker.{name}.spread": Metric(
                "×", "the busier of two engines by the mean", "lower", 1.0, "each holds half", headline=False
            ),
        }
    return found


METRICS: dict[str, Metric] = {
    "routing.hit_rate": Metric(
        "share",
        "prompt tokens that came from a runtime's cache",
        "higher",
        source="an oracle: every repeat hits its whole shared prefix",
        beside="oracle",
    ),
    "routing.computed_tokens": Metric(
        "tokens",
        "prompt tokens that the runtimes had to compute",
        "lower",
        source="an oracle: each shared prefix computed once",
        beside="oracle",
    ),
    "routing.ttft_ms.p50": Metric(
        "ms", "time to first token, median", "lower", source="random routing, same run", beside="random"
    ),
    "routing.ttft_ms.p99": Metric(
        "ms",
        "time to first token, 99th percentile",
        "lower",
        source="random routing, same run",
        beside="random",
        headline=False,
    ),
    "routing.duration_s": Metric(
        "s",
        "first request sent to last answer read",
        "lower",
        source="random routing, same run",
        beside="random",
        headline=False,
    ),
    **simulated(),
    **beside_peers(),
    "routing.errors": Metric("requests", "requests without a complete answer", "lower", source="none expected"),
    **PROGRAMS,
    **of_engine("vLLM"),
    **of_engine("SGLang"),
    "gie.vs_gie.rps_per_core.1kb": Metric(
        "×", "requests per CPU-second by GIE 1.5's, 1 KB bodies, the least of 2, 16 and 64 endpoints", "higher", 1.1
    ),
    "gie.vs_gie.rps_per_core.30kb": Metric("×", "the same, 30 KB bodies", "higher", 3.5),
    "gie.vs_gie.rps_per_core.220kb": Metric("×", "the same, 220 KB bodies", "higher", 6.0),
    "gie.times_gie": Metric("×", "the same by body mode and endpoints", "higher", headline=False),
    "gie.rps_per_core": Metric("requests/s", "requests decided per CPU-second of our picker", "higher", headline=False),
    "gie.rps_per_core_gie": Metric("requests/s", "the same of GIE 1.5's", "higher", headline=False),
    "gie.added_ms.p50": Metric("ms", "added to bare Envoy's median, the most of all endpoints and modes", "lower", 0.8),
    "gie.added_ms.p99": Metric("ms", "added to bare Envoy's 99th percentile, the most of them", "lower", 2.0),
    "gie.each_added_ms": Metric("ms", "added by our picker, by body mode and endpoints", "lower", headline=False),
    "gie.each_added_gie_ms": Metric("ms", "the same with GIE 1.5's", "lower", headline=False),
    "gie.errors": Metric("requests", "requests without a 200 through ours", "lower", source="none expected"),
    "gie.errors_gie": Metric("requests", "requests without a 200 through GIE 1.5's", "lower", headline=False),
    "picker.added_ms.p50": Metric(
        "ms", "latency that asking the picker adds to bare Envoy, median", "lower", 2.0, EXPECTED
    ),
    "picker.added_ms.p99": Metric(
        "ms", "the same at the 99th percentile", "lower", 2.8, "grpc.aio prototype, top of its range"
    ),
    "picker.bare_ms.p50": Metric(
        "ms", "Envoy without the picker, median", "lower", 0.21, "prototype, top of its range", headline=False
    ),
    "picker.bare_ms.p99": Metric(
        "ms", "Envoy without the picker, 99th percentile", "lower", 0.46, "prototype, top of its range", headline=False
    ),
    "picker.rps_per_core.1kb": Metric(
        "requests/s", "requests decided per CPU-second of the picker, 1 KB bodies", "higher", 800.0, EXPECTED
    ),
    "picker.rps_per_core.220kb": Metric(
        "requests/s",
        "the same, 220 KB bodies",
        "higher",
        130.0,
        "published plateau of the Go picker with 220 KB prompts (all its cores together, not stated how many)",
    ),
    "picker.rps": Metric(
        "requests/s", "requests answered per second at saturation", "higher", source="", headline=False
    ),
    "picker.hit_rate": Metric(
        "share",
        "requests that reached an endpoint holding their prefix",
        "higher",
        1.0,
        "every prompt is held",
        headline=False,
    ),
    "picker.send_late_ms.p99": Metric(
        "ms", "how late the paced client sent, 99th percentile", "lower", 1.0, "one tick of its timer", headline=False
    ),
    **_company(),
    "picker.errors": Metric("requests", "requests without a 200", "lower", source="none expected"),
    "chat.render_us.4k": Metric(
        "µs",
        "a chat of 4 KB to its prompt, in the picker's process",
        "lower",
        60.0,
        "the bound that was set",
        headline=False,
    ),
    "chat.worker_us.4k": Metric(
        "µs", "the same by a worker process, for templates that are not plain", "lower", headline=False
    ),
    "tokenization.speedup": Metric(
        "times",
        "a conversation of so many characters with a new turn, against tokenizing all of it",
        "higher",
        headline=False,
    ),
    "tokenization.turn_us": Metric("µs", "the new turn of the longest of them", "lower", headline=False),
    "http.requests_s": Metric(
        "requests/s",
        "small completions that a runtime answers, by a scheduler without a model",
        "higher",
        headline=False,
    ),
    "http.cpu_us": Metric("µs", "what its HTTP process computes for one of them", "lower", headline=False),
    **{
        f"lang.vs_sglang.{name}": Metric(
            "ratio", f"CPU time of the language's client for {what}, by SGLang's", "lower", 1.0, "SGLang's, same run"
        )
        for name, what in (("call", "a program of one call"), ("fork4", "a fork of four calls"))
    },
    **{
        f"lang.cpu_ms.{side}.{name}": Metric("ms", "CPU time of the client", "lower", headline=False)
        for side in ("ours", "theirs")
        for name in ("call", "fork4")
    },
    "sampling.equal": Metric(
        "share",
        "seeded answers that are the same alone and among others, to the last token",
        "higher",
        1.0,
        "every one; 21 of 24 before the sampler was insensitive to the last bit",
        headline=False,
    ),
    "sampling.compared": Metric("answers", "how many were compared", "higher", headline=False),
    "engine.start": Metric("s", "to an engine that is ready: random weights, kernels, graphs", "lower", headline=False),
    "engine.decode": Metric(
        "ms",
        "a decode step of so many sequences that began with so many tokens",
        "lower",
        source="weights and cache moved through memory once, at the speed of a large copy in the same run",
        beside="floor",
    ),
    "engine.prefill": Metric(
        "tokens/s",
        "one prompt of so many tokens",
        "higher",
        source="its operations at the speed of a large matrix product in the same run",
        beside="ceiling",
    ),
    "engine.first_token": Metric("ms", "from a prompt of so many tokens to its first token, alone", "lower"),
    "engine.offline": Metric(
        "tokens/s", "output of 256 requests with 100 to 1,024 tokens in and out, temperature 0.6", "higher"
    ),
    "engine.device.copy_tb_s": Metric("TB/s", "read and written by a large copy", "higher", headline=False),
    "engine.device.multiply_tflop_s": Metric(
        "TFLOP/s", "a matrix product of 8,192³ in bfloat16", "higher", headline=False
    ),
    "server.offline_tokens_s": Metric(
        "tokens/s", "output of 256 requests by the engine alone", "higher", headline=False
    ),
    "server.tokens_s": Metric("tokens/s", "output of the same requests through HTTP", "higher"),
    "server_over_offline": Metric("share", "the one by the other", "higher", source="the bound that was set for a GPU"),
    "start.warm_s": Metric(
        "s",
        "a server's start to its first token, kernels compiled before",
        "lower",
        source="the bound that was set for a GPU",
    ),
    "overlap.idle_share": Metric(
        "share",
        "of the time the GPU waits for the CPU, while 64 streams decode through the server",
        "lower",
        source="the bound that was set",
    ),
    "overlap.gap_share": Metric(
        "share", "the same with the gaps between the kernels of a step", "lower", headline=False
    ),
    "overlap.step_ms": Metric("ms", "a step then, under the profiler", "lower", headline=False),
    "vllm.ours_tokens_s": Metric("tokens/s", "output of 256 requests by the engine alone", "higher", headline=False),
    "vllm.offline_tokens_s": Metric("tokens/s", "output of the same requests by vLLM", "higher", headline=False),
    "offline.vs_vllm": Metric("times", "the one by the other", "higher"),
    "radix.share": Metric(
        "share",
        "of the engine's time spent in the radix tree, where nothing is shared",
        "lower",
        0.003,
        "0.2 of 74.3 s in SGLang's paper",
    ),
    "radix.hit_rate": Metric("share", "prompt tokens found in the cache", "higher", headline=False),
    "radix.vs_optimal": Metric("share", "of what an unbounded cache of tokens would find", "higher", headline=False),
    "radix.hit_vs_optimal": Metric(
        "share",
        "of what an unbounded cache of tokens would find, mean over the shapes of SGLang's paper",
        "higher",
        0.96,
        "SGLang's paper",
    ),
    "structured.jump_forward_speedup": Metric(
        "×",
        "JSON with so much forced text, jump-forward by none; alone: the least of them",
        "higher",
        1.6,
        "the bound that was set for 30 % and more",
    ),
    "structured.jump_forward_steps": Metric(
        "×", "steps without jump-forward by those with it: where the speedup ends", "higher", headline=False
    ),
    "structured.forced_share": Metric("share", "of the tokens then that were not sampled", "higher", headline=False),
    "structured.tokens": Metric("tokens", "of an answer, with and without", "lower", headline=False),
    "structured.tpot_ms": Metric("ms", "a decode step of so many requests", "lower", headline=False),
    "structured.tpot_ratio": Metric(
        "×", "a step of requests with grammars by one of free ones", "lower", 1.02, "the bound that was set for a GPU"
    ),
    "structured.cached_schema_ttft_ms": Metric(
        "ms", "to the first token more, with a schema that is compiled", "lower", 1.0, "the bound that was set"
    ),
    "structured.jump_us": Metric("µs", "to tokenize the end of a sequence anew", "lower", headline=False),
    "structured.mask_ms": Metric("ms", "a step's masks of so many requests, filled and sent", "lower", headline=False),
    "corpus.accepted.jsonschemabench": Metric(
        "share", "schemas of JSONSchemaBench that are taken, of all and of a part", "higher", 0.85, _CORPUS
    ),
    "corpus.accepted.maskbench": Metric(
        "share", "schemas of MaskBench that are taken, of all and of a part", "higher", 0.80, _CORPUS
    ),
    "corpus.refused": Metric("schemas", "refused for this word, or for what they are", "lower", headline=False),
    "corpus.outputs": Metric("texts", "drawn under the masks of what is taken, and ended", "higher", headline=False),
    "corpus.violations": Metric("texts", "of these that `jsonschema` says are none", "lower", headline=False),
    "corpus.wrongly_taken": Metric("instances", "that are invalid, and are taken", "lower", headline=False),
    "corpus.rightly_taken": Metric("share", "of valid instances that are taken", "higher", headline=False),
    "corpus.compile_ms": Metric("ms", "CPU time of a compilation", "lower", headline=False),
    "corpus.compile_ms.p99": Metric("ms", "CPU time of a compilation, 99th percentile", "lower", 100.0, _CORPUS),
    "chaos.gap_ms": Metric("ms", "99th percentile between tokens of free streams", "lower", headline=False),
    "chaos.total_ms": Metric("ms", "99th percentile of their whole answers", "lower", headline=False),
    "chaos.gap": Metric("×", "between tokens: beside the one by beside the other, p99", "lower", 1.5, _CHAOS),
    "chaos.total": Metric("×", "whole answers: beside the one by beside the other, p99", "lower", 1.5, _CHAOS),
    "cpu.tokens_s": Metric("tokens/s", "output on a CPU, so many threads and streams", "higher", headline=False),
    "cpu.transformers_tokens_s": Metric("tokens/s", "the same by transformers.generate", "higher", headline=False),
    "cpu.vs_transformers": Metric("×", "ours by transformers' in the same run", "higher"),
    "cpu.vs_transformers_cpu_s": Metric("×", "the same by seconds of the processor", "higher", headline=False),
    "serving": Metric(
        "×", "how much better the first server is than another one with the same requests in the same run", "higher"
    ),
    "serving.requests_s": Metric(
        "requests/s", "whole answers", "higher", source="the other server, same run", beside="beside", headline=False
    ),
    "serving.output_tokens_s": Metric(
        "tokens/s", "output", "higher", source="the other server, same run", beside="beside"
    ),
    "serving.goodput_s": Metric(
        "requests/s",
        "answers within the limits that the command names",
        "higher",
        source="the other server, same run",
        beside="beside",
    ),
    "serving.cached_share": Metric(
        "share",
        "prompt tokens from the cache, as the server tells",
        "higher",
        source="the other server, same run",
        beside="beside",
        headline=False,
    ),
    "serving.errors": Metric("requests", "without a whole answer", "lower", source="none expected", headline=False),
    "serving.ttft_ms": Metric(
        "ms", "due to first output", "lower", source="the other server, same run", beside="beside", headline=False
    ),
    "serving.itl_ms": Metric(
        "ms", "between chunks of output", "lower", source="the other server, same run", beside="beside", headline=False
    ),
    "serving.tpot_ms": Metric(
        "ms",
        "first to last output ÷ (tokens − 1)",
        "lower",
        source="the other server, same run",
        beside="beside",
        headline=False,
    ),
    "serving.e2e_ms": Metric(
        "ms",
        "due to the end of the answer",
        "lower",
        source="the other server, same run",
        beside="beside",
        headline=False,
    ),
    "bodies.live_ms": Metric(
        "ms",
        "longest wait for /live while a prompt of so many megabytes is refused, median of five",
        "lower",
        source="the runtime when it still tokenized such prompts in a thread (at 30 MB it was not measured)",
        beside="before",
        headline=False,
    ),
    "bodies.rss_mb": Metric(
        "MB",
        "most memory that the HTTP process and its readers held then",
        "lower",
        source="the runtime when it still tokenized such prompts in a thread",
        beside="before",
        headline=False,
    ),
    "picker.pick_ms.1000": Metric("ms", "CPU time of one choice among 1,000 endpoints, median", "lower", 0.3, EXPECTED),
    "picker.pick_ms.5000": Metric("ms", "the same among 5,000 endpoints", "lower", 1.0, EXPECTED),
    "picker.pick_p99_ms": Metric("ms", "CPU time of one choice, 99th percentile", "lower", source="", headline=False),
    "picker.followed": Metric(
        "endpoints", "publishers that one picker follows, each of whose events arrived", "higher", 2000.0, EXPECTED
    ),
    "picker.live_s": Metric(
        "s", "start of the picker's process to all publishers being live", "lower", source="", headline=False
    ),
    "picker.events_s": Metric("s", "until one event of each publisher has arrived", "lower", source="", headline=False),
    "picker.idle_cores": Metric(
        "cores", "the picker's process while publishers only report their load", "lower", 1.0, EXPECTED
    ),
    "picker.files": Metric(
        "files", "file descriptors of the picker's process", "lower", 20_000.0, "a usual hard limit", headline=False
    ),
    "picker.rss_mb": Metric("MB", "memory of the picker's process", "lower", source="", headline=False),
    "scrape.cores": Metric(
        "cores",
        "reading the load of 100 engines from their metrics pages of 100 KB",
        "lower",
        0.1,
        "the bound that was set",
    ),
    "scrape.read_us": Metric("µs", "CPU time of one read", "lower", source="", headline=False),
    "scrape.reads_s": Metric("reads/s", "pages read a second, of all engines", "higher", source="", headline=False),
    "tree.match_us.2700": Metric("µs", "longest cached prefix of a 2,700-token prompt", "lower", 25.0, EXPECTED),
    "tree.match_us.100k": Metric("µs", "longest cached prefix of a 100,000-token prompt", "lower", 600.0, EXPECTED),
    "tree.ingest_blocks_s": Metric("blocks/s", "KV-event payloads to tree, end to end", "higher", 400_000.0, EXPECTED),
    "tree.remove_blocks_s": Metric("blocks/s", "removals from KV-event payloads to tree", "higher", headline=False),
    "tree.bytes_per_block": Metric("B", "memory per 16-token block beyond its text", "lower", 120.0, EXPECTED),
    "tree.rss_mb.100x30k": Metric(
        "MB", "resident memory of a picker with 100 endpoints of 30,000 blocks", "lower", 600.0, EXPECTED
    ),
    "tree.vs_dynamo.lookup": Metric(
        "times", "CPU time of a lookup of 450 blocks by that of Dynamo's tree", "lower", 1.0, "Dynamo's RadixTree"
    ),
    "tree.event_to_routable_ms.p50": Metric(
        "ms",
        "an engine's publishing of a batch of KV events until a pick would use it, median",
        "lower",
        headline=False,
    ),
    "tree.event_to_routable_ms.p99": Metric("ms", "the same at the 99th percentile", "lower", 5.0, EXPECTED),
    "operator.apply_s.p50": Metric("s", "change of a pool to its last child applied, median", "lower", headline=False),
    "operator.apply_s.p95": Metric(
        "s", "change of a pool to its last child applied, 95th percentile", "lower", 1.0, EXPECTED
    ),
    "operator.apply_s.p95.alone": Metric("s", "the same of changes made one after another", "lower", headline=False),
    "operator.apply_s.p95.together": Metric("s", "the same of changes made eight at a time", "lower", headline=False),
    "operator.rss_mb": Metric("MB", "resident memory of the operator, so many pools", "lower"),
    "operator.rss_mb.0": Metric("MB", "resident memory of the operator, no pools", "lower", 90.0, EXPECTED),
    "operator.rss_mb.500": Metric(
        "MB", "resident memory of the operator, 500 pools × 8 children", "lower", 200.0, EXPECTED
    ),
    "operator.idle_writes": Metric(
        "writes", "to the API server when nothing changes, 10 minutes, but for its lease", "lower", 0.0, EXPECTED
    ),
    "operator.idle_reconciles": Metric(
        "reconciles", "made meanwhile, which shows that it looked", "higher", headline=False
    ),
    "operator.converge_s": Metric(
        "s", "from the first request to create so many pools to their last child", "lower", headline=False
    ),
    "operator.children": Metric("objects", "made for so many pools, pods aside", "lower", headline=False),
    "operator.one_gateway.converge_s": Metric(
        "s",
        "from the first request to create so many pools of one gateway to their last child",
        "lower",
        headline=False,
    ),
    "operator.one_gateway.cpu_ms": Metric(
        "ms", "of the operator's processor for each of so many pools of one gateway", "lower", headline=False
    ),
    "operator.one_gateway.reconciles": Metric(
        "reconciles", "of the operator for each of so many pools of one gateway", "lower", headline=False
    ),
    "operator.one_gateway.delete_reconciles": Metric(
        "reconciles", "of the operator when one of so many pools of one gateway is deleted", "lower", headline=False
    ),
    "operator.one_gateway.change_cpu_ms": Metric(
        "ms",
        "of the operator's processor for each pool when a setting changes that holds for all",
        "lower",
        headline=False,
    ),
    "operator.throttled.status_s": Metric(
        "s", "until each of so many pools created at once has a status, with a fifth of a processor", "lower"
    ),
    "operator.throttled.judged_s": Metric(
        "s", "until each status speaks of what was planned, with a fifth of a processor", "lower", headline=False
    ),
    "operator.throttled.converge_s": Metric(
        "s", "from the first request to create so many pools to their last child, with a fifth of a processor", "lower"
    ),
    "operator.throttled.cpu_s": Metric("s", "of the operator's processor for so many pools", "lower", headline=False),
    "operator.throttled.lost": Metric("times", "the lease was lost or a replica ended meanwhile", "lower"),
    "epp.models_consistent_s": Metric(
        "s", "last of 1,000 changed InferenceModels to the picker's list being true", "lower", 2.0, EXPECTED
    ),
    "epp.models_changes_s": Metric(
        "changes/s", "how fast the API server answered the fastest burst", "higher", headline=False
    ),
    "e2e.install_to_first_token_s": Metric(
        "s", "`helm install` to the first token, images on the node", "lower", 45.0, EXPECTED
    ),
    "e2e.dropped_streams": Metric(
        "streams", "cut off, unanswered or 5xx in the journeys where nothing may be", "lower", 0.0, EXPECTED
    ),
    "e2e.streams": Metric("streams", "sent in these journeys", "higher", headline=False),
    "e2e.ready_to_routed_s.p95": Metric(
        "s", "a pod's Ready to the first request that is routed to it, 95th percentile", "lower", 2.0, EXPECTED
    ),
    "e2e.cluster_up_s": Metric("s", "`make cluster-up` of two nodes, everything built before", "lower", 60.0, EXPECTED),
    "e2e.duration_s": Metric("s", "all of `make e2e`", "lower", 1500.0, EXPECTED),
    "e2e.drain_s": Metric(
        "s", "a lowered number of replicas to the pod being gone, idle streams", "lower", 10.0, EXPECTED
    ),
}


def metric(name: str) -> Metric:
    """The entry for `name` or for its longest dotted beginning. Raises KeyError, which lists what there is."""
    known = name
    while known:
        if known in METRICS:
            return METRICS[known]
        known = known.rpartition(".")[0]
    raise KeyError(f"unknown metric {name!r}; known: {', '.join(METRICS)}")


def row(name: str, value: float, reference: float | None = None) -> Row:
    """A result row; `reference` is for metrics whose comparison was measured in the same run.

    `ratio` is value ÷ reference, None where there is no reference or it is 0.
    """
    described = metric(name)
    against = described.reference if reference is None else reference
    ratio = round(value / against, 4) if against else None
    return Row(name, round(value, 6), described.unit, against, ratio)
