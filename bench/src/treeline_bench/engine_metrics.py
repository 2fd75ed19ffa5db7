"""Metrics of the runtime's own benchmarks: the engine, its cache and tiers, structured output, several GPUs."""

from __future__ import annotations

from treeline_bench.figure import BOUND, PAPER, Metric, detail

ENGINE = {
    "engine.start": detail("s", "to an engine that is ready: random weights, kernels, graphs", "lower"),
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
    "engine.device.copy_tb_s": detail("TB/s", "read and written by a large copy", "higher"),
    "engine.device.multiply_tflop_s": detail("TFLOP/s", "a matrix product of 8,192³ in bfloat16", "higher"),
    "server.offline_tokens_s": detail("tokens/s", "output of 256 requests by the engine alone", "higher"),
    "server.tokens_s": Metric("tokens/s", "output of the same requests through HTTP", "higher"),
    "server_over_offline": Metric("share", "the one by the other", "higher", source=f"{BOUND} for a GPU"),
    "start.warm_s": Metric(
        "s", "a server's start to its first token, kernels compiled before", "lower", source=f"{BOUND} for a GPU"
    ),
    "overlap.idle_share": Metric(
        "share", "of the time the GPU waits for the CPU, while 64 streams decode", "lower", source=BOUND
    ),
    "overlap.gap_share": detail(
        "share", "of the time the GPU waits or is between two kernels of a step, while 64 streams decode", "lower"
    ),
    "overlap.step_ms": detail("ms", "a step then, under the profiler", "lower"),
    "vllm.ours_tokens_s": detail("tokens/s", "output of 256 requests by the engine alone", "higher"),
    "vllm.offline_tokens_s": detail("tokens/s", "output of the same requests by vLLM", "higher"),
    "offline.vs_vllm": Metric(
        "times", "our output tokens a second ÷ vLLM's, 256 offline requests on one GPU", "higher"
    ),
    "radix.share": Metric(
        "share",
        "of the engine's time spent in the radix tree, where nothing is shared",
        "lower",
        0.003,
        f"0.2 of 74.3 s in {PAPER}",
    ),
    "radix.hit_rate": detail("share", "prompt tokens found in the cache", "higher"),
    "radix.vs_optimal": detail("share", "of what an unbounded cache of tokens would find", "higher"),
    "radix.hit_vs_optimal": Metric(
        "share", f"hit rate ÷ the best possible, mean over the shapes of {PAPER}", "higher", 0.96, PAPER
    ),
    "tiers.cpu.ttft_ratio": Metric(
        "×", "time to the first token with a cache on the host ÷ without, beyond what the device holds", "lower", 0.5
    ),
    "tiers.cuda.ttft_ratio": Metric("×", "the same on a GPU, of a model shaped like Llama-3.1-8B", "lower", 0.25),
    "tiers.cpu.ttft_ms": detail("ms", "to the first token, from the host or computed", "lower"),
    "tiers.cuda.ttft_ms": detail("ms", "to the first token, from the host or computed", "lower"),
    "tiers.cuda.decode_cost": Metric(
        "share", "by how much longer running answers take while prompts load", "lower", 0.03
    ),
    "tiers.cpu.equal_share": detail("share", "of answers that are the same without the tier", "higher"),
    "tiers.cuda.equal_share": detail("share", "of answers that are the same without the tier", "higher"),
    "tiers.cpu.cached_share": detail("share", "of prompt tokens that came from the cache", "higher"),
    "tiers.cuda.cached_share": detail("share", "of prompt tokens that came from the cache", "higher"),
    "lora.base_share": Metric(
        "share",
        "tokens a second without adapters, by an engine that serves them ÷ by one that does not",
        "higher",
        0.99,
        BOUND,
    ),
    "lora.throughput_share": Metric(
        "share",
        "the same of 32 requests with an adapter each, half of which are in slots before",
        "higher",
        0.85,
        f"{BOUND} on a GPU",
    ),
    "lora.crowded_share": detail("share", "the same with slots for half of the requests' adapters", "higher"),
    "lora.load_s": detail("s", "to load an adapter of rank 16", "lower"),
    "media.paper": Metric(
        "×", "time of questions about shared images, each with a cache of its own ÷ in one", "higher", 5.0, BOUND
    ),
    "media.images_s": detail("1/s", "images that a server is asked about, each once", "higher"),
    "media.vs_vllm": Metric("×", "the same ÷ vLLM's, of 1,000 images on one GPU", "higher", 1.0, BOUND),
    "pd.itl_p99_ratio": Metric(
        "×", "time between tokens, 99th percentile, prompts apart ÷ two servers that do both", "lower", 0.5
    ),
    "pd.ttft_p50_ratio": Metric("×", "median time to the first token of long prompts, likewise", "lower", 1.1),
    "pd.transfer_share_of_link": Metric(
        "share", "of the speed of a copy from GPU to GPU that pages of a prompt reach", "higher", 0.7
    ),
    "pd.transfer_gb_s": detail("GB/s", "pages of a prompt on another server's host, until the first token", "higher"),
    "pd.itl_p99_ms": detail("ms", "between tokens, 99th percentile", "lower"),
    "pd.ttft_p50_ms": detail("ms", "to the first token of long prompts, median", "lower"),
    "pd.throughput_ratio": detail("×", "output tokens a second, apart ÷ together", "higher"),
    "pd.cached_share": detail("share", "of long prompts' tokens that the answering server did not compute", "higher"),
    "pull.ttft_ratio": Metric(
        "×", "time to the first token of 4,096 tokens pulled from another server ÷ computed", "lower", 0.6
    ),
    "pull.ttft_ms": detail("ms", "to the first token, pulled or computed", "lower"),
    "pull.cached_share": detail("share", "of the pulled prompts' tokens that were not computed", "higher"),
    "cpu.tokens_s": detail("tokens/s", "output on a CPU, so many threads and streams", "higher"),
    "cpu.transformers_tokens_s": detail("tokens/s", "tokens a second by transformers.generate", "higher"),
    "cpu.vs_transformers": Metric("×", "ours by transformers' in the same run", "higher"),
    "cpu.vs_transformers_cpu_s": detail("×", "our tokens per CPU-second ÷ those of transformers.generate", "higher"),
    "structured.jump_forward_speedup": Metric(
        "×",
        "tokens a second of JSON with jump-forward, by those without it, by share of forced text; alone: the least",
        "higher",
        1.6,
        f"{BOUND} for 30 % and more",
    ),
    "structured.jump_forward_steps": detail("×", "steps without jump-forward by those with it", "higher"),
    "structured.forced_share": detail("share", "of the tokens then that were not sampled", "higher"),
    "structured.tokens": detail("tokens", "of an answer, with and without", "lower"),
    "structured.tpot_ms": detail("ms", "a decode step of so many requests", "lower"),
    "structured.tpot_ratio": Metric(
        "×", "a step of requests with grammars by one of free ones", "lower", 1.02, f"{BOUND} for a GPU"
    ),
    "structured.cached_schema_ttft_ms": Metric(
        "ms", "to the first token more, with a schema that is compiled", "lower", 1.0, BOUND
    ),
    "structured.jump_us": detail("µs", "to tokenize the end of a sequence again", "lower"),
    "structured.mask_ms": detail("ms", "a step's masks of so many requests, filled and sent", "lower"),
    "spec.ngram.speedup": Metric(
        "×",
        "tokens a second of answers that repeat themselves with n-gram guesses, by those without, so many at once",
        "higher",
        1.5,
        f"{BOUND} for one at once on a CPU; 1.8 on a GPU",
    ),
    "spec.ngram.accept_length": detail("tokens", "that a step with guesses gives a request then", "higher"),
    "spec.eagle3.speedup": detail("×", "the same by an EAGLE-3 head for the tiny model, which counts", "higher"),
    "spec.eagle3.accept_length": detail("tokens", "that a step with guesses gives a request then", "higher"),
    "spec.past.speedup": detail(
        "×", "tokens a second of drawn answers that were given before, with guesses, by those without", "higher"
    ),
    **{
        f"spec.grammar.speedup.b{batch}": Metric(
            "×",
            "tokens a second of JSON of which 30 % is forced with guesses and jump-forward, by those with neither",
            "higher",
            bound,
        )
        for batch, bound in ((1, 1.6), (8, 1.5), (32, 1.3))
    },
    **{
        f"spec.simulated80.speedup.b{batch}": Metric(
            "×", "tokens a second with 3 guesses of which 80 % are taken for right, by those without", "higher", bound
        )
        for batch, bound in ((1, 2.2), (16, 1.6), (64, 1.1))
    },
    "corpus.accepted.jsonschemabench": Metric(
        "share", "schemas of JSONSchemaBench that are accepted, of all or of the part named", "higher", 0.85, BOUND
    ),
    "corpus.accepted.maskbench": Metric(
        "share", "schemas of MaskBench that are accepted, of all or of the part named", "higher", 0.80, BOUND
    ),
    "corpus.refused": detail("schemas", "refused for this word, or for what they are", "lower"),
    "corpus.outputs": detail("texts", "drawn under the masks of what is taken, and ended", "higher"),
    "corpus.violations": detail("texts", "of these that `jsonschema` says are none", "lower"),
    "corpus.wrongly_taken": detail("instances", "that are invalid, and are taken", "lower"),
    "corpus.rightly_taken": detail("share", "of valid instances that are taken", "higher"),
    "corpus.compile_ms": detail("ms", "CPU time of a compilation", "lower"),
    "corpus.compile_ms.p99": detail("ms", "CPU time of a compilation, 99th percentile", "lower", 100.0, BOUND),
}

RANKS = {name.replace("engine.", "tp2."): each for name, each in ENGINE.items() if name.startswith("engine.")}
RANKS |= {
    "tp2.vllm.ours_tokens_s": detail("tokens/s", "output of 256 requests by the engine on two GPUs", "higher"),
    "tp2.vllm.offline_tokens_s": detail("tokens/s", "output of the same requests by vLLM on them", "higher"),
    "tp2.offline.vs_vllm": Metric(
        "times", "our output tokens a second ÷ vLLM's, 256 offline requests on two GPUs", "higher", 1.1
    ),
    "tp2.endurance.answers": detail("requests", "answered completely by a large model on two GPUs", "higher"),
    "tp2.endurance.hung_up": detail("requests", "whose client left early", "higher"),
    "tp2.endurance.retractions": detail("requests", "set aside for want of memory, and answered later", "higher"),
    "tp2.endurance.tokens_s": detail("tokens/s", "that clients received", "higher"),
    "tp2.endurance.minutes": detail("min", "until the last client had its answer", "higher"),
    "tp2.endurance.start_s": detail("s", "to a ready server", "lower"),
    "tp2.endurance.left": Metric("requests", "and pages that remain after the last answer", "lower", 0.0),
}
